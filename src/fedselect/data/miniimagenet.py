"""Mini-ImageNet from parquet, or from images with one of the common split files."""

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedselect.core.errors import DataError, InputError
from fedselect.data.cache import IMAGENET_MEAN, IMAGENET_STD, Parquet
from fedselect.data.cifar import official_test
from fedselect.data.folders import check_size, named, numbered, pictures, read_names
from fedselect.data.images import Images
from fedselect.data.places import Progress, either, find

TABLES = ("miniimagenet.parquet", "mini-imagenet.parquet")
FOLDERS = ("miniimagenet", "mini-imagenet", "mini_imagenet", "miniImagenet", "miniImageNet")
SPLIT_JSON = ("split.json", "splits.json", "miniimagenet_split.json")
Row = tuple[Path, str, str]  # file, class, split


def miniimagenet(
    data_dir: Path | None = None,
    size: int = 84,
    skip_unreadable: bool = False,
    classes: int = 100,
    progress: Progress | None = None,
) -> Images:
    """Mini-ImageNet: a hundred of ImageNet's classes, 600 images each (or fewer), 84x84.

    With fewer `classes`, these are evenly spaced in the list of all.
    """
    check_size(size)
    path = find([*TABLES, *FOLDERS], data_dir).resolve()
    images = _folder(path, size, skip_unreadable, progress) if path.is_dir() else _table(path, size, progress)
    if classes < 1:
        raise InputError(f"classes must be at least 1, not {classes}.")
    many = len(images.class_names)
    return images if classes >= many else images.only([i * many // classes for i in range(classes)])


def _table(path: Path, size: int, progress: Progress | None) -> Images:
    table = Parquet([path])
    names = path.with_name(f"{path.stem}_classes.json")
    y, class_names = named(table.column("label"), read_names(names) if names.exists() else None)
    test = official_test(table.column("split"), path) if table.has("split") else None
    x = table.images("miniimagenet", size, progress)
    return Images("miniimagenet", x, y, class_names, _usable(test, y), mean=IMAGENET_MEAN, std=IMAGENET_STD)


def _folder(path: Path, size: int, skip_unreadable: bool, progress: Progress | None) -> Images:
    rows = list(_rows(path))
    if not rows:
        raise DataError(f"the split files in {path} name no images; get them again.")
    y, class_names = numbered([label for _, label, _ in rows])
    x, kept = pictures("miniimagenet", path, [file for file, _, _ in rows], size, skip_unreadable, progress)
    test = _usable(np.array([split == "test" for _, _, split in rows])[kept], y[kept])
    return Images("miniimagenet", x, y[kept], class_names, test, mean=IMAGENET_MEAN, std=IMAGENET_STD)


def _usable(test: NDArray[np.bool_] | None, y: NDArray[np.int64]) -> NDArray[np.bool_] | None:
    """The few-shot split has disjoint training and test classes, which clients cannot use, so all rows become one pool."""
    if test is None or not test.any() or not set(y[test]) <= set(y[~test]):
        return None
    return test


def _rows(path: Path) -> Iterator[Row]:
    """Images in the order of the split file; each must be there."""
    for name, label, split in _listed(path):
        spots = [path / "images" / name, path / name, path / "images" / label / name, path / label / name]
        file = next((s for s in spots if s.is_file()), None)
        if file is None:
            raise DataError(f"the {split} split names {name} of class {label}, but {spots[0]} is not there; place it there.")
        yield file, label, split


def _listed(path: Path) -> Iterator[tuple[str, str, str]]:
    """(filename, class, split) from split.json, else from train.csv, test.csv and, where it is there, val.csv."""
    whole = next((path / n for n in SPLIT_JSON if (path / n).is_file()), None)
    if whole is not None:
        yield from _listed_json(whole)
        return
    missing = [n for n in ("train.csv", "test.csv") if not (path / n).is_file()]
    if missing:
        raise DataError(f"{path} lacks {' and '.join(missing)} (or {either(SPLIT_JSON)}), which say what is trained on.")
    for split in ("train", "val", "test"):
        file = path / f"{split}.csv"
        if not file.is_file():
            continue
        with file.open(newline="") as lines:
            for i, row in enumerate(csv.reader(lines)):
                if i == 0 and row[:2] == ["filename", "label"]:
                    continue
                if len(row) < 2:
                    raise DataError(f"line {i + 1} of {file} is not filename,label; mend it.")
                yield row[0], row[1], split


def _listed_json(path: Path) -> Iterator[tuple[str, str, str]]:
    """{"train": ["class/file.jpg" or ["file.jpg", "class"], ...], "test": [...]}."""
    splits = read_names(path)
    if not isinstance(splits, dict) or not {"train", "test"} <= set(splits):
        raise DataError(f"{path} must hold the lists train and test (and val, if there is one).")
    for split in ("train", "val", "test"):
        for entry in splits.get(split, []):
            if isinstance(entry, str) and "/" in entry:
                yield entry, entry.split("/")[-2], split
            elif isinstance(entry, list) and len(entry) == 2 and all(isinstance(v, str) for v in entry):
                yield entry[0], entry[1], split
            else:
                raise DataError(f"{path} has the {split} entry {entry!r}; write 'class/file' or ['file', 'class'].")
