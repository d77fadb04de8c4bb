"""Disk: the packed rows of clients in a temporary file, so that memory does not grow with clients outside the cohort."""

import io
import os
import tempfile
import weakref
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedselect.core.errors import InputError, RunError
from fedselect.core.files import disk
from fedselect.core.tree import State, moved
from fedselect.methods.method import Carried
from fedselect.simulate import flat

Head = NDArray[np.int64]
"""What a row begins with: checksums of the rest of this and of its content, its client (from 1), entries by section, scores."""


class Disk:
    """States of more clients than fit into memory: what each carries from round to round, packed, in a file.

    The file is in the folder TMPDIR and has no name, so it disappears however the run ends. Every client has a place in it, as
    long as its longest row. The file is sparse: a client that never took part takes no room. Memory is needed for one byte per
    client, and for the rows of the clients that are read or written.

    carries, like, metrics: as for `Compact`, which gives the same numbers.
    """

    kind: ClassVar[str] = "disk"

    def __init__(
        self,
        clients: int,
        device: torch.device,
        carries: Callable[[State], Mapping[str, Carried]],
        like: State,
        metrics: int,
    ) -> None:
        self.clients, self.device = clients, device
        self.joined = torch.zeros(clients, dtype=torch.bool)
        self._carries, self._metrics = carries, metrics
        self._layout = flat.layout(like, carries(like))
        self.forgets = not self._layout.whole
        self._entries = slice(3, 3 + len(self._layout.sections))
        self._head = 8 * (self._entries.stop + metrics)
        self._place = self._head + self._layout.longest
        self._folder = Path(tempfile.gettempdir())
        with disk(self._folder):
            file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
        weakref.finalize(self, file.close)
        self._file = file.fileno()
        self._clear()  # now, because file systems have a largest size

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return os.fstat(self._file).st_blocks * 512

    def to(self, device: torch.device) -> None:
        """The rows are on disk already."""

    def prefetch(self, ids: Tensor) -> None:
        """Announce the next clients: nothing to do, the system keeps in memory what it can."""

    def take(self, ids: Tensor, device: torch.device) -> State:
        """The states of these clients; those of clients without a row are zero."""
        there, numbers = self.joined[ids.cpu()].tolist(), ids.tolist()
        heads = [self._read_head(i) if known else None for i, known in zip(numbers, there, strict=True)]
        counts = self._layout.fixed.repeat(len(numbers), 1)
        for row, head in enumerate(heads):
            if head is not None:
                counts[row] = torch.from_numpy(head[self._entries].copy())
        sizes = self._layout.nbytes(counts).sum(1).tolist()
        packed = torch.zeros(sum(sizes), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        for i, head, part in zip(numbers, heads, torch.split(packed, sizes), strict=True):
            if head is not None:
                self._read_content(i, head, part.numpy())
        state = flat.unpack(self._layout, packed.to(self.device, non_blocking=True), counts)
        return {k: moved(t, device) for k, t in state.items()}

    def put(self, ids: Tensor, state: State, scores: Tensor | None = None) -> None:
        """Write states, and what the clients' local models scored: (C, metrics), float64."""
        packed, counts = self._pack(state)
        parts = torch.split(packed.cpu(), self._layout.nbytes(counts).sum(1).tolist())
        scores = torch.full((len(counts), self._metrics), torch.nan, dtype=torch.float64) if scores is None else scores
        with disk(self._folder):
            for i, count, score, part in zip(ids.tolist(), counts, scores, parts, strict=True):
                content = part.numpy().data
                head = np.array([0, zlib.crc32(content), i + 1, *count.tolist(), *score.view(torch.int64).tolist()], np.int64)
                head[0] = zlib.crc32(head[1:].data)
                self._write(i, head.tobytes() + content)
        self.joined[ids.cpu()] = True

    def carried(self, state: State) -> State:
        """A state as it would come back after `put`."""
        return flat.unpack(self._layout, *self._pack(state))

    def scored(self, ids: Tensor) -> Tensor:
        """What the local models of these clients scored when they were put, NaN if unknown: (C, metrics), float64."""
        out = torch.full((len(ids), self._metrics), torch.nan, dtype=torch.float64)
        for row, (i, there) in enumerate(zip(ids.tolist(), self.joined[ids.cpu()].tolist(), strict=True)):
            if there:
                out[row] = torch.from_numpy(self._read_head(i)[self._entries.stop :].copy()).view(torch.float64)
        return out

    def dump(self) -> State:
        """All rows end to end, in memory; a checkpoint uses `save`."""
        whole = io.BytesIO()
        self.save(whole)
        return {"packed": {"bytes": torch.frombuffer(bytearray(whole.getvalue() or b"\0"), dtype=torch.uint8)}}

    def load(self, dumped: State) -> None:
        self.restore(io.BytesIO(dumped["packed"]["bytes"].numpy().tobytes()))

    def save(self, file: IO[bytes]) -> None:
        """Write all rows end to end, one after another."""
        for i in self.joined.nonzero().flatten().tolist():
            head = self._read_head(i)
            content = np.empty(self._size(head), np.uint8)
            self._read_content(i, head, content)
            file.write(head.tobytes() + content.data)

    def restore(self, file: IO[bytes]) -> None:
        """Replace all rows by those that `save` wrote."""
        self.joined = torch.zeros_like(self.joined)
        self._clear()
        with disk(self._folder):
            while len(start := file.read(self._head)) == self._head:
                head = np.frombuffer(start, np.int64)
                i = int(head[2]) - 1
                self._write(i, start + file.read(self._size(head)))
                self.joined[i] = True

    def _clear(self) -> None:
        try:
            os.truncate(self._file, 0)
            os.truncate(self._file, self.clients * self._place)
        except OSError as e:
            size = f"{self.clients * self._place / 1e12:.3g} TB for {self.clients} clients"
            raise RunError(
                f"the file system of {self._folder} allows no sparse file of {size} ({e.strerror}); set TMPDIR to a folder on "
                "one that does, such as XFS, or use fewer clients or rows=personal."
            ) from None

    def _pack(self, state: State) -> tuple[Tensor, Tensor]:
        if not flat.layout(state, self._carries(state)).part_of(self._layout):
            raise InputError("a client's state has tensors that it did not have before, so it cannot be stored packed.")
        return flat.pack(self._layout, state)

    def _size(self, head: Head) -> int:
        return sum(s.nbytes(count) for s, count in zip(self._layout.sections, head[self._entries].tolist(), strict=True))

    def _write(self, client: int, content: bytes) -> None:
        left, at = memoryview(content), client * self._place
        while len(left):
            done = os.pwrite(self._file, left, at)
            left, at = left[done:], at + done

    def _read_head(self, client: int) -> Head:
        head = np.zeros(self._head // 8, np.int64)
        self._read(client, 0, head.data.cast("B"))
        if head[2] != client + 1 or head[0] != zlib.crc32(head[1:].data):
            raise self._damaged(client)
        return head

    def _read_content(self, client: int, head: Head, into: NDArray[np.uint8]) -> None:
        self._read(client, self._head, into.data)
        if head[1] != zlib.crc32(into.data):
            raise self._damaged(client)

    def _read(self, client: int, at: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            try:
                read = os.preadv(self._file, [into[done:]], client * self._place + at + done)
            except OSError:  # a failing disk
                read = 0
            if not read:
                raise self._damaged(client)
            done += read

    def _damaged(self, client: int) -> RunError:
        return RunError(
            f"the stored row of client {client} is damaged (in a temporary file in {self._folder}), so it was not used; set "
            "TMPDIR to a folder on another disk and resume."
        )
