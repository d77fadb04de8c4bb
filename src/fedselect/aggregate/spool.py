"""Spool: uploads in a temporary file, written client by client and read entry by entry."""

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
"""Values that are reduced at a time: so many clients by so many entries of a tensor."""
ALIGNED = 8
"""Bytes that every tensor in the file is aligned to."""


@dataclass(frozen=True)
class Piece:
    """One tensor of some clients: where its values lie in the file, and the marks of those that were sent; None: all."""

    shape: torch.Size  # with the client axis
    dtype: torch.dtype
    device: torch.device
    values: int
    marks: int | None


class Spool:
    """Uploads on disk, in the folder that TMPDIR names. The file has no name, so nothing is left of it, however a run ends."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.gettempdir())
        with disk(self._folder):
            self._file: IO[bytes] = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
        self._close = weakref.finalize(self, self._file.close)
        self._parts: dict[str, list[Piece]] = {}

    def add(self, values: Tree, sent: Mask) -> None:
        """Write what these clients sent; tensors that nobody of them sends are left out."""
        for name, v in values.items():
            marks = sent.get(name, False)
            if marks is False:
                continue
            at = self._write(v)
            marked = self._write(marks) if isinstance(marks, Tensor) else None
            self._parts.setdefault(name, []).append(Piece(v.shape, v.dtype, v.device, at, marked))

    def reduce(self, fn: Callable[[Tensor, Tensor], Tensor], least: int = 1) -> tuple[Tree, Mask]:
        """`fn` of (values, sent), both (clients, entries), for all entries; and which had as many senders. Closes the file.

        Values come in float64, as many entries at a time as fit into `ROOM`.
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
        """Where the tensor lies now."""
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        with disk(self._folder):
            at = self._file.tell()
            self._file.write(content.data)
            self._file.write(bytes(-content.nbytes % ALIGNED))
        return at


def _reduced(
    whole: mmap.mmap, parts: list[Piece], fn: Callable[[Tensor, Tensor], Tensor], least: int, advance: Callable[[int], None]
) -> tuple[Tensor, Tensor]:
    """One tensor, reduced over all its clients: its values, and which of them had at least so many senders."""
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
