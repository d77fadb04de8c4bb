"""Tables as federated data: one file with a client column, or a folder with one file per client."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedselect.core.errors import DataError, InputError
from fedselect.core.options import options
from fedselect.data.columns import Scale, Schema
from fedselect.data.division import Division
from fedselect.data.federation import ClientData, Federation
from fedselect.data.federation import Part as Pair
from fedselect.data.fitting import Targets, fit, merge
from fedselect.data.frame import Frame
from fedselect.data.frame_files import is_table, read_frame, tables_in
from fedselect.data.partition import Indices, Part

Names = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Columns:
    """The roles of a table's columns. Several names are a tuple, or a text separated by commas.

    `targets`: whether target columns are classes or numbers; by default numbers if they have fractions or are several, else
    classes. `categories`: columns to treat as categories although they contain numbers.
    """

    target: Names = None
    drop: Names = None
    categories: Names = None
    targets: Targets = "auto"
    scale: Scale = "federation"
    missing: Names = None


COLUMNS, DIVISION = Columns(), Division()


def table(
    path: str | None = None,
    client: str | None = None,
    columns: Columns = COLUMNS,
    division: Division = DIVISION,
    schema: str | None = None,
    *,
    seed: int = 0,
) -> Federation:
    """Your own table: --data table:FILE --client COLUMN --target COLUMN, or table:FOLDER with one file per client."""
    if not path:
        raise InputError(
            "give the path of the table: --data table:FILE, or table:FOLDER with one file per client (in Python: path=...)."
        )
    place = Path(path).expanduser()
    if not place.exists():
        raise InputError(f"there is no table {place}; check the path.")
    if client is None and is_table(place):
        raise InputError(
            f"{place} is one table; name its column of clients with --client COLUMN, or give a folder with one file per client."
        )
    if schema is not None:
        agreed = Schema.read(Path(schema).expanduser())
        check_options(agreed, {**vars(columns), **vars(division)})
        return fitted(read_clients(place, client, agreed.missing), agreed, place.stem)
    frames = read_clients(place, client, words(columns.missing))
    return federate(frames, place.stem, columns, replace(division, seed=seed))


def federate(
    frames: Mapping[str, Frame],
    name: str = "table",
    columns: Columns = COLUMNS,
    division: Division = DIVISION,
) -> Federation:
    """The federation of these clients' tables, by name, with the schema fitted on their training rows."""
    made, owns, parts = _fit(frames, columns, division)
    return _federation(name, frames, {who: made.of_client(own) for who, own in owns.items()}, parts)


def schema_of(
    path: Path, client: str | None, columns: Columns = COLUMNS, division: Division = DIVISION, *, seed: int = 0
) -> Schema:
    """The schema of the tables at a path, one client's or several clients'; a column without a value has no kind yet."""
    return _fit(read_clients(path, client, words(columns.missing)), columns, replace(division, seed=seed))[0]


def fitted(frames: Mapping[str, Frame], schema: Schema, name: str = "table") -> Federation:
    """The federation of these clients' tables with an agreed schema; rows that do not fit it are refused."""
    schema.check_whole()
    owns, parts = {}, {}
    for who, frame in frames.items():
        for column in (*(c.name for c in schema.columns), *schema.target, *schema.division.columns):
            frame.need(column)
        parts[who] = schema.division.parts(frame, who)
        schema.check_training(frame.take(parts[who].train))
        owns[who] = schema
        if schema.scale == "client":
            names = [c.name for c in schema.columns]
            kinds = [c.name for c in schema.columns if c.kind == "category"]
            targets: Targets = "classes" if schema.classes else "numbers"
            own = fit(
                frame, parts[who].train, names, schema.target,
                targets=targets, categories=kinds, scale="client", division=schema.division,
            )  # fmt: skip
            owns[who] = schema.of_client(own)
    return _federation(name, frames, owns, parts)


