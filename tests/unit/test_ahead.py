"""A round that begins early is the round as it is otherwise. On a GPU alone it does so by itself; here it is made to."""

import pytest
import torch

import fedselect as fs
from fedselect.simulate import Simulation
from fedselect.simulate.stack import Stack


@pytest.fixture
def early(monkeypatch):
    monkeypatch.setattr("fedselect.simulate.ahead.may", lambda run: True)


def sims(digits, **how):
    return [Simulation(fs.FedSelect(lr=0.1, limit=0.2 * s), fs.models.mlp(digits), digits, seed=s, **how) for s in (1, 2)]


def rounds(stack, count, more=True):
    return [stack.step(more=more) for _ in range(count)]


def told(found):
    """Records without what depends on the clock."""
    return [[{k: v for k, v in record.items() if k != "seconds"} for record in records] for records in found]


def assert_same(a, b):
    assert a.round == b.round
    ours, theirs = a.models(range(a.clients)), b.models(range(b.clients))
    assert all(torch.equal(v, theirs[n]) for n, v in ours.items())


@pytest.mark.parametrize("how", [{}, {"fraction": 0.5}, {"late": (1, 3)}, {"eval_every": 2}], ids=str)
def test_rounds_that_begin_early_are_those_that_do_not(digits, how, early):
    usual, ahead = Stack(sims(digits, **how)), Stack(sims(digits, **how))
    assert told(rounds(ahead, 4)) == told(rounds(usual, 4, more=False))
    assert ahead._begun
    for a, b in zip(ahead.runs, usual.runs, strict=True):
        assert_same(a, b)


def test_a_round_begins_anew_where_its_run_was_put_elsewhere(digits, early, tmp_path):
    (sim, _), (other, _) = sims(digits), sims(digits)
    stack = Stack([sim])
    rounds(stack, 1)
    sim.save(tmp_path)
    rounds(stack, 2)
    sim.resume(tmp_path)
    assert stack._begun
    rounds(stack, 2)
    for _ in range(3):
        other.step()
    assert_same(sim, other)


def test_asking_for_an_evaluation_is_heard_by_a_round_that_has_begun(digits, early):
    stack = Stack(sims(digits, eval_every=3))
    rounds(stack, 1)
    assert all(record["accuracy"] is not None for record in stack.step(evaluate=True))


def test_a_run_that_is_out_takes_its_early_round_along(digits, early):
    (one, two), (_, alone) = sims(digits), sims(digits)
    stack = Stack([one, two])
    rounds(stack, 1)
    stack.keep([two])
    rounds(stack, 1)
    for _ in range(2):
        alone.step()
    assert_same(two, alone)


def test_what_goes_wrong_early_is_said_in_its_round(digits, early, monkeypatch):
    stack = Stack(sims(digits))
    do = Stack._do

    def fail(self, who, jobs):
        if jobs[0].round == 1:
            raise fs.RunError("no")
        return do(self, who, jobs)

    monkeypatch.setattr(Stack, "_do", fail)
    rounds(stack, 1)
    with pytest.raises(fs.RunError, match="no"):
        stack.step()


def test_a_cpu_begins_no_round_early(digits):
    stack = Stack(sims(digits))
    rounds(stack, 1)
    assert not stack._begun
