"""Split: one part of every client's data, from which batches are taken."""

from dataclasses import KW_ONLY, dataclass, replace

import torch
from torch import Tensor

from fedselect import kernels
from fedselect.training.transforms import crop_flip

READ = 1 << 26
"""Bytes that are copied from a file to a GPU at once."""


@dataclass(frozen=True)
class Split:
    """One part (training, validation or test) of every client's data, in one pool: client i owns n[i] rows from start[i].

    With an `index`, these are rows of the index, which says where in the pool each sample lies; the pool may then be a file.
    Images stay uint8 in the pool and are converted batch by batch: pixel * scale + shift, by channel.
    """

    x: Tensor
    y: Tensor
    start: Tensor
    n: Tensor
    scale: Tensor | None = None
    shift: Tensor | None = None
    _: KW_ONLY
    augment: str = "none"
    sizes: tuple[int, ...] | None = None  # n, if the host can read it without waiting for a GPU
    picks: Tensor | None = None  # (C, longest): a subset of each client's rows; None: all of them, in order
    index: Tensor | None = None  # the position of each sample in the pool; None: samples lie client after client

    def __post_init__(self) -> None:
        if self.sizes is None:
            object.__setattr__(self, "sizes", tuple(self.n.tolist()))

    def rows(self, rows: slice | Tensor) -> "Split":
        """The data of these clients; an index on the host is copied without waiting."""
        if isinstance(rows, slice) and rows == slice(None):
            return self
        assert self.sizes is not None
        at = rows.to(self.n.device, non_blocking=True) if isinstance(rows, Tensor) else rows
        sizes = self.sizes[rows] if isinstance(rows, slice) else tuple(self.sizes[i] for i in rows.tolist())
        picks = None if self.picks is None else self.picks[at]
        return replace(self, start=self.start[at], n=self.n[at], sizes=sizes, picks=picks)

    @property
    def longest(self) -> int:
        return max(self.sizes or (0,))

    @property
    def targets(self) -> Tensor:
        """Of all samples, client after client."""
        return self.y if self.index is None else self.y[self.index]

    def places(self, index: Tensor) -> Tensor:
        """Positions of samples in the pool, by their number within each client: (C, b)."""
        at = self.start.unsqueeze(1) + (index if self.picks is None else self.picks.gather(1, index))
        return at if self.index is None else self.index[at].to(at.dtype)

    def of(self, client: int) -> Tensor:
        """Positions in the pool of one client's samples."""
        assert self.sizes is not None
        return self.rows(slice(client, client + 1)).places(torch.arange(self.sizes[client], device=self.n.device)[None])[0]

    def batch(self, index: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Samples by their number within each client: (C, b) -> (C, b, ...), (C, b); with keys, augmented."""
        flat = self.places(index)
        if self.x.ndim == 4 and kernels.serve(self.x) and self.x.dtype in (torch.uint8, torch.float32):
            from fedselect.kernels.batch import pictures

            draw = keys if self.augment == "crop-flip" else None
            return pictures(self.x, flat, index, draw, self.scale, self.shift), self.y[flat]
        x, y = _at(self.x, flat), _at(self.y, flat)
        if keys is not None and self.augment == "crop-flip":
            x = crop_flip(x, keys, index)
        if self.scale is not None and self.shift is not None:
            x = x.to(self.scale.dtype) * self.scale + self.shift
        return x, y

    def to(self, device: torch.device) -> "Split":
        """The same on a device. A GPU gets the samples themselves, client after client, not the whole pool and its index."""
        if self.index is not None and device.type != "cpu":
            return replace(self, x=self._picked(self.x, device), y=self._picked(self.y, device), index=None).to(device)
        scale = None if self.scale is None else self.scale.to(device)
        shift = None if self.shift is None else self.shift.to(device)
        x, y, start, n = (v.to(device) for v in (self.x, self.y, self.start, self.n))
        picks = None if self.picks is None else self.picks.to(device)
        return Split(x, y, start, n, scale, shift, augment=self.augment, sizes=self.sizes, picks=picks, index=self.index)

    def _picked(self, pool: Tensor, device: torch.device) -> Tensor:
        """The samples of the index, on a device, read a part at a time: the pool may be a file larger than the memory."""
        assert self.index is not None
        out = torch.empty(len(self.index), *pool.shape[1:], dtype=pool.dtype, device=device)
        step = max(1, READ // max(1, pool[:1].nbytes))
        for into, which in zip(torch.split(out, step), torch.split(self.index, step), strict=True):
            into.copy_(pool[which])
        return out


def _at(pool: Tensor, places: Tensor) -> Tensor:
    """pool[places], which copies number by number; whole samples are copied many times as fast."""
    if pool.ndim == 1:
        return torch.take(pool, places)
    return pool.index_select(0, places.flatten()).view(*places.shape, *pool.shape[1:])
