"""Budget: what a run has spent. It is charged before anything is released, and what was charged stays charged."""

import os
from pathlib import Path
from typing import Any

from fedselect.core.errors import RunError
from fedselect.core.files import disk
from fedselect.private.guarantee import Guarantee

NAME = "budget.jsonl"
"""In a run directory and in a client's vault: a line for each round that was charged."""


class Budget:
    """Rounds that were charged. A round that runs again, after a crash, has new noise and is charged again."""

    def __init__(self, guarantee: Guarantee, place: Path | None = None) -> None:
        self.guarantee, self.charged = guarantee, 0
        self._place: Path | None = None
        if place is not None:
            self.keep(place)

    def keep(self, place: Path) -> None:
        """From now on also on disk; what was charged there counts."""
        self._place = place
        self.charged = max(self.charged, _lines(place))

    @property
    def spent(self) -> bool:
        return self.charged >= self.guarantee.rounds

    @property
    def spent_so_far(self) -> float | None:
        """Epsilon of all that was charged, as files have it: none where nothing is promised."""
        return finite(self.guarantee.epsilon(self.charged))

    def charge(self, round: int) -> None:
        """Before a round: note on disk that it takes its part of the budget."""
        if self.spent:
            raise RunError(
                f"the privacy budget is spent: {self.charged} rounds were charged, some twice after a crash; what is released "
                "may be used, training has to stop."
            )
        self.charged += 1
        if self._place is not None:
            with disk(self._place), self._place.open("a") as file:
                file.write(f'{{"round": {round}, "charged": {self.charged}}}\n')
                file.flush()
                os.fsync(file.fileno())

    def to_json(self) -> dict[str, Any]:
        """For the summary of a run: what was promised, what was spent."""
        private, lots = self.guarantee.private, self.guarantee.lots
        return {
            "epsilon": self.spent_so_far,
            "budget": finite(private.epsilon),
            "delta": self.guarantee.delta,
            "unit": private.unit,
            "noise": round(max(lot.noise for lot in lots), 6),
            "rounds_charged": self.charged,
            "seeded": private.seeded,
        }


def finite(epsilon: float) -> float | None:
    """Epsilon as a file has it: none where nothing is promised."""
    return round(epsilon, 6) if epsilon < float("inf") else None


def _lines(place: Path) -> int:
    """Lines of a file, one that was cut off among them."""
    return len(place.read_bytes().splitlines()) if place.exists() else 0
