"""One set of checks that every method passes (habit 5): how clients are executed never shows in the result."""

from dataclasses import replace

import pytest
import torch
from cases import (
    A_FEW_METHODS,
    AWAY,
    CASES,
    EVERY_METHOD,
    MODELS,
    ROUNDS,
    SIZES,
    a_round,
    assert_equal,
    deployed,
    everything,
    federation,
    kept,
    models_of,
    rounds,
    simulation,
)
from local import server_state

import fedselect as fs
from fedselect.core import tree as trees
from fedselect.core.tree import flat
from fedselect.methods.method import Received
from fedselect.simulate import checkpoint


@EVERY_METHOD
def test_chunked_is_whole(case, model, whole):
    _is_whole(case, model, whole, chunk=4)


@A_FEW_METHODS  # by messages, too, every client trains by itself
def test_one_by_one_is_whole(case, model, whole):
    _is_whole(case, model, whole, chunk=1)


def _is_whole(case, model, whole, **how):
    plain, history = whole(case, model)
    sim = simulation(case, model, **how)
    assert rounds(sim) == history
    assert_equal(everything(sim), everything(plain))


@EVERY_METHOD
def test_a_run_in_blocks_is_that_in_tensors(case, model, whole, monkeypatch):
    _is_that_in_tensors(case, model, *whole(case, model), monkeypatch)


@EVERY_METHOD
def test_in_blocks_some_clients_at_a_time_and_late(case, model, away, monkeypatch):
    _is_that_in_tensors(case, model, *away(case, model), monkeypatch, **AWAY)


def _is_that_in_tensors(case, model, plain, history, monkeypatch, **how):
    monkeypatch.setattr(trees, "GATHERED", {"cuda", "cpu"})  # as trees lie on a GPU
    sim = simulation(case, model, **how)
    assert rounds(sim, len(history)) == history
    assert_equal(everything(sim), everything(plain))
    assert any(trees.block(tree) is not None for tree in sim.store.rows.values())


@EVERY_METHOD
def test_by_messages_is_stacked(case, model, whole, tmp_path):
    """The deployment's own server and clients: the server's state, every client's state and both its models, all bytes."""
    sim, history = whole(case, model)
    server, room = deployed(case, model, tmp_path)
    outcomes = [server.step(room) for _ in range(ROUNDS)]
    server.close(room)
    assert_equal(server_state(server), server_state(sim))
    states = [room.node(i)._state(ROUNDS) for i in range(len(SIZES))]
    for k, tree in sim.store.rows.items():
        assert_equal({n: torch.cat([s[k][n] for s in states]) for n in tree}, tree)
    for view in ("local", "merged"):
        assert_equal(kept(room, view), models_of(sim, view))
    for way in ("bytes_up", "bytes_down"):
        sent = [[o.uploads[i][way] for i in range(len(SIZES))] for o in outcomes]
        assert sent == [r["clients"][way] for r in history]


@EVERY_METHOD
def test_a_client_alone_trains_as_in_company(case, model, whole):
    """The same work for clients 2 and 4 in any order and company; only rows move."""
    sim, _ = whole(case, model)

    def client(ids: list[int]) -> dict[str, torch.Tensor]:
        state, up = a_round(sim, torch.tensor(ids))
        return {**flat("state", state), "weight": up.weight}

    together = client([5, 4, 2, 0, 1, 3])
    for row, i in ((1, 4), (2, 2)):
        assert_equal(client([i]), {n: v[row : row + 1] for n, v in together.items()})


@EVERY_METHOD
def test_permuting_clients_permutes_results(case, model, whole):
    sim, _ = whole(case, model)
    server = []
    for ids in (torch.arange(6), torch.tensor([3, 0, 5, 1, 4, 2])):
        _, up = a_round(sim, ids)
        folded = sim.aggregator.fold(sim.memory, sim.server["params"])
        folded.add(up.values, up.sent, up.weight)
        mean, heard, _ = folded.finish()
        after = sim.method.server(sim.server, Received(ids, mean, heard, up.extra))
        got = sim.method.down(after, torch.arange(6))
        server.append(flat("shared", got.shared) | flat("rows", got.rows))
    # sums run in another order: equal to rounding of the last place
    assert_equal(server[0], server[1], tol=1e-6)


