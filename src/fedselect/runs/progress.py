"""Progress: bars on a terminal; elsewhere a line at the start, from time to time and per finished run; nothing with --quiet."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedselect.core import doing
from fedselect.runs.config import Config
from fedselect.runs.labels import labels
from fedselect.runs.loop import Watch
from fedselect.runs.rundir import identity
from fedselect.simulate.keeping import is_end
from fedselect.simulate.records import Record, evaluated
from fedselect.tasks import Measure

PAUSE = 10.0  # seconds between lines while a run goes on
NAMED = 3  # most methods that the first line of a log names


def describe(record: Record, headline: Measure) -> str:
    parts = [f"{headline.name} {measured(record, headline)}"] if evaluated(record) else []
    if record["share"]:
        parts.append(f"personal {record['share']:.1%}")
    if record["train_loss"] is not None:
        parts.append(f"loss {record['train_loss']:.4f}")
    if record.get("epsilon") is not None:
        parts.append(f"epsilon {record['epsilon']:.2f}")
    if record.get("missed"):  # only in deployed runs
        sent = record["clients"]["bytes_up"]
        parts.append(f"{sum(v is not None for v in sent)} of {len(sent)} clients trained")
    return "  ".join(parts)


def measured(record: Record, headline: Measure) -> str:
    """The headline metric, with the number of clients if not all have it."""
    if record[headline.name] is None:
        return "-"
    who = record["clients"][headline.name]
    of = sum(v is not None for v in who)
    return headline.said(record[headline.name]) + (
        "" if of == record.get("of", len(who)) else f" of {of} client{'s' if of > 1 else ''}"
    )


def names(configs: Sequence[Config]) -> Callable[[Config], str]:
    """Makes names for runs: the label and the seed."""
    said = dict(zip(map(identity, configs), labels([c.to_json() for c in configs]), strict=True))
    return lambda config: f"{said.get(identity(config), config.method['name'])} seed {config.seed}"


def opening() -> str:
    """What happens before the first round."""
    gpu = ", compiling kernels that this GPU has not run yet" if torch.cuda.is_available() else ""
    return f"reading data{gpu}, first round"


def beginning(runs: Sequence[Config], out: Path | None = None, lead: str = "") -> str:
    """What is about to be trained, in one line: methods, data, model, clients, rounds, device and directory."""
    one, methods = runs[0], list(dict.fromkeys(str(c.method["name"]) for c in runs))
    named = ", ".join(methods) if len(methods) <= NAMED else f"{len(methods)} methods"
    lead = lead or ("training" if len(runs) == 1 else f"training {len(runs)} runs of")
    clients = one.data.get("clients")  # some data sets decide it themselves
    device = one.device if one.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    parts = [
        str(one.model["name"]),
        *([f"{clients} clients"] if clients else []),
        f"{one.rounds} round{'s' * (one.rounds > 1)}",
        f"on {device}",
        *([f"in {out}"] if out else []),
    ]
    return f"{lead} {named} on {one.data['name']}: {', '.join(parts)}"


def tell(console: Console, line: str) -> None:
    """Print a line of a log as it is, at once."""
    console.print(line, highlight=False, soft_wrap=True, markup=False)
    console.file.flush()


@contextmanager
def _lines(console: Console, name: Callable[[Config], str]) -> Iterator[Watch]:
    """Print a line when a run ends, and at most one per PAUSE in between."""
    began = last = time.perf_counter()

    def work(what: str, share: float | None) -> None:
        nonlocal last
        now = time.perf_counter()
        if share is None or now - last < PAUSE:
            return
        last = now
        tell(console, f"{what} {share:.0%}")

    def line(config: Config, record: Record) -> None:
        nonlocal last
        now = time.perf_counter()
        if not is_end(record, config.rounds) and now - last < PAUSE:
            return
        last = now
        said = describe(record, config.measured()[0])
        tell(console, f"{name(config)}  round {record['round']}/{config.rounds}  {said}  {now - began:.1f} s")

    with doing.heard(work):
        yield line


def bars(console: Console) -> Progress:
    """Progress bars, each with a name and a note."""
    return Progress(
        TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"), TimeElapsedColumn(), TimeRemainingColumn(), console=console,
    )  # fmt: skip


@contextmanager
def working(drawn: Progress) -> Iterator[None]:
    """A bar for work inside a round that takes long, as long as it takes."""
    shown: list[TaskID] = []

    def draw(what: str, share: float | None) -> None:
        if share is None:
            while shown:
                drawn.remove_task(shown.pop())
            return
        if not shown:
            shown.append(drawn.add_task("", total=100, note="%"))
        drawn.update(shown[0], description=what, completed=int(100 * share), refresh=True)

    with doing.heard(draw):
        yield


@contextmanager
def progress(console: Console, quiet: bool, runs: Sequence[Config] = (), out: Path | None = None) -> Iterator[Watch | None]:
    """Yield the function to call after every round. Shows a bar per running run and, with several, one for all.

    `out`: where the runs are written, for the first line of a log.
    """
    if quiet:
        yield None
        return
    name = names(runs)
    if not console.is_terminal:
        if runs:
            tell(console, beginning(runs, out))
        with _lines(console, name) as line:
            yield line
        return
    with bars(console) as drawn, working(drawn):
        total = drawn.add_task("all runs", total=len(runs), note="") if len(runs) > 1 else None
        tasks: dict[str, object] = {}
        waiting = [drawn.add_task(opening(), total=None, note="")]

        def draw(config: Config, record: Record) -> None:
            while waiting:
                drawn.remove_task(waiting.pop())
            key = name(config)
            if key not in tasks:
                tasks[key] = drawn.add_task(key, total=config.rounds, note="")
            task = tasks[key]
            drawn.update(task, completed=record["round"], note=describe(record, config.measured()[0]))  # type: ignore[arg-type]
            if is_end(record, config.rounds) and total is not None:
                drawn.update(total, advance=1)
                drawn.remove_task(task)  # type: ignore[arg-type]

        yield draw
