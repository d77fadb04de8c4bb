"""Tables on disk: CSV, Parquet, Arrow and Feather, NPZ, and folders that Hugging Face `datasets` saved."""

import csv
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedselect.core.errors import DataError, InputError
from fedselect.data import archives
from fedselect.data.frame import Frame, is_number
from fedselect.data.places import either, optional

PARTS = {"train": "train", "test": "test", "val": "val", "valid": "val", "validation": "val", "dev": "val"}
SPLIT = "split"  # the column added to a saved DatasetDict: the dataset of each row


def read_frame(path: Path, missing: tuple[str, ...] = ()) -> Frame:
    """The table at a path; `missing` are further texts that mean "missing"."""
    if not path.exists():
        raise InputError(f"there is no table {path}; check the path.")
    if not is_table(path):
        raise InputError(f"{path} is no table that can be read; give a file ending in {either(list(READERS))}.")
    try:
        table, split = _read_saved(path) if path.is_dir() else (READERS[path.suffix.lower()](path), None)
    except (OSError, ValueError, LookupError, EOFError, TypeError, zipfile.BadZipFile, optional("pyarrow").ArrowException) as e:
        said = " ".join(str(e).split())
        raise DataError(f"{path} cannot be read as a table ({said}); save it again.") from None
    frame = Frame.of(table, str(path), missing, split)
    if not len(frame):
        raise DataError(f"{path} has no rows; give it some, or leave it out.")
    return frame


def is_table(path: Path) -> bool:
    """Whether a path looks like a table: a file with a known ending, or a folder that `datasets` saved."""
    if path.is_dir():
        return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
    return path.suffix.lower() in READERS


def tables_in(folder: Path) -> dict[str, Path]:
    """The tables in a folder by name without ending, in alphabetical order."""
    try:
        there = sorted(p for p in folder.iterdir() if not p.name.startswith(".") and is_table(p))
    except OSError as e:
        raise DataError(f"{folder} cannot be read ({e.strerror}); give a table, or a folder of them.") from None
    if not there:
        raise DataError(f"{folder} holds no tables; put one file for each client there, ending in {either(list(READERS))}.")
    names = [p.stem if p.is_file() else p.name for p in there]
    if twice := [n for n in names if names.count(n) > 1]:
        raise DataError(f"{folder} holds two tables named {twice[0]!r}; each is one client: rename or remove one.")
    return dict(zip(names, there, strict=True))


def _read_csv(path: Path) -> Any:
    """Every cell as text: the type of a column is decided later, from all its values."""
    pa, read = optional("pyarrow"), optional("pyarrow.csv")
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            first = file.readline()
        except UnicodeDecodeError:
            raise DataError(f"{path} is not UTF-8; save it so.") from None
    between = "\t" if path.suffix.lower() == ".tsv" else ";" if ";" in first and "," not in first else ","
    names = next(csv.reader([first], delimiter=between), [])
    if not any(names):
        raise DataError(f"{path} is empty; its first line names the columns.")
    if 2 * sum(map(is_number, names)) > len(names):
        raise DataError(f"{path} has numbers in its first line; put the names of the columns there.")
    if "" in names:
        raise DataError(
            f"{path} has a column without a name (number {names.index('') + 1}); name it, or leave row numbers out as "
            "pandas does with index=False."
        )
    return read.read_csv(
        path,
        read_options=read.ReadOptions(encoding="utf8"),
        parse_options=read.ParseOptions(delimiter=between, newlines_in_values=True),
        convert_options=read.ConvertOptions(column_types={n: pa.string() for n in names}, strings_can_be_null=False),
    )


def _read_parquet(path: Path) -> Any:
    return optional("pyarrow.parquet").read_table(path, page_checksum_verification=True)  # where it has checksums


def _read_arrow(path: Path) -> Any:
    """A file of Arrow's, or a stream of it, as `datasets` writes."""
    pa, ipc = optional("pyarrow"), optional("pyarrow.ipc")
    with pa.OSFile(str(path)) as source:
        try:
            return ipc.open_file(source).read_all()
        except pa.ArrowInvalid:
            source.seek(0)
            return ipc.open_stream(source).read_all()


def _read_npz(path: Path) -> dict[str, Any]:
    """Arrays with one row per sample. An array with two axes is several columns, named by the array `columns` or by number.

    Arrays of another length are metadata, not columns.
    """
    arrays = {name: np.atleast_1d(v) for name, v in archives.arrays(path).items()}
    count = max((len(v) for v in arrays.values()), default=0)
    named = [str(n) for n in arrays.get("columns", ())]
    found: dict[str, Any] = {}
    for name, values in arrays.items():
        if len(values) != count or (name == "columns" and values.ndim == 1):
            continue
        if values.ndim > 2:
            raise DataError(f"{path}: {name} has the shape {values.shape}; a table has one or two axes.")
        values = values.astype(str) if values.dtype.kind == "S" else values
        if values.ndim == 1:
            found[name] = values
            continue
        names = named if len(named) == values.shape[1] else [f"{name}{i}" for i in range(values.shape[1])]
        found |= {n: np.ascontiguousarray(values[:, i]) for i, n in enumerate(names)}
    return found


def _read_saved(folder: Path) -> tuple[Any, str | None]:
    """A Dataset, or a DatasetDict with a column that says which of its datasets a row is of."""
    pa = optional("pyarrow")
    if not (folder / "dataset_dict.json").is_file():
        return _read_dataset(folder), None
    parts = []
    for name in json.loads((folder / "dataset_dict.json").read_text())["splits"]:
        if name not in PARTS:
            raise DataError(f"{folder} has the split {name!r}; rename it to train, val or test, or give {folder / name}.")
        part = _read_dataset(folder / name)
        if SPLIT in part.column_names:
            raise DataError(f"{folder} has a column {SPLIT!r}, which is to hold the split; rename that column.")
        parts.append(part.append_column(SPLIT, pa.array([PARTS[name]] * part.num_rows, pa.string())))
    return pa.concat_tables(parts), SPLIT


def _read_dataset(folder: Path) -> Any:
    pa = optional("pyarrow")
    state = json.loads((folder / "state.json").read_text())
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(f"{folder} is a selection of rows; save it again after flatten_indices().")
    table = pa.concat_tables([_read_arrow(folder / Path(f["filename"]).name) for f in state["_data_files"]])
    info = folder / "dataset_info.json"
    features = json.loads(info.read_text()).get("features") or {} if info.is_file() else {}
    for name, feature in features.items():
        names = feature.get("names") if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" else None
        if names and name in table.column_names:
            labels = [None if v is None or v < 0 else names[v] for v in table.column(name).to_pylist()]
            table = table.set_column(table.column_names.index(name), name, pa.array(labels, pa.string()))
    return table


READERS: dict[str, Callable[[Path], Any]] = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".feather": _read_arrow,
    ".npz": _read_npz,
}
