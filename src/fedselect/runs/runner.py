"""Runs in directories: a single run or a comparison. Both can be resumed at any time. rundir.py lists their files."""

import gc
import json
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from fedselect.core import sums
from fedselect.core.errors import InputError, RunError, Stopped, TrainingError
from fedselect.core.files import check_folder_name, disk, empty, is_unused, locked, read_json, write_json
from fedselect.private import budget
from fedselect.runs import grouped, persistence, schemas
from fedselect.runs.config import Config, Dealt
from fedselect.runs.kept import KeptFile
from fedselect.runs.masks import MaskLog, federation
from fedselect.runs.rundir import (
    BEGIN,
    again,
    check_links,
    check_not_saved,
    deployed,
    done,
    failure,
    finished,
    intact_rounds,
    is_run,
    kept_records,
    no_run,
    outcome,
    owner,
    read_configs,
    write_measures,
)
from fedselect.runs.summary import summarise
from fedselect.simulate import Simulation, ranks
from fedselect.simulate import checkpoint as checkpoints
from fedselect.simulate.keeping import in_tail, is_end, stalled
from fedselect.simulate.records import Record, evaluated
from fedselect.simulate.stack import Stack, form, stacks
from fedselect.tasks.metrics import known
from fedselect.tasks.task import learned

Watch = Callable[[Config, Record], None]
OVERHEAD = 0.05  # share of a run's time that checkpoints may take
DISK = 5e8  # assumed bytes per second of a checkpoint, until the first is written
ONE_PRESS = 0.5  # seconds within which a second Ctrl-C counts as the same key press
SHORT = 60.0  # seconds of work not worth a checkpoint if models are not kept


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
                raise Stopped(f"stopped before {group[0]}; resume with: fedselect resume {out}")
            try:
                go_on([out / name for name in group], stop, watch, alone=False)
            except Stopped as e:
                raise Stopped(re.sub(r"fedselect resume .*", f"fedselect resume {out}", str(e))) from None
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


class _Run:
    """A run in progress, from its last checkpoint or from the start, bitwise equal to an uninterrupted run.

    On a GPU, it is bitwise equal if as many runs are batched as before, otherwise equal up to rounding.
    """

    def __init__(
        self, out: Path, begun: tuple[Config, Simulation] | None = None, dealt: dict[str, Dealt] | None = None
    ) -> None:
        """begun: the configuration and simulation of a new run, if they exist already."""
        self.out = out
        check_links(out)
        there = out / "config.json"
        self.config = begun[0] if begun else Config.from_dict(read_json(there, "it should say how to run."), str(there))
        self.failed: str | None = None
        self._owner = owner(self.config)
        found = checkpoints.find(out / "checkpoint", self._owner, *intact_rounds(out / "metrics.jsonl"))
        chunk, rows = (found.chunk, found.rows) if found else (None, None)
        self.simulation = simulation = begun[1] if begun else self.config.simulation(chunk, rows, dealt)
        if found:
            checkpoints.load(found.place, self.simulation, self._owner)
        if self.simulation.budget:
            self.simulation.budget.keep(out / budget.NAME)
        ranks.everywhere(None)  # the first process cleans up below, after all have read
        self.history: list[Record] = []
        self.over = self.simulation.round >= self.config.rounds or self._spent()
        self._masks: MaskLog | None = None
        self._kept: list[KeptFile] = []
        if ranks.rank() == 0:
            with disk(out):
                (out / "failed.json").unlink(missing_ok=True)  # from an earlier attempt
            checkpoints.drop_after(out / "checkpoint", self.simulation.round)
            self.history = kept_records(out / "metrics.jsonl", self.simulation.round)
            self.over |= bool(self.history) and is_end(self.history[-1], self.config.rounds)
            write_measures(out, self.simulation.metrics, learned(self.config.make_task(), self.simulation.task))
            write_json(out / "federation.json", federation(self.simulation))
            schemas.keep(out, self.simulation.data)
            self._kept.append(KeptFile(out / grouped.NAME, lambda: grouped.find(simulation.groups())))
            if self.simulation.store.kind == "resident" and ranks.world() == 1:  # all masks are in memory
                self._masks = MaskLog(out, self.config.rounds, self.simulation)
                self._kept.append(KeptFile(out / persistence.NAME, lambda: persistence.find(simulation)))
            else:
                with disk(out):
                    for name in ("masks.jsonl", persistence.NAME):  # they would lack rounds
                        (out / name).unlink(missing_ok=True)

    def note(self, record: Record) -> None:
        """Record a finished round."""
        self.history.append(record)
        if stalled(self.history, self.config.patience):
            record["stopped"] = True
        self.over = is_end(record, self.config.rounds) or self._spent()
        if ranks.rank() == 0:
            with disk(self.out / "metrics.jsonl"), (self.out / "metrics.jsonl").open("a") as metrics:
                metrics.write(sums.to_line(record))
        if self._masks and evaluated(record):
            self._masks.add()
        for file in self._kept if evaluated(record) else []:
            file.update()

    def save(self) -> None:
        if ranks.rank() == 0:
            with disk(self.out / "metrics.jsonl"), (self.out / "metrics.jsonl").open("a") as metrics:
                os.fsync(metrics.fileno())  # a checkpoint must never be ahead of the metrics
        if self._masks:
            self._masks.sync()
        checkpoints.save(self.out / "checkpoint", self.simulation, self._owner)

    def _spent(self) -> bool:
        """Whether the privacy budget is spent."""
        budget = self.simulation.budget
        return budget is not None and budget.spent and self.simulation.round > 0

    def finish(self) -> None:
        if self.failed:
            if ranks.rank() == 0:
                write_json(self.out / "failed.json", {"why": self.failed})
            return
        if not self.over:
            return
        cross = self.simulation.cross().tolist() if self.config.cross else None
        live = self.simulation.live_share()
        if ranks.rank() != 0:
            return
        tested, validation = (self.simulation.data.samples(part) for part in ("test", "val"))
        summary = {
            **summarise(self.config, self.history, tested, validation),
            "share_live": None if live is None else round(live, 6),
        }
        if self.simulation.budget:
            summary["privacy"] = self.simulation.budget.to_json()
        if cross is not None:
            summary["cross"] = [[known(v) for v in row] for row in cross]
        write_json(self.out / "summary.json", summary)


