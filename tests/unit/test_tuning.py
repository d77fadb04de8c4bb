"""Choosing a setting: the arithmetic of halving, scores and errors by plain loops, and the search on runs that are made up."""

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedselect as fs
from fedselect.methods import METHODS
from fedselect.tasks import Measure
from fedselect.tuning import halving, memory, space
from fedselect.tuning.budget import Budget
from fedselect.tuning.outcome import Judge, gap, rank
from fedselect.tuning.search import Plan, Progress, search

ACCURACY = Measure("accuracy", True, 0.0, 1.0)
JUDGE = Judge(ACCURACY)


# halving


@pytest.mark.parametrize(
    ("rounds", "marks"), [(30, [3, 8, 30]), (100, [3, 7, 25, 100]), (20, [3, 5, 20]), (4, [3, 4]), (3, [3]), (1, [1])]
)
def test_rounds_after_which_settings_are_judged(rounds, marks):
    assert halving.marks(rounds) == marks


def slow_cost(schedule, seeds):
    """Round by round."""
    total, at = 0, 0
    for rung in schedule:
        while at < rung.until:
            at += 1
            total += seeds * rung.settings
    return total


SIZES = (st.integers(2, 120), st.integers(1, 100), st.integers(1, 4))


@given(*SIZES)
def test_without_a_budget_one_of_four_goes_on_and_it_costs_little(settings, rounds, seeds):
    found = halving.plan(settings, rounds, seeds)
    assert found[0].settings == settings
    assert found[-1].until == rounds
    assert halving.cost(found, seeds) == slow_cost(found, seeds)
    if settings >= 60 and rounds >= 20:
        assert halving.cost(found, seeds) < 0.25 * settings * rounds * seeds


@given(*SIZES, st.integers(1, 40_000))
def test_a_budget_is_kept_and_more_of_it_is_never_used_for_less(settings, rounds, seeds, budget):
    least = halving.cost(halving.plan(2, rounds, seeds), seeds)
    if budget < least:
        with pytest.raises(fs.InputError, match="use a larger budget"):
            halving.plan(settings, rounds, seeds, budget)
        return
    found, more = (halving.plan(settings, rounds, seeds, b) for b in (budget, budget + 1000))
    assert halving.cost(found, seeds) <= budget
    assert halving.cost(more, seeds) >= halving.cost(found, seeds)
    for before, after in itertools.pairwise(found):
        assert before.settings >= after.settings >= min(2, settings)
        assert before.until < after.until


def test_a_budget_above_the_full_grid_is_the_full_grid():
    assert {rung.settings for rung in halving.plan(10, 30, 2, 600)} == {10}


@given(*SIZES, st.integers(-5, 20_000))
def test_a_schedule_that_is_refitted_has_the_rung_that_was_trained(settings, rounds, seeds, budget):
    first = halving.plan(settings, rounds, seeds)
    found = halving.refit(first, seeds, budget)
    assert found[0] == first[0]
    assert [r.until for r in found] == [r.until for r in first]
    assert halving.cost(found, seeds) <= budget or {r.settings for r in found[1:]} <= {min(2, settings)}


@given(st.dictionaries(st.text("abc", min_size=1), st.one_of(st.none(), st.floats(0, 1))), st.integers(1, 5), st.booleans())
def test_survivors_are_the_best(scores, count, more):
    kept = halving.survivors(scores, count, more)
    there = [n for n, s in scores.items() if s is not None]
    assert len(kept) == min(count, len(there))
    for name in kept:
        better = [n for n in there if (scores[n] > scores[name] if more else scores[n] < scores[name])]
        assert set(better) <= set(kept)


def test_of_equal_settings_the_earlier_survives():
    assert halving.survivors({"b": 0.5, "a": 0.5, "c": 0.4}, 1) == ["b"]


def test_a_schedule_is_read_as_it_was_written():
    made = halving.plan(75, 30, 3)
    assert halving.spell(made) == "75x3,19x8,5x30"
    assert halving.read(halving.spell(made), 75, 30) == made


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("many", "SETTINGSxROUND"), ("4x3,8x30", "decreasing settings"), ("8x30,4x30", "increasing rounds"),
        ("8x3,2x20", "at round 30"),
        ("90x3,4x30", "there are only 75"), ("8x0,4x30", "the last of --rungs"),
    ],
)  # fmt: skip
def test_a_schedule_that_makes_no_sense_is_refused(text, said):
    with pytest.raises(fs.InputError, match=said):
        halving.read(text, 75, 30)


