"""Home: what a client knows of itself, and its own data as the federation agreed on it."""

import inspect
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedselect.core.errors import DataError, InputError
from fedselect.core.options import find, options
from fedselect.data import DATA, Federation, tables
from fedselect.data.sets import one_domain
from fedselect.network.plan import Plan, Scalars, Shape, check_deployed, digest_of
from fedselect.private.settings import Private, as_private
from fedselect.runs.config import Config
from fedselect.secret.keys import Identity
from fedselect.simulate.keeping import keeps
from fedselect.simulate.protect import check_together


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


def _plain(config: Config) -> dict[str, Any]:
    known = {f.name for f in fields(Config)}
    return {k: v for k, v in config.to_json().items() if k in known and k != "data"}
