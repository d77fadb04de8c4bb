"""Errors that the user can fix.

FedselectError
├── InputError          an option, a name or a value that cannot be used
│   └── OptionError         an argument that a function does not have; also a TypeError
├── DataError           data that is missing, damaged or does not fit what was asked
├── TrainingError       values that are no longer finite, naming client, round and tensor
└── RunError            a run directory that cannot be written or read
    ├── BusyError           a directory that another process is using
    ├── Stopped             Ctrl-C; everything up to the last finished round is on disk
    └── CheckpointError     a checkpoint that is damaged or belongs to another run
"""

import difflib
from collections.abc import Iterable

CALM = "lower the learning rate, or limit gradients with clip (--clip 1)"
"""What to do if training diverges; with the same options it would diverge again."""


FAR = 0.2
"""How much less similar than the best match a name may be and still be suggested."""


class FedselectError(Exception):
    """Base of all errors that this package raises on purpose; the text is one sentence that says what to do."""


class InputError(FedselectError):
    pass


class OptionError(InputError, TypeError):
    pass


class DataError(FedselectError):
    pass


class TrainingError(FedselectError):
    pass


class RunError(FedselectError):
    pass


class BusyError(RunError):
    pass


class Stopped(RunError):  # noqa: N818
    pass


class CheckpointError(RunError):
    pass


def nearest(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """The known names that a mistyped name probably meant, best first."""
    by_lower = {k.lower(): k for k in known}
    near = difflib.get_close_matches(name.lower(), list(by_lower), n=most, cutoff=0.5)
    likeness = {m: difflib.SequenceMatcher(None, m, name.lower()).ratio() for m in near}
    return [by_lower[m] for m in near if likeness[m] > likeness[near[0]] - FAR]


def unknown(kind: str, name: str, known: Iterable[str], more: str = "") -> InputError:
    """An InputError for an unknown name: it suggests similar names, or else lists all of them, and adds `more`."""
    known = sorted(known)
    near = nearest(name, known)
    hint = f"did you mean {' or '.join(repr(n) for n in near)}?" if near else f"known: {', '.join(known) or 'none'}."
    hint += f" {more}" if more else ""
    return InputError(f"there is no {kind} {name!r}; {hint}")


def diverged(client: int | str, round: int, tensor: str) -> TrainingError:
    """A TrainingError for a client whose values are no longer finite."""
    return TrainingError(f"client {client}, round {round}: {tensor} is no longer finite; {CALM}.")
