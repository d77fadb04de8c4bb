"""Recorded programs: a repeated step is replayed without the Python code that defined it.

On a GPU a whole step (gather, augment, forward, backward, update) becomes one CUDA graph; on a CPU it is traced to the list of
its tensor operations. Either way the operations and their order are those of the step as written, less what changes nothing,
and so are the numbers. What cannot be recorded runs unrecorded, with one warning.
"""

import ctypes
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedselect import kernels
from fedselect.core.tree import State, Tree
from fedselect.tasks.losses import Goal
from fedselect.tasks.task import Task
from fedselect.training.batches import Split
from fedselect.training.buffers import Room
from fedselect.training.fitted import Fitted
from fedselect.training.settings import Training
from fedselect.training.step import AS_WRITTEN, Aim, Batch, Shortcuts, find_shortcuts, forward, hold, one_by_one, step, trained
from fedselect.training.traced import Body, Traced

RECORD_AFTER = {"cuda": 1, "cpu": 10}
"""Steps of one kind after which it is recorded. On a CPU a trace costs about ten steps as written."""
SOON = 0
"""The same on a CPU if at least twice RECORD_AFTER such steps are still to come, so that tracing surely pays."""
TRIES = {"cuda": 2, "cpu": 1}
"""Attempts: a capture may fail because of something else on the GPU at the time; a trace that fails always fails."""
KEPT = {"cuda": 64, "cpu": 256}
"""Recordings kept at a time; clients of unequal size need one for each number of clients that are still training."""


class Walk(NamedTuple):
    """One local epoch over every client's data: the order of its samples, the keys that shuffle them, and the batch size."""

    order: Tensor
    shuffle: Tensor
    size: int


