"""Methods that must coincide, to the bit."""

import pytest
import torch

import fedselect as fs
from fedselect.simulate import Simulation

TRAINING = fs.Training(batch_size=8, momentum=0.9, weight_decay=1e-3, clip=1.0)


def simulate(method: fs.Method, rounds: int, **model_options) -> Simulation:
    data = fs.load("digits", clients=4, classes_per_client=3, train=20, test=12, seed=2)
    sim = Simulation(method, fs.models.small_cnn(data, width=2, **model_options), data, seed=7, training=TRAINING)
    for _ in range(rounds):
        sim.step()
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


def test_rate_0_is_fedavg():
    selected = simulate(fs.FedSelect(rate=0.0, limit=0.5, epochs=2, lr=0.05, norm_stats="shared"), 3)
    assert_same_models(selected, simulate(fs.FedAvg(epochs=2, lr=0.05), 3))


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


def test_fine_tuning_as_long_as_a_round_is_the_next_rounds_local_model_but_for_the_shuffle():
    """FedAvg+FT evaluates what the next round's local training would make of the global model: same start, same steps."""
    sim = simulate(fs.FedAvgFT(epochs=1, lr=0.05), 2)
    tuned, merged = sim.models(range(4), "merged"), sim.server["params"]
    assert any(not torch.equal(v, merged[n].expand_as(v)) for n, v in tuned.items())
    again = simulate(fs.FedAvg(epochs=1, lr=0.05), 2).models(range(4), "merged")
    assert all(torch.equal(v, merged[n].expand_as(v)) for n, v in again.items())
