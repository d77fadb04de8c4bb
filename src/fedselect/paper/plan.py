"""Cells: the runs that a target needs. A cell is a run directory, named by everything its numbers depend on."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fedselect.core.errors import InputError
from fedselect.core.options import options
from fedselect.data.places import find
from fedselect.methods import METHODS
from fedselect.paper.protocol import Column, Row, Setting, Target, read_column, read_tuning
from fedselect.runs.config import Config
from fedselect.runs.rundir import identity
from fedselect.simulate.inputs import check_ranges

Rates = Mapping[tuple[str, str], dict[str, Any]]
"""Tuned options by data set and method."""
FILES = ("path", "data_dir", "weights")  # options that are paths


@dataclass(frozen=True)
class How:
    """The user's choices."""

    seeds: tuple[int, ...] | None = None  # None: the seeds of each target
    scale: float = 1.0
    rounds: int | None = None
    rates: Literal["paper", "tuned", "own"] = "tuned"  # own: the target's rows set their rates
    device: str = "auto"
    precision: str = "auto"

    def __post_init__(self) -> None:
        if self.seeds == ():
            raise InputError("--seeds is empty; pass at least one seed.")
        if not 0.0 < self.scale <= 1.0:
            raise InputError(f"--scale must be greater than 0 and at most 1, not {self.scale}.")
        if self.rounds is not None:
            check_ranges(rounds=self.rounds)
        if self.rates not in ("paper", "tuned", "own"):
            raise InputError(f"--rates must be paper or tuned, not {self.rates!r}.")

    def on(self, target: Target) -> "How":
        """These choices, completed by a target's own seeds and rates."""
        seeds = self.seeds or target.seeds
        rates = "own" if target.rates == "own" else self.rates
        kept = [s for s in seeds if s in read_tuning().seeds]
        if kept and rates != "paper" and target.score == "test":
            raise InputError(f"seed {kept[0]} is reserved for tuning; choose other --seeds.")
        return replace(self, seeds=seeds, rates=rates)

    @property
    def mark(self) -> str:
        """The note on tables and files of runs that are smaller than the paper's, or nothing."""
        said = [f"scaled to {self.scale:g}"] if self.scale < 1 else []
        said += [f"{self.rounds} rounds"] if self.rounds is not None else []
        return f"{', '.join(said)}, not comparable" if said else ""

    @property
    def suffix(self) -> str:
        """The suffix of file names for these choices."""
        said = ["paper-rates"] if self.rates == "paper" else []
        said += [f"scaled-{self.scale:g}"] if self.scale < 1 else []
        said += [f"rounds-{self.rounds}"] if self.rounds is not None else []
        return "".join(f"-{s}" for s in said)


@dataclass(frozen=True)
class Cell:
    """A run and its position in a table."""

    row: Row
    column: str
    setting: Setting
    seed: int
    config: Config


def name_of(config: Config) -> str:
    """The directory name of a cell. It does not depend on the target or on where data files are stored."""
    return identity(replace(config, data=named(config.data, True), model=named(config.model, True)))[:16]


def named(table: Mapping[str, Any], size: bool = False) -> dict[str, Any]:
    """Options with file names instead of paths, with `size` also file sizes to tell files apart."""

    def name(path: Path) -> str:
        return f"{path.name}, {path.stat().st_size} bytes" if size and path.is_file() else path.name

    return {k: name(Path(v)) if k in FILES and v is not None else v for k, v in table.items()}


def cells(target: Target, how: How, tuned: Rates) -> Iterator[Cell]:
    """The runs of a target, without rows that do not apply to a model or setting."""
    how = how.on(target)
    rates = tuned if how.rates == "tuned" else {}
    for name, setting, row, seed in itertools.product(target.on, target.settings, target.rows, how.seeds or ()):
        column = read_column(name)
        if row.model in (None, column.model["name"]) and (not row.by_setting or setting.name in row.by_setting):
            chosen = {**rates.get((name, row.tuned_as), {}), **_finetuning(column, row, rates)}
            yield Cell(row, name, setting, seed, configure(column, row, setting, seed, how, tuned=chosen, score=target.score))


def configure(
    column: Column, row: Row, setting: Setting, seed: int, how: How, *, tuned: Mapping[str, Any], score: str = "test"
) -> Config:
    own = {**row.options, **row.by_setting.get(setting.name or "", {})}
    method = {**column.of(row.method, row.rates_of), **_known(row.method, tuned), **own, **setting.method}
    held = column.tuning if score == "val" else {}
    return _config(
        column,
        how,
        method={"name": row.method, **method},
        data={**column.data, **held, **setting.data, **row.data},
        model={**column.model, **setting.model, **row.model_options},
        training={**column.training, **row.training},
        seed=seed,
        score=score,
    )


def trials(column: str, method: str, how: How) -> list[tuple[dict[str, Any], int, Config]]:
    """The trials to tune a method: options, seed, and a run scored on validation images."""
    tuning, where, brief = read_tuning(), read_column(column), in_tuning(column, how)
    short = replace(where, rounds=_most(where))
    grid = {**tuning.common, **tuning.methods.get(method, {})}
    out = []
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        row = Row("", method, chosen)
        for seed, over in itertools.product(tuning.seeds, where.tuning_over):
            out.append((chosen, seed, configure(short, row, Setting(data=over), seed, brief, tuned={}, score="val")))
    return out


def in_tuning(column: str, how: How) -> How:
    """The user's choices for trials. A number of rounds above their own does not affect them."""
    longer = how.rounds is not None and how.rounds >= _most(read_column(column))
    return replace(how, rounds=None) if longer else how


def _most(column: Column) -> int:
    return min(column.tuning_rounds or read_tuning().rounds, column.rounds)


def scaled(column: Column, data: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """Fewer clients (but still one per domain) and images, at least one per class of a client."""
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


def _config(column: Column, how: How, *, data: dict[str, Any], model: dict[str, Any], **fields: Any) -> Config:
    return Config.from_dict(
        {
            "data": _found(scaled(column, data, how.scale)),
            "model": _found(model),
            "rounds": how.rounds or max(1, round(how.scale * column.rounds)),
            "eval_every": max(1, round(how.scale * column.eval_every)),
            "device": how.device,
            "precision": how.precision,
            **fields,
        },
        column.name,
    )


def _finetuning(column: Column, row: Row, rates: Rates) -> dict[str, Any]:
    """The epochs and rate of fine-tuning, for a row that takes them from another method."""
    if row.finetune_of is None:
        return {}
    said = {**column.of(row.finetune_of), **rates.get((column.name, row.finetune_of), {})}
    return {k: said[k] for k in ("finetune", "finetune_lr") if k in said}


def _known(method: str, values: Mapping[str, Any]) -> dict[str, Any]:
    known = options(METHODS[method])
    return {k: v for k, v in values.items() if k in known}


def _found(table: Mapping[str, Any]) -> dict[str, Any]:
    """Replace { find = [names] } by the path of the first that exists."""
    return {k: str(Path(find(v["find"], None)).resolve()) if isinstance(v, Mapping) else v for k, v in table.items()}
