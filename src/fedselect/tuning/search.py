"""The search itself: rung by rung, on whatever trains the runs."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedselect.core.errors import RunError
from fedselect.tuning import halving
from fedselect.tuning.budget import Budget
from fedselect.tuning.halving import Rung, Schedule
from fedselect.tuning.outcome import History, Judge

CAREFUL = 0.8
"""The share of a time that is planned with: later rungs have fewer runs, which train less well together."""
PROBED = 2
"""Rounds of a method that are measured before anything is planned; the first is slower than those after it."""


class Bench(Protocol):
    """What trains runs: in directories, or in memory."""

    def advance(self, names: Sequence[str], until: int, seeds: int | None = None) -> Mapping[str, Sequence[History | None]]:
        """Train these settings up to a round, on all seeds or the first few: a history for each, None where one diverged."""

    def drop(self, names: Sequence[str]) -> None:
        """These settings do not go on."""


@dataclass(frozen=True)
class Stage:
    """A rung that is done."""

    until: int
    scores: dict[str, float | None]
    kept: list[str]  # who goes on, best first
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class Progress:
    """How far a search is: all that it needs to go on after an interruption, but for the runs themselves."""

    schedule: Schedule | None = None
    stages: list[Stage] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "schedule": [[rung.settings, rung.until] for rung in self.schedule] if self.schedule else None,
            "stages": [stage.to_json() for stage in self.stages],
        }

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> "Progress":
        schedule = tuple(Rung(*pair) for pair in said["schedule"]) if said["schedule"] else None
        return cls(schedule, [Stage(**stage) for stage in said["stages"]])


@dataclass(frozen=True)
class Plan:
    """What is searched."""

    names: Mapping[str, str]  # settings, in the order in which they are taken where not all are, with their methods
    rounds: int
    seeds: int
    look: int  # rounds that are kept for the look at test data
    budget: Budget


def search(
    plan: Plan, bench: Bench, judge: Judge, progress: Progress, note: Callable[[Progress], None] = lambda progress: None
) -> list[str]:
    """The settings of the last rung, best first. `note` is told whenever `progress` has moved on.

    With a budget in rounds everything follows from the seed. With one in time, the number of settings follows from how fast
    single runs are, and the rungs after the first from how fast the first one was; then the schedule is fixed, and noted.
    """
    began = time.perf_counter()
    timed = plan.budget.seconds is not None and (progress.schedule is None or not progress.stages)
    if progress.schedule is None:
        progress.schedule = _first(plan, bench)
        note(progress)
    alive = list(plan.names)[: progress.schedule[0].settings]
    for i in range(len(progress.schedule)):
        if i < len(progress.stages):
            alive = progress.stages[i].kept
            continue
        at = time.perf_counter()
        rung = progress.schedule[i]
        found = bench.advance(alive, rung.until)
        scores = {name: judge.score(found[name], rung.until) for name in alive}
        seconds = time.perf_counter() - at
        if i == 0 and timed:
            progress.schedule = _fixed(plan, progress.schedule, seconds, time.perf_counter() - began)
        rest = progress.schedule[i + 1 :]
        kept = halving.survivors(scores, rest[0].settings if rest else len(scores), judge.measure.more_is_better)
        if not kept:
            raise RunError(f"every setting diverged within {rung.until} rounds; try smaller rates: --lr 0.001,0.003,0.01.")
        progress.stages.append(Stage(rung.until, scores, kept, round(seconds, 3)))
        note(progress)
        bench.drop([name for name in alive if name not in kept])
        alive = kept
    return alive


def _first(plan: Plan, bench: Bench) -> Schedule:
    """The schedule before anything is known but, where the budget is a time, how fast one run of each method is."""
    if plan.budget.seconds is None:
        left = None if plan.budget.rounds is None else plan.budget.rounds - plan.look
        return halving.plan(len(plan.names), plan.rounds, plan.seeds, left)
    one_each = list({method: name for name, method in reversed(list(plan.names.items()))}.values())
    found = bench.advance(one_each, min(PROBED, plan.rounds), seeds=1)
    warm = [runs[0][-1]["seconds"] for runs in found.values() if runs[0]]
    if not warm:
        raise RunError("every method diverged in its first rounds; try smaller rates: --lr 0.001,0.003,0.01.")
    rounds = int(CAREFUL * plan.budget.seconds * len(warm) / max(sum(warm), 1e-6))
    return halving.plan(len(plan.names), plan.rounds, plan.seeds, rounds - plan.look)


def _fixed(plan: Plan, schedule: Schedule, seconds: float, gone: float) -> Schedule:
    """The schedule by how fast the first rung was."""
    assert plan.budget.seconds is not None
    done = halving.cost(schedule[:1], plan.seeds)
    left = CAREFUL * (plan.budget.seconds - gone) * done / max(seconds, 1e-6) - plan.look
    return halving.refit(schedule, plan.seeds, done + int(left))
