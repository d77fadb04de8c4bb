"""MNIST and EMNIST from the published idx files, packed or not: 28x28 gray images of digits and letters."""

import gzip
import string
import zipfile
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedselect.core.errors import DataError
from fedselect.data import archives
from fedselect.data.cache import Pixels
from fedselect.data.images import Images
from fedselect.data.places import Progress, find

SIDE = 28
PICTURES, LABELS = 2051, 2049  # the numbers that idx files of bytes in three dimensions and in one begin with
MEAN, STD = (0.1307,), (0.3081,)  # of MNIST's training pixels
MNIST_PLACES = ("mnist", "MNIST", "train-images-idx3-ubyte.gz", "train-images-idx3-ubyte")
EMNIST_PLACES = ("emnist", "EMNIST", "gzip", "emnist.zip", "gzip.zip")

CAPITALS = string.digits + string.ascii_uppercase
CLASSES = {  # of each part of EMNIST, in the order of its labels
    "balanced": CAPITALS + "abdefghnqrt",  # small letters that look like their capitals are one class with them
    "byclass": CAPITALS + string.ascii_lowercase,
    "bymerge": CAPITALS + "abdefghnqrt",
    "digits": string.digits,
    "letters": string.ascii_uppercase,  # either case; labels begin with 1
    "mnist": string.digits,
}
Subset = Literal["balanced", "byclass", "bymerge", "digits", "letters", "mnist"]


def mnist(data_dir: Path | None = None, progress: Progress | None = None) -> Images:
    """MNIST: 60,000 training and 10,000 test images of 28x28, ten digits."""
    path = find(MNIST_PLACES, data_dir, fetch="mnist")
    parts = [_part(path, f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte", 10) for part in ("train", "t10k")]
    return _images("mnist", parts, string.digits)


def emnist(data_dir: Path | None = None, subset: Subset = "balanced", progress: Progress | None = None) -> Images:
    """EMNIST: digits and letters of 28x28, in six subsets; its files have rows and columns swapped."""
    path = find(EMNIST_PLACES, data_dir, fetch="emnist")
    first = 1 if subset == "letters" else 0
    parts = []
    for part in ("train", "test"):
        stem = f"emnist-{subset}-{part}"
        x, y = _part(path, f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte", len(CLASSES[subset]), first)
        parts.append((x.transpose(0, 2, 1), y))
    return _images("emnist", parts, CLASSES[subset])


def _images(name: str, parts: list[tuple[Pixels, NDArray[np.int64]]], classes: str) -> Images:
    (x, y), (test_x, test_y) = parts
    test = np.arange(len(y) + len(test_y)) >= len(y)
    return Images(
        name, np.concatenate([x, test_x])[..., None], np.concatenate([y, test_y]), tuple(classes), test, mean=MEAN, std=STD
    )


def _part(path: Path, pictures: str, labels: str, classes: int, first: int = 0) -> tuple[Pixels, NDArray[np.int64]]:
    """Images (N, 28, 28) and their classes from 0 on; labels in the file begin with `first`."""
    x, what = _idx(path, pictures, PICTURES, 3)
    if x.shape[1:] != (SIDE, SIDE):
        raise DataError(f"{what} has images of {x.shape[1]}x{x.shape[2]}, not {SIDE}x{SIDE}; get it again.")
    y, where = _idx(path, labels, LABELS, 1)
    if len(x) != len(y):
        raise DataError(f"{what} has {len(x)} images, but {where} has {len(y)} labels; get both again.")
    if len(y) and not first <= int(y.min()) <= int(y.max()) < first + classes:
        raise DataError(f"{where} has labels outside {first} to {first + classes - 1}; get it again.")
    return x, y.astype(np.int64) - first


def _idx(path: Path, name: str, magic: int, dimensions: int) -> tuple[Pixels, str]:
    """An idx file's bytes in their shape, and what to call it in a message."""
    raw, what = _bytes(path, name)
    head = 4 * (1 + dimensions)
    said = np.frombuffer(raw[:head], ">u4") if len(raw) >= head else np.zeros(1, np.uint32)
    if int(said[0]) != magic:
        raise DataError(f"{what} is no idx file of {'images' if dimensions == 3 else 'labels'}; get it again.")
    shape = tuple(int(n) for n in said[1:])
    if len(raw) - head != np.prod(shape):
        raise DataError(
            f"{what} is truncated: it says {' x '.join(map(str, shape))} bytes and has {len(raw) - head}; get it again."
        )
    return np.frombuffer(raw, np.uint8, offset=head).reshape(shape), what


def _bytes(path: Path, name: str) -> tuple[bytes, str]:
    """The unpacked bytes of a file, from a folder (also raw/ or gzip/ in it) or a zip archive of such files."""
    try:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                member = next((m for m in archive.namelist() if m.rsplit("/", 1)[-1] == f"{name}.gz"), None)
                if member is None:
                    raise DataError(f"{path} lacks {name}.gz; delete it and get the whole of it again.")
                return gzip.decompress(archive.read(member)), f"{member} in {path}"
        folder = path if path.is_dir() else path.parent
        for file in (place / f"{name}{end}" for place in (folder, folder / "raw", folder / "gzip") for end in (".gz", "")):
            if file.is_file():
                return (gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()), str(file)
    except archives.DAMAGED as e:
        raise DataError(f"{name} of {path} is truncated or damaged ({e}); delete it and get it again.") from None
    raise DataError(f"{folder} lacks {name}.gz; place it there, too.")