def read_clients(path: Path, client: str | None, missing: tuple[str, ...] = ()) -> dict[str, Frame]:
    """Tables by client: the files of a folder, the rows of a file by the column `client`, or the file's one client."""
    if path.is_dir() and not is_table(path):
        if client is not None:
            raise InputError(f"{path} is a folder, in which each file is one client; leave --client out, or give one file.")
        return {who: read_frame(file, missing) for who, file in tables_in(path).items()}
    frame = read_frame(path, missing)
    return {path.stem: frame} if client is None else by_client(frame, client)


def by_client(frame: Frame, client: str) -> dict[str, Frame]:
    """A table's rows by client, without the column that names the clients."""
    code, names = frame.codes(client)
    if (code < 0).any():
        raise DataError(
            f"{frame.source}: row {frame.row_where(code < 0)} has no {client}; say which client it is of, or remove it."
        )
    rest = replace(frame, columns={n: c for n, c in frame.columns.items() if n != client})
    return {who: rest.take(np.flatnonzero(code == i)) for i, who in enumerate(names)}


def check_options(schema: Schema, given: Mapping[str, Any]) -> None:
    """Refuse options that contradict an agreed schema."""
    for name, default in {n: o.default for group in (Columns, Division) for n, o in options(group).items()}.items():
        said = said_by(schema).get(name)
        if given.get(name, default) not in (default, said):
            here = f"it has {name} {said}" if said is not None else f"not {name}"
            raise InputError(f"the schema says what to do with the columns: {here}; leave --{name.replace('_', '-')} out.")


def said_by(schema: Schema) -> dict[str, Any]:
    """The options of `table` that a schema determines."""
    return {
        "target": ",".join(schema.target),
        "targets": "classes" if schema.classes else "auto" if schema.labels else "numbers",
        "scale": schema.scale,
        "missing": ",".join(schema.missing) or None,
        **{name: getattr(schema.division, name) for name in options(Division)},
    }


def words(names: str | Sequence[str] | None) -> tuple[str, ...]:
    """Names from a list, or from a text separated by commas."""
    if names is not None and not isinstance(names, str):
        return tuple(map(str, names))
    return tuple(dict.fromkeys(n.strip() for n in (names or "").split(",") if n.strip()))


def _fit(
    frames: Mapping[str, Frame], columns: Columns, division: Division
) -> tuple[Schema, dict[str, Schema], dict[str, Part]]:
    """The schema of all clients, each client's own schema, and the division of its rows."""
    first = next(iter(frames.values()))
    if first.split_column and not division.columns:
        division = replace(division, split_column=first.split_column)
    target = words(columns.target)
    if not target:
        raise InputError(f"name the column to predict: --target COLUMN; {first.source} has {', '.join(first.columns)}.")
    aside = (*target, *words(columns.drop), *division.columns, first.split_column)
    for frame in frames.values():
        for name in (*target, *words(columns.categories), *division.columns):
            frame.need(name)
    for name in words(columns.drop):
        if not any(name in frame.columns for frame in frames.values()):
            first.need(name)
    owns, parts = {}, {}
    for who, frame in frames.items():
        parts[who] = division.parts(frame, who)
        names = [n for n in frame.columns if n not in aside]
        owns[who] = fit(
            frame, parts[who].train, names, target,
            targets=columns.targets, categories=words(columns.categories), scale=columns.scale, division=division,
        )  # fmt: skip
    return merge(owns), owns, parts


def _federation(name: str, frames: Mapping[str, Frame], schemas: Mapping[str, Schema], parts: Mapping[str, Part]) -> Federation:
    clients = []
    for who, frame in frames.items():
        schema = schemas[who].check_whole()
        x, y = schema.features(frame), schema.targets(frame)

        def pick(rows: Indices, x: Any = x, y: Any = y) -> Pair:
            return x[rows], y[rows]

        part = parts[who]
        val = pick(part.val) if len(part.val) else None
        test = pick(part.test) if len(part.test) else None
        clients.append(ClientData(pick(part.train), test, val, who, schema=schema))
    classes = clients[0].schema.classes if clients[0].schema else ()
    return Federation(clients, len(classes), name, classes)
