"""answers=own: the reported model answers only with classes that its client trains on."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedselect as fs
from fedselect.methods.common import NEVER
from fedselect.simulate import Simulation
from fedselect.training.step import forward


@pytest.fixture(scope="module")
def digits() -> fs.Federation:
    return fs.load("digits", clients=4, classes_per_client=3, train=20, test=10, seed=2)


def stepped(data: fs.Federation, method: fs.Method, rounds: int = 3) -> Simulation:
    run = Simulation(method, fs.models.mlp(data, hidden=8), data, seed=3)
    for _ in range(rounds):
        run.step()
    return run


def own_classes(data: fs.Federation) -> list[set[int]]:
    return [set(c.train[1].tolist()) for c in data.clients]


@pytest.mark.parametrize("make", [fs.FedAvg, lambda **o: fs.FedSelect(view="merged", limit=0.1, **o)])
def test_it_is_the_best_of_the_clients_own_classes(digits, make):
    plain, own = stepped(digits, make(lr=0.05)), stepped(digits, make(lr=0.05, answers="own"))
    x = torch.stack([c.test[0] for c in digits.clients])
    logits = forward(plain.fitted, plain.models(range(4)), x)[0]
    said = forward(own.fitted, own.models(range(4)), x)[0].argmax(-1)
    for i, classes in enumerate(own_classes(digits)):
        for j, row in enumerate(logits[i].tolist()):
            assert said[i, j] == max(classes, key=lambda k: row[k])
    right = [float((said[i] == c.test[1]).double().mean()) for i, c in enumerate(digits.clients)]
    last = fs.run(make(lr=0.05, answers="own"), model=fs.models.mlp(digits, hidden=8), data=digits, rounds=3, seed=3)
    assert last.history[-1]["clients"]["accuracy"] == pytest.approx(right)


@pytest.mark.parametrize("make", [fs.FedAvg, fs.FedAvgFT, fs.FedBABU, lambda **o: fs.FedSelect(view="merged", **o)])
def test_training_knows_nothing_of_it(digits, make):
    runs = [stepped(digits, make(answers=a)) for a in ("all", "own")]
    assert all(torch.equal(v, runs[1].server["params"][n]) for n, v in runs[0].server["params"].items())
    assert all(map(torch.equal, *(run.models(range(4), "local").values() for run in runs)))


def test_fine_tuning_begins_with_it_and_leaves_it(digits):
    run = stepped(digits, fs.FedBABU(lr=0.1, answers="own"))
    shown = run.models(range(4))
    bias = shown[f"{run.model.head}.bias"]
    for i, classes in enumerate(own_classes(digits)):
        assert {k for k in range(10) if bias[i, k] > NEVER / 2} == classes
        others = sorted(set(range(10)) - classes)
        assert (bias[i, others] == NEVER).all()
        weights = shown[f"{run.model.head}.weight"][i, others]
        assert torch.equal(weights, run.server["params"][f"{run.model.head}.weight"][others])  # no gradient either


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=7), min_size=1, max_size=5))
def test_the_classes_of_clients_are_those_of_their_labels(labels):
    pairs = [(torch.zeros(len(y), 2), torch.tensor(y)) for y in labels]
    run = Simulation(fs.FedAvg(), fs.Model.wrap(nn.Linear(2, 6)), fs.Federation([fs.ClientData(p, p) for p in pairs], 6))
    found = run._work(torch.arange(len(labels)), 0).classes(6)
    assert [set(row.nonzero().flatten().tolist()) for row in found] == [set(y) for y in labels]


def test_what_has_no_use_for_it_is_told(digits):
    with pytest.raises(fs.InputError, match="answers=own changes the merged model, which view=local does not report"):
        fs.FedSelect(answers="own")
    with pytest.raises(fs.InputError, match="answers is all or own, not 'mine'"):
        fs.FedAvg(answers="mine")
    model = fs.Model.wrap(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False)))
    with pytest.raises(fs.InputError, match=r"answers=own needs a head with a bias, and .* has no 1\.bias"):
        Simulation(fs.FedAvg(answers="own"), model, digits)
