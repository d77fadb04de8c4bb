"""Plan: everything a deployed run depends on, as the server stores it and as Flower's run configuration carries it."""

import hashlib
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedselect.core import plugins
from fedselect.core.errors import DataError, InputError
from fedselect.core.options import Option, find, options
from fedselect.data import DATA, Federation, Schema, tables
from fedselect.data.sets import one_domain
from fedselect.models import Layout
from fedselect.network.assignment import Assignment
from fedselect.network.letters import digest
from fedselect.network.protected import check
from fedselect.network.server import Limits
from fedselect.private.settings import Private, as_private
from fedselect.private.words import of_each_client, statement
from fedselect.runs.config import Config
from fedselect.secret.keys import Identity
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


@dataclass(frozen=True)
class Home:
    """What a node knows about itself, from Flower's node configuration: its client number, its vault and its data."""

    client: int
    vault: Path
    data: dict[str, Any] = field(default_factory=dict)
    weights: str | None = None
    device: str = "auto"
    schema: str = ""  # digest of the table schema that this client agreed to
    _: KW_ONLY
    site: str = ""  # this client's folder of a site, which has its keys
    secret: bool = False  # whether it only takes part in runs with secure aggregation
    private: str = ""  # the weakest privacy with which it takes part

    @classmethod
    def from_flat(cls, flat: Scalars) -> "Home":
        known = {"partition-id", "num-partitions", "vault", "weights", "device", "schema", "site", "secret", "private"}
        for key in flat:
            if key not in known and not key.startswith("data."):
                raise InputError(f"the node configuration has an unknown {key!r}; known: {', '.join(sorted(known))}, data.*.")
        if "partition-id" not in flat or "vault" not in flat:
            raise InputError("the node configuration must name partition-id and vault.")
        if type(flat.get("secret", False)) is not bool:
            raise InputError(f"secret in the node configuration is true or false, not {flat['secret']!r}.")
        own = {k.removeprefix("data."): v for k, v in flat.items() if k.startswith("data.")}
        weights = str(flat["weights"]) if "weights" in flat else None
        device, schema, site = str(flat.get("device", "auto")), str(flat.get("schema", "")), str(flat.get("site", ""))
        return cls(
            int(flat["partition-id"]),
            Path(str(flat["vault"])),
            own,
            weights,
            device,
            schema,
            site=site,
            secret=flat.get("secret") is True,
            private=str(flat.get("private", "")),
        )

    def to_flat(self) -> dict[str, bool | float | int | str]:
        flat: dict[str, bool | float | int | str] = {"partition-id": self.client, "vault": str(self.vault)}
        flat |= {f"data.{k}": v for k, v in self.data.items()} | {"device": self.device}
        return flat | {k: v for k in ("weights", "schema", "site", "secret", "private") if (v := getattr(self, k))}

    def identity(self, plan: Plan) -> Identity | None:
        """The client's keys, if the run needs them; refused if this client insists on --secret and the run is without."""
        if not plan.config.secret and self.secret:
            raise InputError(f"client {self.client} only takes part in runs with --secret, and this run is without it.")
        if not plan.config.secret:
            return None
        if not self.site:
            raise InputError(
                f"client {self.client} does not know its folder of a site, which has the keys for --secret; start it with "
                "fedselect deploy client, or set site=PATH in the node configuration."
            )
        return Identity.read(Path(self.site), self.client)

    def adapt(self, plan: Plan) -> Plan:
        """The run with this machine's own files in place of the server's paths; refused if it is not private enough."""
        asked = as_private(plan.config.private)
        if self.private and (asked is None or not asked.covers(Private.read(self.private))):
            raise InputError(
                f"client {self.client} only takes part in runs at least as private as {self.private}; this one is "
                f"{f'private with {asked}' if asked else 'not private'}."
            )
        check_deployed(asked)
        check_together(asked, plan.config.secret, keeps(plan.config.keep, plan.config.patience), plan.config.view)
        model = dict(plan.config.model)
        if model.get("weights"):
            if self.weights is None:
                raise InputError("this run starts from a weights file; start the client with --weights FILE.")
            model["weights"] = self.weights
        return replace(plan, config=replace(plan.config, model=model))

    def load(self, plan: Plan) -> Federation:
        """This client's own data only, its labels numbered as in the federation."""
        if self.schema and self.schema != digest_of(plan.data.schema):
            raise InputError(
                f"this run reads different table columns than client {self.client} agreed to; start runs from the site that "
                "the client belongs to."
            )
        return own_data(self.data, plan.config, self.client, plan.clients, plan.data)


