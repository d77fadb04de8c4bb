"""Frame: the columns of a table, on disk or in memory, read as numbers, names or times when they are asked for.

A file says little about its columns: in a CSV everything is text, in other files numbers may be codes of categories. So a
column keeps its stored values, and the caller says how to read them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedselect.core.errors import DataError, unknown
from fedselect.data.partition import Indices
from fedselect.data.places import optional

MISSING = ("", "na", "n/a", "nan", "null", "?")  # always mean "missing", in any case
NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
WHOLE = r"^[+-]?\d+$"
Kind = Literal["number", "category"]


@dataclass(frozen=True, eq=False)
class Frame:
    """Columns of one length. `rows` are the numbers of these rows in `source`, from 0, for error messages.

    `missing` are further texts that mean "missing"; `split_column` is the column that says which rows are for training and
    testing, if the file itself has such parts.
    """

    source: str
    columns: Mapping[str, Any]  # arrays of pyarrow, null where there is no value
    rows: Indices
    missing: tuple[str, ...] = ()
    split_column: str | None = None

    @classmethod
    def of(
        cls, table: Any, source: str = "the table", missing: tuple[str, ...] = (), split_column: str | None = None
    ) -> "Frame":
        """From a pandas DataFrame, a pyarrow Table, or a mapping of names to columns."""
        pa = optional("pyarrow")
        try:
            if isinstance(table, Mapping):
                table = pa.table({str(name): pa.array(column, from_pandas=True) for name, column in table.items()})
            elif not isinstance(table, pa.Table):
                table = pa.Table.from_pandas(table, preserve_index=False)
        except (pa.ArrowException, TypeError, ValueError, AttributeError) as e:
            raise DataError(f"{source} cannot be read as a table ({e}); give columns of one length and kind each.") from None
        names = [str(name) for name in table.column_names]
        if twice := [n for n in names if names.count(n) > 1]:
            raise DataError(f"{source} has two columns {twice[0]!r}; rename one.")
        columns = {n: _cleaned(_stored(table.column(i)), missing) for i, n in enumerate(names)}
        return cls(source, columns, np.arange(table.num_rows), missing, split_column)

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows: Indices) -> "Frame":
        """Some of the rows."""
        pa = optional("pyarrow")
        picked = pa.array(rows)
        return replace(self, columns={n: c.take(picked) for n, c in self.columns.items()}, rows=self.rows[rows])

    def need(self, name: str) -> None:
        if name not in self.columns:
            raise DataError(f"{self.source}: {unknown('column', name, self.columns)}")

    def kind(self, name: str) -> Kind | None:
        """The kind of a column, judged by its values; None if it has no value."""
        column = self._values(name)
        if column.null_count == len(column):
            return None
        types = optional("pyarrow").types
        if types.is_boolean(column.type):
            return "category"
        if types.is_string(column.type):
            if _parsed(column) is not None:
                return "number"
            names = self._no_numbers(column)
            if not self._matching(column, NUMBER).any():
                return "category"
            text = self._first(column, names)
            raise DataError(
                f"{self.source}: column {name} has numbers and, in row {self.row_where(names)}, {text!r}; correct it, or say "
                f"what it is: --missing {text!r} if it stands for no value, --categories {name} if these are names."
            )
        if types.is_integer(column.type) or types.is_floating(column.type):
            return "number"
        what = "dates" if types.is_timestamp(column.type) else f"values of type {column.type}"
        by_time = f", or divide rows by it with --time {name}" if what == "dates" else ""
        raise DataError(
            f"{self.source}: column {name} holds {what}, not numbers or names; leave it out: --drop {name}{by_time}."
        )

    def whole(self, name: str) -> bool:
        """Whether a column has integers, written as such."""
        column, types = self._values(name), optional("pyarrow").types
        if types.is_string(column.type):
            return bool(self._matching(column, WHOLE)[~self.gaps(name)].all())
        return bool(types.is_integer(column.type))

    def gaps(self, name: str) -> NDArray[np.bool_]:
        """Which rows have no value in a column."""
        return np.asarray(self._values(name).is_null(), np.bool_)

    def numbers(self, name: str) -> NDArray[np.float64]:
        """A column as numbers, gaps as NaN."""
        pa = optional("pyarrow")
        column = self._values(name)
        parsed = _parsed(column)
        if parsed is None and pa.types.is_string(column.type):
            names = self._no_numbers(column)
            text, row = self._first(column, names), self.row_where(names)
            raise DataError(f"{self.source}: column {name} is to hold numbers, and row {row} has {text!r}; correct it.")
        if parsed is None:
            raise DataError(f"{self.source}: column {name} holds values of type {column.type}, not numbers.")
        found = np.array(parsed.to_numpy(zero_copy_only=False), np.float64)
        if (wrong := ~np.isfinite(found) & ~self.gaps(name)).any():
            raise DataError(f"{self.source}: column {name} is not finite in row {self.row_where(wrong)}; correct it.")
        return found

    def codes(self, name: str) -> tuple[Indices, tuple[str, ...]]:
        """A column as names: the number of each row's name, -1 for a gap, and the names in order."""
        pa, pc = optional("pyarrow"), optional("pyarrow.compute")
        column = self._values(name)
        try:
            if pa.types.is_boolean(column.type):
                column = pc.if_else(column, "True", "False")  # as pandas writes them into a CSV
            texts = _short(pc.cast(column, pa.string()))
        except pa.ArrowException:
            raise DataError(f"{self.source}: column {name} holds values of type {column.type}, not names.") from None
        encoded = texts.dictionary_encode()
        names = encoded.dictionary.to_pylist()
        order = in_order(names)
        place = {n: i for i, n in enumerate(order)}
        number = np.array([place[n] for n in names] + [-1], np.int64)
        return number[np.asarray(encoded.indices.fill_null(len(names)))], tuple(order)

    def times(self, name: str) -> NDArray[Any]:
        """A column of dates (2024-03-31, with or without a time) or numbers, as something to sort by."""
        pa, pc = optional("pyarrow"), optional("pyarrow.compute")
        column = self._values(name)
        if column.null_count:
            raise DataError(f"{self.source}: row {self.row_where(self.gaps(name))} has no {name}; fill it in.")
        if pa.types.is_timestamp(column.type):
            return np.asarray(pc.cast(column, pa.int64()))
        if _parsed(column) is not None or not pa.types.is_string(column.type):
            return self.numbers(name)
        dates = np.empty(len(column), "datetime64[us]")
        for i, text in enumerate(column.to_pylist()):
            try:
                dates[i] = np.datetime64(text, "us")
            except ValueError:
                raise DataError(
                    f"{self.source}: column {name} holds {text!r} in row {int(self.rows[i]) + 1}; write times as 2024-03-31, "
                    "as 2024-03-31T18:00 or as numbers."
                ) from None
        return dates

    def row_where(self, found: NDArray[np.bool_]) -> int:
        """The number of the first such row in the source, counted from 1."""
        return int(self.rows[found].min()) + 1

    def _values(self, name: str) -> Any:
        self.need(name)
        return self.columns[name]

    def _matching(self, column: Any, pattern: str) -> NDArray[np.bool_]:
        """Which rows of a column of texts match; a gap does not."""
        pc = optional("pyarrow.compute")
        return np.asarray(pc.match_substring_regex(column, pattern).fill_null(False))

    def _first(self, column: Any, found: NDArray[np.bool_]) -> Any:
        """The value in the first such row of the source."""
        return column[int(np.flatnonzero(found)[np.argmin(self.rows[found])])].as_py()

    def _no_numbers(self, column: Any) -> NDArray[np.bool_]:
        """Which rows of a column of texts have a value that is no number."""
        return ~self._matching(column, NUMBER) & ~np.asarray(column.is_null(), np.bool_)


