"""Plan: everything a deployed run depends on, as the server stores it and as Flower's run configuration carries it."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from fedselect.core import plugins
from fedselect.core.errors import InputError
from fedselect.core.options import Option
from fedselect.data import Federation, Schema, tables
from fedselect.models import Layout
from fedselect.network.assignment import Assignment
from fedselect.network.letters import digest
from fedselect.network.protected import check
from fedselect.network.rounds import Limits
from fedselect.private.settings import Private, as_private
from fedselect.private.words import of_each_client, statement
from fedselect.runs.config import Config
from fedselect.secret.mean import check_hidden, hidden
from fedselect.secret.ring import Ring
from fedselect.simulate.inputs import most, pick_device
from fedselect.simulate.keeping import keeps
from fedselect.simulate.protect import check_together
from fedselect.tasks import suited

Scalars = Mapping[str, bool | bytes | float | int | str]
_RUN = ("rounds", "seed", "fraction", "eval_every", "headline")
_CHOOSING = ("keep", "patience", "view")  # omitted at their defaults, so that digests of older plans hold
_TABLES = ("method", "model", "adapt", "data", "training", "task", "aggregate")
DEFAULTS = {"aggregate": {"name": "clip"}}
"""Defaults of deployed runs that differ from simulations: no single client may decide the model."""

_LIMITS = {"min_clients": int, "timeout": float, "wait": float, "max_norm": float | None}


def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults for a command's flags.

    With --secret nobody can see which updates are long, so they are averaged. With client privacy every update is clipped to
    one length anyway.
    """
    private = given.get("private")
    return {} if given.get("secret") or (private and Private.read(private).unit == "client") else DEFAULTS


@dataclass(frozen=True)
class Shape:
    """What every client's data looks like: the shape of an input and of a target, and the class names in order.

    `whole`: whether inputs are whole numbers. `task`: the default task for the targets. For tables, the schema says how raw
    rows become inputs and targets.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    target_shape: tuple[int, ...] = ()
    schema: Schema | None = None
    _: KW_ONLY
    whole: bool = False
    task: str = "classification"
    layout: Layout | None = None  # of several inputs: how they are packed into one tensor of that shape

    @property
    def classes(self) -> int:
        return len(self.names)

    @classmethod
    def of(cls, data: Federation) -> "Shape":
        task = suited(data) or "classification"
        if (schema := data.clients[0].schema) is not None:
            return cls.of_table(schema if schema.scale == "federation" else schema.without_statistics(), task)
        names = (data.class_names or tuple(map(str, range(data.classes)))) if data.classes else ()
        return cls(tuple(data.shape), names, data.target_shape, whole=data.whole, task=task, layout=data.layout)

    @classmethod
    def of_table(cls, schema: Schema, task: str | None = None) -> "Shape":
        """`task` defaults to regression for numeric targets, multilabel for several targets that are 0 or 1."""
        schema.check_whole()
        target = (len(schema.target),) if len(schema.target) > 1 else ()
        task = task or ("classification" if schema.classes else "multilabel" if schema.labels else "regression")
        return cls((len(schema.inputs),), schema.classes, target, schema, task=task)

    def to_json(self) -> dict[str, Any]:
        """As stored in a site's files."""
        said: dict[str, Any] = {"shape": self.shape, "classes": self.names}
        said |= {"target": self.target_shape} if self.target_shape else {}
        said |= {"whole": True} if self.whole else {}
        said |= {"task": self.task} if self.task != "classification" else {}
        said |= {"layout": self.layout.to_json()} if self.layout else {}
        return said | ({"schema": self.schema.to_json()} if self.schema else {})

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> "Shape":
        schema = Schema.from_json(said["schema"]) if "schema" in said else None
        whole, task = bool(said.get("whole", False)), str(said.get("task", "classification"))
        layout = Layout.from_json(said["layout"]) if "layout" in said else None
        target = tuple(said.get("target", ()))
        return cls(tuple(said["shape"]), tuple(said["classes"]), target, schema, whole=whole, task=task, layout=layout)


