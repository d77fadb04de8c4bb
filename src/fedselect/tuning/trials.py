"""A search in a directory. Its runs are run directories, so it can be killed at any time and resumed with the same outcome.

The directory is a comparison of all settings on all seeds, most of them dropped early, with four more files: tune.json (the
search, its schedule and completed rungs), outcome.json (the ranking), chosen.json (the chosen setting, for `run --config`)
and report.html. test/ contains the final test: the chosen setting with fresh seeds on test data.
"""

import re
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from fedselect.core import snapshots
from fedselect.core.errors import InputError, RunError, Stopped
from fedselect.core.files import check_folder_name, empty, locked, read_json, write_json
from fedselect.runs import runner
from fedselect.runs.config import Config, Dealt
from fedselect.runs.loop import Watch, go_on
from fedselect.runs.rundir import done, failure, finished, outcome, read_records
from fedselect.simulate import ranks
from fedselect.tasks import Spread
from fedselect.tuning import halving
from fedselect.tuning.budget import Budget
from fedselect.tuning.outcome import History, Judge, Row, check_whole, rank
from fedselect.tuning.search import Plan, Progress, planned, search

NAME = "tune.json"
MEND = "restart the search with --overwrite."
Told = Callable[[Progress], None]


@dataclass(frozen=True)
class Asked:
    """The search: settings by name, each a configuration scored on validation data, and the seeds."""

    settings: dict[str, Config]
    seeds: list[int]
    test_seeds: list[int]
    budget: Budget
    worst: bool = False
    rungs: str | None = None

    def __post_init__(self) -> None:
        if not self.settings or not self.seeds:
            raise InputError("there is nothing to choose from; pass at least one method and one seed.")
        for name in self.settings:
            check_folder_name(name)
        if both := sorted({*self.seeds} & {*self.test_seeds}):
            raise InputError(f"seed {both[0]} is in both --seeds and --test-seeds; choose other --test-seeds.")

    @property
    def one(self) -> Config:
        return next(iter(self.settings.values()))

    @property
    def judge(self) -> Judge:
        return Judge(self.one.measured()[0], self.worst)

    @property
    def plan(self) -> Plan:
        methods = {name: str(c.method["name"]) for name, c in self.settings.items()}
        return Plan(methods, self.one.rounds, len(self.seeds), self.one.rounds * len(self.test_seeds), self.budget)

    def runs(self, names: Sequence[str], seeds: int | None = None) -> dict[str, Config]:
        """The runs of these settings, by directory."""
        return {run(n, s): replace(trial(self.settings[n]), seed=s) for n in names for s in self.seeds[:seeds]}

    def chosen(self, name: str) -> dict[int, Config]:
        """The runs of a setting on test data, by seed."""
        return {s: replace(self.settings[name], seed=s, score="test") for s in self.test_seeds}

    def to_json(self) -> dict[str, Any]:
        return {
            "settings": {name: config.to_json() for name, config in self.settings.items()},
            "seeds": self.seeds,
            "test_seeds": self.test_seeds,
            "budget": vars(self.budget),
            "worst": self.worst,
            "rungs": self.rungs,
        }

    @classmethod
    def from_json(cls, said: Mapping[str, Any], where: str) -> "Asked":
        settings = {n: Config.from_dict(c, f"{where}: {n}") for n, c in said["settings"].items()}
        budget = Budget(**said["budget"])
        return cls(settings, said["seeds"], said["test_seeds"], budget, said["worst"], said["rungs"])


@dataclass(frozen=True)
class Found:
    """The outcome of a search."""

    rows: list[Row]
    judge: Judge
    progress: Progress
    chosen: str
    test: dict[str, Any] | None  # results on test data; None: not tested yet


def trial(config: Config) -> Config:
    """The trial of a setting. It is evaluated only at the end of rungs, since fine-tuning takes longer than a round.

    A setting that keeps its best round is evaluated as configured.
    """
    return config if config.keep != "last" else replace(config, eval_every=config.rounds)


