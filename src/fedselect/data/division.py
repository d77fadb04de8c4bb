"""Division: which rows of a client's table are for training, validation and testing."""

from dataclasses import dataclass

import numpy as np

from fedselect.core.errors import DataError, InputError
from fedselect.data.frame import Frame
from fedselect.data.frame_files import PARTS
from fedselect.data.partition import Indices, Part, rng

DIVISION = 31  # purpose of random numbers, see `rng`


@dataclass(frozen=True)
class Division:
    """Divide rows by random shares, by time (the last rows are for testing), by group (never divided), or by a column.

    The draw depends on the seed and on the number of rows or groups, not on which client this is: a client that knows only its
    own table divides it as a simulation of all clients does.
    """

    test_share: float = 0.25
    val_share: float = 0.0
    time: str | None = None
    group: str | None = None
    split_column: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.test_share < 1 and 0 <= self.val_share < 1 and self.test_share + self.val_share < 1):
            raise InputError(
                f"test_share and val_share must be from 0 to 1 and leave rows to train on, not {self.test_share:g} "
                f"and {self.val_share:g}."
            )
        if len(self.columns) > 1:
            raise InputError(f"divide rows by time, group or split_column, not by {' and '.join(self.columns)} together.")

    @property
    def columns(self) -> tuple[str, ...]:
        """The column that rows are divided by, if any; it is not a model input."""
        return tuple(c for c in (self.time, self.group, self.split_column) if c is not None)

    def parts(self, frame: Frame, client: str) -> Part:
        """The row numbers of each part."""
        if self.split_column is not None:
            return self._told(frame, self.split_column, client)
        if self.time is not None:
            return self._cut(np.argsort(frame.times(self.time), kind="stable"), client, "row(s)")
        if self.group is None:
            return self.drawn(len(frame), client)
        code, names = frame.codes(self.group)
        if (code < 0).any():
            raise DataError(f"{frame.source}: row {frame.row_where(code < 0)} has no {self.group}; fill it in.")
        groups = self._cut(rng(self.seed, DIVISION).permutation(len(names)), client, f"value(s) of {self.group}")
        return Part(*(np.flatnonzero(np.isin(code, part)) for part in (groups.train, groups.test, groups.val)))

    def drawn(self, count: int, client: str) -> Part:
        """Divide this many rows by random shares."""
        return self._cut(rng(self.seed, DIVISION).permutation(count), client, "row(s)")

    def _cut(self, order: Indices, client: str, what: str) -> Part:
        """Training, validation, then test rows; the shares give at least one row each."""
        count = len(order)
        test = max(1, round(self.test_share * count)) if self.test_share else 0
        val = max(1, round(self.val_share * count)) if self.val_share else 0
        if count <= test + val:
            uses = " and ".join(["training", *(["validation"] if val else []), *(["testing"] if test else [])])
            raise DataError(f"client {client} is too small, with {count} {what} for {uses}; give it more, or leave it out.")
        return Part(order[: count - test - val], order[count - test :], order[count - test - val : count - test])

    def _told(self, frame: Frame, column: str, client: str) -> Part:
        code, names = frame.codes(column)
        part = np.array([PARTS.get(n.lower(), "") for n in names] + [""])[code]
        if (part == "").any():
            i = int(np.argmax(part == ""))
            said = repr(names[code[i]]) if code[i] >= 0 else "nothing"
            raise DataError(
                f"{frame.source}: {column} says {said} in row {frame.row_where(part == '')}; it must say train, val or test."
            )
        found = Part(*(np.flatnonzero(part == p) for p in ("train", "test", "val")))
        if not len(found.train) or not len(found.test):
            raise DataError(
                f"client {client} has no rows whose {column} is {'test' if len(found.train) else 'train'}; mark some."
            )
        return found