@EVERY_METHOD
def test_a_poisoned_client_leaks_nowhere(case, model, whole, monkeypatch):
    """Client 2's samples are NaN: every other client's round is what it is without that."""
    sim, _ = whole(case, model)
    train = sim._split["train"]
    poisoned = train.x.clone()
    poisoned[train.start[2] : train.start[2] + train.n[2]] = torch.nan
    results = []
    for x in (train.x, poisoned):
        monkeypatch.setitem(sim._split, "train", replace(train, x=x))
        state, _ = a_round(sim, torch.arange(6))
        results.append(flat("state", state))
    assert any(v[2].isnan().any() for v in results[1].values() if v.is_floating_point())
    others = [0, 1, 3, 4, 5]
    assert_equal(*({n: v[others] for n, v in found.items()} for found in results))


@EVERY_METHOD
def test_resumed_is_uninterrupted(case, model, whole, tmp_path):
    first = simulation(case, model)
    rounds(first, 1)
    place = checkpoint.save(tmp_path, first, checkpoint.Run({"who": "me"}))
    second = simulation(case, model)
    checkpoint.load(place, second, checkpoint.Run({"who": "me"}))
    rounds(second, ROUNDS - 1)
    assert_equal(everything(second), everything(whole(case, model)[0]))


@EVERY_METHOD
def test_some_clients_at_a_time_and_late(case, model, away):
    """Two of four take part, two more join in round 3; who sits out keeps its state, and chunks do not show."""
    plain, history = away(case, model)
    sim = simulation(case, model, **AWAY, chunk=2)
    assert rounds(sim, len(history)) == history
    assert_equal(everything(sim), everything(plain))
    present = [[i for i, a in enumerate(r["clients"]["accuracy"]) if a is not None] for r in history]
    assert [present[1], present[3]] == [[0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]  # the rounds that are measured
    sent = [[i for i, b in enumerate(r["clients"]["bytes_up"]) if b is not None] for r in history]
    assert [len(s) for s in sent] == [2, 2, 3, 3]  # half of those present
    assert len({tuple(s) for s in sent}) > 1


@EVERY_METHOD
def test_what_stays_stays(case, model, whole):
    """Of a masked method: bytes up are those of the entries that are not personal, and of a mask that is learned."""
    sim, history = whole(case, model)
    if not isinstance(sim.method, fs.Partial):
        pytest.skip("keeps its personal part in another way")
    before = history[-2]["clients"]["share"]  # the mask in force in the last round
    stats = sum(sim.initial[n].numel() for n in sim.model.stats)
    learned = "kept" in sim.store.rows
    if learned:
        before = [sum(int(m[i].sum()) for m in sim.store.rows["kept"].values()) / sim.model.size for i in range(len(SIZES))]
    for i, up in enumerate(history[-1]["clients"]["bytes_up"]):
        shared = round((1 - before[i]) * sim.model.size)
        extra = up - 4 * shared - (-(-sim.model.size // 8) if learned else 0)
        assert extra in (0, 4 * stats), (i, up, shared)


@EVERY_METHOD
def test_result_reads(case, model):
    data = federation()
    result = fs.run(CASES[case](), model=MODELS[model](data), data=data, rounds=2, seed=1)
    assert 0.0 <= result.accuracy <= 1.0
    assert len(result.history) == 2
    assert len(result.clients) == len(SIZES)
    net = MODELS[model](data)
    module = net.build().eval()
    module.load_state_dict(result.personal(3))
    x, y = data.clients[3].test
    assert float((module(x).argmax(1) == y).double().mean()) == pytest.approx(result.clients[3]["accuracy"], abs=1e-6)
    assert {n: tuple(m.shape[1:]) for n, m in result.masks.items()} == {
        n: tuple(v.shape) for n, v in net.init(0).items() if n in net.params
    }
