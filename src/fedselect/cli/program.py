"""The program: all commands, and how it reports errors."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from fedselect.cli import adapt, demo, diagnose, lists, results, train, tune
from fedselect.cli.deploy import deploy_app
from fedselect.cli.flags import take_plugins
from fedselect.cli.reproduce import reproduce
from fedselect.cli.terminal import console
from fedselect.core import plugins
from fedselect.core.errors import FedselectError, Stopped
from fedselect.core.interrupts import Interruptible

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich",
    help="Personalized federated learning: every client gets its own model.",
)  # fmt: skip


def _version(asked: bool) -> None:
    if asked:
        lists.version()
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version")] = False,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE",
            help="Load your own methods, data sets, models, tasks, optimizers, schedules or aggregators from a module or from "
            "NAME.py in this folder; works with every command",
        ),
    ] = None,  # shown in --help only: `main` removes it from the command line first
) -> None:
    pass


demo.add_to(app)
train.add_to(app)
tune.add_to(app)
diagnose.add_to(app)
results.add_to(app)
adapt.add_to(app)
app.command()(reproduce)
lists.add_to(app)
app.add_typer(deploy_app, name="deploy")


def main() -> None:
    """Run a command. Errors that a user can fix are printed to stderr as one sentence, without a traceback."""
    warnings.showwarning = _warn  # type: ignore[assignment]
    try:
        with Interruptible():
            _run()
    except Stopped as e:
        _fail(str(e), 130)
    except FedselectError as e:
        _fail(f"error: {e}", 2)


def _run() -> None:
    args, named = take_plugins(sys.argv[1:])
    if named or plugins.asked():
        from fedselect.runs.config import load_plugins

        load_plugins(named)
    with _processes():
        app(args)


@contextmanager
def _processes() -> Iterator[None]:
    """Join the processes that torchrun started, of which only the first prints. Without torchrun, do nothing."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    from fedselect.simulate import ranks

    with ranks.joined():
        console.quiet = ranks.rank() > 0
        yield


def _warn(message: Warning | str, category: type[Warning], *_: Any) -> None:
    """Print our own warnings as one sentence, and hide those of libraries."""
    if category is UserWarning and not console.quiet:
        print(f"note: {message}", file=sys.stderr)


def _fail(message: str, code: int) -> None:
    print(message, file=sys.stderr)
    sys.exit(code)
