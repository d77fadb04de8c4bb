"""Cells: which runs a target needs. A cell is one run directory, named by all that its numbers depend on."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedselect.data.places import find
from fedselect.errors import InputError
from fedselect.experiments.config import Config
from fedselect.experiments.reproduce.protocol import Column, Row, Setting, Target, read_column, read_tuning
from fedselect.experiments.runner import identity
from fedselect.methods import METHODS
from fedselect.options import options

Rates = Mapping[tuple[str, str], dict[str, Any]]
"""Tuned options by data set and method."""


@dataclass(frozen=True)
class How:
    """What the user chose."""

    seeds: tuple[int, ...] = (0, 1, 2)
    scale: float = 1.0
    rounds: int | None = None
    rates: Literal["paper", "tuned"] = "tuned"
    device: str = "auto"
    precision: str = "auto"

    def __post_init__(self) -> None:
        if not self.seeds:
            raise InputError("give at least one seed.")
        if not 0.0 < self.scale <= 1.0:
            raise InputError(f"scale is a fraction of the paper's size and must lie in (0, 1], not {self.scale}.")
        if self.rounds is not None and self.rounds < 1:
            raise InputError(f"rounds must be at least 1, not {self.rounds}.")
        if self.rates not in ("paper", "tuned"):
            raise InputError(f"rates is paper or tuned, not {self.rates!r}.")
        kept = [s for s in self.seeds if s in read_tuning().seeds]
        if kept and self.rates == "tuned":
            raise InputError(f"seed {kept[0]} is kept for tuning; report others.")

    @property
    def mark(self) -> str:
        """What every table and file says of runs that are not the paper's size; nothing of those that are."""
        said = [f"scaled to {self.scale:g}"] if self.scale < 1 else []
        said += [f"{self.rounds} rounds"] if self.rounds is not None else []
        return f"{', '.join(said)}, not comparable" if said else ""

    @property
    def suffix(self) -> str:
        """What the name of a file says of this."""
        said = ["paper-rates"] if self.rates == "paper" else []
        said += [f"scaled-{self.scale:g}"] if self.scale < 1 else []
        said += [f"rounds-{self.rounds}"] if self.rounds is not None else []
        return "".join(f"-{s}" for s in said)


@dataclass(frozen=True)
class Cell:
    """Where a run stands in a table."""

    row: Row
    column: str
    setting: Setting
    seed: int
    config: Config


def name_of(config: Config) -> str:
    """The directory of a cell: the same for the same run, whoever asks for it."""
    return identity(config)[:16]


def cells(target: Target, how: How, tuned: Rates) -> Iterator[Cell]:
    """The runs of a target; rows that make no sense for a data set's model are left out."""
    for name, setting, row, seed in itertools.product(target.on, target.settings, target.rows, how.seeds):
        column = read_column(name)
        if row.model in (None, column.model["name"]):
            yield Cell(
                row, name, setting, seed, configure(column, row, setting, seed, how, tuned.get((name, row.tuned_as), {}))
            )


def configure(column: Column, row: Row, setting: Setting, seed: int, how: How, tuned: Mapping[str, Any]) -> Config:
    method = {**column.of(row.method, row.rates_of), **_known(row.method, tuned), **row.options, **setting.method}
    return _config(column, row.method, method, {**column.data, **setting.data}, seed, how)


def trials(column: str, method: str, how: How) -> list[tuple[dict[str, Any], int, Config]]:
    """What is tried to tune a method: options, seed, and a run that is scored on validation images alone."""
    tuning, where = read_tuning(), read_column(column)
    grid = {**tuning.common, **tuning.methods.get(method, {})}
    out = []
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        data = {**where.data, "val": where.val}
        for seed in tuning.seeds:
            config = _config(where, method, {**where.of(method), **chosen}, data, seed, how, score="val")
            out.append((chosen, seed, config))
    return out


def scaled(column: Column, data: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """Fewer clients (a client a domain stays) and images, at least one of each class of a client."""
    if scale == 1:
        return dict(data)
    sizes = {**data, **{k: v for k, v in column.scaled.items() if data.get(k) is None}}
    least = int(data.get("classes_per_client", 1))
    out = dict(data)
    for part in ("train", "test", "val"):
        if sizes.get(part):
            out[part] = max(least, math.ceil(scale * sizes[part]))
    if out.get("val", 0) >= out.get("train", math.inf):
        out["train"] = out["val"] + least
    if "clients" in data:
        out["clients"] = max(2, round(scale * data["clients"]))
    return out


def _config(
    column: Column, method: str, chosen: dict[str, Any], data: Mapping[str, Any], seed: int, how: How, score: str = "test"
) -> Config:
    rounds = how.rounds or max(1, round(how.scale * column.rounds))
    return Config.from_dict(
        {
            "method": {"name": method, **chosen},
            "data": _found(scaled(column, data, how.scale)),
            "model": _found(column.model),
            "training": column.training,
            "rounds": rounds,
            "eval_every": rounds if score == "val" else max(1, round(how.scale * column.eval_every)),
            "seed": seed,
            "device": how.device,
            "precision": how.precision,
            "score": score,
        },
        column.name,
    )


def _known(method: str, values: Mapping[str, Any]) -> dict[str, Any]:
    known = options(METHODS[method])
    return {k: v for k, v in values.items() if k in known}


def _found(table: Mapping[str, Any]) -> dict[str, Any]:
    """{ find = [names] } stands for the first of these that lies where data lies."""
    return {k: str(Path(find(v["find"], None)).resolve()) if isinstance(v, Mapping) else v for k, v in table.items()}
