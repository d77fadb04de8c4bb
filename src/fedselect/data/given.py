"""Federations from arrays with a client per row, from a DataFrame, or from torch datasets by client."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedselect.core.errors import DataError, InputError
from fedselect.data import arrays
from fedselect.data.division import Division
from fedselect.data.federation import About, ClientData, Federation
from fedselect.data.frame import Frame, in_order
from fedselect.data.frame_files import PARTS
from fedselect.data.partition import Part
from fedselect.data.tables import Columns, by_client, federate, words
from fedselect.models.inputs import each


def from_arrays(x: Any, y: Any, client: Any, division: Division, split: Any, about: About) -> Federation:
    """One client per value of `client`, its rows divided by share or by `split`."""
    y, names = _numbered(y)
    inputs, targets = arrays.inputs(x, "x"), arrays.targets(y, "y")
    whose = _ids(client)
    told = None if split is None else _told(split)
    lengths = {"y": _length(targets), "client": len(whose), **({} if told is None else {"split": len(told)})}
    each(inputs, lambda v, name: _check_lengths(f"x, {name}," if name else "x", _length(v), lengths))
    clients = []
    for one in in_order(sorted(set(whose.tolist()))):
        mine = np.flatnonzero(whose == one)
        part = division.drawn(len(mine), one) if told is None else _parts(told[mine], one)
        found = {n: mine[rows] for n in ("train", "test", "val") if len(rows := getattr(part, n))}
        pairs: dict[str, Any] = {n: (arrays.rows(inputs, rows), targets[rows]) for n, rows in found.items()}
        clients.append(ClientData(**pairs, name=one))
    class_names = tuple(about.get("class_names", names))
    given: Any = {"name": "arrays", **about, "class_names": class_names}
    return Federation(clients, **{**given, "classes": about.get("classes", len(class_names))})


def from_frame(frame: Any, client: str, columns: Columns, division: Division, name: str) -> Federation:
    """The rows of a table by the column that names the clients."""
    if isinstance(frame, str | Path):
        raise DataError(f"from_frame takes a table in memory; a file is read by fs.load('table', path={str(frame)!r}, ...).")
    coded = [str(n) for n, kind in getattr(frame, "dtypes", {}).items() if str(kind) == "category"]
    aside = {client, *words(columns.target), *words(columns.drop), *division.columns}
    columns = replace(columns, categories=(*words(columns.categories), *(n for n in coded if n not in aside)))
    try:
        table = Frame.of(frame, "the table", words(columns.missing))
        table.need(client)
        return federate(by_client(table, client), name, columns, division)
    except (DataError, InputError) as e:
        raise type(e)(_as_options(str(e))) from None


def from_datasets(train: Any, test: Any, val: Any, about: About) -> Federation:
    """One client per dataset."""
    if arrays.is_dataset(train):
        raise DataError(
            "give a dataset for each client, as a list or a dict by name; one for all is divided with torch.utils.data.Subset."
        )
    parts = {"train": _by_name(train, "train"), "test": _by_name(test, "test"), "val": _by_name(val, "val")}
    for what in ("test", "val"):
        for one in parts[what]:
            if one not in parts["train"]:
                raise DataError(f"{what} has a client {one} that train does not have; there are {', '.join(parts['train'])}.")
        if isinstance(given := {"test": test, "val": val}[what], list | tuple) and len(given) != len(parts["train"]):
            raise DataError(
                f"train has {len(parts['train'])} clients and {what} {len(given)}; give one dataset for each client."
            )
    clients = [
        ClientData(**{what: by[one] for what, by in parts.items() if one in by}, name=one) for one in parts["train"]
    ]  # fmt: skip
    given_: Any = {"name": "datasets", **about, "class_names": tuple(about.get("class_names", ()))}
    return Federation(clients, **given_)


def _by_name(given: Any, what: str) -> dict[str, Any]:
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return {str(one): dataset for one, dataset in given.items()}
    if not isinstance(given, list | tuple):
        raise DataError(
            f"{what} is a list of datasets, one for each client, or a dict of them by name, not a {type(given).__name__}."
        )
    return {str(i): dataset for i, dataset in enumerate(given)}


def _numbered(y: Any) -> tuple[Any, tuple[str, ...]]:
    """Text classes as numbers, with their names; other targets unchanged."""
    found = arrays.array(y, "y", "targets")
    if found.ndim == 2 and found.shape[1] == 1 and found.dtype.kind != "f":  # a column
        found = found[:, 0]
    if not arrays.is_text(found):
        return found if not isinstance(y, Tensor) else y.view(found.shape), ()
    if found.ndim != 1:
        raise DataError(f"y has texts of shape {found.shape}; give one class for each row.")
    if lost := [i for i, v in enumerate(found.tolist()) if not isinstance(v, str | bytes)]:
        raise DataError(f"y is {found[lost[0]]!r} in row {lost[0]} and a text elsewhere; fill it in or remove the row.")
    names, number = np.unique(found.astype(str), return_inverse=True)
    return number, tuple(names.tolist())


def _ids(client: Any) -> NDArray[Any]:
    """The client of each row, as text."""
    found = arrays.array(client, "client", "ids")
    if found.ndim != 1:
        raise DataError(f"client has the shape {found.shape}; give one id for each row.")
    lost = [i for i, v in enumerate(found.tolist()) if v is None or v != v or v == "" or str(v) in ("<NA>", "NaT")]
    if lost:
        raise DataError(f"row {lost[0]} has no client; say whose it is, or remove it.")
    whole = found.dtype.kind == "f" and bool((found == found.round()).all())
    return np.array([str(v) for v in (found.astype(np.int64) if whole else found).tolist()])


def _told(split: Any) -> NDArray[Any]:
    """train, val or test for each row."""
    found = arrays.array(split, "split", "parts")
    parts = np.array([PARTS.get(str(v).lower(), "") for v in found.tolist()])
    if (parts == "").any():
        row = int(np.argmax(parts == ""))
        raise DataError(f"split says {str(found[row])!r} in row {row}; it must say train, val or test.")
    return parts


def _parts(told: NDArray[Any], client: str) -> Part:
    found = Part(*(np.flatnonzero(told == p) for p in ("train", "test", "val")))
    if not len(found.train):
        raise DataError(f"client {client} has no rows whose split is train; mark some, or leave it out.")
    return found


def _length(v: Any) -> int:
    return len(v) if v.ndim else 0


def _check_lengths(what: str, rows: int, others: Mapping[str, int]) -> None:
    for other, length in others.items():
        if length != rows:
            raise DataError(f"{what} has {rows} rows and {other} has {length}; give each of them one row a sample.")


def _as_options(said: str) -> str:
    """Rewrite flags in a message as arguments: --drop id becomes drop='id'."""
    return re.sub(
        r"--([a-z][a-z-]*) (?:'([^']*)'|([^\s,;.)]+))", lambda m: f"{m[1].replace('-', '_')}={(m[2] or m[3])!r}", said
    )
