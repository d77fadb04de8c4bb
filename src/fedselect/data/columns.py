"""Schema: what the columns of a table are, and how its raw rows become a model's inputs and targets."""

import dataclasses
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedselect.core.errors import DataError, InputError, RunError
from fedselect.core.files import read_json, write_json
from fedselect.data.division import Division
from fedselect.data.frame import Frame, Kind
from fedselect.data.frame_files import read_frame

Scale = Literal["federation", "client"]


@dataclass(frozen=True)
class Column:
    """One input column. `kind` is None if no row has a value; `gaps`: whether any training row lacks a value.

    `mean` and `variance` of numbers are over the training rows of all clients, or of one; None if unknown.
    """

    name: str
    kind: Kind | None
    categories: tuple[str, ...] = ()
    count: int = 0  # training rows with a value
    gaps: bool = False
    mean: float | None = None
    variance: float | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the model inputs made from this column."""
        if self.kind == "category":
            return tuple(f"{self.name}={c}" for c in self.categories)
        return (self.name, f"{self.name} missing") if self.gaps else (self.name,)


@dataclass(frozen=True)
class Schema:
    """The columns and targets of a table and the division of its rows: all that is needed to turn raw rows into inputs.

    A number becomes (number - mean) / standard deviation; a gap becomes 0, the mean, with an extra input that marks it if
    training rows had gaps. A category is one-hot; a gap, or a category that no training row has, is all zeros.
    """

    columns: tuple[Column, ...]
    target: tuple[str, ...]
    classes: tuple[str, ...]  # names; empty if targets are numbers
    rows: int  # training rows it was fitted on
    scale: Scale = "federation"  # means and variances of all clients together, or of each client
    missing: tuple[str, ...] = ()
    division: Division = Division()  # noqa: RUF009  # frozen
    labels: bool = False  # several targets that are all 0 or 1: labels that a row has or not

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the model's inputs."""
        return tuple(name for column in self.columns for name in column.inputs)

    def frame(self, rows: Any) -> Frame:
        """A table as this schema reads it: from a file, a pandas DataFrame, or a mapping of names to columns."""
        if isinstance(rows, str | Path):
            return read_frame(Path(rows).expanduser(), self.missing)
        return rows if isinstance(rows, Frame) else Frame.of(rows, missing=self.missing)

    def features(self, rows: Any) -> Tensor:
        """Raw rows as model inputs, float32 (N, inputs); columns that are not in the schema are ignored."""
        frame, at = self.frame(rows), 0
        x = np.zeros((len(frame), len(self.inputs)), np.float32)
        for column in self.columns:
            put = _categories if column.kind == "category" else _numbers
            put(column, frame, x[:, at : at + len(column.inputs)])
            at += len(column.inputs)
        return torch.from_numpy(x)

    def numbers(self, rows: Any) -> Tensor:
        """Raw rows with one number per column, float64 (N, columns): a category is its index in the column's list.

        Gaps, and categories that no training row has, are NaN. An exported graph takes this as its input.
        """
        frame = self.frame(rows)
        x = np.full((len(frame), len(self.columns)), np.nan)
        for at, column in enumerate(self.columns):
            if column.kind == "category":
                code, names = frame.codes(column.name)
                for i, name in enumerate(names):
                    if _known(column, frame, code == i, name):
                        x[code == i, at] = column.categories.index(name)
            else:
                x[:, at] = frame.numbers(column.name)
        return torch.from_numpy(x)

    def numbers_of(self, features: Tensor) -> Tensor:
        """Numbers that give these features; an unmarked gap becomes the mean."""
        out, at = torch.full((len(features), len(self.columns)), torch.nan, dtype=torch.float64), 0
        for i, column in enumerate(self.columns):
            own, at = features[:, at : at + len(column.inputs)].double(), at + len(column.inputs)
            if column.kind == "category":
                out[:, i] = torch.where(own.amax(1) > 0, own.argmax(1).double(), torch.nan)
            elif column.mean is not None and column.variance is not None:
                value = own[:, 0] * (math.sqrt(column.variance) or 1.0) + column.mean
                out[:, i] = torch.where(own[:, 1] > 0, torch.nan, value) if column.gaps else value
        return out

    def targets(self, rows: Any) -> Tensor:
        """Class numbers, int64 (N,), or numbers, float32 (N,), or (N, d) for several columns."""
        frame = self.frame(rows)
        for name in self.target:
            if (gaps := frame.gaps(name)).any():
                raise DataError(
                    f"{frame.source}: {int(gaps.sum())} of {len(frame)} rows have no {name}, the first is row "
                    f"{frame.row_where(gaps)}; fill it in or remove them."
                )
        if not self.classes:
            for name in self.target if self.labels else ():
                values = frame.numbers(name)
                if (other := ~np.isin(values, (0, 1))).any():
                    row, said = frame.row_where(other), f"{values[other][0]:g}"
                    raise DataError(f"{frame.source}: {name} is {said} in row {row}, but the schema has 0 or 1; correct it.")
            found = torch.from_numpy(np.stack([frame.numbers(n) for n in self.target], 1).astype(np.float32))
            return found if len(self.target) > 1 else found[:, 0]
        code, names = frame.codes(self.target[0])
        for i, name in enumerate(names):
            if name not in self.classes:
                raise DataError(
                    f"{frame.source}: {self.target[0]} is {name!r} in row {frame.row_where(code == i)}; the agreed classes are "
                    f"{', '.join(self.classes[:12])}."
                )
        return torch.from_numpy(np.array([self.classes.index(n) for n in names], np.int64)[code])

    def check_training(self, frame: Frame) -> None:
        """Refuse training rows with a category that the schema lacks: it was made from other rows."""
        for column in (c for c in self.columns if c.kind == "category"):
            code, names = frame.codes(column.name)
            for i, name in enumerate(names):
                if name not in column.categories:
                    raise DataError(
                        f"{frame.source}: column {column.name} is {name!r} in row {frame.row_where(code == i)}, and the schema "
                        f"knows {', '.join(column.categories[:12])}; correct it, or make the schema again with this table."
                    )

    def of_client(self, own: "Schema") -> "Schema":
        """The schema that a client uses; `own` was fitted on its own training rows."""
        if self.scale == "federation":
            return self
        mine = {c.name: c for c in own.columns}
        return replace(
            self,
            columns=tuple(replace(c, mean=mine[c.name].mean, variance=mine[c.name].variance) for c in self.columns),
        )

    def without_statistics(self) -> "Schema":
        """This schema without means and variances."""
        return replace(self, columns=tuple(replace(c, mean=None, variance=None) for c in self.columns))

    def check_whole(self) -> "Schema":
        """Refuse a column without any value, and a table without columns."""
        for column in self.columns:
            if column.kind is None or not column.count:
                raise DataError(f"column {column.name} has no value in any training row; leave it out: --drop {column.name}.")
        if not self.columns:
            raise DataError(f"no column except {', '.join(self.target)} is left to train on; drop fewer columns.")
        return self

    def to_json(self) -> dict[str, Any]:
        said = dataclasses.asdict(self)
        return said if self.labels else {k: v for k, v in said.items() if k != "labels"}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> "Schema":
        """A schema from a file or a message, fully checked."""
        try:
            columns = tuple(_column(c) for c in said["columns"])
            found = cls(
                columns,
                _texts(said["target"]),
                _texts(said["classes"]),
                int(said["rows"]),
                said["scale"],
                _texts(said["missing"]),
                _division(said["division"]),
                bool(said.get("labels", False)),  # files of older versions do not say
            )
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise InputError(
                f"this is not a table schema ({type(e).__name__}: {e}); make one with: fedselect data schema."
            ) from None
        names = [*(c.name for c in columns), *found.target]
        if not found.target or len(set(names)) < len(names) or found.scale not in get_args(Scale):
            raise InputError("this table schema names a column twice, or no target; make it again with: fedselect data schema.")
        return found

    @classmethod
    def read(cls, path: str | Path) -> "Schema":
        """A schema from a file that `fedselect data schema`, `fedselect data merge` or `fedselect export` wrote."""
        try:
            return cls.from_json(read_json(Path(path), "give a file that `fedselect data schema` made."))
        except (InputError, RunError) as e:
            raise InputError(f"{e}" if str(path) in str(e) else f"{path}: {e}") from None

    def write(self, path: Path) -> None:
        write_json(path, self.to_json())


