"""One progress display for all runs: runs done, the current round, the time left."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from fedselect.paper.plan import name_of
from fedselect.runs.config import Config
from fedselect.runs.progress import opening
from fedselect.simulate.records import Record


class Overall:
    """Counts rounds over all runs. Draws a bar on a terminal, elsewhere prints a line per finished run."""

    def __init__(self, console: Console, bars: Progress | None, quiet: bool) -> None:
        self.console, self.bars, self.quiet = console, bars, quiet
        self.began = time.perf_counter()
        self.runs = self.total = self.finished = 0
        self.here = self.elsewhere = 0  # rounds run by this process, and rounds found done
        self._at: dict[str, int] = {}
        self._waits = False
        self._task = bars.add_task("", total=None, left="", note=opening()) if bars else None

    def expect(self, runs: int, rounds: int) -> None:
        """Set the number of runs and rounds still to do."""
        self.runs, self.total = self.finished + runs, self.here + self.elsewhere + rounds
        self._draw("" if self.here else opening())

    def round(self, config: Config, record: Record) -> None:
        self._waits = False
        name = name_of(config)
        if name not in self._at:  # resumed: its earlier rounds were run before
            self.elsewhere += record["round"] - 1
        self.here += 1
        self._at[name] = record["round"]
        self._draw(_label(config))

    def done(self, config: Config) -> None:
        self.finished += 1
        at = self._at.pop(name_of(config), None)
        self.elsewhere += config.rounds - (at or 0)
        if not self.bars and not self.quiet:
            who = "" if at else "  by another process"
            self._print(f"{self.finished}/{self.runs} runs  {_label(config)}{who}  {self.left}")
        self._draw(_label(config))

    def waiting(self, runs: int) -> None:
        said = f"waiting for {runs} run{'s' if runs > 1 else ''} of another process"
        if not self._waits and not self.bars and not self.quiet:
            self._print(said)
        self._waits = True
        self._draw(said)

    @property
    def left(self) -> str:
        """The time left, estimated from this process's rounds so far."""
        ahead = self.total - self.here - self.elsewhere
        if not self.here or ahead <= 0:
            return ""
        seconds = ahead * (time.perf_counter() - self.began) / self.here
        return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"

    def _draw(self, note: str) -> None:
        if self.bars and self._task is not None:
            self.bars.update(
                self._task,
                description=f"{self.finished}/{self.runs} runs",
                left=self.left,
                note=note,
                completed=self.here + self.elsewhere,
                total=self.total or None,
            )

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)


@contextmanager
def overall(console: Console, quiet: bool) -> Iterator[Overall]:
    if quiet or not console.is_terminal:
        yield Overall(console, None, quiet)
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(bar_width=16), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.fields[note]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
    )  # fmt: skip
    with Progress(*columns, console=console, expand=True) as bars:
        yield Overall(console, bars, quiet)


def _label(config: Config) -> str:
    kind = "validation " if config.score == "val" else ""
    return f"{kind}{config.method['name']} on {config.data['name']} seed {config.seed} {name_of(config)[:6]}"
