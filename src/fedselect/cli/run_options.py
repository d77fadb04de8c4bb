"""Flags shared by several commands: the options of a run, taken from the fields of `Config`, and how progress is shown."""

import inspect
from collections.abc import Callable
from dataclasses import Field, dataclass, fields
from typing import Annotated, Any, get_type_hints

import typer

from fedselect.runs.fields import Fields

OPTIONS = {f.name: f for f in fields(Fields) if "help" in f.metadata}
HINTS = get_type_hints(Fields)
Command = Callable[..., None]


@dataclass(frozen=True)
class Shown:
    """How the progress of a run is shown."""

    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result")] = False
    live: Annotated[bool, typer.Option("--watch", help="Serve a live report for a browser on this machine")] = False
    port: Annotated[int, typer.Option(help="Port for --watch (default: a free one)", show_default=False)] = 0
    track: Annotated[str | None, typer.Option(help="Also log to tensorboard, mlflow or wandb")] = None


def with_run_options(*names: str, **defaults: str) -> Callable[[Command], Command]:
    """Add a flag for each of these options of a run to a command that takes **given. Flags that are not set are None.

    `defaults`: defaults of this command to show in the help. A command that takes `shown: Shown` gets its flags, too.
    """

    def wrap(command: Command) -> Command:
        taken = inspect.signature(command).parameters.values()
        hints = get_type_hints(command, include_extras=True)
        kept = [p.replace(annotation=hints[p.name]) for p in taken if p.kind is not p.VAR_KEYWORD and p.name != "shown"]
        shown = [_parameter(f.name, f.default, _SHOWN[f.name]) for f in fields(Shown)] if "shown" in hints else []
        given = [_parameter(n, None, _flag(f, defaults.get(n))) for n, f in OPTIONS.items() if n in (*names, *defaults)]

        def called(**values: Any) -> None:
            own = {"shown": Shown(**{p.name: values.pop(p.name) for p in shown})} if shown else {}
            command(**own, **values)

        flags = [*(p.replace(kind=p.KEYWORD_ONLY) for p in kept), *shown, *given]
        called.__name__, called.__doc__ = command.__name__, command.__doc__
        called.__signature__ = inspect.Signature(flags)  # type: ignore[attr-defined]
        called.__annotations__ = {p.name: p.annotation for p in flags}
        return called

    return wrap


_SHOWN = get_type_hints(Shown, include_extras=True)


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _flag(field: "Field[Any]", instead: str | None = None) -> Any:
    kind, default = HINTS[field.name], instead or field.metadata.get("said", field.metadata["default"])
    said = field.metadata["help"] + ("" if default is None or kind is bool else f" (default: {default})")
    shown = {int: "INTEGER", float: "FLOAT"}.get(kind)  # parsed by Config, so that flags and files give the same errors
    plain = bool if kind is bool else str
    return Annotated[plain | None, typer.Option(f"--{field.name.replace('_', '-')}", help=said, metavar=shown)]
