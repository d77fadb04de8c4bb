"""Several processes, each with a share of the clients: torchrun starts them, torch.distributed adds up their sums."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fedselect.aggregate.masked import MaskedSum
from fedselect.core.errors import RunError
from fedselect.core.tree import State

PATIENCE = timedelta(minutes=30)
"""How long a process waits for the others before it counts them as lost."""


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def joined() -> Iterator[None]:
    """Join the processes that torchrun started; without torchrun, run alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)
    signal.signal(signal.SIGTERM, _lost)  # torchrun stops the remaining processes
    try:
        yield
    except SystemExit as e:  # how a command ends
        if not e.code:
            dist.destroy_process_group()  # left to the exit of the process, its threads may abort it
        raise
    except (RuntimeError, dist.DistError) as e:
        if isinstance(e, torch.cuda.OutOfMemoryError):
            raise
        raise _loss(str(e).splitlines()[0]) from e
    dist.destroy_process_group()


def _lost(signum: int, frame: FrameType | None) -> None:
    raise _loss("torchrun stopped this one")


def _loss(reason: str) -> RunError:
    return RunError(
        f"a process of this run was lost ({reason}); continue from the last checkpoint with fedselect resume, with any number "
        "of processes."
    )


def own(ids: Tensor) -> Tensor:
    """The clients among these that this process owns."""
    return ids if world() == 1 else ids[ids % world() == rank()]


def own_rows(rows: Tensor) -> Tensor:
    """From rows for all clients, those of this process's clients."""
    return rows[rank() :: world()]


def place(ids: Tensor) -> Tensor:
    """Where this process stores the clients it owns."""
    return ids if world() == 1 else ids // world()


def share(clients: int) -> int:
    """How many of this many clients this process owns."""
    return (clients - rank() + world() - 1) // world()


def everywhere(value: Any) -> list[Any]:
    """The value of every process, by rank; for small values only."""
    if world() == 1:
        return [value]
    out: list[Any] = [None] * world()
    dist.all_gather_object(out, value)
    return out


def add_up(folded: MaskedSum, device: torch.device) -> None:
    """Sum over the clients of all processes, in place: two all-reduces, of values and of weights."""
    if world() == 1:
        return
    mine = {n: (v.shape, folded.dtypes[n]) for n, v in folded.total.items()}
    known = {n: it for theirs in everywhere(mine) for n, it in theirs.items()}
    for part in (folded.total, folded.weight):
        zeros = {n: torch.zeros(shape, dtype=torch.float64, device=device) for n, (shape, _) in known.items() if n not in part}
        flat = torch.cat([{**part, **zeros}[n].flatten() for n in known]) if known else torch.zeros(0, device=device)
        dist.all_reduce(flat)
        pieces = torch.split(flat, [shape.numel() for shape, _ in known.values()])
        part.update({n: piece.view(shape) for (n, (shape, _)), piece in zip(known.items(), pieces, strict=True)})
    folded.dtypes.update({n: dtype for n, (_, dtype) in known.items()})


def gathered(order: list[Tensor], extras: list[State]) -> tuple[Tensor, State]:
    """The clients that uploaded and their side statistics, one row each, from all processes."""
    mine = (torch.cat(order), _concat(extras)) if order else None
    if world() == 1:
        return mine or (torch.zeros(0, dtype=torch.int64), {})
    found = [f for f in everywhere(mine and (mine[0], _on_host(mine[1]))) if f is not None]
    ids, at = torch.cat([ids for ids, _ in found]).sort()
    return ids, {k: {n: v[at] for n, v in t.items()} for k, t in _concat([extra for _, extra in found]).items()}


def _concat(extras: list[State]) -> State:
    return {k: {n: torch.cat([e[k][n] for e in extras]) for n in tree} for k, tree in extras[0].items()}


def _on_host(rows: State) -> State:
    return {k: {n: v.cpu() for n, v in t.items()} for k, t in rows.items()}


def collect(rows: State, clients: int) -> State:
    """The rows of all clients, in order, on the host of rank 0; nothing on the others."""
    if world() == 1:
        return rows
    everybody = everywhere(_on_host(rows))
    if rank() != 0:
        return {}
    out: State = {}
    for r, theirs in enumerate(everybody):
        for k, tree in theirs.items():
            for n, v in tree.items():
                room = out.setdefault(k, {})
                if n not in room:
                    room[n] = torch.zeros(clients, *v.shape[1:], dtype=v.dtype)
                room[n][r :: world()] = v
    return out
