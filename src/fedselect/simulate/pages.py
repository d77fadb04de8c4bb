"""Host memory in pages: rows of bytes that grow and shrink without being moved."""

from collections.abc import Iterator

import torch
from torch import Tensor

PAGE = 2**16
"""The size of a page, in bytes, if rows are much longer than that."""
TOGETHER = 64
"""Pages of that size are allocated together: 4 MiB, a power of two, because pinned memory comes in such sizes."""


class Pages:
    """Rows by number. When a row shrinks, other rows reuse its memory; it is never returned to the system.

    longest: most bytes of a row; short rows get smaller pages, so that little memory is wasted.
    """

    def __init__(self, rows: int, pin: bool = False, longest: int | None = None) -> None:
        self._pin = pin
        self._page, self._together = PAGE, TOGETHER
        while longest is not None and 8 * self._page > longest and self._page > 512:
            self._page, self._together = self._page // 2, self._together * 2
        self._blocks: list[Tensor] = []
        self._free: list[int] = []
        self._rows: list[list[int]] = [[] for _ in range(rows)]
        self.sizes = [0] * rows

    @property
    def nbytes(self) -> int:
        return len(self._blocks) * self._together * self._page

    def resize(self, row: int, size: int) -> None:
        """Make room for this many bytes; the remaining content is kept."""
        pages = self._rows[row]
        wanted = -(-size // self._page)
        while len(pages) > wanted:
            self._free.append(pages.pop())
        while len(pages) < wanted:
            if not self._free:
                self._more()
            pages.append(self._free.pop())
        self.sizes[row] = size

    def parts(self, row: int) -> Iterator[Tensor]:
        """A row's bytes in order, as views; adjacent pages are one view."""
        pages, left, at = self._rows[row], self.sizes[row], 0
        page, together = self._page, self._together
        while at < len(pages):
            first, run = pages[at], 1
            while at + run < len(pages) and pages[at + run] == first + run and (first + run) % together:
                run += 1
            begin, size = first % together * page, min(run * page, left)
            yield self._blocks[first // together][begin : begin + size]
            at, left = at + run, left - size

    def _more(self) -> None:
        at = len(self._blocks)
        self._blocks.append(torch.empty(self._together * self._page, dtype=torch.uint8, pin_memory=self._pin))
        self._free += reversed(range(at * self._together, (at + 1) * self._together))
