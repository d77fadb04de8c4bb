"""Clipped and trimmed means: the numbers of plain loops, and what no client and no order may change."""

import math
import statistics

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import fedselect as fs
from fedselect.aggregate import spool
from fedselect.aggregate.entrywise import cut
from fedselect.aggregate.lengths import WINDOW, lengths, middle, remembered, usual

SIZES = {"w": 4, "b": 3}
PARAMS = {"w": torch.tensor([0.5, -1.0, 2.0, 0.25]), "b": torch.tensor([1.0, -0.5, 0.0])}


@st.composite
def uploads(draw, least=1):
    """Steps from PARAMS in eighths, of which float32 sums are exact, a mask of "w" for each client, and weights."""
    clients = draw(st.integers(least, 6))

    def matrix(cells, wide):
        row = st.lists(cells, min_size=wide, max_size=wide)
        return torch.tensor(draw(st.lists(row, min_size=clients, max_size=clients)))

    steps = {n: matrix(st.integers(-16, 16), wide) / 8 for n, wide in SIZES.items()}
    values = {n: PARAMS[n] + s for n, s in steps.items()}
    weight = torch.tensor(draw(st.lists(st.integers(1, 9), min_size=clients, max_size=clients))).double()
    return values, {"w": matrix(st.booleans(), SIZES["w"]), "b": True}, weight


def folded(aggregator, upload, state=None, chunks=1, order=None, params=PARAMS):
    values, sent, weight = upload
    fold = aggregator.fold(aggregator.start(params) if state is None else state, params)
    order = torch.arange(len(weight)) if order is None else torch.tensor(order)
    for part in order.chunk(chunks):
        marks = {n: m[part] if isinstance(m, torch.Tensor) else m for n, m in sent.items()}
        fold.add({n: v[part] for n, v in values.items()}, marks, weight[part])
    return fold.finish()


def plain_length(upload, client, params=PARAMS):
    """Root of the mean square over the sent entries, in a loop."""
    values, sent, _ = upload
    steps = [
        float(v[client, e]) - float(params[n][e])
        for n, v in values.items()
        for e in range(v.shape[1])
        if sent[n] is True or bool(sent[n][client, e])
    ]
    return math.sqrt(sum(s * s for s in steps) / len(steps))


def plain_mean(upload, scale, least=1):
    """Each entry's weighted mean over its senders, of updates times `scale`; None where too few sent it."""
    values, sent, weight = upload
    out = {}
    for n, v in values.items():
        out[n] = []
        for e in range(v.shape[1]):
            who = [c for c in range(len(v)) if sent[n] is True or bool(sent[n][c, e])]
            old = float(PARAMS[n][e])
            total = sum(float(weight[c]) * (old + scale[c] * (float(v[c, e]) - old)) for c in who)
            out[n].append(total / sum(float(weight[c]) for c in who) if len(who) >= least else None)
    return out


def assert_is(found, heard, expected, tol=2e-6):
    for n, row in expected.items():
        for e, value in enumerate(row):
            assert bool(torch.as_tensor(heard[n]).expand(len(row))[e]) == (value is not None)
            if value is not None:
                assert float(found[n][e]) == pytest.approx(value, abs=tol, rel=tol)


def past_of(length, **more):
    return {"parameters": dict.fromkeys(PARAMS, torch.ones(())), "parameters_lengths": {"1": torch.tensor([length])}, **more}


# ---- lengths


@given(uploads())
def test_a_length_is_that_of_a_plain_loop_and_what_was_not_sent_does_not_count(upload):
    values, sent, weight = upload
    spoilt = {**values, "w": torch.where(sent["w"], values["w"], torch.nan)}
    found = lengths(spoilt, sent, PARAMS)
    for c in range(len(weight)):
        assert float(found[c]) == pytest.approx(plain_length(upload, c), rel=1e-6)
    assert torch.cat([lengths({n: v[c : c + 1] for n, v in values.items()}, {"w": sent["w"][c : c + 1], "b": True}, PARAMS)
                      for c in range(len(weight))]).equal(found)  # fmt: skip


@given(st.lists(st.floats(0.0, 10.0), min_size=1))
def test_the_middle_is_the_lower_median_of_those_that_moved(found):
    moved = [f for f in found if f > 0]
    assert middle(torch.tensor(found, dtype=torch.float64)) == (statistics.median_low(moved) if moved else None)


