"""Persistent disagreement against a slow reference, and what the statistic, the choice and the halves promise."""

import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedselect as fs
from fedselect.core import random
from fedselect.methods.disagree import WINDOW
from fedselect.simulate import Simulation
from fedselect.simulate.stack import Stack
from fedselect.training.batches import Split
from fedselect.training.fitted import Fitted
from fedselect.training.recorded import Programs
from fedselect.training.settings import Training
from fedselect.training.work import Pass, Work

SIZES = (9, 1, 6, 3, 12)
SEED, BATCH, LR, EPOCHS = 4, 4, 0.2, 2


def federation(sizes=SIZES):
    full = fs.load("digits", clients=len(sizes), classes_per_client=3, train=20, test=6, seed=5)
    parts = [fs.ClientData((c.train[0][:n], c.train[1][:n]), c.test) for c, n in zip(full.clients, sizes, strict=True)]
    return fs.Federation(parts, 10)


def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Tanh(), nn.Linear(3, 10))


def simulation(sizes=SIZES, method=None, **how):
    method = method or fs.FedPersist(3, threshold=0.3, epochs=EPOCHS, lr=LR, finetune=1)
    training = how.pop("training", Training(batch_size=BATCH, momentum=0.0))
    return Simulation(method, fs.Model.wrap(build), federation(sizes), seed=SEED, training=training, **how)


def steps(sim, count):
    return [{k: v for k, v in sim.step().items() if k != "seconds"} for _ in range(count)]


# ---- the whole rule, slowly


