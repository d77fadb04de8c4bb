"""Runs in a folder shared by several processes. Each run is done once, by the process that locks it first.

The lock of a run directory ends with the process that holds it, however it ends. If a process dies, another one resumes its
runs from their last checkpoints.
"""

import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from fedselect.core.errors import BusyError, Stopped
from fedselect.core.files import disk, in_use, locked, read_json
from fedselect.paper.plan import named
from fedselect.runs.config import Config
from fedselect.runs.loop import go_on
from fedselect.runs.rundir import core, done
from fedselect.runs.runner import groups, prepare
from fedselect.simulate.checkpoint import identity, moved
from fedselect.simulate.records import Record

WAIT = 0.5  # seconds between checks of other processes


class Told(Protocol):
    """Receives progress."""

    def round(self, config: Config, record: Record) -> None: ...
    def done(self, config: Config) -> None: ...
    def waiting(self, runs: int) -> None: ...


def finish(runs: Mapping[Path, Config], stop: Callable[[], bool], told: Told) -> None:
    """Return when all these runs are done, by this or another process."""
    left = {place: config for place, config in runs.items() if not done(place)}
    for place in runs.keys() - left.keys():
        _tidy(place)
    while left:
        free = {str(place): config for place, config in left.items() if not in_use(place)}
        for group in groups(free):
            _take({Path(name): free[name] for name in group}, stop, told)
            _tick_off(left, told)
        if stop():
            raise Stopped("stopped; run the same command again to continue.")
        _tick_off(left, told)
        if left and all(in_use(place) for place in left):
            told.waiting(len(left))
            time.sleep(WAIT)


def _tick_off(left: dict[Path, Config], told: Told) -> None:
    for place in [p for p in left if done(p)]:
        told.done(left.pop(place))


def _take(runs: Mapping[Path, Config], stop: Callable[[], bool], told: Told) -> None:
    """Run those that no other process has locked, in one batch."""
    with ExitStack() as locks:
        mine = []
        for place, config in runs.items():
            with ExitStack() as one:
                try:
                    one.enter_context(locked(place))
                except BusyError:
                    continue
                if not done(place):
                    _moved(place, config)
                    prepare(place, config)
                    locks.push(one.pop_all())
                    mine.append(place)
        if not mine:
            return
        if stop():
            raise Stopped("stopped; run the same command again to continue.")
        try:
            for run in go_on(mine, stop, told.round, alone=False, keep=False):
                _tidy(run.out)
        except Stopped as e:
            raise Stopped(f"{str(e).partition(';')[0]}; run the same command again to continue.") from None


def _moved(place: Path, config: Config) -> None:
    """Let a run resume after its data files were moved, which does not change the name of its directory."""
    there = place / "config.json"
    if there.exists():
        was, now = core(read_json(there, "it must contain the configuration of a run.")), core(config.to_json())
        if was != now and identity(_nowhere(was)) == identity(_nowhere(now)):
            moved(place / "checkpoint", was, now)


def _nowhere(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run's configuration without the paths of its files."""
    return {k: named(v) if k in ("data", "model") else v for k, v in run.items()}


def _tidy(place: Path) -> None:
    """Delete checkpoints, which are large and not needed for tables."""
    with disk(place):
        shutil.rmtree(place / "checkpoint", ignore_errors=True)