class Programs:
    """Trains and evaluates stacked clients of one model, and records repeated steps."""

    def __init__(self, fitted: Fitted, training: Training, task: Task) -> None:
        self.fitted, self.model, self.task = fitted, fitted.model, task
        self.training = training
        self._rooms: dict[Any, Room] = {}
        self._seen: dict[Any, int] = {}
        self._tried: dict[Any, int] = {}
        self._recorded: dict[Any, Callable[[State, int], Any] | None] = {}
        self._compiled: set[Any] = set()
        self._held: tuple[Tree, list[int], Tree] = ({}, [], {})
        self._pool: Any = None
        self._said = False

    def clear(self) -> None:
        """Drop all recordings and the memory they hold."""
        self._rooms.clear()
        self.let_go()
        self._recorded.clear()
        self._pool = None

    def let_go(self) -> None:
        """Drop what was prepared of frozen parameters, and with it the clients' values that it was prepared from."""
        self._held = {}, [], {}

    def place(self, group: str, tree: Mapping[str, Any]) -> Any:
        """The same tensors where recordings find them: on a GPU copies at fixed addresses, kernels with channels last."""
        tensors = {n: v for n, v in tree.items() if isinstance(v, Tensor)}
        if not tensors or not self._captures(next(iter(tensors.values()))):
            return tree
        return {**tree, **self._room(group, tensors).write(tensors)}

    def fetch(self, group: str, placed: Tree) -> Tree:
        """A copy of what was placed, with every tensor in its usual memory order."""
        values = self._room(group, placed).read(len(next(iter(placed.values()))))
        return {n: values[n] for n in placed}

    def rest(self, like: Tree) -> State:
        """The optimizer's memory of these parameters before its first step, where recordings find it: zeros."""
        return {name: self._zeros(_memory(name), like) for name in self.training.the_optimizer.memory}

    def _zeros(self, group: str, like: Tree) -> Tree:
        first = next(iter(like.values()), None)
        if first is None or not self._captures(first):
            return {n: torch.zeros_like(v) for n, v in like.items()}
        room = self._room(group, like)
        room.memory.zero_()
        return room.of(len(first))

    def train(
        self, tree: Tree, memory: State, aim: Aim, data: Split, walks: Sequence[Walk], *, first: int, last: int, left: int = 0
    ) -> Tensor:
        """Steps `first` to `last` of each of these walks over the clients' data, in place; `left` such steps are still to come.

        Returns each client's loss summed over the steps of the last walk: (C,) float64.
        """
        kind = tree[self.model.params[0]].dtype
        walk = walks[0]
        lr, ctx, device = aim.lr, aim.ctx, walk.shuffle.device
        like: Any = {"dtype": kind, "device": device}
        rates = {  # one per client even if all are equal, so that stacking settings changes nothing
            n: v.to(kind) if isinstance(v, Tensor) and v.ndim else torch.full((len(walk.shuffle),), float(v), **like)
            for n, v in (lr if isinstance(lr, Mapping) else {"": lr}).items()
        }
        alone = one_by_one(self.fitted, device)
        inputs: State = {
            "tree": tree, **{f"memory {k}": t for k, t in memory.items()},
            "held": self._hold(tree, aim) if device.type == "cpu" and alone else {},
            "only": {n: m for n, m in aim.only.items() if isinstance(m, Tensor)},
            "lr": rates, **{f"ctx {k}": t for k, t in ctx.items()},
            "batch": {}, "sums": {},
        }  # fmt: skip

        def begin(walk: Walk) -> None:
            """A batch is found by the number of its step; a client's losses are summed over a walk."""
            inputs["batch"] = {"order": walk.order, "shuffle": walk.shuffle, "start": data.start, "n": data.n}
            inputs["sums"] = {
                "at": torch.full((1,), first, device=device),
                "loss": torch.zeros(len(walk.shuffle), dtype=torch.float64, device=device),
            }

        def batch(i: State) -> Batch:
            # a short last batch is filled from the start of the same shuffle: no padding that could leak into statistics
            b, at = i["batch"], i["sums"]["at"]
            places = (at * walk.size + torch.arange(walk.size, device=at.device)) % b["n"].unsqueeze(1)
            x, y = replace(data, start=b["start"], n=b["n"], picks=None).batch(b["order"].gather(1, places), b["shuffle"])
            return Batch(x, y, b["shuffle"], at[0])

        def given(i: State) -> Aim:
            rate = i["lr"] if isinstance(lr, Mapping) else i["lr"][""]
            return Aim({**aim.only, **i["only"]}, rate, aim.goal, {k: i[f"ctx {k}"] for k in ctx})

        def body(i: State, shortcuts: Shortcuts = AS_WRITTEN) -> None:
            past = {k: i[f"memory {k}"] for k in memory}
            now, what = batch(i), given(i)
            losses = step(self.fitted, i["tree"], past, now, what, self.training, shortcuts=shortcuts, held=i["held"])
            i["sums"]["loss"] += losses
            i["sums"]["at"] += 1

        def ready(i: State) -> Body:
            if device.type == "cpu" and (alone or not self.fitted.taps):
                return body  # nothing to gain: a trace leaves out what nobody uses, and strided updates of few taps are slow
            found = find_shortcuts(self.fitted, i["tree"], batch(i), given(i), self.training)
            return lambda i: body(i, found)

        whole = tuple((n, m) for n, m in aim.only.items() if isinstance(m, bool))
        kept = (*_pool(data), data.augment)
        what = ("train", walk.size, whole, isinstance(lr, Mapping), tuple(ctx), *kept, _identity(aim.goal))
        recorded = None
        for walk in walks:
            begin(walk)
            self._compile(what, body, ready, inputs)
            for done in range(first, last):
                recorded = recorded or self._recording(what, ready, inputs, left)
                if recorded is not None:
                    recorded(inputs, last - done)
                    break
                body(inputs)
        return inputs["sums"]["loss"]

    def _hold(self, tree: Tree, aim: Aim) -> Tree:
        """What is prepared of frozen parameters, again only if these are not the same values at the same place."""
        moving = set(trained(self.model, aim.only))
        still = {n: tree[n] for n in self.fitted.taps if n in tree and n not in moving}
        before, versions, _ = self._held
        same = still.keys() == before.keys() and versions == [v._version for v in still.values()]
        if not (same and all(v.data_ptr() == before[n].data_ptr() for n, v in still.items())):
            self._held = still, [v._version for v in still.values()], hold(self.fitted, still)
        return self._held[2]

    def predict(self, tree: Tree, split: Split, at: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Every client's model on `width` of its own samples, starting at `at`: (outputs, features, targets, which are real).

        Valid until the next call.
        """
        picks = {} if split.picks is None else {"picks": split.picks}
        inputs: State = {
            "tree": tree,
            "batch": {"start": split.start, "n": split.n, **picks},
            "sums": {"at": torch.full((1,), at, device=split.n.device)},
        }

        def body(i: State) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            start, n = i["batch"]["start"], i["batch"]["n"]
            index = i["sums"]["at"] + torch.arange(width, device=n.device)
            inside = index < n.unsqueeze(1)
            index = torch.where(inside, index, 0)
            if "picks" in i["batch"]:
                index = i["batch"]["picks"].gather(1, index)
            x, y = replace(split, start=start, n=n, picks=None).batch(index)
            return (*forward(self.fitted, i["tree"], x), y, inside)

        recorded = None
        if split.n.is_cuda:  # a CPU spends its time on the numbers themselves
            what = ("predict", width, *_pool(split))
            self._compile(what, body, lambda i: body, inputs)
            recorded = self._recording(what, lambda i: body, inputs)
        return body(inputs) if recorded is None else recorded(inputs, 1)

    def _compile(self, what: Any, body: Body, ready: Callable[[State], Body], inputs: State) -> None:
        """On a GPU, before a program's first run: compile its kernels, including those of the recording."""
        if what in self._compiled or not kernels.serve(next(iter(inputs["tree"].values()))):
            return
        self._compiled.add(what)
        if one_by_one(self.fitted, inputs["batch"]["n"].device):
            return
        from fedselect.kernels.compiling import compile_for

        with suppress(torch.cuda.OutOfMemoryError):  # no memory for a copy: kernels are compiled when they first run
            copy = {k: {n: v.clone() for n, v in tree.items()} for k, tree in inputs.items()}
            compile_for(lambda: body(copy), lambda: ready(copy)(copy))

    def _recording(
        self, what: tuple[Any, ...], ready: Callable[[State], Body], inputs: State, left: int = 0
    ) -> Callable[[State, int], Any] | None:
        """The recording for these inputs, made now if it is time for one."""
        if kernels.INTERPRETED:  # kernels written in Python cannot be recorded
            return None
        device = inputs["batch"]["n"].device
        if one_by_one(self.fitted, device) and not (device.type == "cpu" and self.fitted.stackable):
            return None
        key = (*what, self.fitted.precision, _shapes(inputs))
        if key in self._recorded:
            return self._recorded[key]
        self._seen[key] = self._seen.get(key, 0) + 1
        if len(self._seen) > 4 * KEPT[device.type]:
            self._seen.pop(next(iter(self._seen)))
        if self._seen[key] <= _wait(device.type, left):
            return None
        try:
            if device.type == "cuda":
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                made: Callable[[State, int], Any] | None = _Captured(ready(inputs), inputs, self._pool)
            else:
                made = Traced(ready(inputs), inputs)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as e:  # a user's model may do anything that a recording does not allow
            self._pool = None  # the failed attempt may have left it unusable
            self._tried[key] = self._tried.get(key, 0) + 1
            if self._tried[key] < TRIES[device.type]:
                return None
            self._say_slow(str(e).splitlines()[0] if str(e) else type(e).__name__)
            made = None
        if len(self._recorded) >= KEPT[device.type]:
            oldest = next(iter(self._recorded))
            del self._recorded[oldest]
            self._seen.pop(oldest, None)  # should it come back, it has to prove again that it is worth a recording
        self._recorded[key] = made
        return made

    def _say_slow(self, reason: str) -> None:
        if not self._said:
            warnings.warn(f"{self.model.name} cannot be recorded and runs on the slow path ({reason}).", stacklevel=2)
        self._said = True

    def _captures(self, v: Tensor) -> bool:
        return v.is_cuda and not one_by_one(self.fitted, v.device)

    def _room(self, group: str, like: Tree) -> "Room":
        """Room for such tensors, the same each time; more clients than before need new room."""
        key = (group, frozenset((n, v.shape[1:], v.dtype) for n, v in like.items()))
        room = self._rooms.get(key)
        if room is None or room.clients < len(next(iter(like.values()))):
            if room is not None:
                self._recorded.clear()  # recordings use the old room
            room = self._rooms[key] = Room(like, self.model.convolutions)
        return room


def _memory(name: str) -> str:
    """The group of tensors in which the optimizer remembers this."""
    return f"memory {name}"


def _wait(device: str, left: int) -> int:
    """How many steps run before one is recorded; `left` such steps are still to come."""
    wait = RECORD_AFTER[device]
    return min(wait, SOON) if device == "cpu" and left >= 2 * wait else wait


def keep_memory() -> None:
    """Let the process keep the memory that it frees. The tensors of a stacked step are so large that malloc would otherwise
    return their memory to the system every time and ask for it again, page by page."""
    with suppress(OSError, AttributeError):  # the GNU C library has this
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD
        mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


class _Captured:
    """A program as a CUDA graph. Trees, masks and contexts are used in place; small inputs are copied in and out."""

    def __init__(self, body: Body, inputs: State, pool: Any) -> None:
        small = ("lr", "batch", "sums")
        self.own = {k: {n: v.clone() for n, v in inputs[k].items()} for k in small if k in inputs}
        self.body = body  # keeps the data it reads alive
        self.graph = torch.cuda.CUDAGraph()
        with nothing_let_go(), torch.cuda.graph(self.graph, pool=pool):
            self.out = body({**inputs, **self.own})

    def __call__(self, inputs: State, times: int) -> Any:
        for k, tree in self.own.items():
            for n, v in tree.items():
                v.copy_(inputs[k][n])
        for _ in range(times):
            self.graph.replay()
        for n, v in self.own["sums"].items():
            inputs["sums"][n].copy_(v)
        return self.out


@contextmanager
def nothing_let_go() -> Iterator[None]:
    """Pause garbage collection: freeing the graph of a finished run during a capture would break the capture."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def _shapes(inputs: State) -> tuple[Any, ...]:
    """The memory layout of the inputs; on a GPU also the addresses of those that are used in place."""
    return tuple(
        (k, n, v.dtype, v.shape, v.stride(), v.data_ptr() if v.is_cuda and k not in ("lr", "batch", "sums") else 0)
        for k, tree in inputs.items()
        for n, v in tree.items()
    )


@dataclass(frozen=True, eq=False)
class _Itself:
    """An object as a key that equals nothing else, however the object defines equality."""

    held: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


def _pool(data: Split) -> tuple[int, int]:
    """Which samples a recording reads: parts of a client's data may share one pool."""
    return data.x.data_ptr(), 0 if data.index is None else data.index.data_ptr()


def _identity(fn: Any) -> Any:
    """A key that is equal for functions that do the same, so that one created anew each round is recognized."""
    if isinstance(fn, Goal):
        return _Itself(fn.task), _identity(fn.objective), _identity(fn.penalty)
    if isinstance(fn, MethodType):
        return _identity(fn.__func__), _Itself(fn.__self__)
    plain = isinstance(fn, FunctionType) and fn.__closure__ is None and fn.__defaults__ is None and fn.__kwdefaults__ is None
    return (fn.__code__, _Itself(fn.__globals__)) if plain else _Itself(fn)