def test_some_rounds_are_remembered_in_order_of_size():
    past = {}
    for r in range(WINDOW + 3):
        past = remembered(past, torch.tensor([r + 0.5, r + 0.25, 0.0]))
    assert {age: v.tolist() for age, v in past.items()} == {
        str(age): [r + 0.25, r + 0.5] for age, r in zip(range(1, WINDOW + 1), range(WINDOW + 2, 2, -1), strict=True)
    }
    assert usual(past) == statistics.median_low([v for row in past.values() for v in row.tolist()])
    assert remembered(past, torch.zeros(2)) is past  # a round in which nothing moved


# ---- the clipped mean


@given(uploads(), st.floats(0.05, 3.0))
def test_with_a_past_it_is_the_mean_of_shortened_updates_as_in_a_plain_loop(upload, length):
    limit = 2.0 * length
    found = [plain_length(upload, c) for c in range(len(upload[2]))]
    mean, heard, memory = folded(fs.ClippedMean(clip_factor=2.0), upload, past_of(length))
    assert_is(mean, heard, plain_mean(upload, [min(1.0, limit / f) if f else 1.0 for f in found]))
    moved = sorted(f for f in found if f)
    assert memory["parameters_lengths"]["1" if not moved else "2"].tolist() == [pytest.approx(length)]
    if moved:
        assert memory["parameters_lengths"]["1"].tolist() == pytest.approx(moved, rel=1e-6)


@given(uploads(), st.sampled_from([None, 0.7]), st.floats(1.0, 4.0))
def test_while_nobody_is_above_the_limit_it_is_the_mean_bit_for_bit(upload, past, factor):
    """In the first round and later, momentum too."""
    found = [plain_length(upload, c) for c in range(len(upload[2]))]
    reference = past or middle(torch.tensor(found))
    assume(reference is None or max(found) <= factor * reference * (1 - 1e-6))
    for momentum in (0.0, 0.9):
        velocity = {"velocity": {n: torch.full_like(v, 0.3) for n, v in PARAMS.items()}} if momentum else {}
        state = past_of(past, **velocity) if past else {"parameters": dict.fromkeys(PARAMS, torch.ones(())), **velocity}
        mean, heard, memory = folded(fs.ClippedMean(momentum, clip_factor=factor), upload, state)
        plain, heard_plainly, remembers = folded(fs.Mean(momentum), upload, velocity)
        assert all(v.equal(plain[n]) for n, v in mean.items())
        assert all(torch.as_tensor(m).equal(torch.as_tensor(heard_plainly[n])) for n, m in heard.items())
        assert memory.keys() - remembers.keys() <= {"parameters", "parameters_lengths"}
        assert all(v.equal(remembers["velocity"][n]) for n, v in memory.get("velocity", {}).items())


@given(uploads(least=2))
def test_a_first_round_with_somebody_too_long_takes_steps_of_the_median_length(upload):
    values, sent, weight = upload
    longer = {n: torch.cat([PARAMS[n] + 64 * (v[:1] - PARAMS[n]), v[1:]]) for n, v in values.items()}
    upload = longer, sent, weight
    found = [plain_length(upload, c) for c in range(len(weight))]
    step = middle(torch.tensor(found, dtype=torch.float64))
    assume(step is not None and max(found) > 1.5 * step * (1 + 1e-6))
    mean, heard, _ = folded(fs.ClippedMean(clip_factor=1.5), upload)
    assert_is(mean, heard, plain_mean(upload, [step / f if f else 0.0 for f in found]))


@given(uploads(least=2), st.sampled_from([None, 0.4]), st.data())
def test_neither_order_nor_chunks_show(upload, past, data):
    clip, state = fs.ClippedMean(clip_factor=1.2), past and past_of(past)
    whole = folded(clip, upload, state)
    order = data.draw(st.permutations(range(len(upload[2]))))
    again = folded(clip, upload, state, chunks=data.draw(st.integers(1, len(order))), order=order)
    for before, after in zip(whole[:2], again[:2], strict=True):
        assert all(torch.as_tensor(v).equal(torch.as_tensor(after[n])) for n, v in before.items())
    assert whole[2].keys() == again[2].keys()
    assert all(v.equal(again[2][k][n]) for k, tree in whole[2].items() for n, v in tree.items())


