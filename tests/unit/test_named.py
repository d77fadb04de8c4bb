"""Misspelt arguments of fs.run, fs.compare, fs.tune and fs.Simulation get one sentence."""

import inspect
import pickle

import pytest

import fedselect as fs


@pytest.mark.parametrize("call", [fs.run, fs.compare, fs.tune, fs.Simulation])
def test_a_misspelt_argument_is_named_with_the_right_one(call):
    with pytest.raises(fs.InputError) as refused:
        call("fedavg", model="mlp", data=[], devise="cpu")
    assert isinstance(refused.value, TypeError)
    assert str(refused.value) == f"fs.{call.__name__} has no option 'devise'; did you mean 'device'?"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"round": 3}, "did you mean 'rounds'"),
        ({"lr": 0.1}, r"it belongs to the method, as in fs\.FedAvg\(lr=0\.1\)\."),
        ({"learning_rate": 0.1}, r"it belongs to the method, as in fs\.FedAvg\(lr=0\.1\)\."),
        ({"batch_size": 8}, r"it belongs to local training: training=fs\.Training\(batch_size=8\)\."),
        ({"xyz": 1}, "fs.run has no option 'xyz'; it has aggregator, chunk, data, .*, val, view"),
    ],
)
def test_an_argument_of_something_else_says_of_what(given, said):
    with pytest.raises(fs.InputError, match=said):
        fs.run("fedavg", model="mlp", data=[], **given)


def test_every_option_of_a_run_is_still_taken(digits):
    """All of Simulation's options but those that run has by itself, with their defaults."""
    taken = inspect.signature(fs.Simulation).parameters.values()
    how = {
        p.name: p.default for p in taken if p.kind is p.KEYWORD_ONLY and p.name not in ("seed", "training", "rounds", "like")
    }
    assert len(fs.run("fedavg", model="mlp", data=digits, rounds=1, **how).history) == 1
    assert pickle.loads(pickle.dumps(fs.run)) is fs.run