def in_order(names: list[str]) -> list[str]:
    """Names in numerical order if all are numbers, else in alphabetical order."""
    return sorted(names, key=lambda n: (float(n), n)) if all(map(is_number, names)) else sorted(names)


def _parsed(column: Any) -> Any:
    """A column as pyarrow floats; None if some value is not a number."""
    pa, pc = optional("pyarrow"), optional("pyarrow.compute")
    if pa.types.is_boolean(column.type) or pa.types.is_timestamp(column.type):
        return None
    try:
        return pc.cast(column, pa.float64())
    except pa.ArrowException:
        return None


def _short(texts: Any) -> Any:
    """2.0 as 2: one file may write a code as an integer, another, with missing values, as a float."""
    return optional("pyarrow.compute").replace_substring_regex(texts, r"^([+-]?\d+)\.0+$", r"\1")


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _stored(column: Any) -> Any:
    """A column in one of few types: text, integers, floats, booleans, times; others unchanged."""
    pa, pc = optional("pyarrow"), optional("pyarrow.compute")
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.dictionary_decode(), kind.value_type
    if pa.types.is_large_string(kind) or pa.types.is_null(kind) or str(kind) == "string_view":
        return pc.cast(column, pa.string())
    if pa.types.is_decimal(kind) or str(kind) == "halffloat":
        return pc.cast(column, pa.float64())
    return pc.cast(column, pa.timestamp("us"), safe=False) if pa.types.is_date(kind) or pa.types.is_timestamp(kind) else column


def _cleaned(column: Any, missing: tuple[str, ...]) -> Any:
    """A column with null for texts that mean "missing"."""
    pa, pc = optional("pyarrow"), optional("pyarrow.compute")
    if pa.types.is_string(column.type):
        column = pc.utf8_trim_whitespace(column)
        said = _short(column) if any(map(is_number, missing)) else column
        absent = pc.or_(
            pc.is_in(said, value_set=pa.array(missing, pa.string())),
            pc.is_in(pc.utf8_lower(column), value_set=pa.array(MISSING, pa.string())),
        )
    elif pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        numbers = pa.array([float(m) for m in missing if is_number(m)], pa.float64())
        absent = pc.or_(pc.is_null(column, nan_is_null=True), pc.is_in(pc.cast(column, pa.float64()), numbers))
    else:
        return column
    return pc.if_else(absent, pa.scalar(None, column.type), column)
