"""The options of a run as flags: each field of `Config` that has a help text, with its type and default."""

import inspect
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import typer

from fedselect.runs.config import Config

HINTS = get_type_hints(Config)


def with_run_options(but: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command that takes **given a flag for each option of a run; those that were not given are None."""

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
        added = [_flag(f) for f in fields(Config) if "help" in f.metadata and f.name not in but]
        hints = get_type_hints(command, include_extras=True)

        def called(**values: Any) -> None:
            command(**values)

        called.__name__, called.__doc__ = command.__name__, command.__doc__
        signature = inspect.Signature([*(p.replace(kind=p.KEYWORD_ONLY) for p in own), *added])
        called.__signature__ = signature  # type: ignore[attr-defined]
        called.__annotations__ = {**{p.name: hints[p.name] for p in own}, **{p.name: p.annotation for p in added}}
        return called

    return wrap


def _flag(field: "Field[Any]") -> inspect.Parameter:
    kind, default = HINTS[field.name], field.metadata.get("default", field.default)
    said = field.metadata["help"] + ("" if default is None or kind is bool else f" (default: {default})")
    name = f"--{field.name.replace('_', '-')}"
    plain = {bool: bool, int: int, float: float}.get(kind, str) if get_origin(kind) is not Literal else str
    annotation = Annotated[plain | None, typer.Option(name, help=said)]  # type: ignore[valid-type]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
