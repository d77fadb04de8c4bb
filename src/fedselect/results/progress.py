"""Progress of runs in memory: a bar in a terminal or a notebook; elsewhere a line from time to time."""

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape

from rich.console import Console

from fedselect.runs.progress import PAUSE, bars, describe, working
from fedselect.simulate.records import Record
from fedselect.tasks import Measure

Show = Callable[[str, Record], None]
OFTEN = 0.1  # seconds between updates in a notebook


@contextmanager
def bar(on: bool, total: int, headline: Measure | None) -> Iterator[Show]:
    """Yield the function to call with the name and record of each round. Shows nothing unless `on`."""
    if not on or headline is None:
        yield lambda name, record: None
        return
    console = Console(stderr=True)
    if console.is_jupyter:
        yield _in_notebook(total, headline)
    elif not console.is_terminal:
        yield _in_lines(console, total, headline)
    else:
        with bars(console) as drawn, working(drawn):
            task = drawn.add_task("", total=total, note="")
            yield lambda name, record: drawn.update(task, advance=1, description=name, note=describe(record, headline))


def _in_notebook(total: int, headline: Measure) -> Show:
    """Update a single output cell. Uses no widgets, since not every notebook supports them."""
    display = importlib.import_module("IPython.display").display
    done, drawn, handle = 0, 0.0, None

    def show(name: str, record: Record) -> None:
        nonlocal done, drawn, handle
        done += 1
        if done < total and time.monotonic() - drawn < OFTEN:
            return
        drawn = time.monotonic()
        said = f"{name} {done}/{total}  {describe(record, headline)}"
        shown = {"text/plain": said, "text/html": f'<progress value="{done}" max="{total}"></progress> {escape(said)}'}
        if handle is None:
            handle = display(shown, raw=True, display_id=True)
        else:
            handle.update(shown, raw=True)

    return show


def _in_lines(console: Console, total: int, headline: Measure) -> Show:
    done, last = 0, time.monotonic()

    def show(name: str, record: Record) -> None:
        nonlocal done, last
        done += 1
        if done == total or time.monotonic() - last >= PAUSE:
            last = time.monotonic()
            said = f"{name}  {done}/{total}  {describe(record, headline)}"
            console.print(said, highlight=False, soft_wrap=True, markup=False)

    return show
