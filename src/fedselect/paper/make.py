"""Build targets: tune rates, run what is missing, and collect the numbers."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedselect.core.errors import DataError
from fedselect.core.files import write_bytes
from fedselect.paper import shared, tune, write
from fedselect.paper.outcome import Block, blocks
from fedselect.paper.pictures import draw, overlaps
from fedselect.paper.plan import How, Rates, cells, configure, name_of
from fedselect.paper.progress import Overall
from fedselect.paper.protocol import Row, Setting, Target, read_column
from fedselect.runs.config import Config
from fedselect.runs.rundir import done


@dataclass(frozen=True)
class Reproduction:
    """The work for some targets, in a folder."""

    targets: Sequence[Target]
    how: How
    out: Path

    @property
    def cells(self) -> Path:
        return self.out / "cells"

    @property
    def keys(self) -> list[tune.Key]:
        return tune.needed(self.targets, self.how)

    def tuning(self) -> dict[Path, Config]:
        return self._places(tune.runs(self.keys, self.how))

    def reported(self, rates: Rates) -> dict[Path, Config]:
        return self._places(cell.config for target in self.targets for cell in cells(target, self.how, rates))

    def judged(self) -> dict[tune.Key, dict[str, Any]]:
        """The choices of tuning so far."""
        return tune.judged(self.keys, self.how, self.cells)

    def _places(self, configs: Iterable[Config]) -> dict[Path, Config]:
        return {self.cells / name_of(config): config for config in configs}


def rates(found: dict[tune.Key, dict[str, Any]]) -> Rates:
    return {key: entry["chosen"] for key, entry in found.items()}


def with_data(targets: Sequence[Target], how: How, asked: bool) -> list[Target]:
    """The targets, without data sets that are not available. A data set that was `asked` for must be available."""
    missing: dict[str, str] = {}
    for target in targets:
        how.on(target)  # raises for invalid seeds before any data is read
    for name in dict.fromkeys(c for t in targets for c in t.on):
        try:
            configure(read_column(name), Row("", "local"), Setting(), 0, how, tuned={}).make_data()
        except DataError as e:
            if asked:
                raise
            missing[name] = str(e)
    left = [replace(t, on=tuple(c for c in t.on if c not in missing)) for t in targets]
    if not any(t.on for t in left):
        raise DataError(f"there is no data for {', '.join(t.name for t in targets)}: {next(iter(missing.values()))}")
    for name, why in missing.items():
        warnings.warn(f"the data set {name} is skipped: {why}", stacklevel=2)
    return [t for t in left if t.on]


def run(work: Reproduction, stop: Callable[[], bool], told: Overall) -> dict[tune.Key, dict[str, Any]]:
    """Run everything that is missing, and return the tuned rates."""
    tuning, later = work.tuning(), work.reported(rates(work.judged()))
    _expect(told, tuning, later)
    shared.finish(tuning, stop, told)
    found = work.judged()
    if found:
        tune.save(found, work.out)
    reported = work.reported(rates(found))
    _expect(told, reported)
    shared.finish(reported, stop, told)
    return found


def gather(work: Reproduction, target: Target, found: dict[tune.Key, dict[str, Any]]) -> tuple[list[Block], list[Path]]:
    """The numbers of a target, and the files they were written to."""
    how = work.how.on(target)
    columns = blocks(target, how, rates(found), work.cells)
    if not columns:
        return [], []
    used = tune.needed([target], how)
    own = {f"{method} on {column}": e["chosen"] for (column, method), e in found.items() if (column, method) in used}
    data = write.as_json(target, columns, how, own)
    if target.figure == "overlap":
        data["overlap"] = overlaps(target, columns, work.cells)
    texts = {
        ".csv": write.as_csv(target, columns, how),
        ".tex": write.as_latex(target, columns, how),
        ".json": write.lean(data) + "\n",
    }
    base = work.out / f"{target.name}{how.suffix}"
    made = [base.with_name(base.name + ending) for ending in texts]
    for path, text in zip(made, texts.values(), strict=True):
        write_bytes(path, text.encode())
    if target.figure:
        made += draw(target, columns, how, work.cells, work.out)
    return columns, made


def _expect(told: Overall, *runs: dict[Path, Config]) -> None:
    ahead = [config for some in runs for place, config in some.items() if not done(place)]
    told.expect(len(ahead), sum(config.rounds for config in ahead))
