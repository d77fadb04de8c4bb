"""The protocol as it stands in protocol/*.toml: data sets (columns), tables and figures (targets), what is tuned."""

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
SHIFTS = ("shifts", "shifts-digits", "natural")  # where clients differ: docs/shifts.md
OWN = ("plain", "beyond", "readings", "little", "stem", "long", "own", *SHIFTS)  # questions of ours


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
    tuning: dict[str, int]  # sizes where test images stay unseen: `val` of a client's `train` are held out
    training: dict[str, Any] = field(default_factory=dict)
    scaled: dict[str, int] = field(default_factory=dict)
    tuning_rounds: int | None = None  # where those of tuning.toml would cost more than the table itself
    tuning_over: tuple[dict[str, Any], ...] = ({},)  # what data differ in that a choice is for: the mean over them decides
    stands_for: tuple[str, ...] = ()  # the paper's data sets in whose place this one may be asked for

    def of(self, method: str, also: str | None = None) -> dict[str, Any]:
        """The paper's options of a method on this data; `also` names a method whose values it shares."""
        known = options(METHODS[method])
        said = {"epochs": self.epochs, **self.rates, **self.methods.get(also or method, {})}
        return {k: v for k, v in said.items() if k in known}


@dataclass(frozen=True)
class Row:
    """A line of a table."""

    name: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    rates_of: str | None = None  # the method whose rates it takes, if not its own
    model: str | None = None  # the one model it makes sense for
    training: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    model_options: dict[str, Any] = field(default_factory=dict)
    finetune_of: str | None = None  # the method whose fine-tuning it takes, its length and rate
    by_setting: dict[str, dict[str, Any]] = field(default_factory=dict)  # options by setting; it is left out of others
    ceiling: bool = False  # it knows what the others must find out, so it is none of them

    @property
    def tuned_as(self) -> str:
        return self.rates_of or self.method


@dataclass(frozen=True)
class Setting:
    """What columns of one data set differ in."""

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
    against: str | None = None  # the row that the others are tested against
    figure: str | None = None
    table: str = ""  # whose published numbers belong here
    score: Literal["test", "val"] = "test"  # val: on images held out of training data, test stays unseen
    seeds: tuple[int, ...] = ()  # where nobody asks for others
    rates: Literal["tuned", "own"] = "tuned"  # own: what rows and columns say

    def takes(self, column: str) -> bool:
        """Whether a data set may be asked for: one of `on`, or one that stands for such and has the options of the settings."""
        asked = read_column(column)
        data, model = options(DATA[asked.data["name"]]), options(MODELS[asked.model["name"]])
        known = all(s.data.keys() <= data.keys() and s.model.keys() <= model.keys() for s in self.settings)
        return column in self.on or (known and any(name in self.on for name in asked.stands_for))


@dataclass(frozen=True)
class Tuning:
    """What is tried, for a method's rate and its own option."""

    rounds: int  # at most; a column may have fewer
    seeds: tuple[int, ...]
    common: dict[str, list[float]]
    methods: dict[str, dict[str, list[float]]]


def targets(name: str) -> list[Target]:
    """The target of this name; `all` is every one of the paper's."""
    if name not in (*TARGETS, *OWN, "all"):
        raise unknown("target", name, [*TARGETS, *OWN, "all"])
    return [read_target(n) for n in (TARGETS if name == "all" else [name])]


def choose(found: Sequence[Target], columns: Sequence[str] | None, methods: Sequence[str] | None) -> list[Target]:
    """These targets with the data sets and methods that were asked for; of several, those in which something is left."""
    names = ", ".join(t.name for t in found)
    for column in columns or ():
        if not any(t.takes(column) for t in found):
            there = ", ".join(dict.fromkeys(c for t in found for c in t.on))
            raise InputError(f"{names}: there is no column {column} there; there is {there}.")
    rows = dict.fromkeys(r.method for t in found for r in t.rows)
    for method in methods or ():
        if method not in rows:
            raise InputError(f"{names}: there is no row of method {method!r}; there are {', '.join(rows)}.")
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
    """One target as its file says."""
    raw = dict(_read(f"targets/{name}.toml"))
    of = raw.pop("of", None)
    for part, make in (("rows", Row), ("settings", Setting)):
        if part in raw:
            raw[part] = tuple(make(**one) for one in raw[part])
    own: dict[str, Any] = {k: tuple(v) if k in ("on", "seeds") else v for k, v in raw.items()}
    if of is not None:  # a table drawn, run in another way, or with rows of ours above its own
        table = read_target(of)
        return replace(table, name=name, **own | {"rows": own.get("rows", ()) + table.rows})
    usual: dict[str, Any] = {"table": name, "seeds": (0, 1, 2)}
    return Target(name, **usual | own)


@cache
def _read(path: str) -> dict[str, Any]:
    return tomllib.loads((files(__package__) / "protocol" / path).read_text(encoding="utf-8"))
