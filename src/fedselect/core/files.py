"""Files that are either whole or absent: written to a temporary file, flushed to disk, then renamed."""

import errno
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fedselect.core import sums
from fedselect.core.errors import BusyError, InputError, RunError

MOMENT = 0.2  # seconds to try before a lock counts as taken
_PART = re.compile(r"\..+\.\d+(\.old)?\.part")


def is_part(path: Path) -> bool:
    """Whether an interrupted `replace` left this file behind."""
    return _PART.fullmatch(path.name) is not None


def is_unused(folder: Path) -> bool:
    """Whether a folder contains only a lock and leftovers of an interrupted `replace`."""
    return folder.is_dir() and all(p.name == ".lock" or is_part(p) for p in folder.iterdir())


def check_folder_name(name: str) -> str:
    """Refuse a run name that is not a plain folder name, such as a path out of its parent."""
    if not re.fullmatch(r"[^./\\\0][^/\\\0]*", name):
        raise InputError(f"a run cannot be named {name!r}; choose a name without slashes that does not start with a dot.")
    return name


def empty(folder: Path) -> None:
    """Remove everything in a folder except its lock. Links are removed, not their targets."""
    with disk(folder):
        for p in folder.iterdir():
            if p.is_dir() and not p.is_symlink():
                shutil.rmtree(p)
            elif p.name != ".lock":
                p.unlink()


def replace(path: Path, write: Callable[[Path], None]) -> None:
    """Replace a file atomically; an existing folder is first moved aside as a whole."""
    fresh, old = (path.with_name(f".{path.name}.{os.getpid()}{end}.part") for end in ("", ".old"))
    with disk(path):
        try:
            write(fresh)
            for part in [fresh, *fresh.rglob("*")] if fresh.is_dir() else [fresh]:
                _sync(part)
            if path.is_dir() and fresh.is_dir():  # a file never replaces a folder
                os.replace(path, old)
            os.replace(fresh, path)
            _sync(path.parent)
        finally:
            if old.exists() and not path.exists():
                os.replace(old, path)
            for left in (fresh, old):
                shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a table of fields with its checksum."""
    write_bytes(path, (json.dumps(sums.sealed(value), indent=2) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    def write(fresh: Path) -> None:
        fresh.write_bytes(content)

    replace(path, write)


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Read a file of `write_json` and check its checksum; `what` completes the error if the file is unusable."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise RunError(f"{path} is missing; {what}") from None
    except (OSError, ValueError) as e:
        raise RunError(f"{path} cannot be read ({e}); {what}") from None
    if not isinstance(found, dict):
        raise RunError(f"{path} does not contain a table of fields; {what}")
    try:
        return sums.opened(found)
    except ValueError as e:
        raise RunError(f"{path} cannot be used ({e}); {what}") from None


@contextmanager
def locked(out: Path, wait: bool = False) -> Iterator[None]:
    """Lock a directory for one process; others get a BusyError, or wait."""
    with disk(out):
        out.mkdir(parents=True, exist_ok=True)
    with held(out / ".lock", wait):
        yield


@contextmanager
def held(path: Path, wait: bool = True, advice: str = "wait until it ends, or choose another --out.") -> Iterator[None]:
    """Lock a file for one process. The system releases the lock when the process ends, however it ends."""
    with disk(path):
        handle = os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600), "w")
    with handle:
        if wait:
            fcntl.flock(handle, fcntl.LOCK_EX)
        elif not _taken(handle):
            raise BusyError(f"{path.parent} is in use by another process; {advice}")
        yield


def _taken(handle: IO[str]) -> bool:
    """Whether the lock was acquired. `in_use` holds it for an instant, so try for a moment."""
    until = time.monotonic() + MOMENT
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(MOMENT / 20)


def in_use(out: Path) -> bool:
    """Whether a process is using a directory; a killed one is not, whatever it left behind."""
    try:
        with (out / ".lock").open() as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


@contextmanager
def disk(path: Path) -> Iterator[None]:
    """Turn errors of the disk into a RunError that says what to do."""
    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(f"the disk is full: {path} was not written; free some space, then resume.") from e
        raise RunError(f"{path} cannot be written ({e.strerror or e}); choose a folder that you can write to.") from e


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
