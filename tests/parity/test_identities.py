"""Methods that must coincide, to the bit."""

from dataclasses import replace

import pytest
import torch

import fedselect as fs
from fedselect.simulate import Simulation

TRAINING = fs.Training(batch_size=8, momentum=0.9, weight_decay=1e-3, clip=1.0)


def simulate(method: fs.Method, rounds: int, training: fs.Training = TRAINING, **model_options) -> Simulation:
    data = fs.load("digits", clients=4, classes_per_client=3, train=20, test=12, seed=2)
    sim = Simulation(method, fs.models.small_cnn(data, width=2, **model_options), data, seed=7, training=training)
    for _ in range(rounds):
        sim.step(evaluate=False)  # models are compared, in the end
    return sim


def assert_same_models(a: Simulation, b: Simulation) -> None:
    for view in ("local", "merged"):
        got, want = a.models(range(4), view), b.models(range(4), view)
        for name, v in got.items():
            assert torch.equal(v, want[name]), (view, name)


@pytest.mark.parametrize("stats", ["local", "shared"])
@pytest.mark.parametrize("weight", ["uniform", "samples"])
def test_limit_0_is_fedavg(stats, weight):
    common = {"epochs": 2, "lr": 0.05, "norm_stats": stats, "weight": weight}
    selected = simulate(fs.FedSelect(limit=0.0, personal_lr=0.3, **common), 3, norm="batch")
    assert_same_models(selected, simulate(fs.FedAvg(**common), 3, norm="batch"))


@pytest.mark.parametrize("optimizer", [{"nesterov": True}, {"optimizer": "adam"}, {"optimizer": "adamw", "weight_decay": 0.1}])
def test_limit_0_is_fedavg_with_every_optimizer(optimizer):
    training = fs.Training(batch_size=8, schedule="step", decay=0.5, **optimizer)
    common = {"epochs": 2, "lr": 0.01, "norm_stats": "local"}
    selected = simulate(fs.FedSelect(limit=0.0, personal_lr=0.3, **common), 3, training, norm="batch")
    assert_same_models(selected, simulate(fs.FedAvg(**common), 3, training, norm="batch"))


def test_rate_0_is_fedavg():
    selected = simulate(fs.FedSelect(rate=0.0, limit=0.5, epochs=2, lr=0.05, norm_stats="shared"), 3)
    assert_same_models(selected, simulate(fs.FedAvg(epochs=2, lr=0.05), 3))


def test_limit_0_with_fine_tuning_is_fedavg_with_fine_tuning():
    common = {"epochs": 2, "lr": 0.05, "finetune": 2, "finetune_lr": 0.02, "norm_stats": "shared"}
    selected = simulate(fs.FedSelect(limit=0.0, view="merged", **common), 3, norm="batch")
    assert_same_models(selected, simulate(fs.FedAvgFT(**common), 3, norm="batch"))


@pytest.mark.parametrize("stats", ["local", "shared"])
@pytest.mark.parametrize("finetune", [0, 2])
def test_fedpersist_with_window_0_is_fedavg_with_fine_tuning(stats, finetune):
    common = {"epochs": 2, "lr": 0.05, "finetune": finetune, "finetune_lr": 0.02, "norm_stats": stats}
    assert_same_models(simulate(fs.FedPersist(0, **common), 3, norm="batch"), simulate(fs.FedAvgFT(**common), 3, norm="batch"))


def test_scaffold_is_fedavg_in_its_first_round():
    common = {"epochs": 2, "lr": 0.05}
    assert_same_models(simulate(fs.Scaffold(**common), 1, norm="batch"), simulate(fs.FedAvg(**common), 1, norm="batch"))


def test_apfl_of_the_personal_model_alone_is_local():
    """Up to rounding: the personal model is read off the mixture."""
    common = {"epochs": 2, "lr": 0.05}
    alone = simulate(fs.APFL(alpha=1.0, alpha_lr=0.0, **common), 3, norm="batch")
    torch.testing.assert_close(
        alone.models(range(4)), simulate(fs.Local(**common), 3, norm="batch").models(range(4)), rtol=0, atol=1e-5
    )
    shared = simulate(fs.FedAvg(**common), 3, norm="batch").server["params"]
    assert all(torch.equal(v, shared[n]) for n, v in alone.server["params"].items())


def assert_close_models(a: Simulation, b: Simulation) -> None:
    """Up to rounding: FedAlike takes means of heads in double precision, and of equal ones too."""
    for view in ("local", "merged"):
        torch.testing.assert_close(a.models(range(4), view), b.models(range(4), view), rtol=0, atol=1e-5)


@pytest.mark.parametrize("stats", ["local", "shared"])
def test_fedalike_with_one_group_is_fedavg_with_fine_tuning(stats):
    common = {"epochs": 2, "lr": 0.05, "finetune": 2, "finetune_lr": 0.02, "norm_stats": stats}
    shared = simulate(fs.FedAvgFT(**common), 4, norm="batch")
    for heads in ("0 0 0 0", "3 3 3 3"):
        assert_close_models(simulate(fs.FedAlike(heads=heads, **common), 4, norm="batch"), shared)
    other = simulate(fs.FedAlike(heads="0 0 1 1", **common), 4, norm="batch")  # what is told is not ignored
    assert not torch.allclose(other.models(range(4))["fc.weight"], shared.models(range(4))["fc.weight"], rtol=0, atol=1e-3)