@dataclass(frozen=True)
class Plan:
    """A configuration, the clients and the data it is for. `initial` is the digest of the values that every client starts from,
    `base` the digest of those that never train."""

    config: Config
    federation: str
    run: str
    clients: int
    data: Shape
    limits: Limits = field(default_factory=Limits)
    _: KW_ONLY
    initial: str = ""
    base: str = ""

    def assignment(self, device: str) -> Assignment:
        """What to train; refused if this machine would start from different values than the others."""
        made = Assignment(
            self.config.make_method(),
            self.config.make_model(self.data),  # type: ignore[arg-type]  # a model needs shape and classes only
            self.config.make_training(),
            self.config.make_task(),
            self.data,
            seed=self.config.seed,
            clients=self.clients,
            headline=self.config.headline,
            asked=tuple(self.config.metrics),
            method_name=self.config.method["name"],
            federation=self.federation,
            run=self.run,
            plan=self.digest(),
            device=pick_device(device),
            card={
                "model": {k: v for k, v in self.config.model.items() if k != "weights"},
                "classes": list(self.data.names),
                "outputs": self.config.make_task().outputs(self.data),
            },
            rounds=self.config.rounds,
            secret=self._ring(),
            private=as_private(self.config.private),
            keep=keeps(self.config.keep, self.config.patience),
            view=self.config.view,
            ahead=self.config.data.get("augment", "none") == "none",
        )
        if self.initial and (self.base or made.model.adapters) and self.base != made.model.base:
            raise InputError(
                f"{made.model.name} has another frozen base here than on the server (digest {made.model.base[:12] or 'none'} "
                f"here, {self.base[:12] or 'none'} there); start with the same weights file as the server: --weights FILE."
            )
        if self.initial and digest(made.initial) != self.initial:
            raise InputError(
                f"the model {made.model.name} starts from different values here than on the server; "
                "use the same version of torch, and the same weights file with --weights."
            )
        return made

    def _ring(self) -> Ring | None:
        """The numbers that are added up when the server may learn sums only."""
        if not self.config.secret:
            return None
        if self.limits.max_norm is not None:
            raise InputError("--max-norm limits the length of a client's update, which --secret hides; leave one of them out.")
        return hidden(self.config.make_aggregator(), most(self.config.fraction, self.clients), self.config.mean).ring

    def promise(self) -> str:
        """The privacy promised to clients, in words; empty if none is."""
        private = as_private(self.config.private)
        if private is None or private.unit == "sample":
            return of_each_client(private, self.config.rounds) if private else ""
        found = check(self.assignment("cpu"), self.config.make_aggregator(), self.limits.fraction)
        return statement(found) if found else ""

    def digest(self) -> str:
        """Identifies the run: covers everything but the path of a weights file, which differs by machine."""
        said = {k: v for k, v in self.to_flat().items() if k != "model.weights"}
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()

    def to_flat(self) -> dict[str, bool | float | int | str]:
        """As Flower carries it: plain values under dotted names; an unset value is 'none'."""
        said = self.config.to_json()
        flat = {
            "federation": self.federation,
            "run": self.run,
            "clients": self.clients,
            "shape": json.dumps(self.data.shape),
            "classes": json.dumps(self.data.names),
            "target": json.dumps(self.data.target_shape),
            **({"whole": True} if self.data.whole else {}),
            "initial": self.initial,
            **({"base": self.base} if self.base else {}),
            **{name: "none" if said[name] is None else said[name] for name in _RUN},
            **({"metrics": ",".join(self.config.metrics)} if self.config.metrics else {}),
            **({"secret": True, "mean": self.config.mean} if self.config.secret else {}),
            **({"private": self.config.private} if self.config.private else {}),
            **{name: "none" if (limit := getattr(self.limits, name)) is None else limit for name in _LIMITS},
        }
        flat |= {name: said[name] for name in _CHOOSING if said[name] not in (None, "last")}
        flat |= {"schema": json.dumps(self.data.schema.to_json())} if self.data.schema else {}
        flat |= {"layout": json.dumps(self.data.layout.to_json())} if self.data.layout else {}
        flat |= {"plugins": ",".join(self.config.plugins)} if self.config.plugins else {}
        tables = [table for table in _TABLES if table != "adapt" or self.config.adapt["name"] != "all"]  # as in older plans
        flat |= {f"{table}.{k}": "none" if v is None else v for table in tables for k, v in said[table].items()}
        return flat

    @classmethod
    def from_flat(cls, flat: Scalars, run: str) -> "Plan":
        """From a run configuration; `run` names the run if the configuration does not."""
        tables: dict[str, dict[str, Any]] = {table: {} for table in _TABLES}
        for key, value in flat.items():
            table, dot, name = key.partition(".")
            if dot and table in tables:
                tables[table][name] = value
        try:
            said = {name: flat[name] for name in (*_RUN, *_CHOOSING, "metrics", "secret", "mean", "private") if name in flat}
            raw = {**tables, **said, "plugins": _plugins(flat)}
            config = Config.from_dict({k: v for k, v in raw.items() if v != {}}, "this run")
            bounds = {n: Option(n, None, kind).parse(flat[n]) for n, kind in _LIMITS.items() if n in flat}
            limits = Limits(fraction=config.fraction, eval_every=config.eval_every, **bounds)
            names = tuple(map(str, json.loads(str(flat["classes"]))))
            schema = Schema.from_json(json.loads(str(flat["schema"]))) if "schema" in flat else None
            whole = bool(flat.get("whole", False))
            layout = Layout.from_json(json.loads(str(flat["layout"]))) if "layout" in flat else None
            shape = Shape(_sizes(flat["shape"]), names, _sizes(flat.get("target", "[]")), schema, whole=whole, layout=layout)
            clients = int(flat["clients"])
        except (KeyError, ValueError, TypeError) as e:
            raise InputError(f"the run configuration cannot be used ({type(e).__name__}: {e}).") from None
        return cls(
            config, str(flat.get("federation") or "flower"), check_name(str(flat.get("run") or run)), clients, shape, limits,
            initial=str(flat.get("initial", "")), base=str(flat.get("base", "")),
        )  # fmt: skip


