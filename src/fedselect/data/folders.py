"""Folders of images: domain/class/*.jpg as in OfficeHome, Office-31 and PACS, and your own class/*.jpg.

A domain (one client's images) or your own folder may contain train/class/*.jpg and test/class/*.jpg (or val/).
"""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedselect.core.errors import DataError, InputError
from fedselect.data.cache import IMAGENET_MEAN, IMAGENET_STD, Parquet, Pixels, decoded_some, listing_stamp, picture
from fedselect.data.images import Images
from fedselect.data.places import Progress, find, optional

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})
OFFICEHOME = ("OfficeHomeDataset_10072016", "OfficeHome", "officehome")


def officehome(
    data_dir: Path | None = None, size: int = 224, skip_unreadable: bool = False, progress: Progress | None = None
) -> Images:
    """OfficeHome: 15,588 images of 65 objects in four domains (Art, Clipart, Product, Real World)."""
    return domains(find(OFFICEHOME, data_dir), size, skip_unreadable, progress, name="officehome")


def domains(
    path: Path, size: int = 224, skip_unreadable: bool = False, progress: Progress | None = None, name: str | None = None
) -> Images:
    """Images in domain/class or domain/train/class and domain/test/class folders, or a parquet file."""
    path = Path(path).resolve()
    name = name or (path.name if path.is_dir() else path.stem)
    check_size(size)
    if path.suffix == ".parquet" and path.is_file():
        return _domain_table(path, size, progress, name)
    files: list[Path] = []
    tags: list[tuple[str, str]] = []
    test: list[bool] = []
    divided: dict[bool, Path] = {}
    for domain in _folders(path):
        if _pictures(domain):
            raise DataError(
                f"{domain} holds images where class folders belong (domain/class/image); read class folders as an image folder."
            )
        inner = _folders(domain)
        if [f.name for f in inner] == ["images"]:  # Office-31
            inner = _folders(inner[0])
        kinds, parts = _class_folders(inner)
        for kind, held in kinds:
            found = _pictures(kind)
            files += found
            tags += [(domain.name, kind.name)] * len(found)
            test += [held] * len(found)
            divided |= {parts: domain} if found else {}
    if not files:
        raise DataError(f"{path} holds no images in domain/class folders; give the folder above the domains.")
    if len(divided) > 1:
        raise DataError(f"{divided[True]} has train/ and test/, but {divided[False]} has not; divide all of them, or none.")
    domain_of, domain_names = numbered([d for d, _ in tags])
    y, class_names = numbered([c for _, c in tags])
    x, kept = pictures("domains", path, files, size, skip_unreadable, progress)
    return Images(
        name, x, y[kept], class_names, np.array(test)[kept] if True in divided else None,
        domain=domain_of[kept], domain_names=domain_names, mean=IMAGENET_MEAN, std=IMAGENET_STD,
    )  # fmt: skip


def image_folder(path: Path, size: int = 224, skip_unreadable: bool = False, progress: Progress | None = None) -> Images:
    """Your own images in class folders, optionally under train/ and test/ (or val/ if there is no test/)."""
    path = Path(path).resolve()
    check_size(size)
    kinds, parts = _class_folders(_folders(path))
    files: list[Path] = []
    tags: list[str] = []
    test: list[bool] = []
    for kind, held in kinds:
        found = _pictures(kind)
        files += found
        tags += [kind.name] * len(found)
        test += [held] * len(found)
    if not files:
        raise DataError(f"{path} holds no images in class folders; make it class/image, or train/class/image and test/...")
    y, class_names = numbered(tags)
    x, kept = pictures("folder", path, files, size, skip_unreadable, progress)
    marks = np.array(test)[kept] if parts else None
    return Images(path.name, x, y[kept], class_names, marks, mean=IMAGENET_MEAN, std=IMAGENET_STD)


