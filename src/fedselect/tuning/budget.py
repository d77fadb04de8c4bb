"""The budget of a search, in rounds or time."""

import re
from dataclasses import dataclass

from fedselect.core.errors import InputError

_SECONDS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Budget:
    """A number of rounds over all runs, including the final test; or seconds, converted to rounds by measuring speed."""

    rounds: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, said: "str | int | Budget | None") -> "Budget":
        """Parse 10m, 90s, 1.5h or a number of rounds such as 2000. None: no limit."""
        if said is None or isinstance(said, Budget):
            return said or cls()
        found = re.fullmatch(r"(\d+(?:\.\d+)?) *([smh]?)", str(said).strip())
        if not found or float(found[1]) == 0 or (not found[2] and "." in found[1]):
            raise InputError(f"budget must be a time (90s, 10m, 2h) or a total number of rounds (2000), not {said!r}.")
        if found[2]:
            return cls(seconds=float(found[1]) * _SECONDS[found[2]])
        return cls(rounds=int(found[1]))
