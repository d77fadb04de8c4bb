"""The protocol in protocol/*.toml: data sets (columns), tables and figures (targets), and tuning grids."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from fedselect.core.errors import InputError, unknown
from fedselect.core.options import options
from fedselect.data import DATA
from fedselect.methods import METHODS
from fedselect.models import MODELS

COLUMNS = (
    "cifar10", "cifar10c", "miniimagenet", "officehome", "pacs", "digits",
    "cifar10-shifts", "miniimagenet-shifts", "digits-shifts", "audiomnist", "har", "heart", "pacs-small",
)  # fmt: skip
TARGETS = (
    "table1", "table2", "table3", "p-alpha", "alpha", "data-size", "fig-convergence", "fig-data-size", "fig-iou",
)  # fmt: skip
SHIFTS = ("shifts", "shifts-digits", "natural")  # known and natural shifts: docs/shifts.md
OWN = ("plain", "beyond", "readings", "little", "stem", "long", "own", *SHIFTS)  # our own experiments


@dataclass(frozen=True)
class Column:
    """A data set and how the paper trains on it."""

    name: str
    title: str
    rounds: int
    epochs: int
    eval_every: int
    data: dict[str, Any]
    model: dict[str, Any]
    rates: dict[str, float]
    methods: dict[str, dict[str, Any]]
    tuning: dict[str, int]  # sizes for tuning: `val` of a client's `train` images are held out
    training: dict[str, Any] = field(default_factory=dict)
    scaled: dict[str, int] = field(default_factory=dict)
    tuning_rounds: int | None = None  # if the rounds of tuning.toml would be too expensive
    tuning_over: tuple[dict[str, Any], ...] = ({},)  # data options to average over when choosing
    stands_for: tuple[str, ...] = ()  # data sets of the paper that this one may replace

    def of(self, method: str, also: str | None = None) -> dict[str, Any]:
        """The paper's options of a method on this data. `also`: a method whose values it uses."""
        known = options(METHODS[method])
        said = {"epochs": self.epochs, **self.rates, **self.methods.get(also or method, {})}
        return {k: v for k, v in said.items() if k in known}


@dataclass(frozen=True)
class Row:
    """A row of a table."""

    name: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    rates_of: str | None = None  # the method whose rates it uses, if not its own
    model: str | None = None  # the only model it applies to
    training: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    model_options: dict[str, Any] = field(default_factory=dict)
    finetune_of: str | None = None  # the method whose fine-tuning epochs and rate it uses
    by_setting: dict[str, dict[str, Any]] = field(default_factory=dict)  # options by setting; other settings omit the row
    ceiling: bool = False  # an upper bound that knows the true groups, so it is not ranked

    @property
    def tuned_as(self) -> str:
        return self.rates_of or self.method


@dataclass(frozen=True)
class Setting:
    """The options of one column, if a data set has several."""

    name: str | None = None
    method: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """A table or figure, of the paper or of ours: rows times data sets times settings."""

    name: str
    title: str
    on: tuple[str, ...]
    rows: tuple[Row, ...]
    settings: tuple[Setting, ...] = (Setting(),)
    against: str | None = None  # the row that others are tested against
    figure: str | None = None
    table: str = ""  # the table with the published numbers
    score: Literal["test", "val"] = "test"  # val: scored on images held out of training data
    seeds: tuple[int, ...] = ()  # default seeds
    rates: Literal["tuned", "own"] = "tuned"  # own: rates set by rows and columns

    def takes(self, column: str) -> bool:
        """Whether a data set can be used: one of `on`, or a replacement with the options that settings need."""
        asked = read_column(column)
        data, model = options(DATA[asked.data["name"]]), options(MODELS[asked.model["name"]])
        known = all(s.data.keys() <= data.keys() and s.model.keys() <= model.keys() for s in self.settings)
        return column in self.on or (known and any(name in self.on for name in asked.stands_for))


@dataclass(frozen=True)
class Tuning:
    """The tuning grid: values of each method's rate and of one more option."""

    rounds: int  # at most; a column may set fewer
    seeds: tuple[int, ...]
    common: dict[str, list[float]]
    methods: dict[str, dict[str, list[float]]]


def targets(name: str) -> list[Target]:
    """The target with this name, or all targets of the paper for `all`."""
    if name not in (*TARGETS, *OWN, "all"):
        raise unknown("target", name, [*TARGETS, *OWN, "all"])
    return [read_target(n) for n in (TARGETS if name == "all" else [name])]


def choose(found: Sequence[Target], columns: Sequence[str] | None, methods: Sequence[str] | None) -> list[Target]:
    """Restrict targets to the requested data sets and methods, and drop those that become empty."""
    names = ", ".join(t.name for t in found)
    for column in columns or ():
        if not any(t.takes(column) for t in found):
            there = ", ".join(dict.fromkeys(c for t in found for c in t.on))
            raise InputError(f"{names}: there is no column {column}; choose one of {there}.")
    rows = dict.fromkeys(r.method for t in found for r in t.rows)
    for method in methods or ():
        if method not in rows:
            raise InputError(f"{names}: there is no row of method {method!r}; choose one of {', '.join(rows)}.")
    out = []
    for target in found:
        on = target.on if columns is None else tuple(c for c in columns if target.takes(c))
        kept = tuple(r for r in target.rows if methods is None or r.method in methods)
        if on and kept:
            out.append(replace(target, on=on, rows=kept))
    return out


def read_column(name: str) -> Column:
    if name not in COLUMNS:
        raise unknown("column", name, COLUMNS)
    raw = _read(f"columns/{name}.toml")
    lists: dict[str, Any] = {k: tuple(raw[k]) for k in ("stands_for", "tuning_over") if k in raw}
    return Column(name, **{**raw, **lists})


def read_tuning() -> Tuning:
    raw = _read("tuning.toml")
    return Tuning(raw["rounds"], tuple(raw["seeds"]), raw["common"], raw["methods"])


def read_target(name: str) -> Target:
    """Read a target from its file."""
    raw = dict(_read(f"targets/{name}.toml"))
    of = raw.pop("of", None)
    for part, make in (("rows", Row), ("settings", Setting)):
        if part in raw:
            raw[part] = tuple(make(**one) for one in raw[part])
    own: dict[str, Any] = {k: tuple(v) if k in ("on", "seeds") else v for k, v in raw.items()}
    if of is not None:  # a table drawn as a figure, run differently, or extended with our rows
        table = read_target(of)
        return replace(table, name=name, **own | {"rows": own.get("rows", ()) + table.rows})
    usual: dict[str, Any] = {"table": name, "seeds": (0, 1, 2)}
    return Target(name, **usual | own)


@cache
def _read(path: str) -> dict[str, Any]:
    return tomllib.loads((files(__package__) / "protocol" / path).read_text(encoding="utf-8"))