def pictures(
    key: str, path: Path, files: Sequence[Path], size: int, skip_unreadable: bool, progress: Progress | None
) -> tuple[Pixels, NDArray[np.int64]]:
    """All images decoded to one size, and their numbers; an unreadable one is an error, or is skipped with a warning."""
    optional("PIL.Image")  # if it is missing, images must not seem unreadable

    def decode(i: int) -> Pixels | None:
        try:
            return picture(files[i], size, str(files[i]))
        except DataError as e:
            if skip_unreadable:
                return None
            raise DataError(f"{str(e).removesuffix('.')}, or skip unreadable ones with skip_unreadable.") from None

    x, kept = decoded_some(
        key, path, len(files), (size, size, 3), decode,
        progress=progress, stamp=listing_stamp(files), every=not skip_unreadable,
    )  # fmt: skip
    if not len(kept):
        raise DataError(f"none of the {len(files)} images in {path} can be read; get them again.")
    if len(kept) < len(files):
        first = files[int(np.setdiff1d(np.arange(len(files)), kept)[0])]
        warnings.warn(
            f"{len(files) - len(kept)} of {len(files)} images in {path} cannot be read and are skipped, first {first}.",
            stacklevel=3,
        )
    return x, kept


def numbered(tags: Sequence[Any] | NDArray[Any]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Names as numbers, in alphabetical order."""
    names, numbers = np.unique(np.array(tags, dtype=str), return_inverse=True)
    return numbers.astype(np.int64), tuple(map(str, names))


def named(column: NDArray[Any], names: Sequence[str] | None) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """A column of names or numbers as numbers and names; numbers are named by `names`, or by themselves."""
    if np.issubdtype(column.dtype, np.floating) or any(v is None for v in column):
        raise DataError("a label or domain is missing or no whole number; give every row a name or a number.")
    if not np.issubdtype(column.dtype, np.integer):
        return numbered(column)
    y = column.astype(np.int64)
    return y, tuple(names) if names else tuple(map(str, range(int(y.max(initial=-1)) + 1)))


def check_size(size: int) -> None:
    if size < 1:
        raise InputError(f"size must be at least 1 pixel, not {size}.")


def read_names(path: Path) -> Any:
    """Read a JSON file of names next to the data."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise DataError(f"{path} cannot be read ({e}); mend or remove it.") from None


def _domain_table(path: Path, size: int, progress: Progress | None, name: str) -> Images:
    table = Parquet([path])
    metas = [path.with_name(f"{stem}_meta.json") for stem in (path.stem, path.stem.split("_")[0])]
    found: Any = next((read_names(m) for m in metas if m.exists()), {})
    meta = found if isinstance(found, dict) else {}
    domain, domain_names = named(table.column("domain"), meta.get("domains"))
    y, class_names = named(table.column("label"), meta.get("classes"))
    if len(domain) and not 0 <= int(domain.min()) <= int(domain.max()) < len(domain_names):
        raise DataError(f"{path} has domains outside 0 to {len(domain_names) - 1}; name them all in {metas[0].name}.")
    x = table.images("domains", size, progress)
    return Images(name, x, y, class_names, domain=domain, domain_names=domain_names, mean=IMAGENET_MEAN, std=IMAGENET_STD)


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(f for f in path.iterdir() if f.is_dir() and not f.name.startswith((".", "__")))
    except OSError as e:
        raise DataError(
            f"{path} cannot be read as a folder ({e.strerror}); give the folder that contains the images."
        ) from None


def _class_folders(folders: Sequence[Path]) -> tuple[list[tuple[Path, bool]], bool]:
    """The class folders among these, or in them if these are train/ and test/ (or val/), each with whether it is for tests.

    Also returns whether these are such parts.
    """
    named = {f.name: f for f in folders}
    held = next((n for n in ("test", "val") if n in named), None)
    if held is None or "train" not in named or _pictures(named["train"]):
        return [(f, False) for f in folders], False
    return [(f, part == held) for part in ("train", held) for f in _folders(named[part])], True


def _pictures(path: Path) -> list[Path]:
    return sorted(f for f in path.iterdir() if f.suffix.lower() in SUFFIXES and not f.name.startswith("."))
