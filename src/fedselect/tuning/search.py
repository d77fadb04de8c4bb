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

FIRST = 0.4
"""The share of a time that the first rung may take."""
CAREFUL = 0.8
"""The share of the rest that is planned with: later rungs have fewer runs, which train less well together."""


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

    With a budget in rounds everything follows from the seed. With one in time, how many settings there are follows from how
    many get through the first rung in part of that time, and the rungs after it from how fast that was; then the schedule is
    fixed and noted, and nothing depends on the clock any more.
    """
    if progress.schedule is None:
        progress.schedule = planned(plan) if plan.budget.seconds is None else _measured(plan, bench, plan.budget.seconds)
        note(progress)
    alive = list(plan.names)[: progress.schedule[0].settings]
    for i, rung in enumerate(progress.schedule):
        if i < len(progress.stages):
            alive = progress.stages[i].kept
            continue
        at = time.perf_counter()
        found = bench.advance(alive, rung.until)
        scores = {name: judge.score(found[name], rung.until) for name in alive}
        rest = progress.schedule[i + 1 :]
        kept = halving.survivors(scores, rest[0].settings if rest else len(scores), judge.measure.more_is_better)
        if not kept:
            raise RunError(f"every setting diverged within {rung.until} rounds; try smaller rates: --lr 0.001,0.003,0.01.")
        progress.stages.append(Stage(rung.until, scores, kept, round(time.perf_counter() - at, 3)))
        note(progress)
        bench.drop([name for name in alive if name not in kept])
        alive = kept
    return alive


def planned(plan: Plan) -> Schedule:
    """The schedule by a budget in rounds, or without one."""
    left = None if plan.budget.rounds is None else plan.budget.rounds - plan.look
    return halving.plan(len(plan.names), plan.rounds, plan.seeds, left)


def _measured(plan: Plan, bench: Bench, seconds: float) -> Schedule:
    """Train settings up to the end of the first rung, one of each method and then ever more, for part of the time.

    Runs are faster the more of them train together, so a few say little about many.
    """
    names, until, began = list(plan.names), halving.marks(plan.rounds)[0], time.perf_counter()
    done, more, took = 0, len(set(plan.names.values())), 0.0
    while done < len(names) and (done == 0 or time.perf_counter() - began + 2 * took < FIRST * seconds):
        at = time.perf_counter()
        bench.advance(names[done : done + more], until)
        took = time.perf_counter() - at
        done, more = min(len(names), done + more), 2 * more
    gone = time.perf_counter() - began
    spent = plan.seeds * done * until
    left = CAREFUL * (seconds - gone) * spent / max(gone, 1e-6) - plan.look
    return halving.refit(halving.plan(done, plan.rounds, plan.seeds), plan.seeds, spent + int(left))
