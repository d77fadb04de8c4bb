"""What runs of the same model and data share: prepared once, with the same results to the bit."""

import json

import pytest
import torch

import fedselect as fs
from fedselect.runs.config import Config
from fedselect.simulate import inputs
from fedselect.simulate.stack import Stack, stacks

METHODS = {"fedavg+ft": fs.FedAvgFT(lr=0.1), "fedselect": fs.FedSelect(rate=0.2), "fedalike": fs.FedAlike()}


def made(digits, model, method, seed, **how):
    return fs.Simulation(method, model, digits, seed=seed, training=fs.Training(batch_size=10), rounds=4, **how)


def model_for(digits):
    return inputs.as_model("mlp", digits, inputs.as_task(None, digits))


def told(records):
    return [{k: v for k, v in r.items() if k != "seconds"} for r in records]


def test_shared_runs_are_the_runs_alone(digits):
    """Stacks of several methods, one after the other, so that later ones find recorded steps; seeds differ in each."""
    model = model_for(digits)
    ready = made(digits, model, METHODS["fedavg+ft"], 0).ready
    for method in METHODS.values():
        runs = [made(digits, model, method, seed, like=ready) for seed in (0, 1)]
        assert all(r.ready is ready for r in runs)
        assert stacks(runs[0]) == stacks(runs[1])
        assert all(s.x is ready.split[part].x for part, s in Stack(runs)._split.items())  # one copy for both
        stack = Stack(runs)
        records = [told(stack.step()) for _ in range(4)]
        for i, seed in enumerate((0, 1)):
            alone = made(digits, model, method, seed)
            assert alone.ready is not ready
            assert told([alone.step() for _ in range(4)]) == [both[i] for both in records]
            ids = torch.arange(len(digits.clients))
            assert all(torch.equal(v, runs[i].models(ids)[n]) for n, v in alone.models(ids).items())


def test_stacks_of_the_same_data_find_the_steps_that_another_has_recorded(digits):
    model = model_for(digits)
    ready = made(digits, model, METHODS["fedavg+ft"], 0).ready
    counts = []
    for method in ("fedavg+ft", "fedper"):
        runs = [made(digits, model, fs.FedPer() if method == "fedper" else METHODS[method], s, like=ready) for s in (0, 1)]
        stack = Stack(runs)
        for _ in range(4):
            stack.step()
        counts.append(len(ready.programs._recorded))
    assert counts[0] > 0
    assert counts[1] == counts[0]


def test_several_federations_are_pooled_once(digits):
    """Client i of the second federation has the rows after those of the first, whichever stack asks."""
    other = fs.load("digits", clients=len(digits.clients), train=20, seed=3)
    model = model_for(digits)
    a, b = (made(d, model, METHODS["fedavg+ft"], 0) for d in (digits, other))
    more = [made(d, model, METHODS["fedavg+ft"], 1, like=r.ready) for d, r in ((digits, a), (other, b))]
    first, second = Stack([a, b])._split["train"], Stack([a, *more, b])._split["train"]
    assert first.x is second.x
    assert len(first.x) == len(a.ready.split["train"].x) + len(b.ready.split["train"].x)
    for k, whose in enumerate([a, more[0], more[1], b]):
        n = whose.clients
        mine, theirs = second.rows(slice(k * n, (k + 1) * n)), whose.ready.split["train"]
        index = torch.zeros(n, 1, dtype=torch.int64)
        assert all(torch.equal(v, w) for v, w in zip(mine.batch(index), theirs.batch(index), strict=True))


@pytest.mark.parametrize(
    "how",
    [
        {"training": fs.Training(batch_size=5)},
        {"late": (1, 2)},
        {"metrics": ["f1"]},
        {"private": "epsilon=8"},
    ],
    ids=lambda how: next(iter(how)),
)
def test_what_a_run_prepared_serves_no_run_that_needs_something_else(digits, how):
    model = model_for(digits)
    ready = made(digits, model, METHODS["fedavg+ft"], 0).ready
    asked = {"training": fs.Training(batch_size=10), "rounds": 4, **how}
    assert fs.Simulation(METHODS["fedavg+ft"], model, digits, like=ready, **asked).ready is not ready
    again = fs.load("digits", clients=len(digits.clients), seed=0)
    assert made(again, model, METHODS["fedavg+ft"], 0, like=ready).ready is not ready
    assert made(digits, model_for(digits), METHODS["fedavg+ft"], 0, like=ready).ready is not ready


def test_configurations_of_the_same_data_and_model_share_them():
    def config(method, **how):
        raw = {"method": {"name": method}, "data": {"name": "digits", "clients": 3}, "model": {"name": "mlp"}, "rounds": 3}
        return Config.from_dict(json.loads(json.dumps({**raw, **how})), "here")

    dealt = {}
    first, other = (config(m).simulation(dealt=dealt) for m in ("fedavg", "fedselect"))
    assert other.ready is first.ready
    assert config("fedavg", seed=1).simulation(dealt=dealt).data is not first.data
    assert config("fedavg", model={"name": "small_cnn"}).simulation(dealt=dealt).ready is not first.ready
    assert config("fedavg").simulation().ready is not first.ready