@pytest.mark.parametrize("stats", ["local", "shared"])
def test_fedalike_with_everybody_alone_is_fedper(stats):
    common = {"epochs": 2, "lr": 0.05, "finetune": 2, "finetune_lr": 0.02, "norm_stats": stats}
    alone = simulate(fs.FedAlike(heads="0 1 2 3", **common), 5, norm="batch")
    assert_close_models(alone, simulate(fs.FedPer(view="merged", **common), 5, norm="batch"))


@pytest.mark.parametrize("stats", ["local", "shared"])
def test_limit_0_with_a_frozen_head_and_fine_tuning_is_fedbabu(stats):
    common = {"epochs": 2, "lr": 0.05, "finetune": 2, "finetune_lr": 0.02, "norm_stats": stats}
    selected = simulate(fs.FedSelect(limit=0.0, freeze="head", view="merged", **common), 3, norm="batch")
    assert_same_models(selected, simulate(fs.FedBABU(**common), 3, norm="batch"))


def test_fine_tuning_keeps_its_rate_when_the_others_fall():
    common = {"epochs": 1, "lr": 0.05, "finetune": 2, "finetune_lr": 0.1, "norm_stats": "shared", "view": "merged"}
    schedule = replace(TRAINING, schedule="step", decay=0.5)
    falling, steady = (simulate(fs.FedSelect(limit=0.0, **common), 1, training) for training in (schedule, TRAINING))
    assert_same_models(falling, steady)  # the first round has the rates as given; fine-tuning after it as well
    falling.step(), steady.step()
    assert not torch.equal(falling.server["params"]["fc.weight"], steady.server["params"]["fc.weight"])
    again = Simulation(fs.FedSelect(limit=0.0, **common), falling.model, falling.data, seed=7, training=TRAINING)
    again.server, again.store, again.round = falling.server, falling.store, falling.round
    assert_same_models(falling, again)


