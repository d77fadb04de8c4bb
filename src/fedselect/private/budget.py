"""Budget: what a run has spent. It is charged before anything is released, and charges are never undone."""

import os
from pathlib import Path
from typing import Any

from fedselect.core import sums
from fedselect.core.errors import RunError
from fedselect.core.files import disk
from fedselect.private.guarantee import Guarantee
from fedselect.private.settings import Private

NAME = "budget.jsonl"
"""In a run directory and in a client's vault: one line for each charged round."""


class Budget:
    """The charged rounds. A round that runs again after a crash draws new noise and is charged again."""

    def __init__(self, guarantee: Guarantee, place: Path | None = None) -> None:
        self.guarantee, self.charged = guarantee, 0
        self._place: Path | None = None
        if place is not None:
            self.keep(place)

    def keep(self, place: Path) -> None:
        """Also keep the budget on disk from now on; rounds charged there count."""
        self._place = place
        self.charged = max(self.charged, _charged(place))

    @property
    def spent(self) -> bool:
        return self.charged >= self.guarantee.rounds

    @property
    def spent_so_far(self) -> float | None:
        """Epsilon of all charged rounds, as stored in files: None if nothing is promised."""
        return finite(self.guarantee.epsilon(self.charged))

    def charge(self, round: int, before: int = 0) -> None:
        """Charge a round on disk before it runs; at least `before` rounds count as charged already."""
        self.charged = max(self.charged, before)
        if self.spent:
            raise RunError(
                f"the privacy budget is spent: {self.charged} rounds were charged, some twice after a crash; use the model as "
                "it is, or start a new run with another budget."
            )
        self.charged += 1
        if self._place is not None:
            line = sums.to_line({"round": round, "charged": self.charged}).encode()
            with disk(self._place), self._place.open("ab+") as file:
                file.seek(0)
                whole = file.read()[-1:] in (b"", b"\n")
                file.write(line if whole else b"\n" + line)
                file.flush()
                os.fsync(file.fileno())

    def to_json(self) -> dict[str, Any]:
        """For the summary of a run: what was promised and spent."""
        return outcome(self.guarantee.private, self.spent_so_far, self.guarantee.delta) | {"charged": self.charged}


def outcome(private: Private, epsilon: float | None, delta: float) -> dict[str, Any]:
    """What was promised, and how much of it is spent."""
    said = {"epsilon": epsilon, "budget": finite(private.epsilon), "delta": delta, "unit": private.unit}
    return said | ({"seeded": True} if private.seeded else {})


def finite(epsilon: float) -> float | None:
    """Epsilon as stored in files: None if nothing is promised."""
    return round(epsilon, 6) if epsilon < float("inf") else None


def _charged(place: Path) -> int:
    """Rounds charged according to a file. An incomplete or damaged line counts as one more; if its end is damaged too, and it
    ran into the next line, as two."""
    charged = 0
    for line in place.read_bytes().split(b"\n") if place.exists() else []:
        try:
            charged = max(charged + 1, int(sums.from_line(line)["charged"]))
        except (ValueError, TypeError, KeyError):
            charged += max(line.count(b"{"), bool(line))
    return charged
