"""CIFAR-10 and CIFAR-100 from the official archive, its unpacked folder, parquet or npz; CIFAR-10-C as published."""

import io
import pickle
import tarfile
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedselect.core.errors import DataError, InputError, unknown
from fedselect.data import archives
from fedselect.data.cache import Parquet, Pixels
from fedselect.data.images import Images
from fedselect.data.places import Progress, find

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MOMENTS = {  # of the training pixels
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
TRAIN = {"cifar10": [f"data_batch_{i}" for i in range(1, 6)], "cifar100": ["train"]}
TEST = {"cifar10": "test_batch", "cifar100": "test"}
META = {"cifar10": ("batches.meta", "label_names"), "cifar100": ("meta", "fine_label_names")}
SEVERITIES = 5


def cifar10(data_dir: Path | None = None, progress: Progress | None = None) -> Images:
    """CIFAR-10: 50,000 training and 10,000 test images of 32x32, ten classes."""
    return _cifar("cifar10", "cifar-10-batches-py", "cifar-10-python.tar.gz", data_dir, progress)


def cifar100(data_dir: Path | None = None, progress: Progress | None = None) -> Images:
    """CIFAR-100: 50,000 training and 10,000 test images of 32x32, a hundred classes."""
    return _cifar("cifar100", "cifar-100-python", "cifar-100-python.tar.gz", data_dir, progress)


def _cifar(name: str, folder: str, archive: str, data_dir: Path | None, progress: Progress | None) -> Images:
    names = [
        folder,
        archive,
        *(f"{name}{end}" for end in ("_train.parquet", ".parquet", ".npz", "_subset.npz", "_test.parquet")),
    ]
    path = find(names, data_dir, fetch=name)
    if path.name == f"{name}_test.parquet":
        warnings.warn(f"{path.parent} has only the official test images of {name}; clients also train on them.", stacklevel=2)
    if path.suffix == ".parquet":
        return _parquet(name, path, progress)
    if path.suffix == ".npz":
        return _npz(name, path, path.stat().st_mtime_ns)
    return _batches(name, path)


def _images(name: str, x: Pixels, y: NDArray[Any], test: NDArray[np.bool_] | None, classes: tuple[str, ...] = ()) -> Images:
    if not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"{name}: labels must be whole numbers, not {y.dtype}; give the class numbers of the official set.")
    named = classes or (CIFAR10_CLASSES if name == "cifar10" else tuple(map(str, range(100))))
    return Images(name, x, y.astype(np.int64), named, test, mean=MOMENTS[name][0], std=MOMENTS[name][1])


# --- the official pickles


def _batches(name: str, path: Path) -> Images:
    wanted = [*TRAIN[name], TEST[name]]
    meta, names_field = META[name]
    found: dict[str, tuple[Pixels, NDArray[np.int64]]] = {}
    classes: tuple[str, ...] = ()
    for member, raw in _members(path, {*wanted, meta}):
        fields = _unpickle(raw, f"{member} in {path}")
        if member == meta:
            classes = tuple(n.decode() if isinstance(n, bytes) else str(n) for n in fields.get(names_field, ()))
        else:
            found[member] = _batch(fields, f"{member} in {path}")
    missing = [n for n in wanted if n not in found]
    if missing:
        raise DataError(f"{path} lacks {', '.join(missing)}; delete it and download it again.")
    x = np.empty((sum(len(found[n][1]) for n in wanted), 32, 32, 3), np.uint8)
    y = np.concatenate([found[n][1] for n in wanted])
    test = np.arange(len(y)) >= len(y) - len(found[TEST[name]][1])
    at = 0
    for n in wanted:
        flat, labels = found.pop(n)
        x[at : at + len(labels)] = flat.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        at += len(labels)
    return _images(name, x, y, test, classes)


def _members(path: Path, wanted: set[str]) -> Iterator[tuple[str, bytes]]:
    """The wanted files of a folder or, in one pass and without unpacking, of an archive."""
    if path.is_dir():
        yield from ((n, (path / n).read_bytes()) for n in sorted(wanted) if (path / n).is_file())
        return
    found = archives.members(path, wanted)
    for name in list(found):
        yield name, found.pop(name)


