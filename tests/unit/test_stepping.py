"""A simulation in a program of one's own: stepped, stopped, saved, and resumed to the bit."""

import pytest
import torch
from torch import nn

import fedselect as fs
from fedselect.core import snapshots


def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 10))


def simulation(digits, method=None, model=net, seed=5, **how):
    return fs.Simulation(method or fs.FedSelect(rate=0.2), fs.Model.wrap(model), digits, seed=seed, fraction=0.6, **how)


def told(records):
    return [{k: v for k, v in r.items() if k != "seconds"} for r in records]


@pytest.mark.parametrize("rows", ["all", "personal"])
def test_saved_and_resumed_is_uninterrupted(digits, tmp_path, rows):
    whole = simulation(digits, rows=rows, late=(1, 4))
    records = [whole.step() for _ in range(6)]
    first = simulation(digits, rows=rows, late=(1, 4))
    again = [first.step() for _ in range(3)]
    first.save(tmp_path / "state")
    second = simulation(digits, rows=rows, late=(1, 4))
    assert second.resume(tmp_path / "state")
    assert second.round == 3
    again += [second.step() for _ in range(3)]
    assert told(again) == told(records)
    ends = [fs.Result(s, []).simulation.models(range(len(digits.clients)), "merged") for s in (whole, second)]
    assert all(torch.equal(v, ends[1][n]) for n, v in ends[0].items())


def test_what_was_saved_before_there_were_aggregators_can_be_resumed(digits, tmp_path):
    """Then `Partial` had a server_momentum of its own, 0 where nobody asked for it, and nothing was said of an aggregator."""
    first = simulation(digits)
    first.step()
    first.save(tmp_path)
    (place,) = snapshots.places(tmp_path)
    said = snapshots.manifest(place, "")
    assert said["config"]["method"]["server_momentum"] == 0.0
    assert "aggregate" not in said["config"]
    assert not [n for n in said["tensors"] if n.startswith("aggregate/")]
    assert simulation(digits).resume(tmp_path)


def test_there_may_be_nothing_to_resume_and_two_states_are_kept(digits, tmp_path):
    made = simulation(digits)
    assert not made.resume(tmp_path / "state")
    for _ in range(3):
        made.step()
        made.save(str(tmp_path / "state"))
    assert sorted(p.name for p in (tmp_path / "state").iterdir()) == ["000002", "000003"]


def half(digits):
    clients = [fs.ClientData((c.train[0][::2], c.train[1][::2]), c.test) for c in digits.clients]
    return fs.Federation(clients, digits.classes)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda d: simulation(d, fs.FedSelect(rate=0.2, lr=0.05)), r"lr was 0\.1, is 0\.05"),
        (lambda d: simulation(d, fs.FedPer()), "kind was DeltaSelect, is Fixed"),
        (lambda d: simulation(d, seed=6), "seed was 5, is 6"),
        (lambda d: simulation(d, training=fs.Training(batch_size=8)), "batch_size was 32, is 8"),
        (lambda d: simulation(d, model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))), "parameters was"),
        (lambda d: fs.Simulation(fs.FedSelect(rate=0.2), net(), d, seed=5, fraction=0.6), "initial values was"),
        (lambda d: simulation(d, aggregator=fs.Median()), r"aggregate was None, is \{'kind': 'Median'\}"),
        (lambda d: simulation(half(d)), "train data was 60 samples .*, is 30 samples"),
    ],
    ids=["rate", "method", "seed", "training", "model", "values", "aggregator", "data"],
)
def test_what_another_simulation_saved_is_refused(digits, tmp_path, other, said):
    simulation(digits).save(tmp_path)
    with pytest.raises(
        fs.CheckpointError, match=rf"another configuration \(.*{said}.*\); restore its old settings .* another folder"
    ):
        other(digits).resume(tmp_path)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (fs.layers("1.weight"), fs.layers("2.weight")),
        (lambda model, name: model.is_head(name), lambda model, name: name in model.norms),
        (lambda model, name: name == "1.bias", lambda model, name: name == "2.bias"),
    ],
    ids=["layers", "lambda", "a lambda's name"],
)
def test_so_is_what_another_choice_of_personal_layers_saved(digits, tmp_path, one, other):
    def chosen(which):
        return simulation(digits, fs.Partial(fs.Fixed(which), (("all", 1),)))

    chosen(one).save(tmp_path)
    assert chosen(one).resume(tmp_path)
    with pytest.raises(fs.CheckpointError, match=r"another configuration \((personal|patterns) was .*, is "):
        chosen(other).resume(tmp_path)


