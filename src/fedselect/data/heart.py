"""UCI heart disease: patients of four hospitals, thirteen columns with gaps, disease or not."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedselect.core.errors import DataError
from fedselect.data.federation import Federation
from fedselect.data.natural import Recorded, arrays, data_folder, divide, federation
from fedselect.data.partition import Indices, Sizes
from fedselect.data.places import find

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
NAMES = ("processed.cleveland.data", "heart+disease", "heart-disease", "heart", "heart.npz")
COLUMNS = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak", "slope", "ca", "thal")
CATEGORIES = {"cp": (1, 2, 3, 4), "restecg": (0, 1, 2), "slope": (1, 2, 3), "thal": (3, 6, 7)}
MISSING = ("?", "-9", "-9.0", "")
Table = NDArray[np.float32]


def heart(
    clients: int | None = None,
    *,
    train: int | None = None,
    test: int | None = None,
    val: int = 0,
    data_dir: str | None = None,
    seed: int = 0,
) -> Federation:
    """UCI heart disease, 13 columns as 31 numbers, disease or not; one client per hospital (4)."""
    data = read(data_folder(data_dir)).first(clients)
    parts = divide(data, Sizes(train, test, val), seed)
    known = np.concatenate([p.train for p in parts])
    return federation("heart", replace(data, x=features(data.x, known)), parts)


def read(data_dir: Path | None = None) -> Recorded:
    """All patients of all hospitals, gaps as NaN, from the published files or a prepared one."""
    path = find(NAMES, data_dir, origin="heart")
    x, y, client = arrays(path, "x", "y", "client") if path.suffix == ".npz" else _files(path)
    if x.shape[1:] != (len(COLUMNS),):
        raise DataError(f"{path}: x must be (N, {len(COLUMNS)}), not {x.shape}; prepare it again.")
    patients = np.arange(len(y), dtype=np.int64)
    return Recorded(
        x.astype(np.float32), y.astype(np.int64), client.astype(np.int64), patients, HOSPITALS, ("healthy", "disease")
    )


def features(x: Table, known: Indices) -> Table:
    """The inputs of a model: standardized numbers; a gap is replaced by the mean, and marked.

    Means and deviations are over the rows `known` of all clients together. A category is one-hot; a gap in it is all
    zeros.
    """
    numbers = x[:, [i for i, name in enumerate(COLUMNS) if name not in CATEGORIES]]
    gaps = np.isnan(numbers)
    there = ~gaps[known]
    count = np.maximum(there.sum(0), 1)
    mean = np.where(there, numbers[known], 0).sum(0) / count
    spread = np.sqrt((np.where(there, numbers[known] - mean, 0) ** 2).sum(0) / count)
    scaled = np.where(gaps, 0, (numbers - mean) / np.where(spread > 0, spread, 1))
    one_hot = [x[:, [COLUMNS.index(name)]] == np.array(values) for name, values in CATEGORIES.items()]
    return np.concatenate([scaled, gaps, *one_hot], 1).astype(np.float32)


def _files(path: Path) -> tuple[Table, Indices, Indices]:
    """processed.HOSPITAL.data of each, from the folder or from that of the first file."""
    folder = path if path.is_dir() else path.parent
    tables = [table(folder / f"processed.{name}.data") for name in HOSPITALS]
    rows = np.concatenate(tables)
    client = np.repeat(np.arange(len(tables)), [len(t) for t in tables])
    return rows[:, :-1], (rows[:, -1] > 0).astype(np.int64), client


def table(file: Path) -> Table:
    """Thirteen columns and the diagnosis, gaps as NaN; a header line is skipped."""
    try:
        lines = [line.strip().split(",") for line in file.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"{file} cannot be read ({e}); place the files of all of {', '.join(HOSPITALS)} there.") from None
    rows = []
    for i, line in enumerate(lines):
        try:
            row = [np.nan if cell.strip() in MISSING else float(cell) for cell in line]
        except ValueError:
            if i == 0:
                continue
            row = []
        if len(row) != len(COLUMNS) + 1 or np.isnan(row[-1]):
            raise DataError(f"{file}: {','.join(line)!r} is not {len(COLUMNS)} numbers and a diagnosis; mend it.")
        rows.append(row)
    return np.array(rows, np.float32).reshape(-1, len(COLUMNS) + 1)
