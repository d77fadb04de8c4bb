"""Where the commands print."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console


def _terminal() -> Console:
    """Where output goes. In a file or a pipe a table is as wide as it needs to be: nothing is cut to fit eighty columns."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=160 if piped else None)


console = _terminal()


def say(text: str) -> None:
    """A line as it is: neither wrapped nor coloured."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def say_metrics(runs: Sequence[Path], score: str) -> None:
    """Every metric over clients, where runs have more than one; score: the data that they are of, test or val."""
    from fedselect.runs import metric_tables

    if metric_tables.several(runs):
        console.print(metric_tables.render(metric_tables.rows(runs), score))