def run(setting: str, seed: int) -> str:
    return f"{setting}-seed{seed}"


def is_search(out: Path) -> bool:
    return (out / NAME).exists()


def start(asked: Asked, out: Path, *, overwrite: bool = False, watch: Watch | None = None, told: Told | None = None) -> Found:
    """Start a search in a new directory."""
    if ranks.world() > 1:
        raise InputError("a search runs in one process; start it without torchrun.")
    runner.may_write(out, overwrite)
    for config in {c.method["name"]: c for c in reversed(asked.settings.values())}.values():
        check_whole(config.eval_fraction)
        config.simulation()  # raises before anything runs if a method does not support the model or data
    progress = Progress()
    if asked.rungs is not None:
        progress.schedule = halving.read(asked.rungs, len(asked.settings), asked.one.rounds)
    elif asked.budget.seconds is None:
        planned(asked.plan)  # raises if the budget is too small
    with locked(out):
        runner.may_write(out, overwrite)
        empty(out)
        _note(out, asked, progress)
        return _go_on(asked, progress, out, watch, told)


def resume(out: Path, watch: Watch | None = None, told: Told | None = None) -> Found:
    """Resume an interrupted search, or read a finished one."""
    with locked(out):
        asked, progress = read(out)
        return _go_on(asked, progress, out, watch, told)


def read(out: Path) -> tuple[Asked, Progress]:
    path = out / NAME
    said = read_json(path, MEND)
    try:
        return Asked.from_json(said, str(path)), Progress.from_json(said)
    except (KeyError, TypeError, ValueError) as e:
        raise RunError(f"{path} is damaged ({e}); {MEND}") from None


def _note(out: Path, asked: Asked, progress: Progress) -> None:
    write_json(out / NAME, {**asked.to_json(), **progress.to_json()})


def _go_on(asked: Asked, progress: Progress, out: Path, watch: Watch | None, told: Told | None) -> Found:
    def note(moved: Progress) -> None:
        _note(out, asked, moved)
        if told:
            told(moved)

    if not (out / "compare.json").exists():
        write_json(out / "compare.json", {n: c.to_json() for n, c in asked.runs(list(asked.settings)).items()})
    if told:
        told(progress)
    with runner.ctrl_c() as stop:
        bench = Bench(asked, out, stop, watch)
        try:
            search(asked.plan, bench, asked.judge, progress, note)
        except Stopped as e:
            found = _write(asked, progress, out, None)
            best = f"the best so far is {found.chosen}, in {out / 'chosen.json'}" if found else "nothing was evaluated yet"
            raise Stopped(f"stopped; {best}. Resume with: fedselect resume {quote(str(out))}") from e
    found = _write(asked, progress, out, None)
    assert found is not None  # a finished search has a best setting
    if not asked.test_seeds:
        return found
    looked = _look(asked, found.chosen, out, watch)
    return _write(asked, progress, out, looked) or found


def _write(asked: Asked, progress: Progress, out: Path, test: dict[str, Any] | None) -> Found | None:
    """Write the current ranking and the leading setting. None if there is no result yet."""
    judge = asked.judge
    found = {name: [_history(out / run(name, s)) for s in asked.seeds] for name in asked.settings}
    rows = rank(found, judge, asked.one.rounds)
    if not rows or rows[0].score is None:
        return None
    chosen = rows[0].name
    seeds = asked.test_seeds or asked.seeds
    write_json(out / "chosen.json", replace(asked.settings[chosen], seed=seeds[0], score="test").to_json())
    write_json(out / "outcome.json", {
        "judged_by": judge.said,
        "headline": judge.measure.to_json(),
        "chosen": chosen,
        "ranking": [row.to_json() for row in rows],
        "seeds": asked.seeds,
        "rounds": asked.one.rounds,
        "curves": {row.name: _curve(found[row.name], judge) for row in rows},
        "methods": {row.name: asked.settings[row.name].method["name"] for row in rows},
        "test": test,
        **progress.to_json(),
    })  # fmt: skip
    return Found(rows, judge, progress, chosen, test)


