"""The outcome of a search: scores on validation data, a ranking, and which differences are significant."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedselect.core.errors import InputError
from fedselect.simulate.keeping import final, in_tail
from fedselect.simulate.records import Record
from fedselect.tasks import Measure, Spread

History = Sequence[Record]
CHANCE = 2.0
"""A difference within this many standard errors is not significant."""


@dataclass(frozen=True)
class Judge:
    """How settings are compared: by the headline metric, as a mean over clients or over their worst tenth."""

    measure: Measure
    worst: bool = False

    @property
    def said(self) -> str:
        return f"{'worst tenth' if self.worst else 'mean'} of clients' {self.measure.name}"

    def clients(self, history: History, until: int) -> list[float | None]:
        """Each client's score after this many rounds: the mean over the last quarter, since a single round is noisy.

        For a run that keeps its best round, the score of that round.
        """
        name, seen = self.measure.name, [r for r in history[:until] if r[self.measure.name] is not None]
        ended = final(seen, name)
        if ended is None:
            return []
        if ended.get("kept") is not None:
            return list(ended["clients"][name])
        tail = [r["clients"][name] for r in seen if in_tail(r["round"], ended["round"])]
        return [None if None in values else statistics.fmean(values) for values in zip(*tail, strict=True)]

    def over(self, values: Sequence[float | None]) -> float | None:
        found = Spread.of(self.measure, values)
        return found.worst_tenth if self.worst else found.mean

    def score(self, runs: Sequence[History | None], until: int) -> float | None:
        """The mean score over the runs of a setting, one per seed; None if one diverged."""
        found = [None if run is None else self.over(self.clients(run, until)) for run in runs]
        there = [v for v in found if v is not None]
        return statistics.fmean(there) if found and len(there) == len(found) else None


def check_whole(eval_fraction: float) -> None:
    """Refuse to compare settings by different clients."""
    if eval_fraction < 1.0:
        raise InputError("tune compares settings over all clients; use eval_fraction=1.")


@dataclass(frozen=True)
class Row:
    """A setting in the ranking."""

    name: str
    rounds: int  # rounds trained
    score: float | None  # None: diverged
    error: float | None  # standard error over seeds
    behind: float | None  # how much worse than the first, if trained equally long
    behind_error: float | None  # standard error of `behind`, paired by seed and client
    chance: bool  # whether `behind` is not significant
    bytes: float  # uploads and downloads of a full run
    seconds: float  # estimated time of a full run

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def rank(found: Mapping[str, Sequence[History | None]], judge: Judge, rounds: int) -> list[Row]:
    """Rank settings by rounds trained, then by score, best first. Settings that did not start are omitted.

    rounds: rounds of a full run, to estimate its cost.
    """
    reached = {name: _reached(runs) for name, runs in found.items()}
    scores = {name: judge.score(runs, reached[name]) for name, runs in found.items()}
    begun = [name for name in found if reached[name] or (scores[name] is None and any(run is None for run in found[name]))]
    sign = -1 if judge.measure.more_is_better else 1

    def place(name: str) -> tuple[bool, int, float]:
        score = scores[name]
        return score is None, -reached[name], math.inf if score is None else sign * score

    order = sorted(begun, key=place)
    first = order[0] if order else ""
    rows = []
    for name in order:
        sent, took = _costs(found[name], rounds)
        rows.append(Row(name, reached[name], scores[name], *_errors(name, first, found, reached, judge), sent, took))
    return rows


def _errors(
    name: str, first: str, found: Mapping[str, Sequence[History | None]], reached: Mapping[str, int], judge: Judge
) -> tuple[float | None, float | None, float | None, bool]:
    """A setting's standard error, its difference to the first, the error of that, and whether it is not significant."""
    if any(run is None for run in found[name]):
        return None, None, None, False
    own = _values(found[name], judge, reached[name])
    each = [v for values in own if (v := judge.over(values)) is not None]
    if name == first or reached[name] != reached[first]:
        return standard_error(each), None, None, False
    behind, error = gap(_values(found[first], judge, reached[first]), own, judge)
    return standard_error(each), behind, error, behind is not None and error is not None and behind <= CHANCE * error


def _costs(runs: Sequence[History | None], rounds: int) -> tuple[float, float]:
    """Bytes and seconds of a full run, extrapolated from the rounds so far."""
    records = [r for run in runs if run for r in run]
    if not records:
        return 0.0, 0.0
    sent = statistics.fmean(r["bytes_up"] + r["bytes_down"] for r in records)
    took = statistics.fmean(r["seconds"] for r in records)
    return round(rounds * sent), round(rounds * took, 3)


def gap(
    best: Sequence[Sequence[float | None]], other: Sequence[Sequence[float | None]], judge: Judge
) -> tuple[float | None, float | None]:
    """How much worse the other setting is, and the standard error of that, paired by seed and client.

    Pairs are not independent: clients share a seed, and seeds may share clients. So the standard error is the larger of two:
    of means over seeds and of means over clients. For the worst tenth there is only the one over seeds.
    """
    sign = 1 if judge.measure.more_is_better else -1
    pairs = [(judge.over(b), judge.over(o)) for b, o in zip(best, other, strict=True)]
    seeds = [sign * (b - o) for b, o in pairs if b is not None and o is not None]
    if not seeds or len(seeds) < len(pairs):
        return None, None
    errors = [standard_error(seeds)]
    if not judge.worst:
        rows = [[_less(b, o) for b, o in zip(bs, os, strict=True)] for bs, os in zip(best, other, strict=True)]
        clients = [[d for d in column if d is not None] for column in zip(*rows, strict=True)]
        errors.append(standard_error([statistics.fmean(c) for c in clients if c]))
    known = [e for e in errors if e is not None]
    return statistics.fmean(seeds), max(known) if known else None


def _less(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def _values(runs: Sequence[History | None], judge: Judge, until: int) -> list[list[float | None]]:
    return [judge.clients(run, until) for run in runs if run is not None]


def _reached(runs: Sequence[History | None]) -> int:
    """The number of rounds that all runs of a setting have. Runs that stopped early do not limit it."""
    lengths = [len(run) for run in runs if run is not None and not (run and run[-1].get("stopped"))]
    ended = [len(run) for run in runs if run]
    return min(lengths) if lengths else max(ended, default=0)


def standard_error(values: Sequence[float]) -> float | None:
    """The standard error of the mean; None for a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