def go_on(
    places: list[Path],
    stop: Callable[[], bool],
    watch: Watch | None,
    *,
    begun: tuple[Config, Simulation] | None = None,
    alone: bool = True,
    keep: bool = True,
    until: int | None = None,
    dealt: dict[str, Dealt] | None = None,
) -> list[_Run]:
    """Finish these runs. Runs of equal shape train in one batch, others one after the other.

    If a run diverges, it raises an error if `alone`; otherwise it is marked as `failed`, and the others continue. Without
    `keep`, final models are not stored: checkpoints serve only to resume, and short runs write none. With `until`, runs
    stop after that round and can be continued later; they are evaluated there and in the last quarter of all rounds.
    """
    dealt = {} if dealt is None else dealt
    opened = [_Run(place, begun, dealt) for place in places]
    groups: dict[Any, list[_Run]] = {}
    for run in opened:
        groups.setdefault(stacks(run.simulation) or id(run), []).append(run)
    for runs in groups.values():
        _drive(runs, stop, watch, until, alone=alone, keep=keep)
        for run in runs:
            run.finish()
    return opened


def _drive(
    runs: list[_Run], stop: Callable[[], bool], watch: Watch | None, until: int | None, *, alone: bool, keep: bool
) -> None:
    runs = [r for r in runs if not r.over]
    if not runs:  # killed after the last round, before the summary was written
        return
    full = runs[0].config.rounds
    rounds = until or full
    rounds = min(rounds, *map(_affordable, runs))
    began, spent, one = time.perf_counter(), 0.0, None  # one: seconds per checkpoint
    stack = Stack([r.simulation for r in runs])
    while runs and stack.round < rounds:
        last = stack.round == rounds - 1
        judged = last or (until is not None and in_tail(stack.round + 1, full))
        outcomes = stack.step(evaluate=True if judged else None, more=not last)
        for run, record in zip(runs, outcomes, strict=True):
            if isinstance(record, TrainingError):
                run.failed = str(record)
                if alone:
                    run.finish()
                    raise record
                continue
            with stack.beside():
                run.note(record)
            if watch:
                watch(run.config, record)
        runs = [r for r in runs if not r.failed]
        if one is None:
            one = ranks.world() * sum(r.simulation.store.nbytes for r in runs) / DISK
        free = time.perf_counter() - began - (0.0 if keep else SHORT)
        answers = ranks.everywhere((stop(), spent + one < OVERHEAD * free))
        going = [r for r in runs if not r.over]
        stopping, due = any(s for s, _ in answers) and not last and bool(going), answers[0][1]
        to_save = runs if stopping or (keep if last else due) else [r for r in runs if r.over and keep]
        if to_save:
            at = time.perf_counter()
            for run in to_save:
                run.save()
            spent += time.perf_counter() - at
            one = (time.perf_counter() - at) * len(runs) / len(to_save)
        if len(going) < len(runs):
            stack.keep([r.simulation for r in going])
            runs = going
        if stopping:
            raise Stopped(f"stopped after round {stack.round} of {rounds}; resume with: fedselect resume {runs[0].out}")


def _affordable(run: _Run) -> int:
    """The round after which the privacy budget is spent. Prints the privacy guarantee first."""
    rounds, kept = run.config.rounds, run.simulation.budget
    if kept is None:
        return rounds
    print(run.simulation.promise, file=sys.stderr)
    last = run.simulation.round + kept.guarantee.rounds - kept.charged
    if last < rounds:
        warnings.warn(f"repeated rounds were charged twice, so the privacy budget is spent after round {last}.", stacklevel=2)
    return last


def may_write(out: Path, overwrite: bool) -> None:
    """Refuse to overwrite anything but a run, and that only with --overwrite."""
    if not (out.exists() or out.is_symlink()) or is_unused(out):
        return
    if not overwrite:
        raise InputError(
            f"{out} already exists; choose another --out, resume it (fedselect resume {out}), or pass --overwrite to replace "
            "everything in it."
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
