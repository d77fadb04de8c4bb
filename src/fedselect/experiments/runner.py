"""Run directories: one run, or a comparison of many, each resumable at any moment.

A run directory holds config.json, metrics.jsonl (a line a round), summary.json (when finished) and checkpoint/.
A comparison holds compare.json and one run directory for each method and seed.
"""

import hashlib
import json
import os
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from fedselect.errors import InputError, RunError
from fedselect.experiments.config import Config
from fedselect.experiments.environment import environment
from fedselect.files import disk, is_part, locked, read_json, write_bytes, write_json
from fedselect.simulate import Result, Simulation
from fedselect.simulate import checkpoint as checkpoints
from fedselect.simulate.engine import Record

Watch = Callable[[Config, Record], None]
OVERHEAD = 0.05  # the share of a run's time that checkpoints may take


class Stopped(RunError):  # noqa: N818
    """Ctrl-C: everything up to the last finished round is on disk."""


@dataclass(frozen=True)
class Comparison:
    """Runs that belong in one table: every method with every seed."""

    runs: dict[str, Config]  # by name of the run directory


def start(config: Config, out: Path, *, overwrite: bool = False, watch: Watch | None = None) -> Result:
    """A new run in a new directory."""
    _may_write(out, overwrite)
    simulation = config.simulation()  # bad input shows before anything is written or replaced
    with locked(out), _ctrl_c() as stop:
        _clear(out)
        write_json(out / "config.json", config.to_json())
        return _go_on(out, stop, watch, simulation)


def start_comparison(comparison: Comparison, out: Path, *, overwrite: bool = False, watch: Watch | None = None) -> list[Path]:
    if not comparison.runs:
        raise InputError("there is nothing to compare: give at least one method and one seed.")
    _may_write(out, overwrite)
    for first in {c.method["name"]: c for c in reversed(comparison.runs.values())}.values():
        first.simulation()  # what a method cannot do with this model or data shows before anything runs
    with locked(out), _ctrl_c() as stop:
        _clear(out)
        write_json(out / "compare.json", {name: config.to_json() for name, config in comparison.runs.items()})
        return _go_on_comparison(out, stop, watch)


def resume(out: Path, watch: Watch | None = None) -> list[Path]:
    """Finish whatever this directory holds; a finished run is left as it is."""
    if not any((out / f).exists() for f in ("compare.json", "config.json")):
        raise RunError(f"{out} is not a run directory: it has neither config.json nor compare.json.")
    with locked(out), _ctrl_c() as stop:
        if (out / "compare.json").exists():
            return _go_on_comparison(out, stop, watch)
        if not finished(out):
            _go_on(out, stop, watch)
        return [out]


def read_configs(out: Path) -> dict[str, Config]:
    """The configurations of a comparison, by run directory."""
    raw = read_json(out / "compare.json", "it should list the runs of a comparison.")
    return {name: Config.from_dict(c, f"{out / 'compare.json'}: {name}") for name, c in raw.items()}


def finished(out: Path) -> bool:
    return (out / "summary.json").exists()


def _go_on_comparison(out: Path, stop: Callable[[], bool], watch: Watch | None) -> list[Path]:
    configs = read_configs(out)
    for name, config in configs.items():
        place = out / name
        if finished(place):
            continue
        if stop():
            raise Stopped(f"stopped before {name}; go on with: fedselect resume {out}")
        with locked(place):
            if not (place / "config.json").exists():
                _clear(place)
                write_json(place / "config.json", config.to_json())
            try:
                _go_on(place, stop, watch)
            except Stopped as e:
                raise Stopped(str(e).replace(str(place), str(out))) from None
    return [out / name for name in configs]


def _go_on(out: Path, stop: Callable[[], bool], watch: Watch | None, simulation: Simulation | None = None) -> Result:
    """Run from the last checkpoint, or from the beginning, to the end; bit for bit what an unbroken run gives."""
    config = Config.from_dict(read_json(out / "config.json", "it should say how to run."), str(out / "config.json"))
    run_id = _identity(config)
    place = checkpoints.latest(out / "checkpoint")
    chunk = int(checkpoints.manifest(place, run_id)["chunk"]) if place else None
    simulation = simulation or config.simulation(chunk)
    if place:
        checkpoints.load(place, simulation, run_id)
    history = kept_records(out / "metrics.jsonl", simulation.round)
    began, spent = time.perf_counter(), 0.0
    with disk(out / "metrics.jsonl"), (out / "metrics.jsonl").open("a") as metrics:
        while simulation.round < config.rounds:
            last = simulation.round == config.rounds - 1
            record = simulation.step(evaluate=True if last else None)
            history.append(record)
            metrics.write(json.dumps(record) + "\n")
            metrics.flush()
            if watch:
                watch(config, record)
            stopping = stop() and not last
            due = spent < OVERHEAD * (time.perf_counter() - began)
            if due or last or stopping:
                os.fsync(metrics.fileno())  # a checkpoint must never be ahead of the metrics
                at = time.perf_counter()
                checkpoints.save(out / "checkpoint", simulation, run_id)
                spent += time.perf_counter() - at
            if stopping:
                raise Stopped(f"stopped after round {simulation.round} of {config.rounds}; go on with: fedselect resume {out}")
    summary = summarise(config, history)
    if config.cross:
        summary["cross"] = [[None if v != v else round(v, 6) for v in row] for row in simulation.cross().tolist()]
    write_json(out / "summary.json", summary)
    return Result(simulation, history)


