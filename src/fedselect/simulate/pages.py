"""Host memory in pages: rows of bytes that grow and shrink without being moved, in RAM or in one file."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedselect.files import disk

PAGE = 2**16
TOGETHER = 64
"""Pages are made so many at a time: 4 MiB, a power of two, because pinned memory is handed out in such sizes."""


class Pages:
    """Rows by number. Memory once taken serves other rows when one shrinks; it is not given back.

    With a path, memory is a file of that name, mapped. It is begun afresh: what it held is gone, and it is of no use to
    anybody later.
    """

    def __init__(self, rows: int, pin: bool = False, path: Path | None = None) -> None:
        self._pin, self._path = pin, path
        self._blocks: list[Tensor] = []
        self._free: list[int] = []
        self._rows: list[list[int]] = [[] for _ in range(rows)]
        self.sizes = [0] * rows

    @property
    def nbytes(self) -> int:
        return len(self._blocks) * TOGETHER * PAGE

    def resize(self, row: int, size: int) -> None:
        """Room for so many bytes; those that stay keep their content."""
        pages = self._rows[row]
        wanted = -(-size // PAGE)
        while len(pages) > wanted:
            self._free.append(pages.pop())
        while len(pages) < wanted:
            if not self._free:
                self._more()
            pages.append(self._free.pop())
        self.sizes[row] = size

    def parts(self, row: int) -> Iterator[Tensor]:
        """A row's bytes in order, as views; pages that lie side by side are one."""
        pages, left, at = self._rows[row], self.sizes[row], 0
        while at < len(pages):
            first, run = pages[at], 1
            while at + run < len(pages) and pages[at + run] == first + run and (first + run) % TOGETHER:
                run += 1
            begin, size = first % TOGETHER * PAGE, min(run * PAGE, left)
            yield self._blocks[first // TOGETHER][begin : begin + size]
            at, left = at + run, left - size

    def _more(self) -> None:
        at, size = len(self._blocks), TOGETHER * PAGE
        if self._path is None:
            block = torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)
        else:
            with disk(self._path), self._path.open("r+b" if at else "wb") as f:
                f.seek(at * size)
                f.write(bytes(size))  # a full disk shows here, not when the memory is touched
            block = torch.from_numpy(np.memmap(self._path, np.uint8, "r+", at * size, (size,)))
        self._blocks.append(block)
        self._free += reversed(range(at * TOGETHER, (at + 1) * TOGETHER))
