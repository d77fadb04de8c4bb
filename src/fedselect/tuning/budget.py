"""How much a search may cost: rounds, or time."""

import re
from dataclasses import dataclass

from fedselect.core.errors import InputError

_SECONDS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Budget:
    """Rounds of all runs together, those of the look at test data too; or seconds, of which rounds are made by measuring."""

    rounds: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, said: "str | int | Budget | None") -> "Budget":
        """10m, 90s or 1.5h; 2000 is a number of rounds. None: as much as the settings need."""
        if said is None or isinstance(said, Budget):
            return said or cls()
        found = re.fullmatch(r"(\d+(?:\.\d+)?) *([smh]?)", str(said).strip())
        if not found or float(found[1]) == 0 or (not found[2] and "." in found[1]):
            raise InputError(f"a budget is a time (90s, 10m, 2h) or a number of rounds in all (2000), not {said!r}.")
        if found[2]:
            return cls(seconds=float(found[1]) * _SECONDS[found[2]])
        return cls(rounds=int(found[1]))
