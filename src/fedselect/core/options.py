"""Tables of named things with options: signatures list the options, docstrings describe them."""

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar

from fedselect.core.errors import InputError, unknown

T = TypeVar("T")
FIXED = frozenset({"data", "seed", "outputs", "model"})
"""Parameters that the run passes to a factory, not the user."""


@dataclass(frozen=True)
class Option:
    name: str
    default: Any
    kind: Any  # the annotation
    meaning: str = ""  # its line in the docstring

    def describe(self) -> str:
        if self.default is inspect.Parameter.empty:
            return f"{self.name} (required)"
        choices = _choices(self.kind)
        return f"{self.name}={_show(self.default)}" + (f" ({'|'.join(map(str, choices))})" if choices else "")

    def value(self, given: Mapping[str, Any]) -> Any:
        """The given value, checked, or the default."""
        if self.name in given:
            return self.parse(given[self.name])
        if self.default is inspect.Parameter.empty:
            raise InputError(f"{self.name} is required: give --{self.name.replace('_', '-')} (in Python: {self.name}=...).")
        return self.default

    def parse(self, value: Any) -> Any:
        """Convert a value from a flag (text) or a file, and check it against the annotation."""
        kinds = [k for k in _members(self.kind) if k is not types.NoneType]
        if value is None or (value == "none" and types.NoneType in _members(self.kind)):
            if types.NoneType not in _members(self.kind):
                raise InputError(f"{self.name} needs a value.")
            return None
        choices = _choices(self.kind)
        if choices:
            if value not in choices:
                raise InputError(f"{self.name} is {' or '.join(map(str, choices))}, not {value!r}.")
            return value
        for kind in (bool, int, float, str):
            if kind in kinds and (parsed := _convert(kind, value)) is not None:
                return parsed
        wanted = {bool: "yes or no", int: "a whole number", float: "a number", str: "a text"}
        raise InputError(f"{self.name} must be {' or '.join(wanted[k] for k in wanted if k in kinds)}, not {value!r}.")


def options(factory: Callable[..., Any], skip: frozenset[str] = FIXED) -> dict[str, Option]:
    """The options that a user can set, without the data, outputs and seed, which come from the run."""
    read = _read if isinstance(factory, types.FunctionType | type) else _read.__wrapped__  # other callables may not be hashable
    return dict(read(factory, skip))


@cache
def _read(factory: Callable[..., Any], skip: frozenset[str]) -> dict[str, Option]:
    """Cached: a configuration asks for the same options dozens of times, and a table of runs has hundreds of those."""
    hints = typing.get_type_hints(factory)
    said = meanings(factory)
    found = {}
    for p in inspect.signature(factory).parameters.values():
        kind = hints.get(p.name, _kind(p.default))
        if p.name in skip:
            continue
        default = p.default
        if p.name == "path" and default is p.empty:  # in a deployment each client has its own; `build` asks for it
            default, kind = None, kind | None
        own = {p.name: Option(p.name, default, kind, said.get(p.name, ""))}
        found.update(options(kind, skip) if _is_group(kind) else own)
    return found


def meanings(factory: Callable[..., Any]) -> dict[str, str]:
    """The meanings of parameters in a docstring, from lines `name: meaning`; continuation lines are indented."""
    found: dict[str, str] = {}
    last = ""
    for line in (inspect.getdoc(factory) or "").splitlines()[1:]:
        if named := re.match(r"(\w+): +(.+)", line):
            last = named[1]
            found[last] = named[2].strip()
        elif last and line.startswith(" "):
            found[last] += " " + line.strip()
        else:
            last = ""
    return found


def _is_group(kind: Any) -> bool:
    """Whether an option is a group, whose options appear one by one on a command line and in a file."""
    return isinstance(kind, type) and is_dataclass(kind)


def call(factory: Callable[..., T], **given: Any) -> T:
    """Call a factory with options by name; options of a group go into that group."""
    left, groups = dict(given), {}
    for name, kind in typing.get_type_hints(factory).items():
        if name not in (*given, "return", *FIXED) and _is_group(kind):
            groups[name] = kind(**{k: left.pop(k) for k in options(kind) if k in left})
    return factory(**left, **groups)


def _kind(default: Any) -> Any:
    """The type of an option without an annotation: a number if its default is one, else text."""
    if isinstance(default, bool | float):
        return type(default)
    return int | float if isinstance(default, int) else str


def summary(factory: Callable[..., Any]) -> str:
    return (inspect.getdoc(factory) or "").split("\n")[0]


def named(name: str, table: Mapping[str, Any]) -> str:
    """The table's spelling of a name that differs only in case or signs (FedAvg, CIFAR-10); else the name unchanged."""
    if name in table:
        return name
    alike = [known for known in table if _letters(known) == _letters(name)]
    return alike[0] if len(alike) == 1 else name


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find(kind: str, name: str, table: Mapping[str, Callable[..., T]]) -> Callable[..., T]:
    if name not in table:
        raise unknown(kind, name, table, more="If a plugin provides it, add --plugin, or in Python import it.")
    return table[name]


def resolve(kind: str, name: str, table: Mapping[str, Callable[..., Any]], given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of one row: the given ones, checked, and the defaults of the others."""
    known = options(find(kind, name, table))
    for option in given:
        if option not in known:
            raise unknown(f"option of {kind} {name}:", option, known)
    return {n: o.value(given) for n, o in known.items()}


def build(kind: str, name: str, table: Mapping[str, Callable[..., T]], given: Mapping[str, Any], **fixed: Any) -> T:
    """Create the thing with this name and these options."""
    seeded = {k: given[k] for k in given if k == "seed"}
    rest = resolve(kind, name, table, {k: v for k, v in given.items() if k != "seed"})
    made = find(kind, name, table)
    if "path" in rest and rest["path"] is None and _needs_path(made):
        raise InputError(f"give the path of the data: --{kind} {name}:PATH (in Python: path=...).")
    return call(made, **rest, **fixed, **seeded)


def _needs_path(factory: Callable[..., Any]) -> bool:
    taken = inspect.signature(factory).parameters.get("path")
    return taken is not None and taken.default is taken.empty


def _members(kind: Any) -> tuple[Any, ...]:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return tuple(m for k in typing.get_args(kind) for m in _members(k))
    return (kind,)


def _choices(kind: Any) -> tuple[Any, ...]:
    return next((typing.get_args(k) for k in _members(kind) if typing.get_origin(k) is Literal), ())


def _show(value: Any) -> str:
    return {True: "yes", False: "no", None: "none"}.get(value, str(value)) if isinstance(value, bool | None) else str(value)


def _convert(kind: type, value: Any) -> Any:
    if kind is bool:
        return (
            value
            if isinstance(value, bool)
            else {"yes": True, "true": True, "no": False, "false": False}.get(str(value).lower())
        )
    if isinstance(value, bool):
        return None
    try:
        if kind is int:
            return int(str(value))
        return float(value) if kind is float else str(value)
    except (TypeError, ValueError):
        return None
