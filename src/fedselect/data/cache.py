"""Images decoded once into a memory-mapped array, safe against concurrent processes and kills."""

import hashlib
import io
import os
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedselect.core.errors import DataError, RunError
from fedselect.core.files import held, read_json, replace, write_json
from fedselect.data.places import Progress, either, optional, user_cache

Pixels = NDArray[np.uint8]
CHUNK = 512  # images decoded at a time
PART = 1 << 24  # bytes of a decoded array that have a checksum
IMAGE_COLUMNS = ("image", "img")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def decoded(
    key: str,
    source: Path,
    count: int,
    shape: tuple[int, ...],
    decode: Callable[[int], Pixels],
    *,
    progress: Progress | None = None,
    stamp: str = "",
) -> Pixels:
    """uint8 (count, *shape), read-only and memory-mapped: decoded now, or when this source was first read.

    `decode` is called once for each row, from several threads. A folder's `stamp` must tell its contents apart (see
    `listing_stamp`): a folder does not change when a file in it does.
    """
    return decoded_some(key, source, count, shape, decode, progress=progress, stamp=stamp, every=True)[0]


def decoded_some(
    key: str,
    source: Path,
    count: int,
    shape: tuple[int, ...],
    decode: Callable[[int], Pixels | None],
    *,
    progress: Progress | None = None,
    stamp: str = "",
    every: bool = False,
) -> tuple[Pixels, NDArray[np.int64]]:
    """Like `decoded`, without the rows for which `decode` returns None; also returns the numbers of the other rows."""
    folder = cache_folder()
    about = source.stat()
    where = _digest(str(source.resolve()), *shape)
    path = folder / f"{key}-{where}-{_digest(about.st_size, about.st_mtime_ns, count, stamp)}.npy"
    about_it = path.with_suffix(".about.json")
    with held(folder / f".{key}-{where}.lock"):
        skipped = _read_about(path, about_it)
        x = None if skipped is None else _open(path, (count - len(skipped), *shape))
        if x is None or skipped is None or (every and skipped):
            if path.exists() and about_it.exists() and not (every and skipped):
                warnings.warn(f"{path} is damaged; its source is decoded again.", stacklevel=2)
            for stale in [*folder.glob(f"{key}-{where}-*"), *folder.glob(f".{key}-{where}-*.part")]:
                stale.unlink()
            dropped = skipped = []
            replace(path, lambda fresh: _write(fresh, count, shape, decode=decode, progress=progress, skipped=dropped))
            write_json(about_it, {"skipped": skipped, "parts": _checksums(path)})
            x = _open(path, (count - len(skipped), *shape))
            assert x is not None
    return x, np.setdiff1d(np.arange(count, dtype=np.int64), np.array(skipped, np.int64))


def cache_folder() -> Path:
    """The folder of decoded images, readable only by its owner."""
    folder = user_cache() / "decoded"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # images may be of people, in a folder that others cannot read
    except OSError as e:
        raise DataError(f"{folder} cannot be created ({e.strerror}); set XDG_CACHE_HOME to a writable folder.") from None
    return folder


def _write(
    fresh: Path,
    count: int,
    shape: tuple[int, ...],
    *,
    decode: Callable[[int], Pixels | None],
    progress: Progress | None,
    skipped: list[int],
) -> None:
    """Write rows one after another; the header with their number is rewritten at the end if some were skipped."""
    with fresh.open("wb") as file, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        _write_head(file, (count, *shape))
        start = file.tell()
        for first in range(0, count, CHUNK):
            rows = range(first, min(first + CHUNK, count))
            for i, row in zip(rows, pool.map(decode, rows), strict=True):
                if row is None:
                    skipped.append(i)
                    continue
                if row.shape != shape or row.dtype != np.uint8:
                    raise DataError(f"image {i} is {row.dtype} {row.shape}, not uint8 {shape}.")
                file.write(np.ascontiguousarray(row).data)
            if progress:
                progress(rows.stop, count)
        if skipped:
            file.seek(0)
            _write_head(file, (count - len(skipped), *shape))
            assert file.tell() == start  # numpy leaves room for the count to grow


def _write_head(file: io.BufferedWriter, shape: tuple[int, ...]) -> None:
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})


def _open(path: Path, shape: tuple[int, ...]) -> Pixels | None:
    """The array, or None if it is missing or incomplete."""
    try:
        x: Pixels = np.load(path, mmap_mode="r" if np.prod(shape) else None)
    except (OSError, ValueError, EOFError):
        return None
    return x if x.shape == shape and x.dtype == np.uint8 else None


