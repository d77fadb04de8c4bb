"""The live table of a search: the leading settings, the current rung, and the estimated time left."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table

from fedselect.runs.config import Config
from fedselect.runs.progress import PAUSE, beginning, tell
from fedselect.runs.rundir import identity
from fedselect.simulate.keeping import final
from fedselect.simulate.records import Record
from fedselect.tuning.halving import cost
from fedselect.tuning.search import Progress
from fedselect.tuning.trials import Asked

SHOWN = 8  # settings


class Board:
    """The state of a search so far. Call `watch` after every round and `told` after every rung."""

    def __init__(self, asked: Asked) -> None:
        self._asked, self._judge = asked, asked.judge
        runs = {(n, s): c for n in asked.settings for s, c in zip(asked.seeds, asked.runs([n]).values(), strict=True)}
        self._names = {identity(c): name for (name, _), c in runs.items()}
        self._met: dict[int, tuple[Config, str | None]] = {}  # configurations by object, with their settings
        self._seen: dict[str, dict[int, list[Record]]] = {}
        self._progress = Progress()
        self._rounds, self._began = 0, time.perf_counter()
        self.looking = False

    def watch(self, config: Config, record: Record) -> None:
        self._rounds += 1
        if id(config) not in self._met:
            self._met[id(config)] = config, self._names.get(identity(config))
        name = self._met[id(config)][1]
        self.looking = name is None
        if name is not None:
            self._seen.setdefault(name, {}).setdefault(config.seed, []).append(record)

    def told(self, progress: Progress) -> None:
        self._progress = progress

    def beginning(self, out: Path) -> str:
        """What is about to be searched, in one line."""
        settings, seeds = list(self._asked.settings.values()), len(self._asked.seeds)
        lead = f"tuning {len(settings)} setting{'s' * (len(settings) > 1)} ({seeds} seed{'s' * (seeds > 1)}) of"
        return beginning(settings, out, lead)

    @property
    def headline(self) -> str:
        """The state of the search in one line."""
        spent = time.perf_counter() - self._began
        if self.looking:
            return f"evaluating the chosen setting on test data, {spent:.0f} s"
        schedule, stages = self._progress.schedule, self._progress.stages
        if schedule is None:
            return f"measuring how fast the first settings train: {self._rounds} rounds, {spent:.0f} s"
        if len(stages) == len(schedule):
            return f"all rungs are done, {spent:.0f} s"
        rung = schedule[len(stages)]
        done, total = self._rounds, cost(schedule, len(self._asked.seeds)) + self._asked.plan.look
        done += cost(schedule[: len(stages)], len(self._asked.seeds)) if not self._seen else 0
        left = f", about {spent * (total - done) / done:.0f} s left" if 0 < done < total else ""
        return (
            f"rung {len(stages) + 1} of {len(schedule)}: {rung.settings} settings to round {rung.until}, "
            f"{done} of {total} rounds, {spent:.0f} s{left}"
        )

    def leaders(self) -> list[tuple[str, int, float]]:
        """Settings with their rounds and scores so far, those that trained longest first, then by score."""
        first, found = self._judge.measure, []
        for name, seeds in self._seen.items():
            ended = [final(records, first.name) for records in seeds.values()]
            scores = [self._judge.over(r["clients"][first.name]) for r in ended if r]
            there = [s for s in scores if s is not None]
            if there:
                rounds = min(records[-1]["round"] for records in seeds.values())
                found.append((name, rounds, sum(there) / len(there)))
        sign = -1 if first.more_is_better else 1
        return sorted(found, key=lambda f: (-f[1], sign * f[2]))

    def __rich__(self) -> Table:
        first = self._judge.measure
        table = Table(title=self.headline, title_justify="left", box=SIMPLE_HEAD)
        table.add_column("setting", no_wrap=True)
        table.add_column("round", justify="right")
        table.add_column(f"validation {first.title}", justify="right")
        for name, rounds, score in self.leaders()[:SHOWN]:
            table.add_row(name, str(rounds), first.show(score))
        return table

    def line(self) -> str:
        lead = self.leaders()[:1]
        said = f"  best so far {lead[0][0]} {self._judge.measure.said(lead[0][2])}" if lead else ""
        return self.headline + said


@contextmanager
def shown(board: Board, console: Console, quiet: bool, out: Path) -> Iterator[None]:
    """Show a board live: as a table on a terminal, elsewhere as a line from time to time."""
    if quiet:
        yield
    elif console.is_terminal:
        with Live(board, console=console, refresh_per_second=2, transient=True):
            yield
    else:
        plain, rung = board.watch, board.told
        tell(console, board.beginning(out))
        last = time.perf_counter()

        def say() -> None:
            nonlocal last
            last = time.perf_counter()
            tell(console, board.line())

        def watch(config: Config, record: Record) -> None:
            plain(config, record)
            if time.perf_counter() - last > PAUSE:
                say()

        def told(progress: Progress) -> None:
            rung(progress)
            say()

        board.watch, board.told = watch, told  # type: ignore[method-assign]
        yield
