"""Where data is searched and stored, and the optional packages that read it."""

import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedselect.core.errors import DataError, InputError

Progress = Callable[[int, int | None], None]  # done, total (None: not known)
ORIGINS = {  # of data that is free to download, but not by us: where, and under which licence
    "femnist": "https://github.com/TalwalkarLab/leaf (BSD 2-clause; its images are of NIST Special Database 19)",
    "audiomnist": "https://github.com/soerenab/AudioMNIST (MIT licence)",
    "har": "https://github.com/GeoTecINIT/sp-sw-har-dataset (CC BY 4.0)",
    "heart": "https://archive.ics.uci.edu/dataset/45/heart+disease (CC BY 4.0)",
}


def user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fedselect"


def places(data_dir: Path | None) -> list[Path]:
    """The folders to look in, first choice first; the first is also where a download goes."""
    named = os.environ.get("FEDSELECT_DATA")
    given = [Path(data_dir)] if data_dir is not None else []
    return [*given, *([Path(named).expanduser()] if named else []), user_cache() / "data"]


def find(names: Sequence[str], data_dir: Path | None, fetch: str | None = None, origin: str | None = None) -> Path:
    """The first of these files or folders that exists; `data_dir` may also be the file or folder itself.

    `fetch` is the name under which `fedselect data fetch` downloads it, where it does; `origin` its name in `ORIGINS`.
    """
    if data_dir is not None:
        given = Path(data_dir)
        if not given.exists():
            raise InputError(f"there is no folder {given}; create it or give another data folder.")
        if given.is_file():
            return given
    folders = places(data_dir)
    for folder in folders:
        for name in names:
            if (folder / name).exists():
                return folder / name
        if folder.name in names and folder.is_dir():
            return folder
    command = f", or run: fedselect data fetch {fetch}" if fetch else f"; get it from {ORIGINS[origin]}." if origin else "."
    looked = "" if len(folders) == 1 else f" (also looked in {', '.join(map(str, folders[1:]))})"
    raise DataError(f"the data is missing: place {either(names)} in {folders[0]}{looked}{command}")


def either(names: Sequence[str]) -> str:
    """a, b or c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def optional(module: str) -> Any:
    """An optional package, imported when data that needs it is read."""
    package = {"PIL": "pillow"}.get(module.split(".")[0], module.split(".")[0])
    try:
        return importlib.import_module(module)
    except ImportError:
        raise DataError(f"this data needs {package}; install it with: pip install 'fedselect[data]'") from None