def _read_about(path: Path, about: Path) -> list[int] | None:
    """The rows that a decoded array leaves out; None if it is damaged or of an earlier version."""
    try:
        said = read_json(about, "")
        return [int(i) for i in said["skipped"]] if _checksums(path) == said["parts"] else None
    except (OSError, RunError, KeyError):
        return None


def _checksums(path: Path) -> list[int]:
    """The checksum of each part of a file."""
    with path.open("rb") as file:
        return [zlib.crc32(part) for part in iter(partial(file.read, PART), b"")]


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def listing_stamp(files: Sequence[Path]) -> str:
    """Changes when a file is added, removed, renamed or rewritten."""
    stamp = hashlib.sha256()
    for file in files:
        about = file.stat()
        stamp.update(f"{file}\0{about.st_size}\0{about.st_mtime_ns}\0".encode())
    return stamp.hexdigest()


def picture(raw: bytes | Path, size: int, name: str) -> Pixels:
    """(size, size, 3): converted to RGB, the shorter side resized to `size`, the longer one center-cropped."""
    image = optional("PIL.Image")
    try:
        with image.open(io.BytesIO(raw) if isinstance(raw, bytes) else raw) as opened:
            return fit(opened, size)
    except Exception as e:  # a decoder may raise almost anything on damaged bytes
        raise DataError(f"{name} cannot be read as an image ({e}); repair or remove it.") from None


def fit(opened: Any, size: int) -> Pixels:
    """`picture` for an image that PIL has open."""
    image = optional("PIL.Image")
    if opened.mode.startswith("I"):  # 16-bit gray, which PIL would clip to white
        opened = image.fromarray((np.asarray(opened) >> 8).clip(0, 255).astype(np.uint8))
    if opened.mode in ("P", "PA", "LA"):
        opened = opened.convert("RGBA")
    rgb = opened.convert("RGB")
    width, height = rgb.size
    short = min(width, height)
    if short != size:
        width, height = (max(size, int(size * side / short)) for side in (width, height))
        rgb = rgb.resize((width, height), image.Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return np.asarray(rgb.crop((left, top, left + size, top + size)), dtype=np.uint8)


class Parquet:
    """Parquet files read one after another as one table; images are streamed, never all in memory."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = [path.resolve() for path in paths]
        self._rows: dict[int, bytes] = {}
        self._next = 0
        self._lock = threading.Lock()
        read = optional("pyarrow.parquet")
        try:
            self.files = [read.ParquetFile(path, memory_map=True, page_checksum_verification=True) for path in paths]
        except (OSError, ValueError) as e:
            raise DataError(f"{either([str(p) for p in paths])} is damaged or not parquet ({e}); download it again.") from None
        self.count = sum(int(f.metadata.num_rows) for f in self.files)
        self.columns: list[str] = self.files[0].schema_arrow.names

    def column(self, *names: str) -> NDArray[Any]:
        """The first of these columns that exists: numbers or texts, one value per row."""
        name = self._name(names)
        try:
            return np.concatenate([f.read([name]).column(0).to_numpy() for f in self.files])
        except (OSError, ValueError, KeyError) as e:
            raise self._damaged(e) from None

    def has(self, name: str) -> bool:
        return name in self.columns

    def images(self, key: str, size: int, progress: Progress | None = None) -> Pixels:
        column = self._name(IMAGE_COLUMNS)
        stream = self._stream(column)

        def decode(i: int) -> Pixels:
            return picture(self._take(stream, i), size, f"row {i} of {either([str(p) for p in self.paths])}")

        stamp = listing_stamp(self.paths)
        return decoded(key, self.paths[0], self.count, (size, size, 3), decode, progress=progress, stamp=stamp)

    def _name(self, names: Sequence[str]) -> str:
        found = next((n for n in names if n in self.columns), None)
        if found is None:
            raise DataError(f"{self.paths[0]} has no column {either(names)}, only {', '.join(self.columns)}; rename one.")
        return found

    def _stream(self, column: str) -> Iterator[bytes]:
        for file in self.files:
            for batch in file.iter_batches(batch_size=CHUNK, columns=[column]):
                for cell in batch.column(0).to_pylist():
                    raw = cell.get("bytes") if isinstance(cell, dict) else cell
                    yield raw if isinstance(raw, bytes) else b""

    def _take(self, stream: Iterator[bytes], i: int) -> bytes:
        """Row i, for threads that ask once each and almost in order."""
        with self._lock:
            try:
                while i not in self._rows:
                    self._rows[self._next] = next(stream)
                    self._next += 1
            except (OSError, ValueError, StopIteration) as e:
                raise self._damaged(e) from None
            return self._rows.pop(i)

    def _damaged(self, e: Exception) -> DataError:
        return DataError(f"{either([str(p) for p in self.paths])} is damaged ({e}); download it again.")
