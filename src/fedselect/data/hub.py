"""Hugging Face `datasets` objects, used by their interface: the library is not imported here."""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedselect.core.errors import DataError, InputError
from fedselect.data.cache import IMAGENET_MEAN, IMAGENET_STD, Pixels, fit
from fedselect.data.folders import check_size, named
from fedselect.data.images import Images
from fedselect.data.places import optional


def from_datasets(dataset: Any, image: str = "image", label: str = "label", size: int | None = None) -> Images:
    """Read images from a Hugging Face dataset.

    Args:
        dataset: A dataset, or a mapping with `train` and `test` (from `datasets.load_dataset` without a split).
        image: The column with the images.
        label: The column with the labels.
        size: Make all images squares of this size; without it they must already be squares of equal size. Gray images
            become RGB.

    Returns:
        Images to partition with `fs.deal_images`.
    """
    if size is not None:
        check_size(size)
    parts: dict[str, Any] = {"train": dataset}
    if isinstance(dataset, Mapping):
        held = next((n for n in ("test", "validation") if n in dataset), None)
        if "train" not in dataset:
            raise InputError(
                f"the dataset has the splits {', '.join(map(str, dataset))} but no train; pass one of them itself."
            )
        parts = {"train": dataset["train"]} | ({"test": dataset[held]} if held else {})
    for part in parts.values():
        _check(part, image, label)
    count = sum(len(p) for p in parts.values())
    if not count:
        raise DataError("the dataset has no rows.")
    side = size or _side(next(p for p in parts.values() if len(p))[0][image], image)
    x = np.empty((count, side, side, 3), np.uint8)
    labels: list[Any] = []
    for part in parts.values():
        for i in range(len(part)):
            row = part[i]
            x[len(labels)] = _pixels(row[image], side, size is None, f"row {i}")
            labels.append(row[label])
    first = parts["train"]
    names = getattr(first.features[label], "names", None)
    y, class_names = named(np.array(labels), names)
    test: NDArray[np.bool_] | None = np.arange(count) >= len(first) if len(parts) > 1 else None
    name = str(getattr(getattr(first, "info", None), "dataset_name", None) or "dataset")
    return Images(name, x, y, class_names, test, mean=IMAGENET_MEAN, std=IMAGENET_STD)


def _check(part: Any, image: str, label: str) -> None:
    features = getattr(part, "features", None)
    if features is None or not hasattr(part, "__len__") or not hasattr(part, "__getitem__"):
        raise InputError("give a datasets.Dataset or DatasetDict; one that streams must be taken into memory first.")
    for column in (image, label):
        if column not in features:
            raise InputError(f"the dataset has no column {column!r}, only {', '.join(map(str, features))}; name the right one.")


def _opened(value: Any, name: str) -> Any:
    """A PIL image from a cell: an image, its bytes, or an array."""
    images = optional("PIL.Image")
    if isinstance(value, images.Image):
        return value
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    try:
        if isinstance(value, bytes | str):
            opened = images.open(io.BytesIO(value) if isinstance(value, bytes) else value)
            opened.load()
            return opened
        pixels: Pixels = np.asarray(value)
        if pixels.ndim == 3 and pixels.shape[2] == 1:
            pixels = pixels[:, :, 0]
        if not np.issubdtype(pixels.dtype, np.integer):
            raise ValueError(f"values are {pixels.dtype}, not whole numbers 0 to 255")
        return images.fromarray(pixels.astype(np.uint8))
    except Exception as e:  # a decoder fed with damaged bytes may raise nearly anything
        raise DataError(f"{name} of the dataset holds no image ({e}); mend or drop it.") from None


def _side(value: Any, column: str) -> int:
    width, height = _opened(value, "row 0").size
    if width != height:
        raise InputError(f"the images in {column!r} are {width}x{height}, not square; give size to resize and crop them.")
    return int(width)


def _pixels(value: Any, side: int, exact: bool, name: str) -> Pixels:
    opened = _opened(value, name)
    if exact and opened.size != (side, side):
        raise InputError(
            f"{name} of the dataset is {opened.size[0]}x{opened.size[1]}, row 0 is {side}x{side}; give size to resize them."
        )
    return fit(opened, side)
