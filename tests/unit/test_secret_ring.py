"""The ring: whole numbers that add up exactly whatever the clients send, and rounding that is right in the mean."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedselect as fs
from fedselect.core import random
from fedselect.secret.mean import FIRST, FIRST_STATISTIC, hidden
from fedselect.secret.ring import CLIENTS, IS_NEAR, OVER, Ring, shapes

LIKE = {"w": torch.Size([2, 3]), "b": torch.Size([4])}


@pytest.mark.parametrize(
    ("clients", "counted", "width", "bits"),
    [(3, True, 4, 24), (15, True, 4, 24), (16, True, 4, 22), (127, True, 4, 18), (128, True, 8, 24), (5000, True, 8, 24),
     (15, False, 4, 24), (127, False, 4, 24)],
)  # fmt: skip
def test_bits_of_a_value(clients, counted, width, bits):
    ring = Ring(clients, counted)
    assert (ring.dtype.itemsize, ring.value_bits) == (width, bits)


@st.composite
def uploads(draw):
    """Some clients' whole numbers and masks, in a ring for at least as many; among them the largest there are."""
    clients = draw(st.integers(1, 6))
    ring = Ring(draw(st.sampled_from([clients, 15, 127, 200])), draw(st.booleans()))
    number = st.sampled_from([-ring.top, ring.top, 0, 1, -1]) | st.integers(-ring.top, ring.top)
    rows = []
    for _ in range(clients):
        marks = draw(st.lists(st.booleans(), min_size=6, max_size=6))
        values = draw(st.lists(number, min_size=10, max_size=10))
        rows.append(([v if m else 0 for v, m in zip(values, [*marks, *[True] * 4], strict=True)], marks))
    return ring, rows


def packed(ring, values, marks):
    whole = torch.tensor(values, dtype=torch.float64).float()
    codes = {"w": whole[:6].view(2, 3), "b": whole[6:], CLIENTS: torch.ones(1), OVER: torch.ones(2), IS_NEAR: torch.zeros(2)}
    return ring.pack(codes, {"w": torch.tensor(marks).view(2, 3), "b": True})


@given(uploads())
def test_sums_are_those_of_plain_integers(upload):
    ring, rows = upload
    lines = [packed(ring, values, marks) for values, marks in rows]
    total = sum(lines[1:], lines[0])
    values, senders = ring.unpack(total, shapes(LIKE))
    plain = [sum(column) for column in zip(*(values for values, _ in rows), strict=True)]
    assert [int(v) for n in LIKE for v in values[n].flatten()] == plain
    sent = [sum(column) for column in zip(*(marks for _, marks in rows), strict=True)]
    counts = [*sent, *[len(rows)] * 4] if ring.counted else [len(rows)] * 10
    assert [int(v) for n in LIKE for v in senders[n].flatten()] == counts
    assert (int(values[CLIENTS]), values[OVER].tolist()) == (len(rows), [float(len(rows))] * 2)


@pytest.mark.parametrize("clients", [15, 127, 200])
def test_as_many_clients_as_the_ring_is_for_do_not_overflow(clients):
    ring = Ring(clients)
    for value in (ring.top, -ring.top):
        line = packed(ring, [value] * 10, [True] * 6)
        total = np.zeros_like(line)
        for _ in range(clients):
            total += line
        values, senders = ring.unpack(total, shapes(LIKE))
        assert values["w"].flatten().tolist() == [float(value * clients)] * 6
        assert senders["b"].tolist() == [float(clients)] * 4


def some(clients, seed=0):
    draw = torch.Generator().manual_seed(seed)
    params = {"w": torch.randn(2, 3, generator=draw), "b": torch.randn(4, generator=draw)}
    values = {n: v + 0.1 * torch.randn(clients, *v.shape, generator=draw) for n, v in params.items()}
    return params, values


REACH = {"w": torch.tensor(0.25), "b": torch.tensor(0.0625)}
KEYS = random.client_keys(7, torch.arange(5), 3, "rounding")


def test_rounding_is_that_of_plain_loops():
    ring, (params, values) = Ring(20), some(5)
    marks = torch.rand(5, 2, 3) < 0.6
    codes = ring.code(values, {"w": marks, "b": True}, params, REACH, KEYS)
    for c in range(5):
        over, near = {"w": 0, "b": 0}, {"w": 0, "b": 0}
        for n in LIKE:
            draw = random.uniform(random.fold(KEYS[c : c + 1], n), LIKE[n].numel())[0].tolist()
            sent = marks[c].flatten().tolist() if n == "w" else [True] * 4
            for k, (v, p) in enumerate(zip(values[n][c].flatten().tolist(), params[n].flatten().tolist(), strict=True)):
                exact = (v - p) * ring.top / float(REACH[n])
                whole = max(-ring.top, min(ring.top, math.floor(exact + draw[k]))) if sent[k] else 0
                assert float(codes[n][c].flatten()[k]) == whole
                over[n] += sent[k] and abs(exact) > ring.top
                near[n] += sent[k] and abs(exact) > ring.top / 8
        assert codes[OVER][c].tolist() == list(over.values())
        assert codes[IS_NEAR][c].tolist() == list(near.values())
    assert codes[OVER].sum() > 0


def test_clients_stacked_are_clients_one_by_one():
    ring, (params, values) = Ring(20), some(5)
    together = ring.code(values, {"w": True, "b": True}, params, REACH, KEYS)
    for c in range(5):
        alone = ring.code(
            {n: v[c : c + 1] for n, v in values.items()}, dict.fromkeys(LIKE, True), params, REACH, KEYS[c : c + 1]
        )
        assert all(together[n][c].equal(v[0]) for n, v in alone.items())