@given(uploads(least=3), st.floats(1.0, 1e6), st.booleans())
def test_a_longer_update_that_is_above_the_limit_changes_nothing_more(upload, factor, first):
    """One of at least three clients, in the first round or later."""
    values, sent, weight = upload
    others = [plain_length(upload, c) for c in range(1, len(weight))]
    assume(plain_length(upload, 0) > 0 and min(others) > 0)
    clip, state = fs.ClippedMean(clip_factor=1.5), None if first else past_of(max(others))
    reach = 1.5 * 2 * max(others) / plain_length(upload, 0)  # beyond the limit, however the median falls

    def at(times):
        scaled = {n: torch.cat([(PARAMS[n] + times * (v[:1] - PARAMS[n])).double(), v[1:].double()]) for n, v in values.items()}
        params = {n: v.double() for n, v in PARAMS.items()}
        return folded(clip, (scaled, sent, weight), state, params=params)[0]

    near, far = at(reach), at(reach * factor)
    for n, v in near.items():
        torch.testing.assert_close(v, far[n], rtol=1e-5, atol=1e-6)


def test_statistics_of_norms_have_a_limit_of_their_own():
    """They may be far larger than parameters, and neither hides the other."""
    params = {"w": torch.zeros(2), "mean": torch.zeros(2)}
    clip = fs.ClippedMean(clip_factor=2.0)
    state = clip.start({"w": params["w"]})
    for _ in range(2):
        w, mean = torch.tensor([[1.0, 1.0]] * 3), torch.tensor([[100.0, 100.0]] * 3)
        found, _, state = folded(clip, ({"w": w, "mean": mean}, {"w": True, "mean": True}, torch.ones(3)), state, params=params)
        assert (found["w"].tolist(), found["mean"].tolist()) == ([1.0, 1.0], [100.0, 100.0])
    mean[0] = 1e6
    found, _, state = folded(clip, ({"w": w, "mean": mean}, {"w": True, "mean": True}, torch.ones(3)), state, params=params)
    assert found["w"].tolist() == [1.0, 1.0]
    assert found["mean"].tolist() == pytest.approx([400 / 3] * 2)  # 100, 100 and twice the usual 100
    assert set(state) == {"parameters", "parameters_lengths", "statistics_lengths"}


def test_two_processes_clip_as_one():
    """What `exchange` and sums that are added up give, in the first round and later."""
    g = torch.Generator().manual_seed(1)
    clip, params = fs.ClippedMean(clip_factor=1.5), {"w": torch.zeros(6)}
    state = alone = clip.start(params)
    for _ in range(3):
        values = {"w": torch.randn(4, 6, generator=g) * torch.tensor([[1.0], [1.0], [1.0], [9.0]])}
        one, one_heard, alone = folded(clip, (values, {"w": True}, torch.ones(4)), alone, params=params)
        folds = [clip.fold(state, params) for _ in range(2)]
        for r, fold in enumerate(folds):
            fold.add({"w": values["w"][r::2]}, {"w": True}, torch.ones(2))
        small = [{kind: list(found) for kind, found in fold._now.items()} for fold in folds]
        for fold in folds:
            fold.exchange(lambda mine, small=small: small)
        total, weight = (sum(getattr(f.sums, part)["w"] for f in folds) for part in ("total", "weight"))
        ends = []
        for fold in folds:
            fold.sums.total["w"], fold.sums.weight["w"] = total, weight
            ends.append(fold.finish())
        for mean, heard, memory in ends:
            torch.testing.assert_close(mean["w"], one["w"])
            assert heard["w"].equal(one_heard["w"])
            assert all(v.equal(alone[k][n]) for k, t in memory.items() for n, v in t.items())
        state = ends[0][2]


def test_what_it_does_in_a_run(digits):
    """A client whose update is fifty times as long decides the mean; clipped, it counts for three."""

    def run(aggregator, factor):
        sim = fs.Simulation(fs.FedAvg(lr=0.05), fs.models.mlp(digits, hidden=8), digits, aggregator=aggregator)
        fold = type(sim.aggregator).fold

        def spoilt(self, state, params):
            made = fold(self, state, params)
            add = made.add

            def longer(values, sent, weight):
                values = {n: v.clone() for n, v in values.items()}
                for n, v in values.items():
                    v[0] = params[n] + factor * (v[0] - params[n])
                add(values, sent, weight)

            made.add = longer
            return made

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(sim.aggregator), "fold", spoilt)
            for _ in range(3):
                sim.step()
        return sim.server["params"]

    honest = run(fs.Mean(), 1.0)
    assert all(v.equal(honest[n]) for n, v in run(fs.ClippedMean(), 1.0).items())

    def far(params):
        return math.sqrt(sum(float((v - honest[n]).square().sum()) for n, v in params.items()))

    assert far(run(fs.ClippedMean(), 50.0)) < far(run(fs.Mean(), 50.0)) / 10