def test_limit_1_ends_as_local_training():
    """Masks fill up in finitely many rounds; from then on nothing but the mask is sent and each client trains alone."""
    sim = simulate(fs.FedSelect(rate=0.5, limit=1.0, epochs=2, lr=0.05, personal_lr=0.1), 0, norm="batch")
    shares = [sim.step()["share"] for _ in range(12)]  # half of what is left joins each time: 2^-12 < 1 entry of 500
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    quiet = sim.step()["clients"]["bytes_up"]
    assert quiet == [-(-sim.model.size // 8)] * 4
    alone = Simulation(fs.Local(epochs=2, lr=0.1), sim.model, sim.data, seed=7, training=TRAINING)
    alone.step()
    alone.round = sim.round
    alone.store.rows = {"params": sim.models(range(4), "local")}
    sim.step()
    alone.step()
    assert_same_models(sim, alone)


def test_everything_personal_from_the_start_is_local():
    everything = fs.Partial(fs.Fixed(lambda model, name: True), (("personal", 2),), lr=9.0, personal_lr=0.05)
    assert_same_models(simulate(everything, 3, norm="batch"), simulate(fs.Local(epochs=2, lr=0.05), 3, norm="batch"))


def test_fedbabu_keeps_its_initial_head_until_fine_tuning():
    sim = simulate(fs.FedBABU(epochs=2, lr=0.05), 3)
    for name, value in sim.models(range(4), "local").items():
        still = torch.equal(value, sim.initial[name].expand_as(value))
        assert still == sim.model.is_head(name)
    tuned = sim.models(range(4), "merged")
    assert not any(torch.equal(v, sim.initial[n].expand_as(v)) for n, v in tuned.items())


def test_fedbn_without_norm_layers_is_fedavg():
    sim = simulate(fs.FedBN(epochs=2, lr=0.05), 3)
    assert_same_models(sim, simulate(fs.FedAvg(epochs=2, lr=0.05), 3))


def test_fedavg_with_shared_statistics_is_one_model():
    sim = simulate(fs.FedAvg(epochs=1, lr=0.05), 2, norm="batch")
    for name, value in sim.models(range(4)).items():
        assert torch.equal(value, value[:1].expand_as(value)), name


def test_fine_tuning_is_evaluated_and_then_forgotten():
    """FedAvg+FT leaves the very same global model as FedAvg; only what is evaluated differs."""
    tuned, plain = simulate(fs.FedAvgFT(epochs=1, lr=0.05), 2), simulate(fs.FedAvg(epochs=1, lr=0.05), 2)
    for name, value in plain.server["params"].items():
        assert torch.equal(tuned.server["params"][name], value)
    own, shared = tuned.models(range(4), "merged"), plain.models(range(4), "merged")
    assert not any(torch.equal(own[n], shared[n]) for n in own)


def test_ditto_without_a_pull_is_local():
    ditto = simulate(fs.Ditto(epochs=2, lr=0.05, lam=0.0), 3, norm="batch")
    assert_same_models(ditto, simulate(fs.Local(epochs=2, lr=0.05), 3, norm="batch"))


def test_ditto_without_a_pull_is_local_with_fine_tuning_too():
    schedule = replace(TRAINING, schedule="step", decay=0.5)  # which fine-tuning does not follow
    ditto = fs.Ditto(epochs=2, lr=0.05, lam=0.0, finetune=2, finetune_lr=0.02)
    phases = {"phases": (("all", 2),), "finetune": (("all", 2),)}
    local = fs.Partial(fs.Fixed(lambda model, name: True), lr=0.05, finetune_lr=0.02, view="merged", **phases)
    assert_same_models(simulate(ditto, 3, schedule, norm="batch"), simulate(local, 3, schedule, norm="batch"))


def test_dittos_global_half_is_fedavg():
    ditto, fedavg = (simulate(m(epochs=2, lr=0.05), 3, norm="batch") for m in (fs.Ditto, fs.FedAvg))
    for name, value in fedavg.server["params"].items():
        assert torch.equal(ditto.server["params"][name], value), name


def test_a_pull_given_for_each_client_as_zeros_is_no_pull():
    """The term itself, not only its absence: with mu a tensor of zeros it is computed and adds exactly nothing."""
    zeros = torch.zeros(4)
    assert_same_models(simulate(fs.FedProx(epochs=2, lr=0.05, mu=zeros), 2), simulate(fs.FedAvg(epochs=2, lr=0.05), 2))


def test_fedprox_without_a_pull_is_fedavg():
    prox = simulate(fs.FedProx(epochs=2, lr=0.05, mu=0.0), 3, norm="batch")
    assert_same_models(prox, simulate(fs.FedAvg(epochs=2, lr=0.05), 3, norm="batch"))


def test_lotteryfl_that_prunes_nothing_is_fedavg():
    lottery = simulate(fs.LotteryFL(epochs=2, lr=0.05, rate=0.0, above=0.0), 3, norm="batch")
    assert_same_models(lottery, simulate(fs.FedAvg(epochs=2, lr=0.05), 3, norm="batch"))


def test_lotteryfl_holds_pruned_entries_at_zero_and_stops_at_its_floor():
    sim = simulate(fs.LotteryFL(epochs=1, lr=0.05, rate=0.3, floor=0.5, above=0.0), 6)
    for view in ("local", "merged"):
        models = sim.models(range(4), view)
        for name, kept in sim.store.rows["kept"].items():
            assert not bool(models[name][~kept].any())
    total = sum(m[0].numel() for m in sim.store.rows["kept"].values())
    left = sum(m.flatten(1).sum(1) for m in sim.store.rows["kept"].values()) / total
    # who prunes goes to 0.7 and then to 0.7^2 = 0.49, the first share below the floor; each tensor rounds down
    assert float(left.min()) == pytest.approx(0.5, abs=0.01)


def test_personal_layers_named_as_the_head_train_as_fedrep_alternating():
    layers = simulate(fs.PersonalLayers(layers="fc", epochs=1, lr=0.05, personal_lr=0.05), 3)
    assert_same_models(layers, simulate(fs.FedRep(epochs=1, lr=0.05), 3))


@pytest.mark.parametrize("stats", ["local", "shared"])
def test_fedpac_mixes_statistics_in_the_head_only_where_they_are_shared(stats, digits):
    net = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 10))
    )
    sim = Simulation(fs.FedPAC(norm_stats=stats), fs.Model.wrap(net, head="2"), digits, training=TRAINING)
    sim.step()
    own, mixed = (sim.models(range(sim.clients), view) for view in ("local", "merged"))
    assert not torch.equal(mixed["2.1.weight"], own["2.1.weight"])
    assert all(torch.equal(mixed[n], own[n]) == (stats == "local") for n in ("2.0.running_mean", "2.0.running_var"))


@pytest.mark.parametrize("stats", ["local", "shared"])
def test_lg_fedavg_warms_up_as_fedavg(stats):
    warm = simulate(fs.LGFedAvg(epochs=1, lr=0.05, warmup=2, norm_stats=stats), 2, norm="batch")
    assert_same_models(warm, simulate(fs.FedAvg(epochs=1, lr=0.05, norm_stats=stats), 2, norm="batch"))
    assert not any(bool(m.any()) for m in warm.store.rows["mask"].values())
    warm.step()
    body = {n: bool(m.all()) for n, m in warm.store.rows["mask"].items()}
    assert body == {n: not warm.model.is_head(n) for n in warm.model.params}


def test_lg_fedavg_may_share_the_convolutions():
    sim = simulate(fs.LGFedAvg(shared="convolutions"), 1)
    masks = {n: bool(m.any()) for n, m in fs.Result(sim, []).masks.items()}
    assert masks == {n: not n.startswith("conv") for n in sim.model.params}
