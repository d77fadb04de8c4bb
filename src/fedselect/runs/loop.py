"""The loop over the rounds of runs: what they write down, when they make checkpoints, and how they end."""

import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedselect.core import sums
from fedselect.core.errors import Stopped, TrainingError
from fedselect.core.files import disk, read_json, write_json
from fedselect.private import budget
from fedselect.runs import grouped, persistence, schemas
from fedselect.runs.config import Config, Dealt
from fedselect.runs.kept import KeptFile
from fedselect.runs.masks import MaskLog, federation
from fedselect.runs.rundir import (
    again,
    check_links,
    intact_rounds,
    kept_records,
    owner,
    write_measures,
)
from fedselect.runs.summary import summarise
from fedselect.simulate import Simulation, ranks
from fedselect.simulate import checkpoint as checkpoints
from fedselect.simulate.keeping import in_tail, is_end, stalled
from fedselect.simulate.records import Record, evaluated
from fedselect.simulate.stack import Stack, stacks
from fedselect.tasks.metrics import known
from fedselect.tasks.task import learned

Watch = Callable[[Config, Record], None]
OVERHEAD = 0.05  # share of a run's time that checkpoints may take
DISK = 5e8  # assumed bytes per second of a checkpoint, until the first is written
SHORT = 60.0  # seconds of work not worth a checkpoint if models are not kept


class Run:
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
) -> list[Run]:
    """Finish these runs. Runs of equal shape train in one batch, others one after the other.

    If a run diverges, it raises an error if `alone`; otherwise it is marked as `failed`, and the others continue. Without
    `keep`, final models are not stored: checkpoints serve only to resume, and short runs write none. With `until`, runs
    stop after that round and can be continued later; they are evaluated there and in the last quarter of all rounds.
    """
    dealt = {} if dealt is None else dealt
    opened = [Run(place, begun, dealt) for place in places]
    groups: dict[Any, list[Run]] = {}
    for run in opened:
        groups.setdefault(stacks(run.simulation) or id(run), []).append(run)
    for runs in groups.values():
        _train(runs, stop, watch, until, alone=alone, keep=keep)
        for run in runs:
            run.finish()
    return opened


def _train(
    runs: list[Run], stop: Callable[[], bool], watch: Watch | None, until: int | None, *, alone: bool, keep: bool
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
            raise Stopped(f"stopped after round {stack.round} of {rounds}; resume with: {again(runs[0].out)}")


def _affordable(run: Run) -> int:
    """The round after which the privacy budget is spent. Prints the privacy guarantee first."""
    rounds, kept = run.config.rounds, run.simulation.budget
    if kept is None:
        return rounds
    print(run.simulation.promise, file=sys.stderr)
    last = run.simulation.round + kept.guarantee.rounds - kept.charged
    if last < rounds:
        warnings.warn(f"repeated rounds were charged twice, so the privacy budget is spent after round {last}.", stacklevel=2)
    return last
