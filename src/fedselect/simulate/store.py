"""Stores clients' states between rounds, by client id: one stack of rows, or packed rows that are streamed."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
from torch import Tensor

from fedselect.core.errors import InputError
from fedselect.core.tree import State, Tree, fresh, moved, put, take
from fedselect.methods.method import Carried
from fedselect.simulate import flat
from fedselect.simulate.pages import Pages

Fetched = tuple[Tensor, Tensor, torch.cuda.Event | None]
"""The clients, their rows end to end on the device, and on a GPU the event after which the copy is done."""


class Store:
    """States of all clients, stacked; a cohort of all clients in order is returned without a copy."""

    kind: ClassVar[str] = "resident"
    forgets: ClassVar[bool] = False

    def __init__(self, clients: int, device: torch.device) -> None:
        self.clients = clients
        self.device = device
        self.rows: State = {}
        self.joined = torch.zeros(clients, dtype=torch.bool)
        self._gone: dict[str, Tensor] = {}  # for each tree, the clients that no longer have it

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(v.nbytes for t in self.rows.values() for v in t.values()) + self.joined.nbytes

    def take(self, ids: Tensor, device: torch.device) -> State:
        if self._everybody(ids):
            return {k: moved(t, device) for k, t in self.rows.items()}
        at = ids.to(self.device, non_blocking=True)
        return {k: moved(take(t, at), device) for k, t in self.rows.items()}

    def put(self, ids: Tensor, state: State) -> None:
        """Store states. A tree that the state no longer has becomes zeros, and is dropped when no client has it."""
        self.joined[ids.cpu()] = True
        if self._everybody(ids):
            self.rows = {k: {n: _apart(v) for n, v in moved(t, self.device).items()} for k, t in state.items()}
            self._gone.clear()
            return
        at = ids.to(self.device, non_blocking=True)
        for k, tree in state.items():
            put(self._room(k, tree), at, moved(tree, self.device))
            if k in self._gone:
                self._gone[k][ids.cpu()] = False
        for k in self.rows.keys() - state.keys():
            gone = self._gone.setdefault(k, torch.zeros_like(self.joined))
            gone[ids.cpu()] = True
            for v in self.rows[k].values():
                v[at] = 0
            if bool((gone | ~self.joined).all()):
                del self.rows[k]

    def to(self, device: torch.device) -> None:
        """Move the rows to another device."""
        self.device = device
        self.rows = {k: moved(t, device) for k, t in self.rows.items()}

    def prefetch(self, ids: Tensor) -> None:
        """Announce the next clients: nothing to do, their rows are at hand."""

    def dump(self) -> State:
        """What a checkpoint holds of the clients, besides `joined`."""
        return self.rows

    def load(self, dumped: State) -> None:
        self.rows = {k: {n: v.to(self.device) for n, v in t.items()} for k, t in dumped.items()}
        self._gone.clear()

    def _room(self, key: str, like: Tree) -> Tree:
        room = self.rows.setdefault(key, {})
        lacking = fresh({n: v for n, v in like.items() if n not in room}, self.clients, self.device)
        for v in lacking.values():
            v.zero_()
        room.update(lacking)
        return room

    def _everybody(self, ids: Tensor) -> bool:
        return len(ids) == self.clients and bool((ids.cpu() == torch.arange(self.clients)).all())


def _apart(v: Tensor) -> Tensor:
    """Separate rows, if a method returns one row for all clients: some will be written, and the others must not change."""
    return v.clone(memory_format=torch.contiguous_format) if len(v) > 1 and v.stride(0) == 0 else v


class Compact:
    """States of more clients than fit: only what each carries from round to round, packed, in host memory.

    What is not carried comes back as zero. A store that `forgets` any values loses a client's view "local" when it is put;
    `scores` holds what the client's last model scored by then, one column per metric. Host memory is pinned if the device is a
    GPU. All copies run on one side stream, in the order of the calls, so no page is read or written too early; a buffer on the
    device is registered with both streams that use it.

    carries: which entries of a state are carried; see `Method.carries`.   like: any client's state, for its structure.
    """

    kind: ClassVar[str] = "compact"

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
        self._carries = carries
        self._layout = flat.layout(like, carries(like))
        self.forgets = not self._layout.whole
        self.scores = torch.full((clients, metrics), torch.nan, dtype=torch.float64)
        self._counts = self._layout.fixed.repeat(clients, 1)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._pages = Pages(clients, pin=self._side is not None, longest=self._layout.longest)
        self._ahead: Fetched | None = None

    @property
    def nbytes(self) -> int:
        """Host memory held."""
        return self._pages.nbytes + self._counts.nbytes + self.joined.nbytes

    def to(self, device: torch.device) -> None:
        """The rows are on the host already."""

    def prefetch(self, ids: Tensor) -> None:
        """Start copying the rows of the next clients, while the present work continues."""
        self._ahead = self._fetch(ids.cpu())

    def take(self, ids: Tensor, device: torch.device) -> State:
        ids, ahead, self._ahead = ids.cpu(), self._ahead, None
        _, packed, copied = ahead if ahead is not None and torch.equal(ahead[0], ids) else self._fetch(ids)
        if copied is not None:
            now = torch.cuda.current_stream(self.device)
            now.wait_event(copied)
            packed.record_stream(now)
        state = flat.unpack(self._layout, packed, self._counts[ids])
        return {k: moved(t, device) for k, t in state.items()}

    def put(self, ids: Tensor, state: State, scores: Tensor | None = None) -> None:
        """Pack states and start copying them to the host; the state may be overwritten at once.

        scores: what the clients' local models scored, (C, metrics).
        """
        ids = ids.cpu()
        if not flat.layout(state, self._carries(state)).part_of(self._layout):
            raise InputError("a client's state has tensors that it did not have before, so it cannot be stored packed.")
        packed, counts = flat.pack(self._layout, state)
        if self._ahead is not None and bool(torch.isin(ids, self._ahead[0]).any()):
            self._ahead = None  # it was copied too early
        self._counts[ids] = counts
        self.joined[ids] = True
        if scores is not None:
            self.scores[ids] = scores
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self.device))
            packed.record_stream(self._side)
        sizes = self._layout.nbytes(counts).sum(1).tolist()
        with self._aside():
            for row, part in zip(ids.tolist(), torch.split(packed, sizes), strict=True):
                self._write(row, part)

    def scored(self, ids: Tensor) -> Tensor:
        """What the local models of these clients scored when they were put, NaN if unknown: (C, metrics), float64."""
        return self.scores[ids]

    def dump(self) -> State:
        """What a checkpoint holds of the clients, besides `joined`: all rows end to end, their lengths, entries and scores."""
        self._settle()
        parts = [part for row in range(self.clients) for part in self._pages.parts(row)]
        whole = torch.cat([torch.zeros(0, dtype=torch.uint8), *parts])
        sizes = {"lengths": torch.tensor(self._pages.sizes), "counts": self._counts}
        return {"packed": {"bytes": whole, **sizes, "scores": self.scores}}

    def load(self, dumped: State) -> None:
        self._settle()
        packed = dumped["packed"]
        self._counts.copy_(packed["counts"])
        self.scores.copy_(packed.get("scores", self.scores))
        self._ahead = None
        for row, part in enumerate(torch.split(packed["bytes"], packed["lengths"].tolist())):
            self._write(row, part)

    def _fetch(self, ids: Tensor) -> Fetched:
        sizes = self._layout.nbytes(self._counts[ids]).sum(1).tolist()
        with self._aside():
            packed = torch.zeros(sum(sizes), dtype=torch.uint8, device=self.device)
            for row, part in zip(ids.tolist(), torch.split(packed, sizes), strict=True):
                for there, here in self._pairs(row, part):
                    here.copy_(there, non_blocking=True)
        return ids, packed, None if self._side is None else self._side.record_event()

    def _write(self, row: int, content: Tensor) -> None:
        self._pages.resize(row, len(content))
        for there, here in self._pairs(row, content):
            there.copy_(here, non_blocking=True)

    def _pairs(self, row: int, buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """A row's host memory, piece by piece, with the matching part of the buffer."""
        at = 0
        for part in self._pages.parts(row):
            yield part, buffer[at : at + len(part)]
            at += len(part)

    def _aside(self) -> AbstractContextManager[object]:
        return nullcontext() if self._side is None else torch.cuda.stream(self._side)

    def _settle(self) -> None:
        if self._side is not None:
            self._side.synchronize()
