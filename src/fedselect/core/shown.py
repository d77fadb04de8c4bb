"""How objects of this package are shown: their name and the options that are not defaults."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from html import escape
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")
MOST = 8  # numbers of a tensor to show


class Made(NamedTuple):
    """What was called, with all options, also default ones."""

    name: str
    options: dict[str, Any]
    defaults: dict[str, Any]


class Shown:
    """A base of dataclasses that shows them as `FedPAC(lr=0.05)`. A class that defines `__repr__` keeps it."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__repr__" not in vars(cls):
            cls.__repr__ = Shown.__repr__  # type: ignore[method-assign]  # set before @dataclass looks for one

    def __repr__(self) -> str:
        return call_of(*made(self))


def made(thing: Any) -> Made:
    """How an object was created: by one of its aliases, or by its class with these fields."""
    if (by := getattr(thing, "_made_by", None)) is not None:
        return by  # type: ignore[no-any-return]
    own = [f for f in fields(thing) if f.init] if hasattr(thing, "__dataclass_fields__") else []
    return Made(type(thing).__name__, {f.name: getattr(thing, f.name) for f in own}, {f.name: _default(f) for f in own})


def alias(factory: Callable[P, T]) -> Callable[P, T]:
    """Show the objects that a function creates under the function's name; changed copies are shown by class."""
    known = inspect.signature(factory)
    defaults = {n: p.default for n, p in known.parameters.items()}

    @functools.wraps(factory)
    def make(*args: P.args, **options: P.kwargs) -> T:
        out = factory(*args, **options)
        given = known.bind(*args, **options)
        given.apply_defaults()
        object.__setattr__(out, "_made_by", Made(factory.__name__, dict(given.arguments), defaults))
        return out

    return make


def call_of(name: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """The call that creates an object, without default options."""
    told = [f"{n}={_value(v)}" for n, v in options.items() if not _same(v, defaults.get(n, MISSING))]
    return f"{name}({', '.join(told)})"


def html_table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]], sums: Sequence[Sequence[str]] = ()) -> str:
    """A table for a notebook; `sums` are shown below a line."""

    def row(cells: Sequence[str], tag: str = "td") -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(c)}</{tag}>" for c in cells) + "</tr>"

    head, body = row(heads, "th"), "".join(map(row, rows))
    foot = f"<tfoot>{''.join(row(r, 'th') for r in sums)}</tfoot>" if sums else ""
    return f"<table><caption>{escape(caption)}</caption><thead>{head}</thead><tbody>{body}</tbody>{foot}</table>"


def _default(f: "Field[Any]") -> Any:
    return f.default if f.default_factory is MISSING else f.default_factory()


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def _value(value: Any) -> str:
    if isinstance(value, Tensor):
        numbers = [f"{v:g}" for v in value.flatten().tolist()[:MOST]]
        return f"[{', '.join(numbers)}{', ...' if value.numel() > MOST else ''}]"
    if inspect.isfunction(value):
        return value.__qualname__
    return repr(value)
