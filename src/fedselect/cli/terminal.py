"""Where the commands print."""

from collections.abc import Sequence
from pathlib import Path

from fedselect.runs import metric_tables, tables

console = tables.terminal()


def say(text: str) -> None:
    """A line as it is: neither wrapped nor coloured."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def say_metrics(runs: Sequence[Path], score: str) -> None:
    """Every metric over clients, where runs have more than one; score: the data that they are of, test or val."""
    if metric_tables.several(runs):
        console.print(metric_tables.render(metric_tables.rows(runs), score))