def own_data(own: Mapping[str, Any], config: Config, client: int, clients: int, agreed: Shape) -> Federation:
    """One client's data: its own folder or table, or its part of a data set that the seed partitions among clients."""
    if own.get("path"):
        table = {**undealt(str(own.get("name", config.data["name"]))), **own}
    elif "path" in config.data or config.data.get("data_dir"):
        kind = own_kind(config.data)
        raise InputError(f"clients of this federation bring their own data; start the client with: --data {kind}:PATH.")
    else:
        name = str(own.get("name", config.data["name"]))
        sized = {"clients": clients} if "clients" in options(find("data", name, DATA)) else {}
        table = {**(config.data if name == config.data["name"] else {}), **own, **sized}
    if agreed.schema is not None and own.get("name") == "table" and own.get("path"):
        place = Path(own["path"])
        frames = tables.read_clients(place, own.get("client"), agreed.schema.missing)
        whole = tables.fitted(frames, agreed.schema, place.stem)
    elif (own.get("name"), config.data["name"]) == ("folder", "domains"):
        known = inspect.signature(one_domain).parameters
        how = {k: v for k, v in {**config.data, **own}.items() if k in known}
        whole = one_domain(client, config.seed, **how)
    else:
        whole = Config.from_dict({**_plain(config), "data": table}, f"client {client}").make_data()
    if len(whole.clients) == 1:
        part = whole.clients[0]
    elif client < len(whole.clients):
        part = whole.clients[client]
    else:
        raise InputError(f"client {client} has no data: the data set is partitioned among {len(whole.clients)} clients.")
    return fitting(replace(whole, clients=[part], pools={}), f"client {client}", agreed, name=str(client))


def fitting(whole: Federation, who: str, agreed: Shape, name: str) -> Federation:
    """One client's data with the federation's class numbers; refused if it is not what the federation agreed on."""
    part = whole.clients[0]
    if whole.layout != agreed.layout:
        raise DataError(
            f"{who} has inputs {whole.layout or whole.shape}; this federation agreed on {agreed.layout or agreed.shape}."
        )
    if tuple(whole.shape) != agreed.shape:
        raise DataError(
            f"{who} has inputs of shape {tuple(whole.shape)}; this federation agreed on {agreed.shape}: "
            "convert them to that shape (images in folders become color squares of --size)."
        )
    if whole.whole != agreed.whole:
        here, there = ("whole numbers" if w else "floats" for w in (whole.whole, agreed.whole))
        raise DataError(f"{who} has inputs of {here}; this federation agreed on {there}.")
    if whole.target_shape != agreed.target_shape or bool(whole.classes) != bool(agreed.classes):
        raise DataError(f"{who} has different targets than this federation agreed on: {whole}.")
    names = Shape.of(whole).names
    foreign = [n for n in names if n not in agreed.names]
    if foreign:
        raise DataError(
            f"{who} has the class {foreign[0]!r}; this federation agreed on {', '.join(agreed.names[:12])}: "
            "rename or remove it, or make a new site with all classes."
        )
    mine = replace(part, name=name)
    if names:
        number = torch.tensor([agreed.names.index(n) for n in names])
        pairs = [None if p is None else (p[0], _renumbered(p[1], number)) for p in (part.train, part.test, part.val)]
        mine = replace(mine, train=pairs[0], test=pairs[1], val=pairs[2])  # type: ignore[arg-type]
    return Federation([mine], agreed.classes, whole.name, agreed.names, mean=whole.mean, std=whole.std, augment=whole.augment)


def _renumbered(labels: Tensor, number: Tensor) -> Tensor:
    """Labels as the federation numbers them; negative labels in a sequence mean "no label" and stay."""
    return torch.where(labels < 0, labels, number[labels.long().clamp_min(0)])


def own_kind(data: Mapping[str, Any]) -> str:
    """The kind of a client's own data, given the site's: where the site names folders of several clients, one folder."""
    return str(data["name"]) if "path" in options(find("data", data["name"], DATA)) and data["name"] != "domains" else "folder"


def undealt(name: str) -> dict[str, Any]:
    """The options with which a data set stays whole: one client has all of it."""
    known = options(find("data", name, DATA))
    return {k: v for k, v in {"clients": 1, "split": "iid"}.items() if k in known}


def digest_of(schema: Schema | None) -> str:
    return "" if schema is None else hashlib.sha256(json.dumps(schema.to_json(), sort_keys=True).encode()).hexdigest()


def _plain(config: Config) -> dict[str, Any]:
    known = {f.name for f in fields(Config)}
    return {k: v for k, v in config.to_json().items() if k in known and k != "data"}
