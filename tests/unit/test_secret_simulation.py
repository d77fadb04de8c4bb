"""--secret in simulation: next to the plain run, the same stacked, resumed and pickled, and refused where it must be."""

import pickle
import sys

import pytest
import torch

import fedselect as fs
from fedselect.results.running import compare
from fedselect.secret.keys import Identity
from fedselect.simulate import Simulation

HOW = {"seed": 2, "secret": True}
METHOD = fs.FedSelect(rate=0.2, limit=0.5, epochs=1, lr=0.1)


def state(sim):
    return {f"{k}/{n}": v for part in (sim.server, sim.memory) for k, t in part.items() for n, v in t.items()}


def same(one, other):
    return state(one).keys() == state(other).keys() and all(v.equal(state(other)[n]) for n, v in state(one).items())


def stepped(digits, rounds, **how):
    sim = Simulation(METHOD, "mlp", digits, **{**HOW, **how})
    for _ in range(rounds):
        sim.step()
    return sim


def test_it_stays_next_to_the_plain_run(digits):
    """Three rounds: off by rounding, far less than what training moves; and not the same bits, so rounding took place."""
    hidden, plain = stepped(digits, 3), stepped(digits, 3, secret=False)
    off = max(float((v - plain.server["params"][n]).abs().max()) for n, v in hidden.server["params"].items())
    moved = max(float((v - plain.initial[n]).abs().max()) for n, v in plain.server["params"].items())
    assert 0 < off < 1e-4 * moved


@pytest.mark.parametrize("aggregator", [fs.Mean(server_momentum=0.5), fs.FedAdam()])
def test_server_optimizers_work_on_the_mean(digits, aggregator):
    hidden, plain = (stepped(digits, 2, aggregator=aggregator, secret=secret) for secret in (True, False))
    assert hidden.memory.keys() == {*plain.memory, "reach", "cut"}
    for n, v in plain.server["params"].items():
        assert torch.allclose(hidden.server["params"][n], v, atol=1e-4)


def test_resumed_and_pickled_it_goes_on_to_the_same_bits(digits, tmp_path):
    whole = stepped(digits, 4)
    first = stepped(digits, 2)
    first.save(tmp_path)
    resumed = Simulation(METHOD, "mlp", digits, **HOW)
    assert resumed.resume(tmp_path)
    copied = pickle.loads(pickle.dumps(first))
    for sim in (resumed, copied):
        sim.step(), sim.step()
        assert same(sim, whole)
    with pytest.raises(fs.CheckpointError, match="secret"):
        Simulation(METHOD, "mlp", digits, seed=2).resume(tmp_path)


def test_stacked_with_others_it_is_the_run_alone(digits):
    found = compare({"a": METHOD, "b": fs.FedAvg(lr=0.1)}, model="mlp", data=digits, rounds=2, seeds=(2, 3), secret=True)
    alone = fs.run(METHOD, model="mlp", data=digits, rounds=2, **HOW)
    assert [r["accuracy"] for r in found["a", 2].history] == [r["accuracy"] for r in alone.history]
    assert all(v.equal(alone.personal(1)[n]) for n, v in found["a", 2].personal(1).items())


def test_cut_into_chunks_it_is_the_same(digits):
    assert same(stepped(digits, 2), stepped(digits, 2, chunk=1))


def test_a_simulation_needs_no_cryptography_and_a_client_says_that_it_does(digits, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    stepped(digits, 1)
    with pytest.raises(
        fs.InputError, match=r"needs the package cryptography; install it with: pip install 'fedselect\[flower\]'"
    ):
        Identity.read(tmp_path, 0)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"fraction": 0.4}, "at least 3 clients in a round, and this run has 1"),
        ({"aggregator": fs.Median()}, "Median looks at the values of single clients"),
        ({"secret": "yes"}, "secret must be True or False"),
        ({"mean": "all"}, "mean must be senders or cohort"),
        ({"secret": False, "mean": "cohort"}, "mean=cohort needs secure aggregation"),
    ],
)
def test_what_cannot_be_is_said_at_once(digits, how, said):
    with pytest.raises(fs.InputError, match=said):
        Simulation(METHOD, "mlp", digits, **{**HOW, **how})