def test_rounding_is_right_in_the_mean():
    """A value a third of the way between two steps: of 3000 draws about a third go up."""
    ring = Ring(15)
    keys = random.client_keys(0, torch.arange(3000), 0, "rounding")
    third = torch.full((3000, 1), (5 + 1 / 3) / ring.top)
    codes = ring.code({"x": third}, {"x": True}, {"x": torch.zeros(1)}, {"x": torch.ones(())}, keys)["x"]
    assert set(codes.flatten().tolist()) == {5.0, 6.0}
    assert float(codes.mean()) == pytest.approx(5 + 1 / 3, abs=4 * math.sqrt(2 / 9 / 3000))


def test_what_is_kept_may_hold_anything():
    ring, (params, values) = Ring(20), some(5)
    marks = torch.rand(5, 2, 3) < 0.5
    spoilt = {**values, "w": torch.where(marks, values["w"], torch.nan)}
    plain, other = (ring.code(v, {"w": marks, "b": True}, params, REACH, KEYS) for v in (values, spoilt))
    assert all(v.equal(other[n]) for n, v in plain.items())
    assert not bool(plain["w"][~marks].any())


# ---- the aggregator


def up(values, sent):
    return fs.Up(values, sent, torch.ones(len(next(iter(values.values()))), dtype=torch.float64))


@pytest.mark.parametrize("mean", ["senders", "cohort"])
def test_the_mean_is_that_of_the_rounded_updates(mean):
    params, values = some(5)
    marks = torch.rand(5, 2, 3) < 0.5
    marks[:, 0, 0] = False  # nobody sends it
    how = hidden(fs.Mean(), 5, mean)
    fold = how.fold(how.start(params), params)
    fold.take(up(values, {"w": marks, "b": True}), lambda: KEYS)
    found, heard, memory = fold.finish()
    codes = how.ring.code(values, {"w": marks, "b": True}, params, {n: torch.tensor(FIRST) for n in LIKE}, KEYS)
    for n, mask in (("w", marks), ("b", torch.ones(5, 4, dtype=torch.bool))):
        step = codes[n].double() * FIRST / how.ring.top
        by = mask.sum(0).double() if mean == "senders" else torch.full_like(step[0], 5)
        plain = (params[n].double() + torch.where(mask, step, 0.0).sum(0) / by.clamp_min(1)).float()
        there = torch.as_tensor(heard[n])
        assert torch.allclose(torch.where(there, found[n], params[n]), plain, rtol=0, atol=1e-6)
        assert there.equal(by > 0)
    assert float(memory["cut"]["share"]) == 0.0


def test_chunks_and_order_do_not_show():
    params, values = some(5)
    marks = torch.rand(5, 2, 3) < 0.5
    how = hidden(fs.Mean(), 5, "senders")
    ends = []
    for order in ([[0, 1, 2, 3, 4]], [[4], [2, 0], [3, 1]]):
        fold = how.fold(how.start(params), params)
        for part in order:
            fold.take(up({n: v[part] for n, v in values.items()}, {"w": marks[part], "b": True}), lambda part=part: KEYS[part])
        ends.append(fold.finish())
    assert all(v.equal(ends[1][0][n]) for n, v in ends[0][0].items())
    assert all(v.equal(ends[1][2]["reach"][n]) for n, v in ends[0][2]["reach"].items())


def test_the_range_follows_what_was_cut():
    """w moves by more than its range and gets a larger one, b by little and gets a smaller one; s is a statistic."""
    params = {"w": torch.zeros(2, 3), "b": torch.zeros(4), "s": torch.zeros(2)}
    moved = {"w": torch.full((5, 2, 3), 3.0), "b": torch.full((5, 4), 0.01), "s": torch.full((5, 2), 50.0)}
    how = hidden(fs.Mean(), 5, "senders")
    state = how.start({n: params[n] for n in LIKE})
    assert set(state["reach"]) == set(LIKE)
    seen = []
    for _ in range(3):
        fold = how.fold(state, params)
        seen.append([float(fold.reach[n]) for n in params])
        fold.take(up(moved, dict.fromkeys(params, True)), lambda: KEYS)
        mean, _, state = fold.finish()
        seen[-1] += [round(float(mean["w"].mean()), 3), round(float(state["cut"]["share"]), 3)]
    assert seen == [
        [FIRST, FIRST, FIRST_STATISTIC, 1.0, 0.5],  # 30 of 60 values
        [4 * FIRST, FIRST / 2, FIRST_STATISTIC, 3.0, 0.0],
        [4 * FIRST, FIRST / 4, FIRST_STATISTIC, 3.0, 0.0],
    ]


@dataclasses.dataclass(frozen=True)
class Shortened(fs.Mean):
    """An aggregator of one's own that looks at single uploads, as docs/own-aggregator.md has one."""


@pytest.mark.parametrize("aggregator", [fs.ClippedMean(), fs.Median(), fs.TrimmedMean(), Shortened()])
def test_aggregators_that_look_at_single_clients_are_refused(aggregator):
    with pytest.raises(fs.InputError, match=f"{type(aggregator).__name__} looks at the values of single clients.*mean or adam"):
        hidden(aggregator, 5, "senders")


@pytest.mark.parametrize("clients", [1, 2])
def test_too_few_clients_are_refused(clients):
    with pytest.raises(fs.InputError, match=f"at least 3 clients in a round, and this run has {clients}"):
        hidden(fs.Mean(), clients, "senders")
