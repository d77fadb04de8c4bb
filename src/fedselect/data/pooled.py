"""Pooled: many clients whose samples are rows of one array, which may be a file."""

import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from fedselect.data.federation import ClientData

BLOCK = 1 << 26
"""Bytes of a file that are read at once."""


@dataclass(frozen=True)
class Rows:
    """One part of every client's samples: client i has the rows index[start[i]:start[i] + n[i]] of the array."""

    index: Tensor
    start: Tensor
    n: Tensor

    @classmethod
    def of(cls, index: NDArray[Any], n: NDArray[np.int64], pool: int) -> "Rows":
        """index: the rows of one client after another.   n: how many each has.   pool: how many the array has."""
        counts = torch.from_numpy(n)
        start = (counts.cumsum(0) - counts).clamp_max(max(0, len(index) - 1))  # also of who has none: all are read side by side
        return cls(torch.from_numpy(index.astype(np.int32 if pool < 2**31 else np.int64)), start, counts)


@dataclass(frozen=True, eq=False)
class Pooled(Sequence["ClientData"]):
    """The clients of one array. A client's samples are copied out of it when the client is asked for.

    So a million clients cost some bytes each, where a million `ClientData` cost a gigabyte.

    names: of the clients, in order.   parts: rows by part: train, test, val.
    """

    x: Tensor
    y: Tensor
    names: NDArray[Any]
    parts: Mapping[str, Rows]
    _none: Rows = field(init=False)

    def __post_init__(self) -> None:
        empty = torch.zeros(len(self.names), dtype=torch.int64)
        object.__setattr__(self, "_none", Rows(torch.zeros(0, dtype=torch.int32), empty, empty))

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator["ClientData"]:
        return map(self._client, range(len(self)))

    @overload
    def __getitem__(self, i: int) -> "ClientData": ...
    @overload
    def __getitem__(self, i: slice) -> "list[ClientData]": ...
    def __getitem__(self, i: int | slice) -> "ClientData | list[ClientData]":
        found = range(len(self))[i]
        return self._client(found) if isinstance(found, int) else list(map(self._client, found))

    def rows(self, part: str) -> Rows:
        return self.parts.get(part, self._none)

    def targets(self, part: str) -> Tensor:
        """All clients' targets of one part."""
        return self.y[self.rows(part).index]

    def on_validation(self) -> "Pooled":
        """The same clients with their validation data as test data."""
        return Pooled(self.x, self.y, self.names, {**self.parts, "test": self.parts["val"]})

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The whole array, a part at a time."""
        step = max(1, BLOCK // max(1, self.x[:1].nbytes))
        return zip(torch.split(self.x, step), torch.split(self.y, step), strict=True)

    def _client(self, i: int) -> "ClientData":
        from fedselect.data.federation import ClientData

        found: Any = {}
        for part, rows in self.parts.items():
            at = int(rows.start[i])
            if n := int(rows.n[i]):
                which = rows.index[at : at + n]
                found[part] = (self.x[which], self.y[which])
        return ClientData(**found, name=str(self.names[i]))


def own_mapping(array: Any) -> Any:
    """A mapping of our own of a file opened for reading: writing to it changes neither the file nor other arrays."""
    if not isinstance(array, np.memmap) or array.flags.writeable or array.filename is None or not array.flags.c_contiguous:
        return array
    first: Any = array
    while isinstance(first.base, np.ndarray):
        first = first.base
    at = first.offset + array.ctypes.data - first.ctypes.data
    return np.memmap(array.filename, array.dtype, "c", at, array.shape)


def release(array: Any) -> None:
    """After all of a mapping of our own was read once: give its memory back, and from now on read only what is asked for."""
    if isinstance(array, np.memmap) and isinstance(array.base, mmap.mmap):
        array.base.madvise(mmap.MADV_DONTNEED)
        array.base.madvise(mmap.MADV_RANDOM)
