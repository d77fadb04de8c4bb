"""Schemas from data: fitted on each client's training rows, then merged.

Counts, means and variances of several clients add up, and names of categories and classes are combined. So clients exchange
means and variances, but no rows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

import numpy as np

from fedselect.core.errors import DataError, InputError
from fedselect.data.columns import Column, Scale, Schema
from fedselect.data.division import Division
from fedselect.data.frame import Frame, Kind, in_order
from fedselect.data.partition import Indices

MOST = 100  # categories of a column, or classes, that need not be asked for by name
Targets = Literal["auto", "classes", "numbers"]


def fit(
    frame: Frame,
    training: Indices,
    columns: Sequence[str],
    target: Sequence[str],
    *,
    targets: Targets = "auto",
    categories: Sequence[str] = (),
    scale: Scale = "federation",
    division: Division,
) -> Schema:
    """The schema of one client's table: what its training rows say. Kinds and classes are those of all its rows."""
    known = frame.take(training)
    kinds: dict[str, Kind | None] = {n: "category" if n in categories else frame.kind(n) for n in columns}
    return Schema(
        tuple(_fitted(known, name, kinds[name], name in categories) for name in columns),
        tuple(target),
        _classes(frame, target, targets),
        len(known),
        scale,
        frame.missing,
        division,
        targets == "auto" and len(target) > 1 and all(_yes_or_no(frame, name) for name in target),
    )


def merge(schemas: Mapping[str, Schema]) -> Schema:
    """Merge the clients' schemas, by name, into one; its numbers do not depend on the order of clients."""
    (first, one), *others = schemas.items()
    for name, other in others:
        _check_alike(first, one, name, other)
    columns = []
    for column in one.columns:
        found = {who: next(c for c in s.columns if c.name == column.name) for who, s in schemas.items()}
        columns.append(_merged(found))
    classes = tuple(in_order(list({c for s in schemas.values() for c in s.classes})))
    merged = replace(
        one,
        columns=tuple(columns),
        classes=classes,
        rows=sum(s.rows for s in schemas.values()),
        labels=all(s.labels for s in schemas.values()),
    )
    return merged if one.scale == "federation" else merged.without_statistics()


def _fitted(frame: Frame, name: str, kind: Kind | None, told: bool) -> Column:
    gaps = frame.gaps(name)
    seen = Column(name, kind, count=int((~gaps).sum()), gaps=bool(gaps.any()))
    if kind == "category":
        _, names = frame.codes(name)
        if not told and (len(names) > MOST or 2 * len(names) > seen.count > 20):
            raise DataError(
                f"{frame.source}: column {name} has {len(names)} different names in {seen.count} training rows; leave it out "
                f"with --drop {name}, or keep it with --categories {name}."
            )
        return replace(seen, categories=names)
    if kind == "number" and seen.count:
        values = frame.numbers(name)[~gaps]
        mean = float(values.mean())
        return replace(seen, mean=mean, variance=float(((values - mean) ** 2).mean()))
    return seen


def _merged(found: Mapping[str, Column]) -> Column:
    """Merge one column of all clients. Means are weighted by counts; variances within and between clients add up."""
    kinds = {c.kind: who for who, c in found.items() if c.kind is not None}
    name = next(iter(found.values())).name
    if len(kinds) > 1:
        raise DataError(
            f"column {name} holds numbers at client {kinds['number']} and names at client {kinds['category']}; mend one of "
            f"them, or take both as names: --categories {name}."
        )
    kind = next(iter(kinds), None)
    seen = [c for c in found.values() if c.count]
    count = sum(c.count for c in seen)
    merged = Column(name, kind, count=count, gaps=any(c.gaps for c in found.values()))
    if kind == "category":
        return replace(merged, categories=tuple(in_order(list({n for c in seen for n in c.categories}))))
    told = [(c.count, c.mean, c.variance) for c in seen if c.mean is not None and c.variance is not None]
    if not told:
        return merged
    mean = math.fsum(n * m for n, m, _ in told) / count
    return replace(merged, mean=mean, variance=math.fsum(n * (v + (m - mean) ** 2) for n, m, v in told) / count)


def _check_alike(first: str, one: Schema, name: str, other: Schema) -> None:
    """Refuse clients whose tables cannot be trained on together."""
    for a, b, x, y in ((first, name, one, other), (name, first, other, one)):
        lacking = [c.name for c in x.columns if c.name not in {d.name for d in y.columns}]
        if lacking:
            raise DataError(
                f"client {b} lacks the column {lacking[0]!r} that client {a} has; add it, or leave it out: --drop {lacking[0]}."
            )
    if one.target != other.target or bool(one.classes) != bool(other.classes):
        said = [f"{' and '.join(s.target)} as {'classes' if s.classes else 'numbers'}" for s in (one, other)]
        raise DataError(
            f"client {first} has the target {said[0]}, client {name} {said[1]}; say which: --targets classes or numbers."
        )
    for what, a in _options(one).items():
        if a != (b := _options(other)[what]):
            raise DataError(f"client {first} has {what} {a}, client {name} {b}; make both schemas with the same options.")


def _options(schema: Schema) -> dict[str, Any]:
    """The options that must be the same for all clients."""
    return {"scale": schema.scale, "missing": ",".join(schema.missing), **asdict(schema.division)}


def _yes_or_no(frame: Frame, name: str) -> bool:
    """Whether a column has only 0, 1 and gaps."""
    values = frame.numbers(name)
    return bool((np.isnan(values) | (values == 0) | (values == 1)).all())


def _classes(frame: Frame, target: Sequence[str], targets: Targets) -> tuple[str, ...]:
    """The names of a target's classes; empty if its values are numbers."""
    for name in target:
        if frame.gaps(name).all():
            raise DataError(f"{frame.source}: no row has a {name}; fill it in.")
    if len(target) > 1:
        if targets == "classes":
            raise InputError(f"{', '.join(target)} are several targets, which are numbers; name one for classes.")
        return ()
    (name,) = target
    if targets == "numbers" or (targets == "auto" and frame.kind(name) == "number" and not frame.whole(name)):
        return ()
    _, names = frame.codes(name)
    if targets == "auto" and len(names) > MOST:
        raise DataError(
            f"{frame.source}: {name} has {len(names)} different values; say whether they are numbers or classes, such as "
            "--targets numbers."
        )
    return names
