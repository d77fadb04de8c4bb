"""Plugins: a user's own modules, which add rows to the tables when they are imported.

Installed packages name theirs in an entry point; `--plugin` and the environment name others. Nothing else loads code: a
configuration or a message that needs a plugin is refused if that plugin is not loaded.
"""

import os
import sys
import traceback
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fedselect.core.errors import InputError

GROUP = "fedselect.plugins"  # of entry points
VARIABLE = "FEDSELECT_PLUGINS"  # modules or absolute paths of .py files, separated by commas
Tables = Mapping[str, dict[str, Any]]
Entry = tuple[str, str]
"""A table and a name in it: ("method", "fedavg")."""


@dataclass(frozen=True)
class Plugin:
    """A loaded plugin: the name of its module, and the rows it added."""

    name: str
    rows: frozenset[Entry]


_LOADED: dict[str, Plugin] = {}


def loaded() -> dict[str, Plugin]:
    """The plugins of this process by name."""
    return dict(_LOADED)


def load(named: Iterable[str], tables: Tables) -> None:
    """Import the installed plugins, those in the environment, then these; child processes load the same."""
    for name in _installed():
        _load(name, None, tables)
    said = [s.strip() for text in (os.environ.get(VARIABLE, ""), *named) for s in text.split(",") if s.strip()]
    there = dict.fromkeys(_absolute(s) for s in said)
    for entry in there:
        _load(*_module(entry), tables)
    if there:
        os.environ[VARIABLE] = ",".join(there)


def asked() -> bool:
    """Whether there are plugins to load, installed or in the environment."""
    return bool(os.environ.get(VARIABLE, "").strip() or _installed())


def used(rows: Iterable[Entry]) -> list[str]:
    """The plugins that these rows come from."""
    wanted = set(rows)
    return sorted(p.name for p in _LOADED.values() if p.rows & wanted)


def need(names: Iterable[str], remedy: str = "add") -> None:
    """Refuse a run that needs a plugin which is not loaded in this process."""
    for name in names:
        if name not in _LOADED:
            raise InputError(
                f"this run needs the plugin {name!r}, which is not loaded here; install it, or {remedy} --plugin {name}."
            )


@cache
def _installed() -> list[str]:
    return sorted({entry.module for entry in entry_points(group=GROUP)})


def _absolute(said: str) -> str:
    """A module's name unchanged; for a file, also of a module in the current directory, its full path."""
    here = (Path(f"{said}.py"), Path(said, "__init__.py"))
    file = Path(said) if said.endswith(".py") else next((p for p in here if p.is_file()), None)
    if file is None:
        return said
    if not file.is_file():
        raise InputError(f"there is no plugin {said}: no such file.")
    full = str(file.resolve())
    if "," in full:
        raise InputError(f"the plugin {full} cannot be passed to other processes because of the comma in its path; rename it.")
    return full


def _module(entry: str) -> tuple[str, Path | None]:
    """The name of a module, and its file if known."""
    if not entry.endswith(".py"):
        return entry, None
    file = Path(entry)
    return (file.parent.name if file.stem == "__init__" else file.stem), file


def _load(name: str, file: Path | None, tables: Tables) -> None:
    if name in _LOADED:
        _check_file(name, file)
        return
    before = {kind: dict(table) for kind, table in tables.items()}
    try:
        _import(name, file)
        _check_file(name, file)
        rows = _added(name, before, tables)
    except InputError:
        sys.modules.pop(name, None)
        for kind, table in tables.items():
            table.clear()
            table.update(before[kind])
        raise
    if not rows:
        warnings.warn(f"the plugin {name!r} adds no {' or '.join(tables)}.", stacklevel=2)
    _LOADED[name] = Plugin(name, rows)


def _import(name: str, file: Path | None) -> None:
    """Import a module; its folder is searched last, so that nothing in it hides other modules."""
    if file is not None:
        folder = str(file.parents[1] if file.stem == "__init__" else file.parent)
        sys.path += [folder] if folder not in sys.path else []
    try:
        import_module(name)
    except (Exception, SystemExit) as e:
        if isinstance(e, ModuleNotFoundError) and e.name and f"{name}.".startswith(f"{e.name}."):
            raise InputError(
                f"there is no plugin {name!r}: no module of that name is installed or in the current directory; "
                f"give the name of a module, or its file: --plugin PATH/{name}.py"
            ) from None
        raise InputError(f"the plugin {name!r} cannot be imported ({_said(e)}).") from None


def _said(error: BaseException) -> str:
    """A module's own error in one line, with the line of code that raised it."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    ours = {__file__, import_module.__code__.co_filename}
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in ours and "<frozen" not in f.filename]
    return f"{text}, {frames[-1].filename} line {frames[-1].lineno}" if frames else text


def _check_file(name: str, file: Path | None) -> None:
    """Refuse a module of this name that is not the given file but another one that Python found first."""
    found = getattr(sys.modules[name], "__file__", None)
    if file is not None and (found is None or Path(found).resolve() != file):
        raise InputError(f"the plugin {file} has the same name as the module {found or name}; rename it.")


def _added(name: str, before: Tables, tables: Tables) -> frozenset[Entry]:
    """The rows that a module added; it may not change existing ones."""
    for kind, old in before.items():
        for row, value in old.items():
            if tables[kind].get(row) is not value:
                owner = next((f"of the plugin {p.name!r}" for p in _LOADED.values() if (kind, row) in p.rows), "of fedselect")
                raise InputError(f"the plugin {name!r} replaces the {kind} {row!r} {owner}; rename its own.")
    added = frozenset((kind, row) for kind, table in tables.items() for row in table.keys() - before[kind].keys())
    for kind, row in sorted(added):
        if not callable(tables[kind][row]):
            raise InputError(f"the plugin {name!r} adds the {kind} {row!r}, which is not a function or a class.")
    return added
