"""Runs in directories: a single run or a comparison. Both can be resumed at any time. rundir.py lists their files."""

import gc
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from types import FrameType
from typing import Any

import torch

from fedselect.core.errors import InputError, RunError, Stopped
from fedselect.core.files import check_folder_name, empty, is_unused, locked, read_json, write_json
from fedselect.runs.config import Config, Dealt
from fedselect.runs.loop import Watch, go_on
from fedselect.runs.rundir import (
    BEGIN,
    again,
    check_not_saved,
    deployed,
    done,
    failure,
    finished,
    is_run,
    no_run,
    outcome,
    owner,
    read_configs,
)
from fedselect.simulate import Simulation, ranks
from fedselect.simulate import checkpoint as checkpoints
from fedselect.simulate.records import Record
from fedselect.simulate.stack import form, stacks

ONE_PRESS = 0.5  # seconds within which a second Ctrl-C counts as the same key press


@dataclass(frozen=True)
class Comparison:
    """Runs of one table: every method with every seed."""

    runs: dict[str, Config]  # by run directory


def start(config: Config, out: Path, *, overwrite: bool = False, watch: Watch | None = None) -> list[Record]:
    """Start a run in a new directory and return its history."""
    if ranks.rank() == 0:
        may_write(out, overwrite)
    simulation = config.simulation()  # raises for bad input before anything is written or replaced
    _say_frozen([simulation])
    with _locked(out), ctrl_c() as stop:
        if ranks.rank() == 0:
            may_write(out, overwrite)  # another run may have used the directory since
            empty(out)
            write_json(out / "config.json", config.to_json())
        ranks.everywhere(None)  # wait for the directory
        with _withdrawn(out):
            (run,) = go_on([out], stop, watch, begun=(config, simulation))
        return run.history


def start_comparison(comparison: Comparison, out: Path, *, overwrite: bool = False, watch: Watch | None = None) -> list[Path]:
    if not comparison.runs:
        raise InputError("there is nothing to compare; pass at least one method and one seed.")
    for name in comparison.runs:
        check_folder_name(name)
    if ranks.rank() == 0:
        may_write(out, overwrite)
    dealt: dict[str, Dealt] = {}
    firsts = {c.method["name"]: c for c in reversed(comparison.runs.values())}.values()
    # raises before anything runs if a method does not support the model or data
    _say_frozen(first.simulation(dealt=dealt) for first in firsts)
    del dealt
    with _locked(out), ctrl_c() as stop:
        if ranks.rank() == 0:
            may_write(out, overwrite)  # another run may have used the directory since
            empty(out)
            write_json(out / "compare.json", {name: config.to_json() for name, config in comparison.runs.items()})
        ranks.everywhere(None)
        with _withdrawn(out):
            return _go_on_comparison(out, stop, watch)


def _say_frozen(simulations: Iterable[Simulation]) -> None:
    """Say once whether frozen layers run once per sample."""
    found = {str(s.frozen) for s in simulations if s.frozen}
    if ranks.rank() == 0:
        print(*(f"note: {words}\n" for words in sorted(found)), sep="", end="", file=sys.stderr)


@contextmanager
def _withdrawn(out: Path) -> Iterator[None]:
    """Empty the directory if a run is refused at its start, so that the corrected command works. Checkpoints are kept."""
    try:
        yield
    except InputError as e:
        if ranks.rank() == 0:
            if any(out.glob("**/checkpoint/*")) or any(out.glob("**/summary.json")):
                raise InputError(f"{e} To start over, add --overwrite.") from None
            empty(out)
        raise


def resume(out: Path, watch: Watch | None = None) -> list[Path]:
    """Finish the run or comparison in this directory. A finished run stays as it is."""
    if not any((out / name).exists() for name in BEGIN):
        if out.is_dir() and any(out.iterdir()) and is_unused(out):
            raise RunError(f"the run in {out} stopped before its first round; start it again with the same command.")
        raise no_run(out)
    check_not_saved(out)
    if deployed(out):
        raise RunError(f"{out} is a deployed run; resume it with: {again(out)}")
    with _locked(out), ctrl_c() as stop:
        if (out / "compare.json").exists():
            return _go_on_comparison(out, stop, watch)
        if not finished(out):
            go_on([out], stop, watch)
        return [out]


def _go_on_comparison(out: Path, stop: Callable[[], bool], watch: Watch | None) -> list[Path]:
    """Finish the runs of a comparison, training runs of equal shape together. A diverged run does not stop the others."""
    configs = read_configs(out)
    for name, config in configs.items():  # raise errors before anything runs
        if finished(out / name):
            outcome(out / name)
        elif not done(out / name):
            _may_prepare(out / name, config)
    for group in groups(configs, lambda name: done(out / name)):
        with ExitStack() as locks:
            for name in group:
                locks.enter_context(_locked(out / name))
                prepare(out / name, configs[name])
            ranks.everywhere(None)
            if stop():
                raise Stopped(f"stopped before {group[0]}; resume with: fedselect resume {quote(str(out))}")
            try:
                go_on([out / name for name in group], stop, watch, alone=False)
            except Stopped as e:
                raise Stopped(re.sub(r"fedselect resume .*", lambda _: f"fedselect resume {quote(str(out))}", str(e))) from None
    ranks.everywhere(None)  # wait for the last of the files
    if not any(finished(out / name) for name in configs):
        first = next(iter(configs))
        raise RunError(f"every run diverged; {first}: {failure(out / first)}")
    return [out / name for name in configs]


