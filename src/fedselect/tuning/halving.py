"""The schedule of successive halving: how many settings train for how long. Pure arithmetic; nothing trains here.

Each rung trains its settings up to a round, and the best of them continue in the next rung. The last rung ends with the
last round.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedselect.core.errors import InputError

DROP = 4
"""One of this many settings continues, unless the budget allows more."""
LEAST = 3
"""Rounds before any setting is dropped; earlier, methods that fine-tune look alike."""


@dataclass(frozen=True)
class Rung:
    settings: int
    until: int  # round at which the rung ends


Schedule = tuple[Rung, ...]


def marks(rounds: int, drop: int = DROP) -> list[int]:
    """The rounds at which rungs end, in ascending order."""
    found = [rounds]
    while found[0] > LEAST:
        found.insert(0, max(LEAST, math.ceil(found[0] / drop)))
    return found


def widths(settings: int, rungs: int, drop: float) -> list[int]:
    """Settings per rung: one of `drop` continues, but at least two."""
    return [max(min(2, settings), math.ceil(settings / drop**i) if i else settings) for i in range(rungs)]


def cost(schedule: Sequence[Rung], seeds: int) -> int:
    """Rounds over all runs."""
    before = [0, *(rung.until for rung in schedule)]
    return seeds * sum(rung.settings * (rung.until - b) for rung, b in zip(schedule, before, strict=False))


def plan(settings: int, rounds: int, seeds: int, budget: int | None = None) -> Schedule:
    """The most thorough schedule within a budget of rounds: all settings if possible, dropping as few as possible.

    Without a budget, one of four settings continues at each rung. With a large budget, none is dropped.
    """
    if budget is None:
        return _made(settings, marks(rounds), DROP)
    for drop in (1, 2, 3, DROP):
        found = _made(settings, marks(rounds), drop)
        if cost(found, seeds) <= budget:
            return found
    for fewer in range(settings - 1, 1, -1):
        found = _made(fewer, marks(rounds), DROP)
        if cost(found, seeds) <= budget:
            return found
    least = cost(_made(min(2, settings), marks(rounds), DROP), seeds)
    raise InputError(
        f"the budget leaves {max(0, budget)} rounds for trials, but two settings on {seeds} seed{'s' * (seeds > 1)} need "
        f"{least}; use a larger budget, fewer rounds or fewer seeds."
    )


def refit(schedule: Schedule, seeds: int, budget: int) -> Schedule:
    """Adjust all rungs but the first, which is already trained, to a total budget of rounds."""
    until = [rung.until for rung in schedule]
    made = [_made(schedule[0].settings, until, drop) for drop in (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, math.inf)]
    return next((found for found in made if cost(found, seeds) <= budget), made[-1])


def _made(settings: int, until: Sequence[int], drop: float) -> Schedule:
    return tuple(Rung(n, r) for n, r in zip(widths(settings, len(until), drop), until, strict=True))


def survivors(scores: Mapping[str, float | None], count: int, more_is_better: bool = True) -> list[str]:
    """The `count` best settings, best first; ties keep their order. Diverged settings (score None) never survive."""
    there = [(name, score) for name, score in scores.items() if score is not None]
    return [name for name, _ in sorted(there, key=lambda pair: -pair[1] if more_is_better else pair[1])[:count]]


def spell(schedule: Sequence[Rung]) -> str:
    """A schedule as text: 64x3,16x8,4x30."""
    return ",".join(f"{rung.settings}x{rung.until}" for rung in schedule)


def read(text: str, settings: int, rounds: int) -> Schedule:
    """Parse a schedule from text, for at most this many settings."""
    try:
        pairs = [part.split("x") for part in text.split(",")]
        found = tuple(Rung(int(n), int(r)) for n, r in pairs)
    except ValueError:
        raise InputError(
            f"--rungs must be SETTINGSxROUND, separated by commas, such as 64x3,16x8,4x30, not {text!r}."
        ) from None
    for before, after in itertools.pairwise(found):
        if after.settings > before.settings or after.until <= before.until:
            raise InputError(f"--rungs must have decreasing settings and increasing rounds, unlike {text!r}.")
    if found[-1].settings < 1 or found[0].until < 1 or found[-1].until != rounds:
        raise InputError(f"the last of --rungs must end at round {rounds} with at least one setting, unlike {text!r}.")
    if found[0].settings > settings:
        raise InputError(f"the first rung of {text!r} has {found[0].settings} settings, but there are only {settings}.")
    return found
