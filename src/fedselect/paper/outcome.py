"""Our numbers beside the paper's: means over seeds, differences, ranks, and whether FedSelect's lead is significant."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

from fedselect.core.errors import RunError
from fedselect.core.files import read_json
from fedselect.paper.numbers import PUBLISHED
from fedselect.paper.plan import Cell, How, Rates, cells, name_of, named
from fedselect.paper.protocol import Target, read_column
from fedselect.runs.rundir import finished, headline
from fedselect.tasks.classes import ACCURACY

TEST = "Wilcoxon signed-rank, two-sided, paired over clients and seeds, not corrected for the number of rows"


@dataclass(frozen=True)
class Compared:
    """The reference row minus this row, client by client."""

    pairs: int
    gain: float  # mean difference in points
    p: float


@dataclass(frozen=True)
class Seed:
    """The results of one run that a table needs. Accuracies are in percent."""

    seed: int
    accuracy: float  # in the last round, mean over clients
    tail: float  # mean over the last quarter of the rounds, since a single round is noisy
    clients: tuple[float | None, ...]
    _: KW_ONLY
    share: float = 0.0  # personal share of the parameters
    share_live: float | None = None  # personal share of the parameters that affect an output
    bytes_up: float = 0.0  # per round, over all clients
    bytes_down: float = 0.0
    seconds: float = 0.0
    rounds: tuple[int, ...] = ()  # evaluated rounds
    curve: tuple[float, ...] = ()  # accuracy in these rounds
    date: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    local: float | None = None  # accuracy of local models, whatever the method reports
    merged: float | None = None  # accuracy of merged models


@dataclass(frozen=True)
class Entry:
    """A cell of a table: all seeds of one row in one column."""

    row: str
    seeds: tuple[Seed, ...]  # finished seeds
    config: dict[str, Any] = field(default_factory=dict)  # of the first seed, with file names instead of paths
    _: KW_ONLY
    runs: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()  # reasons, one per diverged seed
    paper: float | None = None
    paper_rank: int | None = None
    rank: int | None = None
    compared: Compared | None = None

    @property
    def ended(self) -> bool:
        return len(self.seeds) + len(self.failed) == len(self.runs)

    @property
    def mean(self) -> float | None:
        return statistics.fmean(s.accuracy for s in self.seeds) if self.seeds else None

    @property
    def tail(self) -> float | None:
        return statistics.fmean(s.tail for s in self.seeds) if self.seeds else None

    @property
    def std(self) -> float | None:
        return statistics.stdev(s.accuracy for s in self.seeds) if len(self.seeds) > 1 else None

    @property
    def error(self) -> float | None:
        """The standard error of the mean."""
        return None if self.std is None else self.std / len(self.seeds) ** 0.5

    @property
    def difference(self) -> float | None:
        return None if self.mean is None or self.paper is None else self.mean - self.paper


@dataclass(frozen=True)
class Block:
    """A column of a table."""

    column: str
    setting: str | None
    entries: tuple[Entry, ...]

    @property
    def title(self) -> str:
        return " ".join(filter(None, (read_column(self.column).title, self.setting)))

    @property
    def weights(self) -> str | None:
        """The name of the weights file that models start from."""
        name: str | None = self.entries[0].config["model"].get("weights")
        return name


def blocks(target: Target, how: How, tuned: Rates, folder: Path) -> list[Block]:
    """The completed rows of a target, by column: those whose seeds have all ended."""
    found: dict[tuple[str, str | None], dict[str, list[Cell]]] = {}
    wait = how.on(target).rates == "tuned"
    for cell in cells(target, how, tuned):
        if wait and (cell.column, cell.row.tuned_as) not in tuned:
            continue  # its rates are not tuned yet
        found.setdefault((cell.column, cell.setting.name), {}).setdefault(cell.row.name, []).append(cell)
    there = {key: [e for own in rows.values() if (e := _entry(target, own, folder)).ended] for key, rows in found.items()}
    return [Block(*key, tuple(_ranked(target, entries))) for key, entries in there.items() if entries]


def ranks(values: Mapping[str, float]) -> dict[str, int]:
    """Rank 1 is the largest. Values equal up to rounding share the better rank."""
    return {name: 1 + sum(other > value + 1e-9 for other in values.values()) for name, value in values.items()}


def compare(ours: Entry, other: Entry) -> Compared | None:
    """Wilcoxon's signed-rank test between two rows, with one pair per client and seed that both have."""
    from scipy.stats import wilcoxon

    own = {s.seed: s.clients for s in ours.seeds}
    pairs = [
        (a, b)
        for s in other.seeds
        if s.seed in own
        for a, b in zip(own[s.seed], s.clients, strict=True)
        if a is not None and b is not None
    ]
    if not pairs:
        return None
    off = [round(a - b, 6) for a, b in pairs]
    ranked = _tied(off)
    return Compared(len(off), statistics.fmean(off), float(wilcoxon(ranked).pvalue) if any(ranked) else 1.0)


ROUNDING = 2.5e-4
"""Tolerance in points for equal differences: accuracies are rounded to six digits, so each is off by up to 1e-4."""


def _tied(off: Sequence[float]) -> list[float]:
    """The differences, made exactly equal in size if equal up to rounding, since the test ranks them."""
    sizes = sorted({abs(d) for d in off})
    first: dict[float, float] = {}
    for size, before in zip(sizes, [0.0, *sizes], strict=False):
        first[size] = first.get(before, 0.0) if size - before <= ROUNDING else size
    return [math.copysign(first[abs(d)], d) for d in off]


def _entry(target: Target, own: Sequence[Cell], folder: Path) -> Entry:
    places = {cell.seed: folder / name_of(cell.config) for cell in own}
    failed = [p / "failed.json" for p in places.values() if (p / "failed.json").exists()]
    one, published = own[0], PUBLISHED.get(target.table)
    config = one.config.to_json()
    return Entry(
        one.row.name,
        tuple(_seed(seed, p) for seed, p in places.items() if finished(p)),
        {**config, "data": named(config["data"]), "model": named(config["model"])},
        runs=tuple(p.name for p in places.values()),
        failed=tuple(read_json(f, "it must contain why a run failed.")["why"] for f in failed),
        paper=published.value(one.row.name, one.column, one.setting.name) if published else None,
    )


def read_summary(place: Path) -> dict[str, Any]:
    """The summary of a run of the protocol, whose headline must be accuracy."""
    if (first := headline(place).name) != ACCURACY.name:
        raise RunError(f"{place} has the headline {first}, but reproduce compares {ACCURACY.name}; remove it to run it again.")
    return read_json(place / "summary.json", "it must contain the outcome of a run.")


def _seed(seed: int, place: Path) -> Seed:
    said = read_summary(place)
    return Seed(
        seed,
        100 * said["accuracy"],
        100 * said["accuracy_tail"],
        tuple(None if a is None else 100 * a for a in said["clients"]),
        share=said["share"],
        share_live=said.get("share_live"),
        bytes_up=said["bytes_up"] / said["rounds"],
        bytes_down=said["bytes_down"] / said["rounds"],
        seconds=said["seconds"],
        rounds=tuple(round for round, _ in said["curve"]),
        curve=tuple(100 * accuracy for _, accuracy in said["curve"]),
        date=said["date"],
        environment=said["environment"],
        **{view: None if (a := said.get(f"accuracy_{view}")) is None else 100 * a for view in ("local", "merged")},
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