def halves(client, y):
    """Sample numbers of either half, each twice: shuffled once, dealt in turn."""
    key = random.client_keys(SEED, torch.tensor([client]), 0, "halves")
    mixed = random.permutations(key, torch.tensor([len(y)]), len(y))[0].tolist()
    dealt = (mixed[0::2], mixed[1::2]) if len(y) > 1 else (mixed, mixed)
    return [[half[min(j // 2, len(half) - 1)] for j in range(len(y))] for half in dealt]  # as many as the whole


def sgd(client, values, x, y, samples, round_):
    """Plain SGD in float64 over these samples, as the i-th client shuffles so many in this round."""
    values = {n: v.clone().requires_grad_() for n, v in values.items()}
    n, size = len(samples), min(BATCH, len(samples))
    for epoch in range(EPOCHS):
        key = random.fold(random.client_keys(SEED, torch.tensor([client]), round_, "train"), epoch)
        order = random.permutations(key, torch.tensor([n]), n)[0].tolist()
        for step in range(math.ceil(n / size)):
            batch = [samples[order[j % n]] for j in range(step * size, (step + 1) * size)]
            loss = F.cross_entropy(torch.func.functional_call(build().double(), values, (x[batch],)), y[batch])
            grads = torch.autograd.grad(loss, list(values.values()))
            values = {k: (v - LR * g).detach().requires_grad_() for (k, v), g in zip(values.items(), grads, strict=True)}
    return {k: v.detach() for k, v in values.items()}


class Slow:
    """A client by the book: all its pulls in lists."""

    def __init__(self, number, x, y):
        self.number, self.x, self.y = number, x.double(), y
        self.halves = halves(number, y)
        self.last = self.found = None
        self.pulls = []  # of both halves
        self.own, self.personal = {}, set()

    def round(self, received, round_, select):
        if self.last is not None and self.found is None:
            self.pulls.append([{n: half[n] - received[n] for n in received} for half in self.last])
        before = {n: self.own[n] if n in self.personal else v for n, v in received.items()}  # what is newly kept begins shared
        if len(self.pulls) == select.window and self.found is None:
            self.found = {n: self.persistence([n]) for n in received}
            self.choose(received, select)
        if self.found is not None:
            self.own = sgd(self.number, before, self.x, self.y, range(len(self.y)), round_)
        else:
            self.last = [sgd(self.number, before, self.x, self.y, half, round_) for half in self.halves]
            self.own = {n: (self.last[0][n] + self.last[1][n]) / 2 for n in received}

    def persistence(self, names):
        if len(self.y) == 1:
            return 0.0
        same = size = 0.0
        for n in names:
            first, second = [a[n] for a, _ in self.pulls[0::2]], [b[n] for _, b in self.pulls[1::2]]
            same += float((sum(first) / len(first) * (sum(second) / len(second))).sum())
            size += sum(float((half[n] ** 2).sum()) for pull in self.pulls for half in pull) / (2 * len(self.pulls))
        return min(1.0, same / size)

    def choose(self, received, select):
        layers = {}
        for n in received:
            layers.setdefault(n.split(".")[0], []).append(n)
        above = [tensors for tensors in layers.values() if self.persistence(tensors) > select.threshold]
        if above and len(self.y) > 1:
            self.personal |= set(above[-1])


@pytest.mark.parametrize(("fraction", "choices"), [(1.0, 3), (0.6, 2)])
def test_the_engine_is_the_slow_reference(fraction, choices):
    sim = simulation(fraction=fraction)
    server = {n: v.double() for n, v in sim.initial.items()}
    clients = [Slow(i, *c.train) for i, c in enumerate(sim.data.clients)]
    kept = set()
    for r in range(6 if fraction == 1.0 else 9):
        sim.step()
        cohort = random.choose(SEED, torch.arange(len(SIZES)), round(fraction * len(SIZES)), r, "cohort").tolist()
        for i in cohort:
            clients[i].round(server, r, sim.method.select)
        for n in server:
            sent = [clients[i].own[n] for i in cohort if n not in clients[i].personal]
            server[n] = sum(sent) / len(sent) if sent else server[n]
        for i, c in enumerate(clients):
            for n in server:
                found = float(sim.store.rows["persistence"][n][i])
                assert math.isnan(found) if c.found is None else found == pytest.approx(c.found[n], abs=1e-4), (r, i, n)
                assert bool(sim.store.rows["mask"][n][i].all()) == bool(sim.store.rows["mask"][n][i].any())
                assert bool(sim.store.rows["mask"][n][i].any()) == (n in c.personal), (r, i, n)
            kept |= {frozenset(c.personal)}
    for n, v in server.items():
        torch.testing.assert_close(sim.server["params"][n].double(), v, rtol=0, atol=1e-5)
    assert len(kept) == choices  # nothing, the last layer and, where all take part, the first


# ---- the statistic, on pulls that are made up


class Door:
    """In place of Work: trains to what is given for either half."""

    def __init__(self, round, names, clients):
        self.round, self.model = round, SimpleNamespace(params=names)
        self.ids, self.n = torch.arange(clients), torch.full((clients,), 9)
        self.loss = torch.zeros(clients)

    def half(self, which, whose=None):
        return SimpleNamespace(which=which, loss=self.loss)


def after_window(select, pulls):
    """The memory after a window of pulls, by name (window, halves, clients, ...); the aggregate moves meanwhile."""
    names, clients = list(pulls), next(iter(pulls.values())).shape[2]
    at = {n: torch.randn(p.shape[3:], generator=torch.Generator().manual_seed(1)).expand(p.shape[2:]) for n, p in pulls.items()}
    memory = select.start(Door(0, names, clients), at)
    for r in range(select.window + 1):
        at = {n: v + 0.1 * r for n, v in at.items()}
        memory = select.begin(Door(r, names, clients), memory, at)
        if r < select.window:
            ends = [{n: at[n] + 0.1 * (r + 1) + pulls[n][r, half] for n in names} for half in (0, 1)]
            _, memory = select.grow(Door(r, names, clients), memory, at, lambda door, ends=ends: ends[door.which])
    assert not memory.keys() & set(WINDOW)
    return memory


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def found(pulls):
    return after_window(fs.Disagreement(len(pulls)), {"w": pulls})["persistence"]["w"]


@pytest.mark.parametrize("window", [2, 3, 6])
def test_a_pull_that_stays_has_persistence_1(window):
    pulls = draw(1, 1, 5, 7).expand(window, 2, 5, 7)
    torch.testing.assert_close(found(pulls), torch.ones(5, dtype=torch.float64), rtol=0, atol=1e-4)


def test_pulls_that_turn_round_have_persistence_minus_1():
    pulls = draw(1, 1, 5, 7) * torch.tensor([1.0, -1.0, 1.0, -1.0]).view(4, 1, 1, 1).expand(4, 2, 1, 1)
    torch.testing.assert_close(found(pulls), -torch.ones(5, dtype=torch.float64), rtol=0, atol=1e-4)


def no_mean(values):
    return abs(float(values.mean())) < 4 * float(values.std()) / math.sqrt(len(values))


def test_noise_has_mean_0_and_a_spread_that_falls_with_the_entries():
    """Of k entries with variance 1, <m, m'> over 2 and 2 rounds has variance k / (2 * 2), and E|d|^2 is about k."""
    for k in (64, 256):
        values = found(draw(4, 2, 3000, k))
        assert no_mean(values)
        # the spread of 3000 values is known to 1.3%; four times that
        assert float(values.std()) == pytest.approx(1 / math.sqrt(4 * k), rel=0.052)


def test_what_only_one_half_asks_for_has_mean_0():
    """Each half pulls the same way in every round, either its own."""
    pulls = draw(1, 2, 3000, 64).expand(4, 2, 3000, 64) + 0.3 * draw(4, 2, 3000, 64, seed=1)
    assert no_mean(found(pulls))


def test_persistence_is_the_share_that_rounds_and_halves_have_in_common():
    """A part for good (variance 1), one of each half (1) and one of each round and half (2): 1 of 4."""
    common, own, noise = draw(1, 1, 3000, 64), draw(1, 2, 3000, 64, seed=1), draw(4, 2, 3000, 64, seed=2)
    values = found(common + own + math.sqrt(2) * noise)
    # a quotient of means: off by the order of 1 / k
    assert float(values.mean()) == pytest.approx(0.25, abs=4 * float(values.std()) / math.sqrt(3000) + 0.25 / 64)


def test_no_pull_at_all_persists_in_nothing():
    assert found(torch.zeros(2, 2, 3, 4)).tolist() == [0.0, 0.0, 0.0]


# ---- the choice


SHARES = st.sampled_from([0.0, 0.05, 0.1, 0.3, 0.5, 0.7, 1.0])


@given(st.data(), st.integers(1, 6), st.integers(1, 4), st.booleans())
def test_the_last_layer_above_the_threshold_is_kept(data, layers, clients, single):
    """For each client its own threshold, in double or single precision."""
    rows = st.lists(st.sampled_from([-0.5, 0.0, 0.2, 0.4, 0.6, 1.0]), min_size=layers, max_size=layers)
    scores = data.draw(st.lists(rows, min_size=clients, max_size=clients))
    threshold = data.draw(st.lists(SHARES, min_size=clients, max_size=clients))
    some = data.draw(st.lists(st.booleans(), min_size=clients, max_size=clients))
    select = fs.Disagreement(2, torch.tensor(threshold, dtype=torch.float32 if single else torch.float64))
    table = torch.tensor(scores, dtype=torch.float64)
    chosen = select._choose({str(i): table[:, i] for i in range(layers)}, torch.tensor(some))
    for c in range(clients):
        above = [i for i in range(layers) if some[c] and scores[c][i] > threshold[c]]
        assert [i for i in range(layers) if bool(chosen[str(i)][c])] == above[-1:]


def test_tensors_of_a_layer_are_judged_and_kept_together():
    """In b.weight a pull of 1 stays and b.bias has one of 2 that turns: 1 - 4 of 5. In a.weight it stays, a.bias has none."""
    stays = torch.ones(2, 2, 2, 5)
    turns = 2 * stays * torch.tensor([1.0, -1.0]).view(2, 1, 1, 1)
    pulls = {"a.weight": stays, "a.bias": torch.zeros_like(stays), "b.weight": stays, "b.bias": turns}
    memory = after_window(fs.Disagreement(2, 0.2), pulls)
    assert {n: m.all(1).tolist() for n, m in memory["mask"].items()} == {
        "a.weight": [True, True],
        "a.bias": [True, True],
        "b.weight": [False, False],
        "b.bias": [False, False],
    }
    assert memory["persistence"]["b.weight"].tolist() == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("window", [2, 3])
def test_threshold_1_keeps_nothing(window):
    """Not even where the halves' largest pulls fall on the rounds that count, and <m, m'> is twice E|d|^2."""
    pulls = torch.zeros(window, 2, 1, 4)
    pulls[0::2, 0], pulls[1::2, 1] = 1.0, 1.0
    memory = after_window(fs.Disagreement(window, 1.0), {"w": pulls})
    assert memory["persistence"]["w"].tolist() == [1.0]
    assert not memory["mask"]["w"].any()
    assert after_window(fs.Disagreement(window, 0.99), {"w": pulls})["mask"]["w"].all()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"window": 1}, "window must be 0 or at least 2"), ({"window": -2}, "window must not be negative"),
        ({"threshold": 1.5}, "threshold is a share"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(given, words):
    with pytest.raises(fs.InputError, match=words):
        fs.FedPersist(**given)


# ---- a window in a run


def away(**how):
    return simulation(fraction=0.6, late=(2, 3), **how)


def taken_part(history):
    return [sum(r["clients"]["bytes_up"][i] is not None for r in history) for i in range(len(SIZES))]


@pytest.mark.parametrize("make", [simulation, away])
def test_a_client_is_tested_after_a_window_of_its_own_pulls(make):
    """Whoever sits rounds out or joins late, later: in the round it takes part in after that."""
    sim, history, seen = make(), [], set()
    for _ in range(10):
        history += steps(sim, 1)
        done = [not bool(v) for v in sim.store.rows["persistence"]["1.weight"].isnan()]
        joined = sim.store.joined.tolist()
        for i, rounds in enumerate(taken_part(history)):
            if joined[i]:
                assert done[i] == (rounds > sim.method.select.window)
            seen.add((rounds, done[i]))
    assert {(3, False), (4, True)} <= seen


def test_a_client_with_one_sample_keeps_nothing():
    sim = simulation(method=fs.FedPersist(2, threshold=0.0, lr=LR))
    history = steps(sim, 4)
    share = history[-1]["clients"]["share"]
    assert SIZES[1] == 1
    assert share[1] == 0.0
    assert sum(s > 0.0 for s in share) >= 2
    assert all(float(v[1]) == 0.0 for v in sim.store.rows["persistence"].values())


@pytest.mark.parametrize("how", [{}, {"chunk": 2}, {"fraction": 0.6}, {"fraction": 0.6, "late": (2, 3), "chunk": 1}])
def test_after_the_last_test_nothing_of_the_window_is_stored(how):
    sim = simulation(method=fs.FedPersist(3, threshold=0.3, epochs=1, lr=LR), **how)
    steps(sim, 3)
    assert set(WINDOW) - {"units"} <= sim.store.rows.keys()
    before = sim.store.nbytes
    history = steps(sim, 1)
    while bool(sim.store.rows["persistence"]["1.weight"].isnan().any()) or not bool(sim.store.joined.all()):
        history += steps(sim, 1)
        assert len(history) < 40
    steps(sim, 12)  # who shared a cohort with the last has taken part once more
    assert not sim.store.rows.keys() & set(WINDOW)
    d = 64 * 3 + 3 + 3 * 10 + 10
    assert before - sim.store.nbytes == len(SIZES) * (3 * 4 * d + (4 + 2) * 8)  # trees; energy of four tensors, two counts


def test_packed_rows_shrink_after_the_test():
    sim = simulation(rows="personal")
    steps(sim, 3)
    d = 64 * 3 + 3 + 3 * 10 + 10
    assert min(sim.store._pages.sizes) >= 3 * 4 * d
    history = steps(sim, 2)
    for size, share in zip(sim.store._pages.sizes, history[-1]["clients"]["share"], strict=True):
        # own values, the mask and as much of the one trained with as bits, and four persistences; sections end at eights
        assert size <= 4 * round(share * d) + 2 * (d // 8 + 1) + 4 * 8 + 4 * 8


@pytest.mark.parametrize("how", [{}, {"fraction": 0.6, "late": (2, 3)}])
def test_packed_rows_and_chunks_give_the_same_run(how):
    """Also where clients in their window and past it train side by side."""
    runs = [simulation(**how, **rows) for rows in ({}, {"rows": "personal"}, {"chunk": 2, "rows": "personal"})]
    histories = [steps(run, 8) for run in runs]
    assert all(h == histories[0] for h in histories)
    models = [run.models(range(len(SIZES)), "merged") for run in runs]
    assert all(torch.equal(m[n], v) for m in models for n, v in models[0].items())


@pytest.mark.parametrize("how", [{}, {"fraction": 0.6, "late": (2, 3)}, {"rows": "personal"}])
def test_resumed_within_the_window_and_after_it_is_uninterrupted(how, tmp_path):
    whole, first = simulation(**how), simulation(**how)
    history = steps(whole, 7)
    for at in (2, 3, 5):
        steps(first, at - first.round)
        first.save(tmp_path / str(at))
        second = simulation(**how)
        assert second.resume(tmp_path / str(at))
        assert steps(second, 7 - at) == history[at:]
        for view in ("merged",) if "rows" in how else ("merged", "local"):
            ours, theirs = (sim.models(range(len(SIZES)), view) for sim in (second, whole))
            assert all(torch.equal(v, theirs[n]) for n, v in ours.items())


def test_runs_in_a_stack_may_be_at_different_points_of_their_windows():
    def runs():
        how = {"fraction": 0.8, "training": Training(batch_size=BATCH)}
        method = fs.FedPersist(2, epochs=1, lr=LR)
        made = [Simulation(method, fs.Model.wrap(build), federation(), seed=s, **how) for s in range(4)]
        for run in made:
            steps(run, 5)
        return made

    stacked, alone = runs(), runs()
    assert {"pulls" in run.store.rows for run in stacked} == {True, False}  # some have let the window go
    together = Stack(stacked)
    for _ in range(3):
        for got, run in zip(together.step(), alone, strict=True):
            assert {**got, "seconds": 0} == {**run.step(), "seconds": 0}


# ---- halves of the data


def door(sizes, y, seed=0, round_=0, ids=None):
    n = torch.tensor(sizes)
    x = draw(len(y), 3)
    part = Split(x, y, n.cumsum(0) - n, n)
    programs = Programs(Fitted(fs.Model.wrap(nn.Linear(3, 4))), Training(batch_size=4), fs.Classification())
    ids = torch.arange(len(sizes)) if ids is None else ids
    return Work(programs, part, part, ids=ids, round=round_, seed=seed, initial=dict)


def samples(work):
    """The places in the pool that each client has, in order."""
    at = work._data.places(torch.arange(work._data.longest).expand(len(work.n), -1))
    return [row[:n].tolist() for row, n in zip(at, work.n.tolist(), strict=True)]


KINDS = {
    "classes": lambda total, g: torch.randint(0, 3, (total,), generator=g),
    "numbers": lambda total, g: torch.randn(total, generator=g),
    "vectors": lambda total, g: torch.randn(total, 2, generator=g),
    "words": lambda total, g: torch.randint(0, 5, (total, 4), generator=g),
}


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.sampled_from(sorted(KINDS)), st.integers(0, 99))
def test_halves_are_disjoint_and_together_everything(sizes, kind, seed):
    y = KINDS[kind](sum(sizes), torch.Generator().manual_seed(seed))
    work = door(sizes, y, seed)
    first, second = samples(work.half(0)), samples(work.half(1))
    for size, whole, a, b in zip(sizes, samples(work), first, second, strict=True):
        assert len(a) == len(b) == size  # each sample twice, but for one of an odd number
        assert set(Counter(a).values()) | set(Counter(b).values()) <= {1, 2, 3}
        a, b = sorted(set(a)), sorted(set(b))
        if size == 1:
            assert a == b == whole
            continue
        assert sorted(a + b) == whole
        assert len(a) - len(b) in (0, 1)
    later = door(sizes, y, seed, round_=7)
    assert [samples(later.half(i)) for i in (0, 1)] == [first, second]


def test_halves_differ_by_seed_and_client():
    y = torch.zeros(20, dtype=torch.int64)
    a, b, c = (samples(door([20], y, seed, ids=torch.tensor([i])).half(0))[0] for seed, i in ((0, 0), (1, 0), (0, 1)))
    assert len({frozenset(a), frozenset(b), frozenset(c)}) == 3


def test_a_half_is_a_door_like_any_other():
    """It may be halved again, cut to some clients, and knows its classes."""
    y = torch.tensor([0, 1, 2, 3, 3, 3, 3, 0, 0, 1])
    work = door([7, 3], y)
    half = work.half(0)
    quarters = [samples(half.half(i)) for i in (0, 1)]
    assert [set(a + b) for a, b in zip(*quarters, strict=True)] == [set(s) for s in samples(half)]
    assert samples(half.rows(torch.tensor([1, 0]))) == samples(half)[::-1]
    for row, mine in zip(half.classes(4).tolist(), samples(half), strict=True):
        assert row == [any(int(y[i]) == label for i in mine) for label in range(4)]


def trained(work):
    tree = {"weight": draw(1, 4, 3).expand(len(work.n), 4, 3), "bias": torch.zeros(len(work.n), 4)}
    passes = [Pass(dict.fromkeys(work.model.params, True), 0.1, epoch) for epoch in range(2)]
    return work.train(tree, passes), work


def test_halves_of_unequal_clients_train_stacked_as_one_by_one():
    y = torch.randint(0, 4, (31,), generator=torch.Generator().manual_seed(3))
    work = door([5, 12, 1, 4, 9], y)
    for which in (0, 1):
        whole, half = trained(work.half(which))
        for i in range(5):
            alone, its = trained(work.rows(slice(i, i + 1)).half(which))
            assert all(torch.equal(v[0], whole[n][i]) for n, v in alone.items())
            assert torch.equal(its.loss[0], half.loss[i])


def test_clients_that_are_not_halved_train_as_ever():
    y = torch.randint(0, 4, (31,), generator=torch.Generator().manual_seed(3))
    work, marked = door([5, 12, 1, 4, 9], y), torch.tensor([True, False, False, True, False])
    half, ever = trained(work.half(0))[0], trained(work)[0]
    for which in (0, 1):
        half = trained(work.half(which))[0]
        some = trained(work.half(which, marked))[0]
        for i, cut in enumerate(marked.tolist()):
            assert all(torch.equal(v[i], (half if cut else ever)[n][i]) for n, v in some.items())
