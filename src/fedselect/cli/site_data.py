"""What a site says about its clients' data, and what a client says about its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedselect.cli.flags import configure
from fedselect.core.errors import InputError
from fedselect.core.options import find, options

if TYPE_CHECKING:
    from fedselect.data import Federation
    from fedselect.network.plan import Shape

FOLDER = ("size", "skip_unreadable", "train", "test", "val", "augment")
"""Options that all clients' folders share."""


def alike(data: dict[str, Any], name: str) -> dict[str, Any]:
    """The options of the site's data that also apply to the client's own: all of them for data of the same kind."""
    if name == data["name"]:
        return data
    return {k: data[k] for k in FOLDER if k in data} if (name, data["name"]) == ("folder", "domains") else {}


def at_home(data: dict[str, Any]) -> dict[str, Any]:
    """The options of a client's own data, with an absolute path: its processes run in another folder.

    For a table, only its path and client column: the run supplies the rest with its schema.
    """
    own = {k: v for k, v in data.items() if v is not None and (data["name"] != "table" or k in ("name", "path", "client"))}
    return own | ({"path": str(Path(own["path"]).expanduser().resolve())} if "path" in own else {})


def dealt(data: str, given: dict[str, str], clients: int) -> dict[str, str]:
    """Add the number of clients to the data's flags, unless the data has clients of its own."""
    from fedselect.data import DATA
    from fedselect.runs.config import at_path

    name = at_path({"name": data})["name"]
    return {**given, "clients": str(clients)} if "clients" in options(find("data", name, DATA)) else given


def shared(data: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """The options of a site's data without paths on this machine. For tables, those in the schema."""
    from fedselect.data.tables import said_by

    if shape.schema is not None:
        return {"name": data["name"], **{k: v for k, v in said_by(shape.schema).items() if v is not None}}
    return {k: v for k, v in data.items() if k not in ("path", "data_dir") and v is not None}


def agreed(
    data: str, classes: str | None, shape: str | None, given: dict[str, str], clients: int
) -> tuple[dict[str, Any], Shape, tuple[str, ...]]:
    """The options, shape and client names of the data, read from the data itself or from --classes and --shape."""
    from fedselect.network.plan import Shape

    if classes is None and shape is None:
        config = configure({}, None, data, None, dealt(data, given, clients))
        whole = config.make_data()
        return shared(config.data, found := Shape.of(whole)), found, named(whole)
    if classes is None or shape is None:
        raise InputError("if clients bring their own data, pass both --classes and --shape.")
    names = tuple(n.strip() for n in classes.split(",") if n.strip())
    sides = shape.split(",")
    if len(set(names)) < max(2, len(names)) or not all(s.strip().isdecimal() and int(s) > 0 for s in sides):
        raise InputError("--classes takes at least two different names and --shape whole numbers, both separated by commas.")
    sizes = tuple(map(int, sides))
    return {"name": "folder", **({"size": sizes[-1]} if len(sizes) == 3 else {})}, Shape(sizes, names), ()


def named(data: Federation) -> tuple[str, ...]:
    """The names of the clients, or nothing if they are only numbered."""
    names = tuple(client.name or str(i) for i, client in enumerate(data.clients))
    return () if names == tuple(map(str, range(len(names)))) or len(set(names)) < len(names) else names


def chance(data: Federation) -> float | None:
    """The mean accuracy of always predicting a client's most frequent training class. None for other tasks."""
    from fedselect.tasks import suited

    if suited(data) != "classification":
        return None
    right = [(c.test[1] == c.train[1].mode().values).float().mean() for c in data.clients if c.test is not None]
    return float(sum(right) / len(right))
