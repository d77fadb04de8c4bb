"""Spool: uploads in a temporary file, written by client and read by entry."""

import mmap
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from fedselect.core import doing
from fedselect.core.files import disk
from fedselect.core.tree import Mask, Tree

ROOM = 1 << 21
"""Number of values reduced at a time: clients times entries of a tensor."""
ALIGNED = 8
"""Alignment of tensors in the file, in bytes."""


@dataclass(frozen=True)
class Piece:
    """One tensor of some clients: where its values and its mask are in the file; no mask: all entries were sent."""

    shape: torch.Size  # with the client axis
    dtype: torch.dtype
    device: torch.device
    values: int
    marks: int | None


class Spool:
    """Uploads on disk, in the folder TMPDIR. The file has no name, so it disappears however the run ends."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.gettempdir())
        with disk(self._folder):
            self._file: IO[bytes] = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
        self._close = weakref.finalize(self, self._file.close)
        self._parts: dict[str, list[Piece]] = {}

    def add(self, values: Tree, sent: Mask) -> None:
        """Write the uploads of these clients; tensors that none of them sends are left out."""
        for name, v in values.items():
            marks = sent.get(name, False)
            if marks is False:
                continue
            at = self._write(v)
            marked = self._write(marks) if isinstance(marks, Tensor) else None
            self._parts.setdefault(name, []).append(Piece(v.shape, v.dtype, v.device, at, marked))

    def reduce(self, fn: Callable[[Tensor, Tensor], Tensor], least: int = 1) -> tuple[Tree, Mask]:
        """Apply `fn` to (values, sent), both (clients, entries); also return which entries had enough senders. Closes the file.

        `fn` gets values in float64, as many entries at a time as fit into `ROOM`.
        """
        out: Tree = {}
        heard: Tree = {}
        with disk(self._folder):
            self._file.flush()
        if self._parts:  # an empty file cannot be mapped
            whole = mmap.mmap(self._file.fileno(), 0)
            entries = sum(parts[0].shape[1:].numel() for parts in self._parts.values())
            with doing.progress("combining", entries) as advance:
                for name, parts in self._parts.items():
                    out[name], heard[name] = _reduced(whole, parts, fn, least, advance)
        self._close()
        return out, heard

    def _write(self, tensor: Tensor) -> int:
        """Write a tensor; return its offset in the file."""
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        with disk(self._folder):
            at = self._file.tell()
            self._file.write(content.data)
            self._file.write(bytes(-content.nbytes % ALIGNED))
        return at


def _reduced(
    whole: mmap.mmap, parts: list[Piece], fn: Callable[[Tensor, Tensor], Tensor], least: int, advance: Callable[[int], None]
) -> tuple[Tensor, Tensor]:
    """One tensor, reduced over all its clients: its values, and which entries had at least this many senders."""
    first = parts[0]
    size, shape = first.shape[1:].numel(), first.shape[1:]
    out = torch.zeros(size, dtype=first.dtype, device=first.device)
    heard = torch.zeros(size, dtype=torch.bool, device=first.device)
    step = max(1, ROOM // sum(p.shape[0] for p in parts))
    for at in range(0, size, step):
        here = slice(at, at + step)
        values = torch.cat([_read(whole, p.values, p.dtype, p.shape)[:, here].double() for p in parts])
        sent = torch.cat([_sent(whole, p)[:, here] for p in parts])
        out[here] = fn(values.to(first.device), sent.to(first.device)).to(first.dtype)
        heard[here] = (sent.sum(0) >= least).to(first.device)
        advance(sent.shape[1])
    return out.view(shape), heard.view(shape)


def _sent(whole: mmap.mmap, part: Piece) -> Tensor:
    if part.marks is not None:
        return _read(whole, part.marks, torch.bool, part.shape)
    return torch.ones((), dtype=torch.bool).expand(part.shape[0], part.shape[1:].numel())


def _read(whole: mmap.mmap, at: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """A view of the file as (clients, entries)."""
    return torch.frombuffer(whole, dtype=dtype, count=shape.numel(), offset=at).view(shape[0], -1)
