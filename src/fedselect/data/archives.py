"""Archives read to their end, since gzip and zip check a checksum only when the whole file is read."""

import gzip
import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedselect.core.errors import DataError

DAMAGED = (
    tarfile.TarError, zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, ValueError, KeyError, RuntimeError
)  # fmt: skip
"""Errors that readers raise on damaged bytes."""


@contextmanager
def intact(path: Path, otherwise: str = "damaged") -> Iterator[None]:
    """Name the file that cannot be read."""
    try:
        yield
    except DAMAGED as e:
        raise DataError(f"{path} is truncated or {otherwise} ({e}); delete it and download it again.") from None


def members(path: Path, wanted: Container[str]) -> dict[str, bytes]:
    """The wanted files of a tar archive by name, in one pass and without unpacking to disk.

    Data after the end of the archive is read too: gzip's checksum is at the very end of a file.
    """
    found: dict[str, bytes] = {}
    with intact(path), path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        stream: Any = gzip.GzipFile(fileobj=raw) if packed else raw
        with tarfile.open(fileobj=stream, mode="r|" if packed else "r|*") as archive:
            for member in archive:
                name = member.name.rsplit("/", 1)[-1]
                if member.isfile() and name in wanted and (file := archive.extractfile(member)):
                    found[name] = file.read()
        while packed and stream.read(1 << 20):
            pass
    return found


def arrays(path: Path) -> Mapping[str, NDArray[Any]]:
    """All arrays of an .npz file; pickled ones are refused."""
    with intact(path, "no npz file"), zipfile.ZipFile(path) as archive:
        return {name.removesuffix(".npy"): _array(archive.read(name)) for name in archive.namelist()}


def _array(raw: bytes) -> NDArray[Any]:
    found: NDArray[Any] = np.lib.format.read_array(io.BytesIO(raw), allow_pickle=False)
    return found
