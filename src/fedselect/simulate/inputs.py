"""Checks what a simulation is given, and turns it into what the engine uses."""

import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from fedselect.aggregate import AGGREGATORS
from fedselect.aggregate.aggregator import Aggregator, Mean, check_aggregator
from fedselect.core.errors import InputError
from fedselect.core.options import build, find, named
from fedselect.data import ClientData, Federation
from fedselect.methods import METHODS
from fedselect.methods.method import Method, check_method
from fedselect.models import MODELS, Model, with_weights
from fedselect.private.settings import Private
from fedselect.secret.mean import Over
from fedselect.simulate import ranks
from fedselect.tasks import TASKS, Task, suited

Network = Model | nn.Module | Callable[[], nn.Module] | str
"""A model, a module, a function that creates one, or the name of a model."""


class RunOptions(TypedDict, total=False):
    """How clients are run, whatever the method: options of Simulation that `run` passes on."""

    task: Task | str | None
    headline: str | None
    metrics: Sequence[str]
    fraction: float
    late: tuple[int, int] | None
    chunk: int | Literal["auto"]
    rows: str
    device: str
    precision: str
    recompute: bool
    deterministic: bool
    eval_every: int
    eval_fraction: float
    val: bool
    keep: Literal["last", "best", "own"]
    view: Literal["best"] | None
    aggregator: Aggregator | str | None
    secret: bool
    mean: Over
    private: Private | str | None


def pick_device(name: str) -> torch.device:
    """auto, cpu, cuda (the GPU of this process), or one GPU by its number: cuda:1."""
    check_ranges(device=name)
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise InputError("this machine has no CUDA device; use device=cpu (--device cpu).")
    if name.startswith("cuda:"):
        _make_current(int(name.removeprefix("cuda:")))
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _make_current(gpu: int) -> None:
    """Make a requested GPU the current one, because kernels and recorded steps run there."""
    if gpu >= torch.cuda.device_count():
        raise InputError(f"there is no cuda:{gpu} here; choose from cuda:0 to cuda:{torch.cuda.device_count() - 1}.")
    if ranks.world() > 1:
        raise InputError(
            "torchrun gives each process one GPU; use device=cuda (--device cuda), and CUDA_VISIBLE_DEVICES to choose."
        )
    torch.cuda.set_device(gpu)


def pick_precision(name: str, device: torch.device) -> str:
    check_ranges(precision=name)
    if name == "tf32" and device.type != "cuda":
        raise InputError("precision tf32 needs a GPU; use float32 (--precision float32).")
    if name == "bf16" and device.type != "cuda" and not multiplies_bf16():
        raise InputError(
            "precision bf16 needs a GPU, or a CPU with instructions for it (AVX512_BF16 or AMX), which this one lacks; use "
            "float32 (--precision float32)."
        )
    return ("tf32" if device.type == "cuda" else "float32") if name == "auto" else name


def multiplies_bf16() -> bool:
    """Whether this CPU has instructions for products of bfloat16."""
    looks: Any = torch.cpu  # torch has no public way to ask
    return any(getattr(looks, f"_is_{name}_supported", bool)() for name in ("avx512_bf16", "amx_tile"))


