"""Commands that list what is available: methods, models, tasks, optimizers, aggregators, data, version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import DownloadColumn, Progress
from rich.table import Table
from rich.text import Text

from fedselect.cli import schemas
from fedselect.cli.flags import EXTRA, configure, flags
from fedselect.cli.terminal import console, say
from fedselect.core.options import Option, find, named, options, summary
from fedselect.core.version import package_version

if TYPE_CHECKING:
    from fedselect.tasks import Task

data_app = typer.Typer(no_args_is_help=True, help="List, inspect and download data sets.")


def add_to(app: typer.Typer) -> None:
    for command in (methods, models, tasks, optimizers, aggregators, version):
        app.command()(command)
    schemas.add_to(data_app)
    app.add_typer(data_app, name="data")


def methods(name: Annotated[str | None, typer.Argument(help="Show the options of this method, one per line")] = None) -> None:
    """List the methods and their options."""
    from fedselect.methods import METHODS
    from fedselect.runs import presets
    from fedselect.training.settings import Training

    if name is None:
        _list("method", METHODS)
        console.print("options of local training, for all methods: " + _inline(options(Training)))
        console.print(f"defaults differ on {', '.join(presets.SUITED)}; show them with: fedselect methods NAME")
        return
    name = named(name, METHODS)
    factory = find("method", name, METHODS)
    console.print(f"[bold]{name}[/bold]  {summary(factory)}", highlight=False)
    _details({**options(factory), **options(Training)})
    for chosen in presets.NAMES:
        console.print(f"  --preset {chosen:<8} {presets.describe(chosen, name, 'cifar10')}", highlight=False)
    for data in presets.SUITED:
        values = (f"{k}={v}" for table in presets.suited(name, data).values() for k, v in table.items())
        console.print(f"  defaults on {data}: {', '.join(values)}", highlight=False)


@data_app.command("show", context_settings=EXTRA)
def data_show(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="A name from `fedselect data list`, or table:PATH, folder:PATH, domains:PATH")],
    seed: Annotated[int, typer.Option(help="Seed of the partition")] = 0,
    out: Annotated[Path | None, typer.Option(help="Also draw the partition to this .png, .pdf or .svg file")] = None,
) -> None:
    """Show how a data set is divided among clients. Options of the data set are flags: --clients 20."""
    from fedselect.cli import show

    made = configure({}, None, name, None, flags(ctx.args), seed=seed, task="classification")  # nothing is trained
    data = made.make_data()
    console.print(show.table(data), markup=False)
    if (columns := show.columns(data)) is not None:
        console.print(columns, markup=False)
    if out is not None:
        say(f"wrote {show.picture(data, out)}")


@data_app.command("fetch")
def data_fetch(
    name: Annotated[
        str, typer.Argument(help="mnist, emnist, cifar10, cifar100 or cifar10c; for other data sets, prints where to get them")
    ],
    data_dir: Annotated[
        Path | None, typer.Option(help="Where to store it (default: $FEDSELECT_DATA or the user cache)")
    ] = None,
) -> None:
    """Download a data set and verify it. An interrupted download resumes."""
    from fedselect.data.fetch import fetch

    with Progress(*Progress.get_default_columns(), DownloadColumn(), console=console, disable=not console.is_terminal) as bars:
        task = bars.add_task(f"fetching {name}", total=None)
        path = fetch(name, data_dir, lambda done, total: bars.update(task, completed=done, total=total))
    say(f"{name} is in {path}")


@data_app.command("list")
def data_list() -> None:
    """List the data sets and their options."""
    from fedselect.data import DATA

    _list("data", DATA)


def models() -> None:
    """List the models, and the adapters that train only part of a model, with their options."""
    from fedselect.models import ADAPTERS, MODELS

    _list("model", MODELS)
    _list("adapt", ADAPTERS)


def tasks() -> None:
    """List the tasks (classification, regression, ...) with their metrics and options."""
    from fedselect.tasks import TASKS

    _list("task", TASKS, more=_measured)


def optimizers() -> None:
    """List the optimizers and learning-rate schedules of local training with their options."""
    from fedselect.training.settings import SEAMS, Training

    for kind, (table, _, _) in SEAMS.items():
        _list(kind, table, options(Training))


def aggregators() -> None:
    """List the aggregators, the server's rules to combine uploads, with their options."""
    from fedselect.aggregate import AGGREGATORS

    _list("aggregator", AGGREGATORS)


def version() -> None:
    """Print the version."""
    console.print(package_version(), highlight=False)


def _measured(factory: Callable[..., Task]) -> str:
    """The metrics of a task: those always measured, and those measured on request."""
    try:
        task = factory()
    except TypeError:  # an option of it has no default
        return ""
    asked = ", ".join(m.name for m in task.more)
    return f"\nmetrics: {', '.join(m.name for m in task.measured())}" + (
        f"; on request with --metrics: {asked}" if asked else ""
    )


def _list(
    kind: str,
    table: Any,
    settings: Mapping[str, Option] | None = None,
    more: Callable[[Any], str] = lambda factory: "",
) -> None:
    """Print the rows of a table. `settings`: options whose defaults come from the run. `more`: text to add to a row."""
    grid = Table(box=None, pad_edge=False)
    grid.add_column(kind, style="bold", no_wrap=True)
    grid.add_column("what it does, and its options with their defaults")
    for name, factory in table.items():
        own = {n: (settings or {}).get(n, o) for n, o in options(factory).items()}
        grid.add_row(name, f"{summary(factory)}{more(factory)}\n[dim]{_inline(own)}[/dim]")
    console.print(grid, highlight=False)


def _inline(found: dict[str, Option]) -> str:
    return ", ".join(o.describe() for o in found.values())


def _details(found: dict[str, Option]) -> None:
    """Print a line per option: its flag, default and meaning."""
    grid = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(max_width=29)
    grid.add_column()
    for option in found.values():
        default = option.describe().partition("=")[2].replace("|", " | ")
        grid.add_row(f"  --{option.name.replace('_', '-')}", Text(default), Text(option.meaning))
    console.print(grid, highlight=False)
