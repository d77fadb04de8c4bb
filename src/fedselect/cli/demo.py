"""fedselect demo: the comparison from the README, configured in demo.toml."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from fedselect.cli import completion
from fedselect.cli.flags import EXTRA, flags
from fedselect.cli.run_options import Shown, with_run_options
from fedselect.cli.terminal import say
from fedselect.cli.train import Overwrite, compared, train_all

CONFIG = Path(__file__).with_name("demo.toml")


@with_run_options("rounds")
def demo(
    ctx: typer.Context,
    shown: Shown,
    *,
    methods: Annotated[
        str | None,
        typer.Option(help="Only these methods, separated by commas (default: all nine)", autocompletion=completion.methods),
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, separated by commas (default: 0,1,2)")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs and the report")] = Path("runs/demo"),
    overwrite: Overwrite = False,
    **given: Any,
) -> None:
    """Compare nine methods on real data in about two minutes, and write a report."""
    from fedselect.runs.config import read

    runs = compared(read(CONFIG), "the demo", methods, None, None, seeds, more=flags(ctx.args), **given)
    drawn = find_spec("plotly") is not None
    if not drawn:
        say("plotly is missing, so no report will be written; install it with: pip install 'fedselect[report]'")
    train_all(runs, out, overwrite, shown, report=drawn)


def add_to(app: typer.Typer) -> None:
    app.command(context_settings=EXTRA)(demo)