def summarise(config: Config, history: list[Record]) -> dict[str, Any]:
    """The small outcome of a run: what a table needs, and what a reader must know to trust it."""
    evaluated = [r for r in history if r["accuracy"] is not None]
    last = evaluated[-1]
    tail = [r["accuracy"] for r in evaluated if r["round"] > last["round"] - 10]
    own = [a for a in last["clients"]["accuracy"] if a is not None]
    return {
        "method": config.method["name"],
        "data": config.data["name"],
        "model": config.model["name"],
        "seed": config.seed,
        "rounds": last["round"],
        "accuracy": last["accuracy"],
        "accuracy_local": last["accuracy_local"],
        "accuracy_merged": last["accuracy_merged"],
        "accuracy_last10": round(statistics.fmean(tail), 6),
        "std_clients": round(statistics.pstdev(own), 6),
        "clients": last["clients"]["accuracy"],
        "share": last["share"],
        "bytes_up": sum(r["bytes_up"] for r in history),
        "bytes_down": sum(r["bytes_down"] for r in history),
        "seconds": round(sum(r["seconds"] for r in history), 3),
        "environment": environment(config.device),
    }


def _identity(config: Config) -> str:
    """What makes two configurations the same run: all but where and in how large pieces it runs."""
    core = {k: v for k, v in config.to_json().items() if k not in ("device", "chunk")}
    return hashlib.sha256(json.dumps(core, sort_keys=True).encode()).hexdigest()


def read_records(path: Path) -> list[Record]:
    """The rounds of a metrics file."""
    try:
        return [json.loads(line) for line in (path.read_text() if path.exists() else "").splitlines()]
    except ValueError as e:
        raise RunError(f"{path} is damaged ({e}); start again with --overwrite.") from None


def kept_records(path: Path, rounds: int) -> list[Record]:
    """The lines of the rounds a checkpoint covers; what was written after it is dropped, for those rounds run again."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    if len(lines) < rounds:
        raise RunError(f"{path} has {len(lines)} rounds where the checkpoint has {rounds}; start again with --overwrite.")
    kept = b"".join(line + b"\n" for line in lines[:rounds])
    if lines and path.read_bytes() != kept:
        write_bytes(path, kept)
    return read_records(path)


def _may_write(out: Path, overwrite: bool) -> None:
    """Refuse to touch what is there, unless it is a run and was said to be replaced."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise InputError(f"{out} exists already; choose another --out, resume it, or replace it with --overwrite.")
    if not _is_run(out):
        raise InputError(f"{out} holds something other than a run; --overwrite replaces runs only. Choose another --out.")


def _is_run(out: Path) -> bool:
    """Whether a directory holds nothing but what runs and comparisons write."""
    own = {"config.json", "compare.json", "metrics.jsonl", "summary.json", "checkpoint", "report.html", ".lock"}
    return out.is_dir() and all(p.name in own or is_part(p) or _is_run(p) for p in out.iterdir())


def _clear(out: Path) -> None:
    """Empty a run directory whose lock we hold."""
    with disk(out):
        for p in out.iterdir():
            if p.name != ".lock":
                shutil.rmtree(p) if p.is_dir() else p.unlink()


@contextmanager
def _ctrl_c() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks to stop after the round in progress; a second one stops at once, at the last checkpoint."""
    asked = False

    def ask(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise Stopped("stopped at once; fedselect resume goes on from the last checkpoint.")
        asked = True
        os.write(2, b"\nfinishing this round, then stopping; press Ctrl-C again to stop at once\n")

    try:
        before = signal.signal(signal.SIGINT, ask)
    except ValueError:  # not the main thread: nobody can press Ctrl-C on us
        yield lambda: False
        return
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
