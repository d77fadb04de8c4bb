"""Flags that are options of a method, a data set, a model or training, and the configuration built from them and a file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fedselect.core.errors import InputError
from fedselect.core.options import find, named, options

if TYPE_CHECKING:
    from fedselect.runs.config import Config

EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Typer settings of a command that accepts such flags."""


def flags(args: list[str]) -> dict[str, str]:
    """Parse the flags that typer does not know: --name value or --name=value."""
    from fedselect.runs import meant

    found: dict[str, str] = {}
    rest = list(args)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--"):
            raise _stray(flag)
        name, equals, value = flag[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise meant.option(name) or InputError(f"--{name} needs a value.")
            value = rest.pop(0)
        found[name] = value
    return found


def _stray(word: str) -> InputError:
    """The error for a word without a flag. If it names a method, data set, ..., suggest the flag that takes it."""
    from fedselect.runs.config import TABLES

    kinds = [table for table, (_, rows) in TABLES.items() if named(word, rows) in rows]
    what = f"type --{kinds[0]} {word}" if kinds else "write flags as --name value"
    return InputError(f"{word!r} does not belong to a flag; {what}.")


def take_plugins(args: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the arguments without --plugin, and the plugins named."""
    rest: list[str] = []
    named: list[str] = []
    left = iter(args)
    for arg in left:
        flag, equals, value = arg.partition("=")
        if flag != "--plugin":
            rest.append(arg)
            continue
        value = value if equals else next(left, "")
        if not value or value.startswith("-"):
            raise InputError("--plugin needs a module: --plugin NAME.")
        named.append(value)
    return rest, named


def words(text: str) -> list[str]:
    """Split a comma-separated list of names, without duplicates."""
    return list(dict.fromkeys(w.strip() for w in text.split(",") if w.strip()))


LISTS = ("target", "drop", "categories", "missing", "targets", "beside", "layers")
"""Options whose value is a list of names separated by commas."""


def alternatives(flag: str, value: str) -> list[str]:
    """The values of an option that a command tries: separated by commas, and by semicolons where a value is itself a list."""
    option = flag.rpartition(".")[2].replace("-", "_")
    return list(dict.fromkeys(w.strip() for w in value.split(";" if option in LISTS else ",") if w.strip()))


def numbers(text: str) -> list[int]:
    """Parse a comma-separated list of seeds, without duplicates."""
    try:
        return list(dict.fromkeys(int(s) for s in text.split(",")))
    except ValueError:
        raise InputError(f"seeds must be whole numbers separated by commas, not {text!r}.") from None


def configure(
    raw: dict[str, Any],
    method: str | None,
    data: str | None,
    model: str | None,
    given_flags: dict[str, str],
    *,
    among: list[str] | None = None,
    where: str = "this run",
    tasks: dict[str, str] | None = None,
    **fields: Any,
) -> Config:
    """Build a configuration from the fields of a file, overridden by flags.

    `where` names the file in errors. Without a task, the task that suits the data is used; `tasks` caches it for commands
    that build many configurations.
    """
    from fedselect.runs.config import DEFAULTS, FLAGGED, TABLES, Config, at_path, canonical, place
    from fedselect.training.settings import SEAMS

    given_flags, fields["view"] = _view(given_flags, fields.get("view"))
    parts: dict[str, dict[str, Any]] = {}
    for part in (*TABLES, "training"):
        if not isinstance(raw.get(part, {}), dict):
            raise InputError(f"{where}: {part} must be a table.")
        parts[part] = dict(raw.get(part, {})) if part == "training" else canonical(part, raw.get(part, {}))
    asked = {"method": method, "data": data, "model": model, **{part: fields.pop(part, None) for part in FLAGGED}}
    chosen = {part: name and named(name, TABLES[part][1]) for part, name in asked.items()}
    method = chosen["method"]
    for part, name in chosen.items():
        default = DEFAULTS.get(part)
        if name and name != parts[part].get("name", default):
            parts[part] = {}  # the file's options belong to another method, model, ...
        if name or default:
            parts[part]["name"] = name or parts[part].get("name", default)
    parts["data"] = at_path(parts["data"])
    if not chosen["task"] and "name" not in raw.get("task", {}):
        theirs = options(find("adapt", str(parts["adapt"]["name"]), TABLES["adapt"][1]))
        certain = {flag: value for flag, value in given_flags.items() if flag.replace("-", "_") not in theirs}
        parts["task"]["name"] = _task({**parts["data"], **_of_data(str(parts["data"]["name"]), certain)}, tasks)
    if fields.get("preset") is not None:  # published values override those of a file
        parts["method"], parts["training"] = {"name": parts["method"]["name"]}, {}
    elif method and method != canonical("method", raw.get("method", {})).get("name", method):
        raw = {k: v for k, v in raw.items() if k != "preset"}
    own = f"method:{parts['method']['name']}"
    names = among or [parts["method"]["name"]]
    told = {kind: given_flags.get(kind, given_flags.get(f"training.{kind}")) for kind in SEAMS}
    trained = {kind: name and named(name, SEAMS[kind][0]) for kind, name in told.items()}
    parts["training"] = _of(parts["training"], trained)
    picked = {part: table.get("name") for part, table in parts.items()} | {k: parts["training"].get(k) for k in SEAMS}
    for flag, value in given_flags.items():
        for home, option in place(flag, names, picked, value):
            if home == own or not home.startswith("method:"):
                parts[home.partition(":")[0]][option] = value
    given = {k: v for k, v in fields.items() if v is not None}
    return Config.from_dict({**raw, **parts, **given}, where)


def _view(given_flags: dict[str, str], view: str | None) -> tuple[dict[str, str], str | None]:
    """Split off --view best, which is an option of the run. The other views are options of methods."""
    view = view or given_flags.get("view")
    rest = {flag: value for flag, value in given_flags.items() if flag != "view"}
    if view in (None, "best"):
        return rest, view
    if view not in ("local", "merged"):
        raise InputError(f"--view must be local, merged or best, not {view!r}.")
    return {**rest, "view": view}, None


def _task(data: dict[str, Any], known: dict[str, str] | None) -> str:
    from fedselect.runs.config import task_of

    known, key = {} if known is None else known, json.dumps(data, sort_keys=True)
    if key not in known:
        known[key] = task_of(data)
    return known[key]


def _of_data(name: str, given_flags: dict[str, str]) -> dict[str, str]:
    """The flags that are options of the data set."""
    from fedselect.data import DATA

    named = {flag.removeprefix("data.").replace("-", "_"): value for flag, value in given_flags.items()}
    return {option: value for option, value in named.items() if option in options(find("data", name, DATA))}


def _of(training: dict[str, Any], asked: dict[str, str | None]) -> dict[str, Any]:
    """Training settings with the requested optimizer and schedule, without the options of the ones they replace."""
    from fedselect.training.settings import own_options

    for kind, name in asked.items():
        before = training.get(kind)
        if name and before not in (None, name):
            training = {k: v for k, v in training.items() if k not in own_options(kind, str(before))}
        training |= {kind: name} if name else {}
    return training
