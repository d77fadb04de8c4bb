"""Tries a model before the first round: one step of one client, and how many clients fit into the memory."""

import os
import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedselect.core.errors import InputError, RunError
from fedselect.core.tree import State
from fedselect.simulate.jobs import Job
from fedselect.simulate.stack import Stack
from fedselect.tasks.losses import Goal
from fedselect.training.step import Batch, one_by_one, try_step

if TYPE_CHECKING:
    from fedselect.simulate.engine import Simulation

MOST = 65_535
"""Most clients side by side: the limit of an axis of a GPU's grid."""
CPU_ROOM = 1 << 26
"""Bytes that stacked clients may use on a CPU: with more, they leave its caches, and a tensor's memory may be new each time."""
TOO_LARGE = "not even one client fits into the GPU's memory; use a smaller model or batch_size (--batch-size)."


def join(run: "Simulation") -> State:
    """Let one client join and discard it: errors of method, model or data show now, not after an hour."""
    state: State = Stack([run]).do(Job("join", torch.zeros(1, dtype=torch.int64), 0))
    run.method.mask(run.model, state)
    run.method.wants(run.model, state)
    return state


def fits(run: "Simulation") -> int:
    """How many clients fit side by side into half of the free memory, by what one client's step keeps.

    A CPU gains nothing beyond what its caches hold.
    """
    kept = 0

    def count(t: Tensor) -> Tensor:
        nonlocal kept
        kept += t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        step(run, 0)
    weights = sum(v.nbytes for v in run.initial.values())
    alone = one_by_one(run.fitted, run.device)
    room = 0.5 * (_free_on(run.device) if run.device.type == "cuda" else host_memory())
    if run.device.type == "cpu" and not alone:
        room = min(room, CPU_ROOM)
    trees = 9 + len(run.training.the_optimizer.memory)
    return min(MOST, max(1, int(room / (trees * weights + (0 if alone else 2 * kept)))))


def step(run: "Simulation", client: int) -> None:
    """Run one step of one client and discard it: does this model run stacked, and on as little data as this client has?"""
    train = run.inputs.rows(slice(client, client + 1))
    size = min(run.training.batch_size, int(train.n[0]))
    samples = train.batch(torch.arange(size, device=run.device).unsqueeze(0))
    batch = Batch(*samples, keys=torch.zeros(1, dtype=torch.int64, device=run.device))
    others = run.fitted.others()
    try:
        why = try_step(run.fitted, run.initial, batch, Goal(run.task), run.training)
    except InputError as e:
        if size > 1:
            raise
        raise InputError(f"client {run.data.clients[client].name or client}, with one sample per step: {e}") from None
    except torch.cuda.OutOfMemoryError:
        raise RunError(TOO_LARGE) from None
    except RuntimeError as e:
        given = run.data.layout or f"of shape {run.data.shape}"
        raise InputError(f"{run.model.name} cannot be trained on inputs {given}: {e}") from e
    run.fitted.check_others(others)
    if why:
        said = f"{run.model.name} cannot run for all clients at once, so they run one by one ({why})."
        warnings.warn(said, stacklevel=2)


def host_memory() -> int:
    """Bytes of memory that are free."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_on(device: torch.device) -> int:
    """Bytes of a GPU that are free, or reserved by torch but unused."""
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held
