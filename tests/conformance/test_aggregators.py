"""What every aggregator passes: how clients are executed and how uploads travel never shows in the result."""

import pytest
from cases import (
    AGGREGATES,
    CASES,
    MODELS,
    ROUNDS,
    TRAINING,
    assert_equal,
    deployed,
    everything,
    federation,
    rounds,
    simulation,
)
from local import QUICK, server_state

import fedselect as fs
from fedselect.core.tree import flat
from fedselect.network.server import Server
from fedselect.network.vault import Vault
from fedselect.simulate import Simulation
from fedselect.simulate.stack import Stack, stacks

pytestmark = pytest.mark.parametrize("case", AGGREGATES)


def made(case: str, **how) -> Simulation:
    method, model, aggregator = AGGREGATES[case]
    return simulation(method, model, aggregator=aggregator, **how)


@pytest.fixture(scope="module")
def whole():
    """The plain run that the others are compared with, made once for each case."""
    found: dict[str, tuple[Simulation, list[dict]]] = {}

    def get(case: str) -> tuple[Simulation, list[dict]]:
        if case not in found:
            sim = made(case)
            found[case] = (sim, rounds(sim))
        return found[case]

    return get


def test_it_is_not_the_plain_mean(case, whole):
    method, model, _ = AGGREGATES[case]
    mean = simulation(method, model)
    rounds(mean)
    plain, own = server_state(mean), server_state(whole(case)[0])
    assert all(v.equal(own[n]) for n, v in plain.items()) == (method == "local")


def test_chunked_is_whole(case, whole):
    sim = made(case, chunk=4)
    history = rounds(sim)
    assert_equal(everything(sim), everything(whole(case)[0]))
    assert history == whole(case)[1]


def test_some_clients_at_a_time_and_late(case):
    ends = []
    for chunk in ("auto", 2):
        sim = made(case, fraction=0.5, late=(2, 3), chunk=chunk)
        rounds(sim, 4)
        ends.append(everything(sim))
    assert_equal(*ends)


def test_resumed_is_uninterrupted(case, whole, tmp_path):
    first = made(case)
    rounds(first, 1)
    first.save(tmp_path)
    second = made(case)
    assert second.resume(tmp_path)
    rounds(second, ROUNDS - 1)
    assert_equal(everything(second), everything(whole(case)[0]))
    method, model, _ = AGGREGATES[case]
    with pytest.raises(fs.CheckpointError, match=r"aggregate was .*, is None"):
        simulation(method, model).resume(tmp_path)


def test_by_messages_is_stacked_also_after_the_server_was_lost(case, whole, tmp_path):
    method, model, aggregator = AGGREGATES[case]
    server, room = deployed(method, model, tmp_path, aggregator)
    server.step(room)
    vault = Vault(tmp_path / "checkpoint")
    server.save(vault, {})
    server.step(room)  # lost: it was not saved
    server = Server(room.assigned, QUICK, tmp_path / "masks-2", aggregator=aggregator)
    server.load(vault, 1)
    for _ in range(ROUNDS - 1):
        server.step(room)
    sim = whole(case)[0]
    assert_equal(server_state(server), server_state(sim))
    assert_equal(flat("memory", server.memory), flat("memory", sim.memory))


def test_in_a_stack_with_other_aggregators_it_is_the_run_alone(case, whole):
    method, model, _ = AGGREGATES[case]
    data = federation()
    others = (fs.Mean(), AGGREGATES[case][2], fs.Median(), fs.Mean(server_momentum=0.9))
    runs = [Simulation(CASES[method](), MODELS[model](data), data, seed=11, training=TRAINING, aggregator=a) for a in others]
    assert len({stacks(run) for run in runs}) == 1
    assert stacks(runs[0]) is not None
    stack = Stack(runs)
    for _ in range(ROUNDS):
        stack.step()
    assert_equal(everything(runs[1]), everything(whole(case)[0]))