TIMES = {"10m": 600, "1.5h": 5400, "90 s": 90}


@pytest.mark.parametrize(
    ("said", "found"),
    [*((said, Budget(seconds=v)) for said, v in TIMES.items()), ("2000", Budget(2000)), (7, Budget(7)), (None, Budget())],
)
def test_budgets(said, found):
    assert Budget.parse(said) == found


@pytest.mark.parametrize("said", ["ten", "0", "-5m", "10 days", "", "2.5"])
def test_a_budget_that_is_none_is_refused(said):
    with pytest.raises(fs.InputError, match="budget must be a time"):
        Budget.parse(said)


# what is tried


@pytest.mark.parametrize("method", METHODS)
def test_every_setting_of_the_space_can_be_made(method):
    grid = space.grid(space.values(method))
    for one in grid:
        METHODS[method](**one)
    assert grid == [{}] or "lr" in grid[0]


def test_what_is_given_is_not_tried():
    assert "lr" not in space.values("fedavg+ft", ["lr"])


@given(st.integers(0, 10))
def test_where_not_all_are_taken_methods_take_turns(seed):
    settings = {f"{m}{i}": m for m, n in (("a", 5), ("b", 2), ("c", 3)) for i in range(n)}
    order = space.order(settings, seed)
    assert sorted(order) == sorted(settings)
    assert [settings[n] for n in order[:6]] == ["a", "b", "c"] * 2
    assert order == space.order(settings, seed)


# scores and errors


def record(round, values):
    sent = {"bytes_up": 10, "bytes_down": 20}
    clients = {"accuracy": values, **{way: [1] * len(values) for way in sent}}
    return {"round": round, "accuracy": statistics.fmean(values), "seconds": 0.5, **sent, "clients": clients}


def history(*rounds):
    return [record(r, values) for r, values in enumerate(rounds, start=1)]


def test_a_run_is_judged_by_its_last_quarter():
    run = history([0.1, 0.1], [0.2, 0.4], [0.3, 0.5], [0.5, 0.9])
    assert JUDGE.clients(run, 4) == [0.5, 0.9]
    assert JUDGE.clients(run, 3) == [0.3, 0.5]
    long = history(*[[r / 10, 0.0] for r in range(1, 9)])
    assert JUDGE.clients(long, 8) == [pytest.approx(0.75), 0.0]  # of rounds 7 and 8


def test_a_run_that_keeps_its_best_round_is_judged_by_that():
    run = history([0.1, 0.1], [0.6, 0.4], [0.3, 0.5])
    run[-1]["kept"] = 2
    assert JUDGE.clients(run, 3) == [0.6, 0.4]


def test_the_worst_tenth_and_a_run_that_diverged():
    run = history([0.1 * i for i in range(1, 11)])
    assert Judge(ACCURACY, worst=True).score([run, run], 1) == pytest.approx(0.1)
    assert JUDGE.score([run, None], 1) is None
    assert JUDGE.score([run, []], 1) is None


ROW = {n: st.lists(st.floats(0, 1), min_size=n, max_size=n) for n in range(2, 6)}
VALUES = st.integers(2, 5).flatmap(lambda clients: st.lists(ROW[clients], min_size=2, max_size=4))


@given(VALUES, st.randoms(use_true_random=False), st.booleans())
def test_a_difference_and_its_error_by_plain_loops(best, drawn, more):
    other = [[drawn.random() for _ in row] for row in best]
    found, error = gap(best, other, Judge(Measure("m", more)))
    sign, seeds, clients = (1 if more else -1), len(best), len(best[0])
    pairs = [[sign * (best[s][c] - other[s][c]) for c in range(clients)] for s in range(seeds)]
    assert found == pytest.approx(sum(map(sum, pairs)) / (seeds * clients), abs=1e-5)

    def error_of(means):
        middle = sum(means) / len(means)
        return math.sqrt(sum((m - middle) ** 2 for m in means) / (len(means) - 1) / len(means))

    by_seed = error_of([sum(row) / clients for row in pairs])
    by_client = error_of([sum(pairs[s][c] for s in range(seeds)) / seeds for c in range(clients)])
    assert error == pytest.approx(max(by_seed, by_client), abs=1e-5)


