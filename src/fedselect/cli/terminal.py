"""The console that all commands print to."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console


def _terminal() -> Console:
    """The console. In a file or a pipe it is wide, so that tables are not cut to eighty columns."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=160 if piped else None)


console = _terminal()


def say(text: str) -> None:
    """Print a line as it is, without wrapping or color."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def say_metrics(runs: Sequence[Path], score: str) -> None:
    """Print a table of every metric if the runs have more than one. `score`: the data measured on, test or val."""
    from fedselect.runs import metric_tables

    if metric_tables.several(runs):
        console.print(metric_tables.render(metric_tables.rows(runs), score))
