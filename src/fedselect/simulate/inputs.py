"""What a simulation is given: made into what it works with, or refused in a sentence."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypedDict

import torch
from torch import nn

from fedselect.aggregate.aggregator import Aggregator
from fedselect.core.errors import InputError
from fedselect.data import ClientData, Federation
from fedselect.models import Model
from fedselect.tasks.task import Classification, Task


class RunOptions(TypedDict, total=False):
    """How clients are run, whatever the method: options of Simulation that `run` passes on."""

    task: Task | None
    headline: str | None
    fraction: float
    late: tuple[int, int] | None
    chunk: int | Literal["auto"]
    rows: str
    device: str
    precision: str
    deterministic: bool
    eval_every: int
    aggregator: Aggregator | None


def pick_device(name: str) -> torch.device:
    check_ranges(device=name)
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no CUDA device here; use --device cpu.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def pick_precision(name: str, device: torch.device) -> str:
    check_ranges(precision=name)
    if name in ("tf32", "bf16") and device.type != "cuda":
        raise InputError(f"precision {name} needs a GPU; a CPU computes in float32.")
    return ("tf32" if device.type == "cuda" else "float32") if name == "auto" else name


def check_late(late: tuple[int, int] | None, rounds: int) -> None:
    if late is not None and late[1] > rounds:
        raise InputError(f"late: a client that joins in round {late[1]} of {rounds} never takes part.")


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Refuse, for the time being, operations of torch whose result on a GPU may differ from one time to the next."""
    memory: Any = torch.utils.deterministic
    before, fill = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory = fill


def as_model(model: Model | nn.Module) -> Model:
    if isinstance(model, nn.Module):
        return Model.wrap(model)
    if not isinstance(model, Model):
        raise InputError(f"model must be a module, or what makes one: fs.Model.wrap(MyNet), not {model!r}.")
    return model


def as_task(task: Task | None, data: Federation) -> Task:
    task = Classification() if task is None else task
    if not isinstance(task, Task):
        raise InputError(f"task must be a task such as fs.Classification(), not {task!r}.")
    if why := task.unfit_data(data):
        raise InputError(why)
    return task


def as_federation(data: Federation | Iterable[ClientData]) -> Federation:
    if isinstance(data, Federation):
        return data
    clients = [data] if isinstance(data, ClientData) else list(data)
    if not all(isinstance(c, ClientData) for c in clients):
        raise InputError("data must be a Federation or a list of fs.ClientData.")
    return Federation(clients)


RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "rounds": (lambda v: v >= 1, "must be at least 1"),
    "seed": (lambda v: 0 <= v < 2**63, "must lie in 0 to 2**63 - 1"),
    "fraction": (lambda v: 0.0 < v <= 1.0, "is the share of clients in a round and must lie in (0, 1]"),
    "eval_every": (lambda v: v >= 1, "must be at least 1"),
    "chunk": (lambda v: v == "auto" or (isinstance(v, int) and v >= 1), "must be at least 1 or auto"),
    "rows": (lambda v: v in ("auto", "all", "personal"), "is auto, all or personal"),
    "device": (lambda v: v in ("auto", "cpu", "cuda"), "is auto, cpu or cuda"),
    "precision": (lambda v: v in ("auto", "float32", "tf32", "bf16"), "is auto, float32, tf32 or bf16"),
}
"""What an option of a run may be, and how that is said: for Python, the command line, files and deployments alike."""


def check_ranges(**given: Any) -> None:
    """Refuse options of a run that are out of range."""
    for name, value in given.items():
        fits, said = RANGES[name]
        if not fits(value):
            raise InputError(f"{name} {said}, not {value!r}.")


def check_present(late: tuple[int, int] | None, clients: int) -> None:
    """Refuse clients that join late where nobody, or no round, would be left."""
    if late is not None and not 0 < late[0] < clients:
        raise InputError(f"late: {late[0]} of {clients} clients cannot join late; at least one must be there at first.")
    if late is not None and late[1] < 1:
        raise InputError(f"late: rounds are counted from 1, and no client can join in round {late[1]}.")