def check_deployed(private: Private | None) -> None:
    """Refuse noise from a shared seed."""
    if private is not None and private.seeded:
        raise InputError("with seeded=yes everyone who has the seed knows the noise; use it in simulations only.")


def _sizes(said: object) -> tuple[int, ...]:
    return tuple(map(int, json.loads(str(said))))


def need_plugins(flat: Scalars, who: str) -> None:
    """Refuse a run that uses a plugin that the server or this client was not started with."""
    plugins.need(_plugins(flat), f"start the {who} with")


def _plugins(flat: Scalars) -> list[str]:
    return [name for name in str(flat.get("plugins", "")).split(",") if name]


def check_name(name: str) -> str:
    """A run's name must be a plain folder name, on the server and on clients."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise InputError(f"a run cannot be named {name!r}; use letters, digits, dots and dashes.")
    return name


def plan(config: Config, federation: str, run: str, clients: int, data: Shape, limits: Limits) -> Plan:
    """A new plan, with the digest of its initial values; fails early on what cannot work."""
    if data.schema is not None:
        tables.check_options(data.schema, config.data)
    made = Plan(config, federation, run, clients, data, limits)
    check_deployed(as_private(config.private))
    check_together(as_private(config.private), config.secret, keeps(config.keep, config.patience), config.view)
    assigned = made.assignment("cpu")
    check(assigned, config.make_aggregator(), limits.fraction)
    if config.secret:
        check_hidden(assigned.rehearse())
    base = assigned.model.base if assigned.model.adapters else ""
    return replace(made, initial=digest(assigned.initial), base=base)


def digest_of(schema: Schema | None) -> str:
    return "" if schema is None else hashlib.sha256(json.dumps(schema.to_json(), sort_keys=True).encode()).hexdigest()
