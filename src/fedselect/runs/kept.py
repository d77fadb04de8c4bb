"""Small files of a run directory that hold what is known so far, and are not there until anything is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedselect.core.errors import RunError
from fedselect.core.files import disk, read_json, write_json

Found = dict[str, Any]
MEND = "delete it: the report then goes without."


class KeptFile:
    """Holds what a run knows so far."""

    def __init__(self, path: Path, find: Callable[[], Found | None]) -> None:
        """Begin where the run stands: what was written after its round is dropped, for that runs again."""
        self._path, self._find = path, find
        self._last: Found | None = None
        with disk(path):
            path.unlink(missing_ok=True)
        self.update()

    def update(self) -> None:
        """Write what is new."""
        found = self._find()
        if found is not None and found != self._last:
            write_json(self._path, found)
            self._last = found


def read(path: Path, whole: Callable[[Found], bool], lacks: str) -> Found | None:
    """What the file holds, if it is there; `lacks` says what is wrong where it is not whole."""
    if not path.exists():
        return None
    found = read_json(path, MEND)
    try:
        right = whole(found)
    except (KeyError, AttributeError, TypeError, IndexError):
        right = False
    if not right:
        raise RunError(f"{path} {lacks}; {MEND}")
    return found
