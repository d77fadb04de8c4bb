"""FEMNIST as LEAF writes it: handwritten digits and letters in JSON files, one client per writer.

A file is a table of `users`, `num_samples` and `user_data`, which has for each user `x`, images as 784 numbers in [0, 1], and
`y`, their labels. LEAF makes them from 8-bit images, so they are stored as such.
"""

import hashlib
import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedselect.core.errors import DataError, InputError
from fedselect.core.files import held, replace
from fedselect.data import archives
from fedselect.data.cache import Pixels, cache_folder, listing_stamp
from fedselect.data.federation import Federation
from fedselect.data.mnist import CLASSES, SIDE
from fedselect.data.natural import ROWS, Recorded, data_folder, divide, evenly, federation
from fedselect.data.partition import Indices, Part, Sizes, rng
from fedselect.data.places import find

PLACES = ("femnist", "FEMNIST")
CLASS_NAMES = tuple(CLASSES["byclass"])  # also LEAF's order: digits, capitals, small letters
Parsed = tuple[NDArray[np.str_], Indices, Pixels, Indices]
"""A file's users, how many samples each has, and the images and labels of one after the other."""


def femnist(
    clients: int | None = None,
    *,
    train: int | None = None,
    test: int | None = None,
    val: int = 0,
    data_dir: str | None = None,
    seed: int = 0,
) -> Federation:
    """FEMNIST of LEAF, handwritten digits and letters, 28x28, 62 classes; one client per writer."""
    writers = read(data_folder(data_dir), clients)
    sizes = Sizes(train, test, val)
    parts = divide(writers.data, sizes, seed) if writers.test is None else _told(writers.data, writers.test, sizes, seed)
    return federation("femnist", writers.data, parts)


@dataclass(frozen=True)
class Writers:
    """The samples of all writers, each a separate recording; `test` marks LEAF's test samples."""

    data: Recorded
    test: NDArray[np.bool_] | None


def read(data_dir: Path | None = None, clients: int | None = None) -> Writers:
    """The first writers in LEAF's folder; all by default."""
    path = find(PLACES, data_dir, origin="femnist").resolve()
    if clients is not None and clients < 1:
        raise InputError(f"there must be at least one client, not {clients}.")
    folders = [(path / base / part) for base in ("data", ".") for part in ("train", "test", "all_data")]
    there = {f.name: f for f in reversed(folders) if f.is_dir() and any(f.glob("*.json"))}
    if "train" in there and "test" not in there:
        raise DataError(f"{there['train']} has no test/ beside it; make it again with LEAF's preprocess.sh -t sample.")
    if "train" not in there:
        return _whole(there.get("all_data", path), clients)
    own, held_out = _users(there["train"], clients), _users(there["test"], None)
    missing = [name for name in own if name not in held_out]
    if missing:
        raise DataError(
            f"writer {missing[0]} is in {there['train']} but not in {there['test']}; divide samples, not writers: "
            "preprocess.sh -t sample."
        )
    everything = [pair for name in own for pair in (own[name], held_out[name])]
    data = _recorded(list(own), everything, each=2)
    marks = np.repeat(np.arange(len(everything)) % 2 == 1, [len(y) for _, y in everything])
    return Writers(data, marks)


def _whole(folder: Path, clients: int | None) -> Writers:
    """Files without a split."""
    found = _users(folder, clients)
    return Writers(_recorded(list(found), list(found.values()), each=1), None)


def _users(folder: Path, clients: int | None) -> dict[str, tuple[Pixels, Indices]]:
    """The first users in a folder's files, by name."""
    files = sorted(folder.glob("*.json"), key=_order)
    if not files:
        raise DataError(f"{folder} holds no .json files of LEAF; give the folder that holds train/ and test/, or all_data/.")
    found: dict[str, tuple[Pixels, Indices]] = {}
    for file in files:
        for name, pair in _file(file).items():
            if name in found:
                raise DataError(f"{file} has the writer {name}, who is in another file, too; remove one of them.")
            found[name] = pair
        if clients is not None and len(found) >= clients:
            return dict(list(found.items())[:clients])
    if clients is not None:
        raise InputError(f"clients must lie in 1 to {len(found)}, not {clients}.")
    return found


def _order(file: Path) -> tuple[int, str]:
    """all_data_2 comes before all_data_10."""
    return len(file.name), file.name