def _numbers(column: Column, frame: Frame, x: NDArray[np.float32]) -> None:
    values = frame.numbers(column.name)
    gaps = np.isnan(values)
    if column.mean is None or column.variance is None:  # this client had no value to train on, so it knows no scale
        gaps[:] = True
    else:
        x[:, 0] = np.where(gaps, 0, (values - column.mean) / (math.sqrt(column.variance) or 1.0))
    if column.gaps:
        x[:, 1] = gaps


def _categories(column: Column, frame: Frame, x: NDArray[np.float32]) -> None:
    code, names = frame.codes(column.name)
    for i, name in enumerate(names):
        if _known(column, frame, code == i, name):
            x[code == i, column.categories.index(name)] = 1


def _known(column: Column, frame: Frame, where: NDArray[np.bool_], name: str) -> bool:
    """Whether training rows had this category; warns if not."""
    if name not in column.categories:
        warnings.warn(
            f"{frame.source}: column {column.name} is {name!r} in {int(where.sum())} row(s) but in no training row; "
            "it is treated as missing.",
            stacklevel=5,
        )
    return name in column.categories


def _column(said: Mapping[str, Any]) -> Column:
    found = Column(**{**said, "categories": _texts(said["categories"])})
    numbers = [v for v in (found.mean, found.variance) if v is not None]
    if (
        not isinstance(found.name, str)
        or found.kind not in (*get_args(Kind), None)
        or type(found.count) is not int
        or type(found.gaps) is not bool
        or not all(type(v) in (int, float) and math.isfinite(v) for v in numbers)
        or (found.variance is not None and found.variance < 0)
    ):
        raise ValueError(f"column {found.name!r} cannot be used")
    return found


def _division(said: Mapping[str, Any]) -> Division:
    found = Division(**said)
    if not all(isinstance(c, str) for c in found.columns) or type(found.seed) is not int:
        raise ValueError("its division of rows cannot be used")
    return found


def _texts(said: Any) -> tuple[str, ...]:
    if not isinstance(said, list | tuple) or not all(isinstance(v, str) for v in said):
        raise TypeError("names are a list of texts")
    return tuple(said)
