"""Read a new client's data like that of the run, and check that it fits."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedselect.core.errors import DataError, InputError
from fedselect.core.names import client_number
from fedselect.core.options import build, find, options
from fedselect.data import DATA, ClientData, Federation, tables
from fedselect.data.division import Division
from fedselect.data.frame import Frame
from fedselect.network.home import fitting, undealt
from fedselect.network.shared import Shared
from fedselect.runs.config import at_path

WHO = "the client"


def one_client(shared: Shared, given: Any) -> Federation:
    """A federation of one client, from any of the accepted types."""
    agreed = shared.data
    if isinstance(given, Federation):
        if len(given.clients) != 1:
            raise InputError(f"this data has {len(given.clients)} clients; pass one of them: data.clients[0].")
        whole = given
    else:
        if not isinstance(given, ClientData):
            given = _client(shared, given)
        whole = Federation([given], agreed.classes, class_names=agreed.names)
    look = shared.look
    mine = fitting(whole, WHO, agreed, name=whole.clients[0].name or "new")
    if look.kind is None:  # a deployed run, where only clients know
        return mine
    found = str(mine.clients[0].train[0].dtype).removeprefix("torch.")
    if (found == "uint8") != (look.kind == "uint8"):
        raise DataError(f"{WHO} has inputs of type {found}; the run trained on {look.kind}.")
    return replace(mine, mean=look.mean, std=look.std, augment=look.augment, pools={})


def _client(shared: Shared, given: Any) -> ClientData:
    if isinstance(given, tuple) and len(given) == 2:
        x, y = given
        return ClientData((x, _numbered(y, shared.data.names)))
    if shared.data.schema is not None:
        return _rows(shared, {"new": Frame.of(given, "the table", shared.data.schema.missing)}, 0.0, 0).clients[0]
    raise InputError(f"the client must be fs.ClientData or a pair (inputs, targets), not a {type(given).__name__}.")


def _numbered(y: Any, names: tuple[str, ...]) -> Any:
    """Class names as the class numbers of the run."""
    if not names or isinstance(y, torch.Tensor) or np.asarray(y).dtype.kind not in "UO":
        return y
    said = [str(v) for v in np.asarray(y).tolist()]
    if foreign := [v for v in said if v not in names]:
        raise DataError(f"{WHO} has the class {foreign[0]!r}; the run has {', '.join(names[:12])}: rename or remove it.")
    return torch.tensor([names.index(v) for v in said], dtype=torch.int64)


def read(shared: Shared, name: str, client: str | None, seed: int, flags: Mapping[str, str]) -> Federation:
    """Read what --data names: a folder, a table, or one client of a known data set."""
    asked = {"path": "", **at_path({"name": name})}
    config = shared.about["config"] or {"data": {"name": ""}}
    known = options(find("data", asked["name"], DATA))
    given = {k.removeprefix("data.").replace("-", "_"): v for k, v in flags.items()}
    if asked["name"] == "table":
        whole = _table(shared, asked["path"], given, seed)
    else:
        for option in given:
            if option not in known:
                raise InputError(f"--data {asked['name']} has no option {option!r}; it has {', '.join(known)}.")
        same = config["data"] if asked["name"] == config["data"]["name"] and not asked["path"] else {}
        sized = {"size": shared.data.shape[-1]} if asked["path"] and "size" in known else {}
        own = {**undealt(asked["name"]), "path": asked["path"]} if asked["path"] else {}
        table = {k: v for k, v in {**same, **sized, **own, **given}.items() if k != "name"}
        whole = build("data", asked["name"], DATA, {**table, "seed": seed})
    return one_client(shared, replace(whole, clients=[whole.clients[_which(whole, client)]], pools={}))


def few(data: Federation, samples: int, seed: int) -> Federation:
    """A random subset of the client's training samples."""
    client = data.clients[0]
    x, y = client.train
    if not 1 <= samples <= len(y):
        raise InputError(f"the client has {len(y)} training samples; --samples must be between 1 and {len(y)}, not {samples}.")
    some = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[:samples].sort().values
    return replace(data, clients=[replace(client, train=(x[some], y[some]), val=None)], pools={})


def _which(whole: Federation, client: str | None) -> int:
    count = len(whole.clients)
    if client is None and count > 1:
        raise InputError(f"this data has {count} clients; choose one with --client, by its name or a number, 0 to {count - 1}.")
    return 0 if client is None else client_number(client, whole.names)


def _table(shared: Shared, path: str, given: Mapping[str, str], seed: int) -> Federation:
    schema = shared.data.schema
    if schema is None:
        raise InputError(
            "the run was not trained on a table, so --data cannot be a table; pass data of the same kind as the run's."
        )
    if not path:
        raise InputError("the table is missing; type --data table:FILE.")
    if extra := [k for k in given if k not in ("test_share", "client")]:
        raise InputError(
            f"a table is read with the schema of the run, so {extra[0]!r} is not an option here; the only option is test_share."
        )
    try:
        share = float(given.get("test_share", 0))
    except ValueError:
        raise InputError(f"--test-share must be a number from 0 to 1, not {given['test_share']!r}.") from None
    return _rows(shared, tables.read_clients(Path(path).expanduser(), None, schema.missing), share, seed)


def _rows(shared: Shared, frames: Mapping[str, Frame], test_share: float, seed: int) -> Federation:
    """Raw rows read with the schema of the run. By default all are training data."""
    assert shared.data.schema is not None
    return tables.fitted(frames, replace(shared.data.schema, division=Division(test_share, seed=seed)))