def test_the_ranking_puts_first_what_was_worth_training_longest():
    def begun(*ends):
        return [history([0.5, 0.5], end) for end in ends]

    found = {
        "late": begun([0.79, 0.71], [0.86, 0.73]), "best": begun([0.80, 0.71], [0.84, 0.76]), "far": begun(*[[0.1, 0.2]] * 2),
        "dropped": [history([0.9, 0.9])] * 2, "diverged": [history([0.9, 0.9]), None], "not begun": [[], []],
    }  # fmt: skip
    rows = rank(found, JUDGE, 10)
    assert [r.name for r in rows] == ["best", "late", "far", "dropped", "diverged"]
    best, late, far, dropped, diverged = rows
    assert (best.behind, best.chance) == (None, False)
    assert late.behind == pytest.approx(0.005)
    assert (late.chance, far.chance) == (True, False)
    assert dropped.behind is None  # it did not train as long
    assert diverged.score is None
    assert (best.bytes, best.seconds) == (300, 5.0)  # of ten rounds


# the search


class MadeUp:
    """Runs whose scores are known: a setting's quality, reached more or less slowly."""

    def __init__(self, quality, slow=()):
        self.quality, self.slow, self.asked, self.dropped = quality, slow, [], []

    def advance(self, names, until, seeds=None):
        self.asked.append((len(names), until))

        def at(name, r):
            return self.quality[name] * (min(1.0, r / 20) if name in self.slow else 1.0)

        return {
            n: [None if self.quality[n] is None else history(*[[at(n, r)] * 2 for r in range(1, until + 1)])] * 2 for n in names
        }

    def drop(self, names):
        self.dropped.append(sorted(names))


def plan(names, rounds=30, budget=None):
    return Plan(dict.fromkeys(names, "m"), rounds, 2, 0, Budget.parse(budget))


@given(st.lists(st.floats(0, 1), min_size=2, max_size=40, unique=True))
def test_the_best_is_found_where_scores_do_not_change_their_order(qualities):
    quality = {f"s{i}": q for i, q in enumerate(qualities)}
    bench, progress = MadeUp(quality), Progress()
    found = search(plan(quality), bench, JUDGE, progress)
    assert quality[found[0]] == pytest.approx(max(qualities), abs=1e-5)
    assert bench.asked == [(rung.settings, rung.until) for rung in progress.schedule]
    assert sum(map(len, bench.dropped)) + len(found) == len(quality)


def test_a_setting_that_is_slow_at_first_is_lost_which_a_larger_budget_mends():
    quality = {**{f"s{i}": 0.5 + i / 1000 for i in range(20)}, "slow": 0.9}
    assert search(plan(quality), MadeUp(quality, ["slow"]), JUDGE, Progress())[0] == "s19"
    assert search(plan(quality, budget=20 * 30 * 2 + 60), MadeUp(quality, ["slow"]), JUDGE, Progress())[0] == "slow"


def test_one_that_diverged_never_goes_on_and_if_all_do_a_sentence_says_so():
    quality = {"a": None, "b": 0.1, "c": None}
    assert search(plan(quality), MadeUp(quality), JUDGE, Progress()) == ["b"]
    with pytest.raises(fs.RunError, match="every setting diverged within 3 rounds; try smaller learning rates"):
        search(plan(["a", "c"]), MadeUp(quality), JUDGE, Progress())


@pytest.mark.parametrize("stop_after", [0, 1, 2])
def test_a_search_goes_on_from_what_was_noted_to_the_same_end(stop_after):
    quality = {f"s{i}": (7 * i % 40) / 40 for i in range(40)}
    whole, notes = Progress(), []
    ended = search(plan(quality), MadeUp(quality), JUDGE, whole, lambda p: notes.append(p.to_json()))
    assert len(notes) == 4  # the schedule, and three rungs
    again, bench = Progress.from_json(notes[stop_after]), MadeUp(quality)
    assert search(plan(quality), bench, JUDGE, again) == ended
    assert [s.kept for s in again.stages] == [s.kept for s in whole.stages]
    assert len(bench.asked) == 3 - stop_after


