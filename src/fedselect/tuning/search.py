"""The search: rung by rung, independent of what trains the runs."""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedselect.core.errors import RunError
from fedselect.tuning import halving
from fedselect.tuning.budget import Budget
from fedselect.tuning.halving import Rung, Schedule
from fedselect.tuning.outcome import History, Judge

FIRST = 0.4
"""Share of a time budget that the first rung may take."""
CAREFUL = 0.8
"""Share of the remaining time to plan with, since later rungs have fewer runs to batch."""


class Bench(Protocol):
    """Trains runs, in directories or in memory."""

    def advance(self, names: Sequence[str], until: int, seeds: int | None = None) -> Mapping[str, Sequence[History | None]]:
        """Train these settings up to a round, on all or the first few seeds. Returns a history per run, None if diverged."""

    def drop(self, names: Sequence[str]) -> None:
        """Forget these settings, which do not continue."""


@dataclass(frozen=True)
class Stage:
    """A completed rung."""

    until: int
    scores: dict[str, float | None]
    kept: list[str]  # settings that continue, best first
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class Progress:
    """The state of a search, without its runs: enough to resume it."""

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
    """The plan of a search."""

    names: Mapping[str, str]  # settings with their methods, in order of priority
    rounds: int
    seeds: int
    look: int  # rounds reserved for the final test
    budget: Budget


def search(
    plan: Plan, bench: Bench, judge: Judge, progress: Progress, note: Callable[[Progress], None] = lambda progress: None
) -> list[str]:
    """Run the search and return the settings of the last rung, best first. `note` is called whenever `progress` changes.

    With a budget in rounds, the search is deterministic given the seed. With a budget in time, the number of settings
    depends on how many finish the first rung within a share of that time, and later rungs on their speed. After that, the
    schedule is fixed and recorded, and no longer depends on the clock.
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
            raise RunError(
                f"every setting diverged within {rung.until} rounds; try smaller learning rates (--lr 0.001,0.003,0.01)."
            )
        progress.stages.append(Stage(rung.until, scores, kept, round(time.perf_counter() - at, 3)))
        note(progress)
        bench.drop([name for name in alive if name not in kept])
        alive = kept
    return alive


def planned(plan: Plan) -> Schedule:
    """The schedule for a budget in rounds, or without a budget."""
    left = None if plan.budget.rounds is None else plan.budget.rounds - plan.look
    return halving.plan(len(plan.names), plan.rounds, plan.seeds, left)


def _measured(plan: Plan, bench: Bench, seconds: float) -> Schedule:
    """Train settings to the end of the first rung for part of the time: first one per method, then more and more.

    Larger batches of runs are faster per run, so the speed of a few predicts little.
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
    found = halving.refit(halving.plan(done, plan.rounds, plan.seeds), plan.seeds, spent + int(left))
    whole = gone * (halving.cost(found, plan.seeds) + plan.look) / spent
    if whole > seconds:
        warnings.warn(
            f"the budget of {seconds:.0f} s is too short even for a small search, which takes about {whole:.0f} s here; use "
            "a larger budget or fewer rounds. Ctrl-C ends the search with the best setting so far.",
            stacklevel=2,
        )
    return found