# ---- the trimmed mean


@given(uploads(), st.sampled_from([0.0, 0.1, 0.2, 0.34, 0.49]), st.integers(1, 4))
def test_the_trimmed_mean_is_that_of_a_plain_loop(upload, trim, least):
    values, sent, weight = upload
    found, heard, memory = folded(fs.TrimmedMean(trim=trim, least_senders=least), upload)
    assert memory == {}
    for n, v in values.items():
        for e in range(v.shape[1]):
            row = sorted(float(v[c, e]) for c in range(len(weight)) if sent[n] is True or bool(sent[n][c, e]))
            off = min(math.ceil(trim * len(row) - 1e-9), max(0, (len(row) - 1) // 2))
            kept = row[off : len(row) - off]
            assert bool(heard[n][e]) == (len(row) >= least)
            if len(row) >= least:
                assert float(found[n][e]) == pytest.approx(statistics.fmean(kept), rel=1e-6, abs=1e-7)


@given(uploads(), st.integers(1, 7), st.data())
def test_an_entry_with_too_few_senders_keeps_its_value_in_whatever_order_they_come(upload, least, data):
    for rule in (fs.Median(least_senders=least), fs.TrimmedMean(least_senders=least)):
        found, heard, _ = folded(rule, upload)
        server = fs.merge(heard, found, PARAMS)
        count = upload[1]["w"].sum(0)
        assert heard["w"].equal(count >= least)
        assert server["w"][count < least].equal(PARAMS["w"][count < least])
        order = data.draw(st.permutations(range(len(upload[2]))))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spool, "ROOM", data.draw(st.integers(1, 20)))
            again, heard_again, _ = folded(rule, upload, chunks=data.draw(st.integers(1, len(order))), order=order)
        assert all(v.equal(again[n]) for n, v in found.items())
        assert all(m.equal(heard_again[n]) for n, m in heard.items())


def test_how_many_are_left_out():
    """The share rounded up, so that among three one bad value never counts; of two none can be told from the other."""
    assert [cut(n, 0.2) for n in range(12)] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 3]
    assert [cut(n, 0.0) for n in range(4)] == [0] * 4
    assert cut(10, 0.3) == 3  # 0.3 * 10 is a little more than 3
    assert cut(7, 0.49) == 3  # the median


def test_values_however_large_of_the_share_that_is_cut_do_not_count():
    values = torch.cat([torch.randn(8, 5, generator=torch.Generator().manual_seed(0)), torch.full((2, 5), 1e30)])
    found, _, _ = folded(fs.TrimmedMean(trim=0.2), ({"w": values}, {"w": True}, torch.ones(10)), params={"w": torch.zeros(5)})
    honest = values[:8].sort(0).values[2:]  # of ten, two at either end: below, two honest ones
    torch.testing.assert_close(found["w"], honest.double().mean(0).float())


# ---- what is refused


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: fs.ClippedMean(clip_factor=0.5), "clip_factor must be a number of at least 1, not 0.5"),
        (lambda: fs.ClippedMean(clip_factor=float("nan")), "clip_factor must be a number of at least 1"),
        (lambda: fs.ClippedMean(clip_factor=torch.ones(3)), "clip_factor must be a number"),
        (lambda: fs.ClippedMean(1.5), "server_momentum is a share"),
        (lambda: fs.TrimmedMean(trim=0.5), r"trim, the share dropped at each end, must be in \[0, 0.5\), not 0.5"),
        (lambda: fs.TrimmedMean(trim=-0.1), "trim, the share"),
        (lambda: fs.TrimmedMean(least_senders=0), "least_senders must be an integer of at least 1, not 0"),
        (lambda: fs.Median(least_senders=1.5), "least_senders must be an integer"),
    ],
)
def test_options_that_cannot_be_are_refused(make, said):
    with pytest.raises(fs.InputError, match=said):
        make()
