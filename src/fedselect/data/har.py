"""SP-SW HAR: human activities from the accelerometer and gyroscope of phone and watch, in one-second windows."""

import re
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedselect.core.errors import DataError, InputError
from fedselect.data.federation import Federation
from fedselect.data.natural import Recorded, arrays, below, data_folder, divide, federation
from fedselect.data.partition import Indices, Sizes
from fedselect.data.places import find

NAMES = ("sp-sw-har-dataset", "sp-sw-har-dataset-main", "DATA", "spsw_har.npz")
ACTIVITIES = ("SEATED", "SITTING_DOWN", "STANDING_UP", "TURNING", "WALKING")
COLUMNS = ("x_acc", "y_acc", "z_acc", "x_gyro", "y_gyro", "z_gyro", "timestamp", "label")
SLOWER = 2  # recorded at 100 Hz; every second row is kept: 50 Hz
WINDOW, STEP = 50, 25  # rows: 1 s, and half of it
PURE = 0.8  # a window is kept if more than this share of its rows has one label
UNITS = np.array([9.80665] * 3 + [1.0] * 3, np.float32)[:, None]  # acceleration in g, rotation in rad/s
Windows = NDArray[np.float32]


def har(
    clients: int | None = None,
    per: Literal["device", "person"] = "device",
    *,
    train: int | None = None,
    test: int | None = None,
    val: int = 0,
    data_dir: str | None = None,
    seed: int = 0,
) -> Federation:
    """SP-SW HAR, five activities by phone and watch, windows of 6x50; one client per device, or per person with both."""
    if per not in ("device", "person"):
        raise InputError(f"per is device or person, not {per!r}.")
    data = read(data_folder(data_dir), per).first(clients)
    return federation("har", data, divide(data, Sizes(train, test, val), seed))


def read(data_dir: Path | None = None, per: str = "device") -> Recorded:
    """All windows of all clients, from the published folder or a prepared file."""
    path = find(NAMES, data_dir, origin="har")
    fields = ("x", "y", "client", "execution", "watch")
    x, y, person, execution, watch = _folder(path) if path.is_dir() else arrays(path, *fields)
    if x.shape[1:] != (6, WINDOW):
        raise DataError(f"{path}: x must be (N, 6, {WINDOW}), not {x.shape}; prepare it again.")
    who = 2 * person.astype(np.int64) + watch if per == "device" else 2 * person.astype(np.int64)
    found, client = np.unique(who, return_inverse=True)
    names = tuple(f"{w // 2:02d}" + (f" {('phone', 'watch')[w % 2]}" if per == "device" else "") for w in found)
    return Recorded(
        x.astype(np.float32) / UNITS,
        y.astype(np.int64),
        client.astype(np.int64),
        execution.astype(np.int64),
        names,
        tuple(a.lower().replace("_", " ") for a in ACTIVITIES),
        tuple(int(w) // 2 for w in found),
    )


def _folder(path: Path) -> tuple[Windows, Indices, Indices, Indices, NDArray[np.bool_]]:
    """DATA/sPERSON/sPERSON_EXECUTION_sp.csv of the phone, ..._sw.csv of the watch."""
    xs, ys, tags = [], [], []
    for file in sorted(below(path, "DATA").glob("*/*.csv")):
        if said := re.fullmatch(r"s(\d+)_(\d+)_s([pw])", file.stem):
            x, y = windows(file)
            xs.append(x)
            ys.append(y)
            tags += [(int(said[1]), int(said[2]), said[3] == "w")] * len(y)
    if not tags:
        raise DataError(f"{path} holds no recordings DATA/s01/s01_01_sp.csv; give the folder that holds DATA.")
    person, execution, watch = np.array(tags, np.int64).T
    return np.concatenate(xs), np.concatenate(ys), person, execution, watch.astype(np.bool_)


def windows(file: Path) -> tuple[Windows, Indices]:
    """The windows (N, 6, 50) of one recording that are nearly all of one activity, and which."""
    try:
        table = np.loadtxt(file, delimiter=",", dtype=str, ndmin=2)
    except (OSError, ValueError) as e:
        raise DataError(f"{file} cannot be read ({e}); get it again.") from None
    if table.shape[1:] != (len(COLUMNS),) or tuple(table[0]) != COLUMNS:
        raise DataError(f"{file} must begin with the line {','.join(COLUMNS)}; get it again.")
    rows = table[1::SLOWER]
    if other := sorted(set(rows[:, -1]) - set(ACTIVITIES)):
        raise DataError(f"{file} has the label {str(other[0])!r}; labels are {', '.join(ACTIVITIES)}.")
    try:
        values = rows[:, :6].astype(np.float32)
    except ValueError as e:
        raise DataError(f"{file}: {e}; get it again.") from None
    label = np.searchsorted(ACTIVITIES, rows[:, -1])
    starts = np.arange(0, max(0, len(rows) - WINDOW + 1), STEP)
    at = starts[:, None] + np.arange(WINDOW)
    share = np.stack([(label[at] == c).mean(1) for c in range(len(ACTIVITIES))], 1)
    pure = share.max(1) > PURE
    return values[at[pure]].transpose(0, 2, 1), share.argmax(1)[pure].astype(np.int64)