def test_with_a_time_the_schedule_is_fixed_after_the_first_rung_and_then_followed(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr("fedselect.tuning.search.time.perf_counter", lambda: next(clock))  # a second each time it is read
    quality = {f"s{i}": i / 100 for i in range(64)}
    notes = []
    search(plan(quality, budget="30s"), MadeUp(quality), JUDGE, Progress(), lambda p: notes.append(p.to_json()["schedule"]))
    assert 1 <= notes[0][0][0] <= 64
    assert all(n == notes[0] for n in notes)


def test_a_time_that_is_too_short_is_said_with_what_the_search_takes(monkeypatch):
    clock = iter(range(0, 10**6, 10))
    monkeypatch.setattr("fedselect.tuning.search.time.perf_counter", lambda: next(clock))
    quality = {f"s{i}": i / 100 for i in range(8)}
    with pytest.warns(
        UserWarning, match=r"the budget of 2 s is too short .* takes about (\d+) s here; use a larger budget"
    ) as said:
        found = search(plan(quality, budget="2s"), MadeUp(quality), JUDGE, Progress())
    assert found
    # the clock is read at 0, 10, 20, 30 and 40 s, while one setting trains 3 rounds; to round 30 it takes 40 s * 30 / 3
    assert "about 400 s" in str(said[0].message)


# in memory


@pytest.fixture(scope="module")
def data():
    return fs.load("digits", clients=3, train=25, val=10, test=10, seed=0)


def test_tune_in_memory_chooses_what_the_runs_say(data):
    methods = {"good": fs.FedAvgFT(lr=0.1, finetune=2), "bad": fs.FedAvgFT(lr=1e-5, finetune=2), "alone": fs.Local(lr=0.001)}
    tuned = fs.tune(methods, model="mlp", data=data, rounds=6, seeds=(0, 1))
    assert tuned.name == "good"
    assert tuned.method == methods["good"]
    assert [r.simulation.seed for r in tuned.results] == [2, 3, 4]
    alone = [fs.run(tuned.method, model="mlp", data=data, rounds=6, seed=s).headline for s in (2, 3, 4)]
    assert tuned.headline == pytest.approx(statistics.fmean(alone))
    assert repr(tuned).startswith(
        "chosen: good, by the mean of clients' accuracy on validation data; on test data with fresh seeds: "
    )
    scores = []
    for seed in (0, 1):
        run = fs.run(methods["good"], model="mlp", data=data.on_validation(), rounds=6, seed=seed)
        scores.append(statistics.fmean(r["accuracy"] for r in run.history[4:]))  # the last quarter of six
    assert tuned.ranking[0].score == pytest.approx(statistics.fmean(scores), abs=1e-5)


def test_tune_in_memory_is_the_same_each_time_and_takes_names_patience_and_the_worst(data):
    def once():
        how = {"rounds": 4, "seeds": (0,), "test_seeds": (), "budget": 60, "worst": True, "keep": "best"}
        return fs.tune(["fedavg+ft", "local"], model="mlp", data=data, **how)

    one, other = once(), once()
    assert [(r.name, r.score) for r in one.ranking] == [(r.name, r.score) for r in other.ranking]
    assert one.judge.worst
    with pytest.raises(fs.InputError, match="was not used"):
        _ = one.headline


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"methods": ["fedsel"]}, "did you mean"), ({"methods": []}, "nothing to choose"),
        ({"test_seeds": (0,)}, "must differ from seeds"),
        ({"budget": 5}, "use a larger"), ({"budget": "soon"}, "budget must be a time"),
    ],
)  # fmt: skip
def test_tune_refuses_in_a_sentence(data, given, said):
    with pytest.raises(fs.InputError, match=said):
        fs.tune(**{"methods": ["local"], "model": "mlp", "data": data, "seeds": (0, 1), **given})


def test_tune_needs_validation_data_of_everybody(digits):
    with pytest.raises(fs.FedselectError, match="no validation data"):
        fs.tune(["local"], model="mlp", data=digits)


def test_settings_by_name_are_those_of_the_space():
    found = memory.named_settings(["fedper"])
    assert next(iter(found)) == "fedper-lr=0.01-personal_lr=0.01"
    assert len(found) == 6
