"""One set of checks that every method passes (habit 5): how clients are executed never shows in the result."""

import pytest
import torch
from cases import (
    CASES,
    MODELS,
    PAIRS,
    ROUNDS,
    SIZES,
    a_round,
    assert_equal,
    deployed,
    everything,
    federation,
    kept,
    rounds,
    simulation,
)
from local import server_state

import fedselect as fs
from fedselect.core import tree as trees
from fedselect.simulate import Simulation, checkpoint

pytestmark = pytest.mark.parametrize(("case", "model"), PAIRS)


@pytest.fixture(scope="module")
def whole():
    """The plain run that the others are compared with, made once for each case."""
    made: dict[tuple[str, str], tuple[Simulation, list[dict]]] = {}

    def get(case: str, model: str) -> tuple[Simulation, list[dict]]:
        if (case, model) not in made:
            sim = simulation(case, model)
            made[case, model] = (sim, rounds(sim))
        return made[case, model]

    return get


@pytest.mark.parametrize("chunk", [1, 4])
def test_chunked_is_whole(case, model, chunk, whole):
    sim = simulation(case, model, chunk=chunk)
    history = rounds(sim)
    assert_equal(everything(sim), everything(whole(case, model)[0]))
    assert history == whole(case, model)[1]


@pytest.mark.parametrize("fraction", [1.0, 0.6])
def test_a_run_in_blocks_is_that_in_tensors(case, model, fraction, whole, monkeypatch):
    """As trees lie on a GPU."""
    sims = []
    for devices in ({"cuda"}, {"cuda", "cpu"}):
        monkeypatch.setattr(trees, "GATHERED", devices)
        sim = whole(case, model)[0] if fraction == 1.0 and devices == {"cuda"} else simulation(case, model, fraction=fraction)
        if sim.round == 0:
            rounds(sim)
        sims.append(sim)
    assert_equal(everything(sims[1]), everything(sims[0]))
    assert any(trees.block(tree) is not None for tree in sims[1].store.rows.values())


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
        assert_equal(kept(room, view), sim.models(range(len(SIZES)), view))
    for way in ("bytes_up", "bytes_down"):
        sent = [[o.uploads[i][way] for i in range(len(SIZES))] for o in outcomes]
        assert sent == [r["clients"][way] for r in history]


def test_a_client_alone_trains_as_in_company(case, model):
    """The same work for clients 2 and 4 in any order and company; only rows move."""
    method = CASES[case]()
    data = federation()
    net = MODELS[model](data)
    sim = Simulation(method, net, data, seed=11)
    sim.step()

    def client(ids: list[int]) -> dict[str, torch.Tensor]:
        state, up = a_round(sim, torch.tensor(ids))
        return {**{f"{k}/{n}": v for k, t in state.items() for n, v in t.items()}, "weight": up.weight}

    together = client([5, 4, 2, 0, 1, 3])
    for row, i in ((1, 4), (2, 2)):
        assert_equal(client([i]), {n: v[row : row + 1] for n, v in together.items()})


def test_permuting_clients_permutes_results(case, model):
    sim = simulation(case, model)
    sim.step()
    method, order = sim.method, torch.tensor([3, 0, 5, 1, 4, 2])
    server = []
    for ids in (torch.arange(6), order):
        from fedselect.methods.method import Received

        _, up = a_round(sim, ids)
        folded = sim.aggregator.fold(sim.memory, sim.server["params"])
        folded.add(up.values, up.sent, up.weight)
        mean, heard, _ = folded.finish()
        after = method.server(sim.server, Received(ids, mean, heard, up.extra))
        got = method.down(after, torch.arange(6))
        server.append({f"{k}/{n}": v for part in (got.shared, got.rows) for k, t in part.items() for n, v in t.items()})
    # sums run in another order: equal to rounding of the last place
    assert_equal(server[0], server[1], tol=1e-6)


def test_a_poisoned_client_leaks_nowhere(case, model):
    """Client 2's samples are NaN: every other client's round is what it is without that."""
    method, data = CASES[case](), federation()
    results = []
    for poison in (False, True):
        sim = Simulation(method, MODELS[model](data), data, seed=11)
        sim.step()
        if poison:
            train = sim._split["train"]
            train.x[train.start[2] : train.start[2] + train.n[2]] = torch.nan
        state, _ = a_round(sim, torch.arange(6))
        results.append({f"{k}/{n}": v[[0, 1, 3, 4, 5]] for k, t in state.items() for n, v in t.items()})
    assert_equal(*results)


def test_resumed_is_uninterrupted(case, model, whole, tmp_path):
    first = simulation(case, model)
    rounds(first, 1)
    place = checkpoint.save(tmp_path, first, checkpoint.Run({"who": "me"}))
    second = simulation(case, model)
    checkpoint.load(place, second, checkpoint.Run({"who": "me"}))
    rounds(second, ROUNDS - 1)
    assert_equal(everything(second), everything(whole(case, model)[0]))


def test_some_clients_at_a_time_and_late(case, model):
    """Two of three take part, two more join in round 3; who sits out keeps its state, and chunks do not show."""
    runs = []
    for chunk in ("auto", 2):
        sim = simulation(case, model, fraction=0.5, late=(2, 3), chunk=chunk)
        history = rounds(sim, 4)
        runs.append((everything(sim), history))
    assert_equal(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]
    present = [[i for i, a in enumerate(r["clients"]["accuracy"]) if a is not None] for r in runs[0][1]]
    assert present == [[0, 1, 2, 3]] * 2 + [[0, 1, 2, 3, 4, 5]] * 2
    sent = [[i for i, b in enumerate(r["clients"]["bytes_up"]) if b is not None] for r in runs[0][1]]
    assert [len(s) for s in sent] == [2, 2, 3, 3]  # half of those present
    assert len({tuple(s) for s in sent}) > 1


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


def test_result_reads(case, model):
    data = federation()
    result = fs.run(CASES[case](), model=MODELS[model](data), data=data, rounds=2, seed=1)
    assert 0.0 <= result.accuracy <= 1.0
    assert len(result.history) == 2
    assert len(result.clients) == len(SIZES)
    net = MODELS[model](data)
    net.module.load_state_dict(result.personal(3))
    x, y = data.clients[3].test
    net.module.eval()
    assert float((net.module(x).argmax(1) == y).double().mean()) == pytest.approx(result.clients[3]["accuracy"], abs=1e-6)
    assert {n: tuple(m.shape[1:]) for n, m in result.masks.items()} == {
        n: tuple(result.personal(0)[n].shape) for n in net.params
    }
