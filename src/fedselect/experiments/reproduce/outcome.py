"""Our numbers beside the paper's: means over seeds, differences, ranks, and whether FedSelect's lead is more than chance."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedselect.experiments.paper import PUBLISHED
from fedselect.experiments.reproduce.plan import Cell, How, Rates, cells, name_of
from fedselect.experiments.reproduce.protocol import Target, read_column
from fedselect.experiments.runner import finished
from fedselect.files import read_json

TEST = "Wilcoxon signed-rank, two-sided, paired over clients and seeds, not corrected for the number of rows"


@dataclass(frozen=True)
class Compared:
    """The reference row less this one, client by client."""

    pairs: int
    gain: float  # mean difference in points
    p: float


@dataclass(frozen=True)
class Entry:
    """A cell of a table: all seeds of one row in one column. Accuracies in percent."""

    row: str
    seeds: tuple[int, ...]
    accuracy: tuple[float, ...]  # of the seeds
    clients: tuple[tuple[float | None, ...], ...]
    runs: tuple[str, ...]
    failed: tuple[str, ...] = ()  # why, for each seed that did not come to its end
    paper: float | None = None
    paper_rank: int | None = None
    rank: int | None = None
    compared: Compared | None = None

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.accuracy) if self.accuracy else None

    @property
    def std(self) -> float | None:
        return statistics.stdev(self.accuracy) if len(self.accuracy) > 1 else None

    @property
    def difference(self) -> float | None:
        return None if self.mean is None or self.paper is None else self.mean - self.paper


@dataclass(frozen=True)
class Block:
    """A column of a table."""

    column: str
    setting: str | None
    weights: str | None  # the file that models start from
    entries: tuple[Entry, ...]

    @property
    def title(self) -> str:
        return " ".join(filter(None, (read_column(self.column).title, self.setting)))


def blocks(target: Target, how: How, tuned: Rates, folder: Path) -> list[Block]:
    """What there is of a target, column by column."""
    found: dict[tuple[str, str | None], dict[str, list[Cell]]] = {}
    for cell in cells(target, how, tuned):
        found.setdefault((cell.column, cell.setting.name), {}).setdefault(cell.row.name, []).append(cell)
    return [
        Block(
            *key,
            next(iter(rows.values()))[0].config.model.get("weights"),
            tuple(_ranked(target, [_entry(target, own, folder) for own in rows.values()])),
        )
        for key, rows in found.items()
    ]


def ranks(values: Mapping[str, float]) -> dict[str, int]:
    """1 for the largest; equal ones share the better rank."""
    return {name: 1 + sum(other > value for other in values.values()) for name, value in values.items()}


def compare(ours: Entry, other: Entry) -> Compared | None:
    """Wilcoxon's signed-rank test of the differences between two rows, a pair for each client and seed both have."""
    from scipy.stats import wilcoxon

    own = dict(zip(ours.seeds, ours.clients, strict=True))
    pairs = [
        (a, b)
        for seed, theirs in zip(other.seeds, other.clients, strict=True)
        for a, b in zip(own.get(seed, ()), theirs, strict=seed in own)
        if a is not None and b is not None
    ]
    if not pairs:
        return None
    off = [a - b for a, b in pairs]
    return Compared(len(off), statistics.fmean(off), float(wilcoxon(off).pvalue) if any(off) else 1.0)


def _entry(target: Target, own: Sequence[Cell], folder: Path) -> Entry:
    places = {cell.seed: folder / name_of(cell.config) for cell in own}
    there: dict[int, dict[str, Any]] = {
        seed: read_json(p / "summary.json", "it should hold the outcome of a run.") for seed, p in places.items() if finished(p)
    }
    failed = [p / "failed.json" for p in places.values() if (p / "failed.json").exists()]
    one = own[0]
    return Entry(
        one.row.name,
        tuple(there),
        tuple(100 * s["accuracy"] for s in there.values()),
        tuple(tuple(None if a is None else 100 * a for a in s["clients"]) for s in there.values()),
        tuple(p.name for p in places.values()),
        tuple(read_json(f, "it should say why a run failed.")["why"] for f in failed),
        PUBLISHED[target.table].value(one.row.name, one.column, one.setting.name),
    )


def _ranked(target: Target, entries: list[Entry]) -> list[Entry]:
    own = ranks({e.row: e.mean for e in entries if e.mean is not None})
    theirs = ranks({e.row: e.paper for e in entries if e.paper is not None})
    ours = next((e for e in entries if e.row == target.against), None)
    return [
        replace(
            e,
            rank=own.get(e.row),
            paper_rank=theirs.get(e.row),
            compared=compare(ours, e) if ours is not None and e is not ours else None,
        )
        for e in entries
    ]