def check_late(late: tuple[int, int] | None, rounds: int) -> None:
    check_ranges(late=late)
    if late is not None and late[1] > rounds:
        raise InputError(f"late: a client that joins in round {late[1]} of {rounds} never takes part.")


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Refuse, within this context, torch operations whose result on a GPU may differ from one time to the next."""
    if not on:
        yield
        return
    memory: Any = torch.utils.deterministic
    before, fill = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)  # only on request: it imports torch's compiler, which takes a second
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory = fill


def as_method(method: Method | str) -> Method:
    """The method given, or the one of this name."""
    if callable(method) and getattr(method, "__name__", "") in {f.__name__ for f in METHODS.values()}:
        raise InputError(f"method must be an object, not a class; call it: fs.{method.__name__}().")
    found = build("method", named(method, METHODS), METHODS, {}) if isinstance(method, str) else method
    check_method(found)
    return found


def as_aggregator(aggregator: Aggregator | str | None) -> Aggregator:
    """The aggregator given, or the one of this name; by default the mean."""
    if isinstance(aggregator, str):
        aggregator = build("aggregator", named(aggregator, AGGREGATORS), AGGREGATORS, {})
    found = Mean() if aggregator is None else aggregator
    check_aggregator(found)
    return found


def as_model(model: Network, data: Federation, task: Task) -> Model:
    """The model given, or the one of this name for this data and task."""
    if isinstance(model, str):
        asked = with_weights({"name": model})
        return make_model(named(asked.pop("name"), MODELS), asked, data, task)
    if isinstance(model, Model):
        return model
    if not isinstance(model, nn.Module) and callable(model) and (lacks := _needed(model)):
        name = getattr(model, "__name__", "model")
        raise InputError(f"model must be a module, or a function without arguments; {name} needs {lacks}: lambda: {name}(...).")
    if isinstance(model, nn.Module) or callable(model):
        return Model.wrap(model)
    raise InputError(f"model must be a module, a function that creates one, or one of {', '.join(MODELS)}, not {model!r}.")


def _needed(make: Callable[..., Any]) -> str:
    """The required arguments of a function, by name."""
    try:
        known = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # written in C, or without a readable signature
        return ""
    own = [p for p in known if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return ", ".join(p.name for p in own if p.default is p.empty)


def make_model(name: str, options: Mapping[str, Any], data: Federation, task: Task) -> Model:
    """A model by name, created for this data, with as many outputs as the task needs."""
    factory = find("model", name, MODELS)
    if why := task.unfit_data(data):
        raise InputError(why)
    asked = {"outputs": task.outputs(data)} if "outputs" in inspect.signature(factory).parameters else {}
    return build("model", name, MODELS, options, data=data, **asked)


def as_task(task: Task | str | None, data: Federation) -> Task:
    """The task given, or the one of this name; by default the one that the data is for."""
    if task is None:
        task = TASKS[suited(data) or "classification"]()
    if isinstance(task, str):
        task = build("task", named(task, TASKS), TASKS, {})
    if not isinstance(task, Task):
        raise InputError(f"task must be a task such as fs.Classification(), or one of {', '.join(TASKS)}, not {task!r}.")
    try:
        hash(task)
    except TypeError:
        raise InputError(
            f"{type(task).__name__} must be a frozen dataclass with plain values as options; put @dataclass(frozen=True) "
            "before the class, and use tuples instead of lists."
        ) from None
    if why := task.unfit_data(data):
        raise InputError(why)
    return task


def fit(task: Task, data: Federation, there: Tensor) -> Task:
    """The task, fitted to the training targets of the clients that are present from the start."""
    if task.statistics(data.clients[0].train[1].cpu(), data) is None:
        return task
    mine = [c.train[1].cpu() for c, here in zip(data.clients, there.tolist(), strict=True) if here]
    rows = [row for y in mine if (row := task.statistics(y, data)) is not None]
    return task.fitted(torch.stack(rows), torch.tensor([len(y) for y in mine], dtype=torch.float64)) if rows else task


def as_federation(data: Federation | Iterable[ClientData]) -> Federation:
    if isinstance(data, Federation):
        return data
    if isinstance(data, str):
        raise InputError(f"data must be a Federation or a list of fs.ClientData; load a data set by name: fs.load({data!r}).")
    clients = [data] if isinstance(data, ClientData) else list(data) if isinstance(data, Iterable) else [data]
    if not all(isinstance(c, ClientData) for c in clients):
        raise InputError(
            "data must be a Federation or a list of fs.ClientData; from arrays: fs.Federation.from_arrays(x, y, client)."
        )
    return Federation(clients)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(v, Integral) for v in value)


def _are_names(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(v, str) for v in value)


def _is_device(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"auto|cpu|cuda(:\d+)?", value) is not None


RANGES: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "rounds": (Integral, lambda v: v >= 1, "must be at least 1"),
    "seed": (Integral, lambda v: 0 <= v < 2**63, "must be from 0 to 2**63 - 1"),
    "fraction": (Real, lambda v: 0.0 < v <= 1.0, "is the share of clients in a round and must be above 0 and at most 1"),
    "late": (object, lambda v: v is None or _is_pair(v), "is how many clients join late and in which round, such as (2, 10)"),
    "eval_every": (Integral, lambda v: v >= 1, "must be at least 1"),
    "chunk": (object, lambda v: v == "auto" or (isinstance(v, int) and v >= 1), "must be at least 1 or auto"),
    "eval_fraction": (
        Real,
        lambda v: 0.0 < v <= 1.0,
        "is the share of clients that are evaluated and must be above 0 and at most 1",
    ),
    "rows": (object, lambda v: v in ("auto", "all", "personal", "disk"), "must be auto, all, personal or disk"),
    "device": (object, _is_device, "must be auto, cpu, cuda or one GPU such as cuda:0"),
    "precision": (object, lambda v: v in ("auto", "float32", "tf32", "bf16"), "must be auto, float32, tf32 or bf16"),
    "deterministic": (object, lambda v: isinstance(v, bool), "must be True or False"),
    "headline": (object, lambda v: v is None or isinstance(v, str), "must be the name of a metric"),
    "metrics": (object, lambda v: _are_names(v), "must be a list of names, such as ['auroc', 'f1']"),
    "secret": (object, lambda v: isinstance(v, bool), "must be True or False"),
    "mean": (object, lambda v: v in ("senders", "cohort"), "must be senders or cohort"),
    "keep": (object, lambda v: v in ("last", "best", "own"), "must be last, best or own"),
    "view": (object, lambda v: v in (None, "best"), "must be best or left out; local and merged are options of some methods"),
    "patience": (object, lambda v: v is None or (isinstance(v, int) and v >= 1), "must be a number of evaluations, at least 1"),
}
"""The type and range of each run option, with its error message: for Python, the command line, files and deployments alike."""
KINDS: dict[type, str] = {Integral: "a whole number", Real: "a number"}


def check_ranges(**given: Any) -> None:
    """Refuse run options of the wrong type or out of range."""
    for name, value in given.items():
        kind, fits, said = RANGES[name]
        if not isinstance(value, kind):
            raise InputError(f"{name} must be {KINDS[kind]}, not {value!r}.")
        if not fits(value):
            raise InputError(f"{name} {said}, not {value!r}.")


def most(fraction: float, clients: int) -> int:
    """How many of this many clients train in a round."""
    return max(1, round(fraction * clients))


def no_validation(keep: str) -> InputError:
    """The error for a run that chooses a round, or else a model, on validation data when there is none."""
    what = "view=best chooses" if keep == "last" else f"keep={keep} and patience choose"
    return InputError(
        f"{what} on validation data, and no client has any; hold some out of the training data: "
        "--val 20, for a table --val-share 0.2, in Python fs.ClientData(val=...) or val_share=0.2."
    )


def check_validation(data: Federation, val: bool, keep: str, view: str | None, eval_fraction: float) -> None:
    """Refuse to score or choose on validation data if there is none, and to choose a round by some clients only."""
    if keep != "last" and eval_fraction < 1.0:
        raise InputError(f"keep={keep} and patience compare rounds over all clients; use eval_fraction=1 or keep=last.")
    if (keep != "last" or view is not None) and not data.has("val"):
        raise no_validation(keep)
    if val and not data.has("val"):
        raise InputError(
            "no client has validation data to score; give fs.ClientData(val=...), or for arrays and tables val_share."
        )


def check_present(late: tuple[int, int] | None, clients: int) -> None:
    """Refuse late clients if no client, or no round, would be left."""
    check_ranges(late=late)
    if late is not None and not 0 < late[0] < clients:
        raise InputError(f"late: {late[0]} of {clients} clients cannot join late; at least one must be present at the start.")
    if late is not None and late[1] < 1:
        raise InputError(f"late: rounds are counted from 1, so no client can join in round {late[1]}.")