def prepare(out: Path, config: Config) -> None:
    """Turn a locked directory into the directory of this run, unless it already is.

    Trained rounds are kept. The device may change, but any other change of the configuration is refused.
    """
    if ranks.rank() != 0:
        return
    there, asked = out / "config.json", json.loads(json.dumps(config.to_json()))
    if there.exists() and read_json(there, "it should say how to run.") == asked:
        return
    if not _may_prepare(out, config):
        empty(out)
    write_json(there, asked)


def _may_prepare(out: Path, config: Config) -> bool:
    """Whether there is a checkpoint to resume from. Without one, the directory will be emptied, so it must be a run."""
    if out.is_symlink():
        raise RunError(
            f"{out} is a link, but the runs of a comparison must be folders in it; replace the link with its target."
        )
    if _may_go_on(out, config):
        return True
    if out.exists() and not is_run(out):
        raise RunError(f"{out} contains files that are not part of a run, so nothing was changed; move it elsewhere.")
    return False


def _may_go_on(out: Path, config: Config) -> bool:
    """Whether there is a checkpoint to resume from. A checkpoint of another run is an error, so that it is never lost."""
    asked = out.parent / "compare.json"
    other = f"restore the original {asked}" if asked.exists() else "choose another --out"
    mend = f"{other}, or remove {out} to start this run over."
    return checkpoints.claim(out / "checkpoint", owner(config), mend)


def groups(
    configs: Mapping[str, Config], over: Callable[[str], bool] = lambda name: False, dealt: dict[str, Dealt] | None = None
) -> Iterator[list[str]]:
    """Group runs that may train in one batch, as many as fit in memory; `go_on` makes the final decision.

    Finished runs count but are not returned, so that runs that started together also resume together.
    """
    apart = ("seed", "method", "aggregate", "preset", "cross", "plugins")
    alike: dict[Any, list[str]] = {}
    for name, config in configs.items():
        rest = {k: v for k, v in config.to_json().items() if k not in apart}
        alike.setdefault((json.dumps(rest, sort_keys=True), form(config.make_method())), []).append(name)
    for names in alike.values():
        if all(map(over, names)):
            continue
        if torch.cuda.is_available():
            gc.collect()  # free the GPU memory of the previous group
        one = configs[names[0]].simulation(dealt=dealt)
        fit = max(1, one.fits // one.clients) if stacks(one) else 1
        del one
        parts = -(-len(names) // fit)  # equal sizes, so that no run has the GPU to itself
        for part in range(parts):
            group = names[part * len(names) // parts : (part + 1) * len(names) // parts]
            if left := [name for name in group if not over(name)]:
                yield left


def may_write(out: Path, overwrite: bool) -> None:
    """Refuse to overwrite anything but a run, and that only with --overwrite."""
    if not (out.exists() or out.is_symlink()) or is_unused(out):
        return
    if not overwrite:
        raise InputError(
            f"{out} already exists; choose another --out, resume it (fedselect resume {quote(str(out))}), or pass --overwrite "
            "to replace everything in it."
        )
    if out.is_symlink():
        raise InputError(f"{out} is a link, but --overwrite replaces only folders; pass the target of the link as --out.")
    if not is_run(out):
        raise InputError(
            f"{out} contains files that are not part of a run, and --overwrite replaces only runs; choose another --out."
        )


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Lock a run directory. Of the processes of one run, only the first takes the lock."""
    if ranks.rank() != 0:
        yield
        return
    with locked(out):
        yield


@contextmanager
def ctrl_c() -> Iterator[Callable[[], bool]]:
    """Handle Ctrl-C: the first stops after the current round, the second at once.

    One key press may arrive twice, from the terminal and from a parent process that forwards it.
    """
    asked: float | None = None

    def ask(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        now = time.monotonic()
        if asked is not None and now - asked > ONE_PRESS:
            raise Stopped("stopped at once; fedselect resume continues from the last checkpoint.")
        if asked is not None:
            return
        asked = now
        os.write(2, b"\nfinishing this round, then stopping; press Ctrl-C again to stop at once\n")

    try:
        before = signal.signal(signal.SIGINT, ask)
    except ValueError:  # not the main thread, which never receives Ctrl-C
        yield lambda: False
        return
    try:
        yield lambda: asked is not None
    finally:
        signal.signal(signal.SIGINT, before)