def _curve(runs: Sequence[History | None], judge: Judge) -> list[list[float]]:
    """A setting's score after each evaluated round, averaged over seeds."""
    there = [{r["round"]: judge.over(r["clients"][judge.measure.name]) for r in run} for run in runs if run]
    if not there or len(there) < len(runs):
        return []
    rounds = [r for r in there[0] if all(seed.get(r) is not None for seed in there)]
    return [[r, round(statistics.fmean(v for seed in there if (v := seed[r]) is not None), 5)] for r in rounds]


def _history(place: Path) -> History | None:
    """The rounds of a run, empty if it has not started; None if it diverged."""
    if failure(place):
        return None
    return read_records(place / "metrics.jsonl", growing=not finished(place)) if (place / "config.json").exists() else []


def _look(asked: Asked, chosen: str, out: Path, watch: Watch | None) -> dict[str, Any]:
    """Train the chosen setting with fresh seeds and evaluate it on test data."""
    place = out / "test"
    runs = {run(chosen, s): config for s, config in asked.chosen(chosen).items()}
    if (place / "compare.json").exists():
        made = runner.resume(place, watch)
    else:
        made = runner.start_comparison(runner.Comparison(runs), place, overwrite=place.exists(), watch=watch)
    there = [outcome(p) for p in made if finished(p)]
    first = asked.judge.measure
    values = [s[first.name] for s in there]
    return {
        "seeds": [s["seed"] for s in there],
        "values": values,
        "worst_tenth": [Spread.of(first, s["clients"]).worst_tenth for s in there],
        "kept": [s.get("kept") for s in there],
        "diverged": len(made) - len(there),
        "bytes": round(statistics.fmean(s["bytes_up"] + s["bytes_down"] for s in there)),
        "seconds": round(statistics.fmean(s["seconds"] for s in there), 3),
    }


class Bench:
    """Trains run directories, runs of equal shape in one batch."""

    def __init__(self, asked: Asked, out: Path, stop: Callable[[], bool], watch: Watch | None) -> None:
        self._asked, self._out, self._stop, self._watch = asked, out, stop, watch
        self._dealt: dict[str, Dealt] = {}

    def advance(self, names: Sequence[str], until: int, seeds: int | None = None) -> dict[str, list[History | None]]:
        runs = self._asked.runs(names, seeds)
        for group in runner.groups(runs, lambda name: self._there(name, until), self._dealt):
            with self._prepared({name: runs[name] for name in group}) as places:
                if self._stop():
                    raise Stopped("stopped")
                go_on(places, self._stop, self._watch, alone=False, until=until, dealt=self._dealt)
        return {name: [_history(self._out / run(name, s)) for s in self._asked.seeds[:seeds]] for name in names}

    def drop(self, names: Sequence[str]) -> None:
        """Delete checkpoints but keep metrics."""
        for name in self._asked.runs(names):
            shutil.rmtree(self._out / name / "checkpoint", ignore_errors=True)

    def _there(self, name: str, until: int) -> bool:
        """Whether a run has reached this round and can continue from there."""
        place = self._out / name
        saved = snapshots.places(place / "checkpoint")
        return done(place) or (bool(saved) and int(saved[-1].name) >= until)

    @contextmanager
    def _prepared(self, runs: Mapping[str, Config]) -> Iterator[list[Path]]:
        with ExitStack() as locks:
            for name, config in runs.items():
                locks.enter_context(locked(self._out / name))
                runner.prepare(self._out / name, config)
            yield [self._out / name for name in runs]


def settings_name(method: str, values: Mapping[str, Any]) -> str:
    """The name of a setting. Its run directories add the seed."""
    said = "-".join([method, *(f"{name.rpartition('.')[2]}={value}" for name, value in values.items())])
    return re.sub(r"[^\w.,=+-]+", "_", said).lstrip(".")