def _recorded(names: Sequence[str], pairs: Sequence[tuple[Pixels, Indices]], each: int) -> Recorded:
    """The samples of these users, with `each` pairs per user."""
    counts = [len(y) for _, y in pairs]
    client = np.repeat(np.arange(len(pairs)) // each, counts)
    x, y = (np.concatenate(part) for part in zip(*pairs, strict=True))
    return Recorded(x, y, client, np.arange(len(y), dtype=np.int64), tuple(names), CLASS_NAMES)


def _told(data: Recorded, test: NDArray[np.bool_], sizes: Sizes, seed: int) -> list[Part]:
    """Each writer's samples as LEAF split them; `val` are held out of the training samples."""
    parts = []
    for i, name in enumerate(data.names):
        mine = data.client == i
        train, aside = (
            rows[evenly(data.y[rows], rng(seed, ROWS, i, part))]
            for part, rows in enumerate((np.flatnonzero(mine & ~test), np.flatnonzero(mine & test)))
        )
        if len(train) <= sizes.val:
            raise DataError(f"client {name} has {len(train)} samples to train on; val={sizes.val} would leave none.")
        parts.append(Part(train[sizes.val : sizes.train], aside[: sizes.test], train[: sizes.val]))
    return parts


# --- a file, parsed once


def _file(file: Path) -> dict[str, tuple[Pixels, Indices]]:
    """A file's users; its numbers are cached as bytes, since reading text takes a hundred times as long."""
    folder, where = cache_folder(), hashlib.sha256(str(file).encode()).hexdigest()[:16]
    kept = folder / f"femnist-{where}-{listing_stamp([file])[:16]}.npz"
    with held(folder / f".femnist-{where}.lock"):
        users, counts, x, y = _read_kept(kept) or _keep(kept, _parsed(file), folder.glob(f"femnist-{where}-*"))
    ends = np.cumsum(counts)
    return {str(u): (x[e - n : e], y[e - n : e]) for u, n, e in zip(users, counts, ends, strict=True)}


def _read_kept(path: Path) -> Parsed | None:
    """The cache of an earlier run; None if it is missing or damaged."""
    if not path.exists():
        return None
    try:
        kept = archives.arrays(path)
        return kept["users"], kept["counts"], kept["x"], kept["y"]
    except (DataError, KeyError):
        warnings.warn(f"{path} is damaged; what it was made from is read again.", stacklevel=2)
        return None


def _keep(path: Path, parsed: Parsed, stale: Iterable[Path]) -> Parsed:
    def write(fresh: Path) -> None:
        with fresh.open("wb") as file:
            np.savez(file, users=parsed[0], counts=parsed[1], x=parsed[2], y=parsed[3])

    for old in stale:
        old.unlink()
    replace(path, write)
    return parsed


def _parsed(file: Path) -> Parsed:
    try:
        said: Any = json.loads(file.read_text())
        users, counts, held_by = list(said["users"]), list(said["num_samples"]), said["user_data"]
        pairs = [_user(file, str(u), int(n), held_by[u]) for u, n in zip(users, counts, strict=True)]
    except OSError as e:
        raise DataError(f"{file} cannot be read ({e.strerror}); get it again.") from None
    except (ValueError, KeyError, TypeError) as e:
        said_ = " ".join(f"{type(e).__name__}: {e}".split())
        raise DataError(f"{file} is no file of LEAF with users, num_samples and user_data ({said_}); make it again.") from None
    kept = [(str(u), pair) for u, pair in zip(users, pairs, strict=True) if len(pair[1])]
    if not kept:
        raise DataError(f"{file} has no samples; make it again, or remove it.")
    x, y = (np.concatenate(part) for part in zip(*(pair for _, pair in kept), strict=True))
    return np.array([u for u, _ in kept], dtype=str), np.array([len(pair[1]) for _, pair in kept], np.int64), x, y


def _user(file: Path, user: str, count: int, said: Any) -> tuple[Pixels, Indices]:
    """One writer's images (N, 1, 28, 28) and labels."""
    x, y = np.array(said["x"], np.float32).reshape(len(said["x"]), -1), np.array(said["y"])
    who = f"{file}: writer {user}"
    if not len(x) == len(y) == count:
        raise DataError(f"{who} has {len(x)} images and {len(y)} labels, not {count} of each; make the file again.")
    if not count:
        return np.empty((0, 1, SIDE, SIDE), np.uint8), np.empty(0, np.int64)
    if x.shape[1] != SIDE * SIDE or not (float(x.min()) >= 0 and float(x.max()) <= 1):
        raise DataError(f"{who} must have images of {SIDE * SIDE} numbers from 0 to 1; make the file again.")
    if not np.issubdtype(y.dtype, np.integer) or not 0 <= int(y.min()) <= int(y.max()) < len(CLASS_NAMES):
        raise DataError(f"{who} has a label outside 0 to {len(CLASS_NAMES) - 1}; make the file again.")
    return np.rint(255 * x).astype(np.uint8).reshape(-1, 1, SIDE, SIDE), y.astype(np.int64)
