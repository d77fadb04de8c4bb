"""Small files of a run directory with results so far. A file is missing until there is a result."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedselect.core.errors import RunError
from fedselect.core.files import disk, read_json, write_json

Found = dict[str, Any]
MEND = "delete it; the report then omits this part."


class KeptFile:
    """A file that always has the latest result."""

    def __init__(self, path: Path, find: Callable[[], Found | None]) -> None:
        """Start from the current round of the run. Content of later rounds is dropped, since they run again."""
        self._path, self._find = path, find
        self._last: Found | None = None
        with disk(path):
            path.unlink(missing_ok=True)
        self.update()

    def update(self) -> None:
        """Write the file if its content changed."""
        found = self._find()
        if found is not None and found != self._last:
            write_json(self._path, found)
            self._last = found


def read(path: Path, whole: Callable[[Found], bool], lacks: str) -> Found | None:
    """Read the file if it exists. `lacks`: the error text if `whole` finds it incomplete."""
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