class _Unpickler(pickle.Unpickler):
    """Allows only arrays, texts, lists and dicts: a pickle that names any other function to call is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes in the old format
            import _codecs

            return _codecs.encode
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _unpickle(raw: bytes, what: str) -> dict[str, Any]:
    try:
        fields = _Unpickler(io.BytesIO(raw), encoding="bytes").load()
    except Exception as e:  # damaged pickles raise almost anything
        raise DataError(f"{what} is not a CIFAR batch ({e}); no code from it was run; download the official file.") from None
    if not isinstance(fields, dict):
        raise DataError(f"{what} is not a CIFAR batch (it has no table); download the official file.")
    return {k.decode("latin1") if isinstance(k, bytes) else str(k): v for k, v in fields.items()}


def _batch(fields: dict[str, Any], what: str) -> tuple[Pixels, NDArray[np.int64]]:
    data, labels = fields.get("data"), fields.get("labels", fields.get("fine_labels"))
    if type(data) is not np.ndarray or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        raise DataError(f"{what} is not a CIFAR batch (its data are not rows of 3072 bytes); download the official file.")
    if not isinstance(labels, list) or len(labels) != len(data) or not all(isinstance(v, int) and 0 <= v < 100 for v in labels):
        raise DataError(f"{what} is not a CIFAR batch (its labels are not {len(data)} class numbers); get the official file.")
    return data, np.array(labels, np.int64)


# --- other shapes


def _parquet(name: str, path: Path, progress: Progress | None) -> Images:
    """A training and a test file, one file with a `split` column, or one file without an official split."""
    other = path.with_name(path.name.replace("_train.", "_test."))
    if other != path and not other.exists():
        raise DataError(f"{path} exists but {other.name} does not; place it in {path.parent} too.")
    table = Parquet([path] if other == path else [path, other])
    y = table.column("label", "fine_label", "labels")
    test = None
    if other != path:
        test = np.arange(table.count) >= Parquet([path]).count
    elif table.has("split"):
        test = official_test(table.column("split"), path)
    return _images(name, table.images(name, 32, progress), y, test)


def official_test(split: NDArray[Any], path: Path) -> NDArray[np.bool_]:
    """Which rows a split column marks as test: 'test' or 1."""
    test: NDArray[np.bool_] = np.isin(split.astype(str), ("test", "1"))
    if test.all() or not test.any():
        raise DataError(f"the split column of {path} must contain both 'train' (or 0) and 'test' (or 1).")
    return test


@lru_cache(maxsize=1)  # run after run reads the same file
def _npz(name: str, path: Path, changed: int) -> Images:
    fields = ("x_train", "y_train", "x_test", "y_test")
    file = archives.arrays(path)
    if missing := [f for f in fields if f not in file]:
        raise DataError(f"{path} lacks {', '.join(missing)}; save it with {', '.join(fields)}.")
    x_train, y_train, x_test, y_test = (file[f] for f in fields)
    y_train, y_test = y_train.reshape(-1), y_test.reshape(-1)
    for part, x, labels in (("train", x_train, y_train), ("test", x_test, y_test)):
        if x.ndim != 4 or x.shape[-1] != 3:
            raise DataError(f"{path}: x_{part} must be (N, height, width, 3), not {x.shape}; save it so.")
        if len(x) != len(labels):
            raise DataError(f"{path} has {len(x)} images in x_{part} but {len(labels)} labels in y_{part}; save one for each.")
    if x_train.shape[1:] != x_test.shape[1:]:
        raise DataError(f"{path}: x_train {x_train.shape} and x_test {x_test.shape} must have one height and width.")
    y = np.concatenate([y_train, y_test])
    return _images(name, np.concatenate([x_train, x_test]), y, np.arange(len(y)) >= len(y_train))


# --- the published corruptions


def cifar10c_published(data_dir: Path | None = None, y: NDArray[np.int64] | None = None) -> Callable[[str, int], Pixels]:
    """The published CIFAR-10-C test arrays as (corruption, severity 1 to 5) -> uint8 (10000, 32, 32, 3), memory-mapped.

    Reads the unpacked folder, or the .tar in place: it is not compressed, so its arrays can be mapped.
    `y`: labels of the test images that they replace, which must agree in number and order.
    """
    path = find(["CIFAR-10-C", "CIFAR-10-C.tar"], data_dir, fetch="cifar10c")
    spots = _spots(path)
    if "labels" not in spots:
        raise DataError(f"{path} lacks labels.npy; download CIFAR-10-C again.")
    labels = _map(*spots["labels"])
    if y is not None and not np.array_equal(labels[: len(y)], y):
        raise DataError(
            f"labels.npy in {path} does not begin with the labels of CIFAR-10's {len(y)} test images; "
            "get both sets again, the test images in their official order."
        )

    def corrupted(name: str, severity: int) -> Pixels:
        name = {"jpeg": "jpeg_compression"}.get(name, name)
        if name not in spots:
            raise unknown("published corruption", name, set(spots) - {"labels"})
        if not 1 <= severity <= SEVERITIES:
            raise InputError(f"severity must be from 1 to {SEVERITIES}, not {severity}.")
        x = _map(*spots[name])
        if x.ndim != 4 or x.dtype != np.uint8 or len(x) != len(labels) or len(x) % SEVERITIES:
            raise DataError(f"{name}.npy in {path} is {x.dtype} {x.shape} with {len(labels)} labels; get CIFAR-10-C again.")
        each = len(x) // SEVERITIES
        return x[(severity - 1) * each : severity * each]

    return corrupted


def _spots(path: Path) -> dict[str, tuple[Path, int]]:
    """Array name -> its file and its offset there."""
    if path.is_dir():
        return {file.stem: (file, 0) for file in path.glob("*.npy")}
    try:
        with tarfile.open(path, "r:") as archive:
            return {Path(m.name).stem: (path, m.offset_data) for m in archive if m.isfile() and m.name.endswith(".npy")}
    except (tarfile.TarError, OSError) as e:
        raise DataError(f"{path} is truncated or damaged ({e}); delete it and get it again.") from None


def _map(path: Path, start: int) -> NDArray[Any]:
    """An .npy array, memory-mapped in place; its header is read without pickle."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(file)
            if dtype.hasobject or fortran:
                raise ValueError("it holds no plain numbers")
            return np.memmap(path, dtype, "r", file.tell(), shape)
    except (OSError, ValueError, EOFError) as e:
        raise DataError(f"{path} is truncated or damaged ({e}); get it again.") from None