def picky():
    """Of a kernel of 7x7 a picture of 2x2 meets nine taps, one of 8x8 all."""
    return nn.Sequential(nn.Conv2d(1, 3, 7, padding=3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 10))


def test_simulations_of_one_model_do_not_disturb_each_other(digits):
    def cut(side):
        parts = [[(x[..., :side, :side], y) for x, y in (c.train, c.test)] for c in digits.clients]
        return fs.Federation([fs.ClientData(*p) for p in parts], digits.classes)

    def first(model, *others):
        made = fs.Simulation(fs.FedSelect(rate=0.2, limit=0.4, select=fs.Reading(counts="live")), model, cut(2))
        for data in others:
            fs.Simulation(fs.FedAvg(), model, data)
        record = made.step()
        return record["clients"]["share"], made.live_share()

    assert first(fs.Model.wrap(picky), cut(8)) == first(fs.Model.wrap(picky))


def test_a_function_may_make_the_same_module_each_time(digits):
    module = net()
    model = fs.Model.wrap(lambda: module)
    with torch.no_grad():
        ends = [fs.run(fs.FedPAC(), model=model, data=digits, rounds=2, seed=3).personal(0) for _ in range(2)]
    assert all(torch.equal(v, ends[1][n]) for n, v in ends[0].items())
    assert not module._forward_hooks  # it is nobody's but the user's


def test_masks_before_the_first_round(digits):
    with pytest.raises(fs.InputError, match="no client has joined yet"):
        fs.Result(simulation(digits), []).masks  # noqa: B018


def test_another_process_goes_on(fork, tmp_path):
    """What a state is known by holds nothing of the process that wrote it."""
    code = (
        "import fedselect as fs; from torch import nn; from pathlib import Path\n"
        "norms = fs.Partial(fs.Fixed(fs.layers('1.weight')), (('all', 1),))\n"
        "s = fs.Simulation(norms, fs.Model.wrap(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))), fs.load('digits'))\n"
        f"print(s.resume({str(tmp_path)!r}), s.round); s.step(); s.save({str(tmp_path)!r})"
    )
    said = [fork(code).communicate()[0] for _ in range(2)]
    assert said == ["False 0\n", "True 1\n"]


def test_a_simulation_takes_what_run_takes_and_says_what_it_cannot_take(digits):
    module = net()
    clients = [fs.ClientData((c.train[0], torch.arange(20) % 10), c.test) for c in digits.clients]
    one = fs.Simulation(fs.FedAvg(), module, clients).step()
    assert one["accuracy"] == fs.run(fs.FedAvg(), model=module, data=clients, rounds=1).accuracy
    for wrong, said in (
        ((fs.FedAvg, module, digits), "method must be"),
        ((fs.FedAvg(), 3, digits), "model must be a module, a function that creates one"),
        ((fs.FedAvg(), module, [digits.clients[0].train]), "data must be a Federation"),
    ):
        with pytest.raises(fs.InputError, match=said):
            fs.Simulation(*wrong)
    with pytest.raises(fs.InputError, match=r"training must be fs\.Training"):
        fs.Simulation(fs.FedAvg(), module, digits, training={"batch_size": 8})


def test_a_programs_own_random_numbers_and_module_are_left_alone(digits):
    module = net().train()
    before = torch.get_rng_state(), [v.clone() for v in module.state_dict().values()], torch.is_grad_enabled()
    fs.run(fs.FedSelect(), model=module, data=digits, rounds=2)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(map(torch.equal, module.state_dict().values(), before[1]))
    assert module.training
    assert torch.is_grad_enabled() == before[2]
