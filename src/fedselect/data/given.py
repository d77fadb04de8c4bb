"""Federations from arrays with a client per row, from a DataFrame, or from torch datasets by client."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from fedselect.data.pooled import Pooled, Rows, own_mapping, release
from fedselect.data.tables import Columns, by_client, federate, words
from fedselect.models.inputs import each

PART_NAMES = ("train", "test", "val")


def from_arrays(x: Any, y: Any, client: Any, division: Division, split: Any, about: About) -> Federation:
    """One client per value of `client`, its rows divided by share or by `split`."""
    y, names = _numbered(y)
    mapped = isinstance(x, np.memmap)
    x, y = own_mapping(x), own_mapping(y)
    inputs, targets = arrays.inputs(x, "x"), arrays.targets(y, "y")
    whose = _whose(client)
    told = None if split is None else _told(split)
    lengths = {"y": _length(targets), "client": len(whose.code), **({} if told is None else {"split": len(told)})}
    each(inputs, lambda v, name: _check_lengths(f"x, {name}," if name else "x", _length(v), lengths))
    order = whose.code.argsort(kind="stable")
    parts = _drawn(whose, order, division) if told is None else _as_told(whose, order, told)
    class_names = tuple(about.get("class_names", names))
    given: Any = {"name": "arrays", **about, "class_names": class_names}
    given["classes"] = about.get("classes", len(class_names))
    if mapped:
        rows = {part: Rows.of(index, n, len(order)) for part, (index, n) in parts.items()}
        data = Federation(Pooled(inputs, targets, whose.names, rows), **given)
        for array in (x, y):
            release(array)
        return data
    clients: list[dict[str, Any]] = [{} for _ in whose.names]
    for part, (index, n) in parts.items():
        for own, rows_ in zip(clients, np.split(index, n.cumsum()[:-1]), strict=True):
            own |= {part: (arrays.rows(inputs, rows_), targets[rows_])} if len(rows_) else {}
    return Federation([ClientData(**own, name=str(n)) for own, n in zip(clients, whose.names, strict=True)], **given)


@dataclass(frozen=True)
class Whose:
    """The clients' names in order, and the number of the client of each row."""

    names: NDArray[Any]
    code: NDArray[np.int64]

    @property
    def counts(self) -> NDArray[np.int64]:
        return np.bincount(self.code, minlength=len(self.names))


Parts = dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]]
"""For each part, the rows of one client after another, and how many each client has."""


def _drawn(whose: Whose, order: NDArray[np.int64], division: Division) -> Parts:
    """Rows divided by random shares. The draw depends on how many rows a client has, so it is made once for each number."""
    counts = whose.counts
    first, clients = counts.cumsum() - counts, len(counts)
    sizes, one = np.unique(counts, return_index=True)
    drawn = {size: division.drawn(size, str(name)) for size, name in zip(sizes.tolist(), whose.names[one], strict=True)}
    parts: Parts = {}
    for part in PART_NAMES:
        n = np.zeros(clients, np.int64)
        for count, rows in drawn.items():
            n[counts == count] = len(getattr(rows, part))
        start, index = n.cumsum() - n, np.empty(n.sum(), np.int64)
        for count, rows in drawn.items():
            mine, which = np.flatnonzero(counts == count)[:, None], getattr(rows, part)
            index[start[mine] + np.arange(len(which))] = order[first[mine] + which]
        if len(index):
            parts[part] = index, n
    return parts


def _as_told(whose: Whose, order: NDArray[np.int64], told: NDArray[Any]) -> Parts:
    """Rows divided by `split`."""
    parts: Parts = {}
    for part in PART_NAMES:
        index = order[told[order] == part]
        if len(index):
            parts[part] = index, np.bincount(whose.code[index], minlength=len(whose.names))
    trained = parts["train"][1] if "train" in parts else np.zeros(len(whose.names))
    if not trained.all():
        lost = whose.names[int(np.argmin(trained > 0))]
        raise DataError(f"client {lost} has no rows whose split is train; mark some, or leave it out.")
    return parts


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


def _whose(client: Any) -> Whose:
    """The client of each row."""
    found = arrays.array(client, "client", "ids")
    if found.ndim != 1:
        raise DataError(f"client has the shape {found.shape}; give one id for each row.")
    if found.dtype.kind in "iu":  # many numbers are sorted faster than many texts
        return Whose(*np.unique(found, return_inverse=True))
    lost = [i for i, v in enumerate(found.tolist()) if v is None or v != v or v == "" or str(v) in ("<NA>", "NaT")]
    if lost:
        raise DataError(f"row {lost[0]} has no client; say whose it is, or remove it.")
    whole = found.dtype.kind == "f" and bool((found == found.round()).all())
    names, code = np.unique([str(v) for v in (found.astype(np.int64) if whole else found).tolist()], return_inverse=True)
    ordered = in_order(names.tolist())
    place = {name: i for i, name in enumerate(ordered)}
    return Whose(np.array(ordered), np.array([place[n] for n in names.tolist()], np.int64)[code])


def _told(split: Any) -> NDArray[Any]:
    """train, val or test for each row."""
    found = arrays.array(split, "split", "parts")
    values, at = np.unique(found.astype(str), return_inverse=True)
    parts = np.array([PARTS.get(v.lower(), "") for v in values.tolist()] or [""])[at]
    if (parts == "").any():
        row = int(np.argmax(parts == ""))
        raise DataError(f"split says {str(found[row])!r} in row {row}; it must say train, val or test.")
    return parts


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
