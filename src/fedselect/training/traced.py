"""A program on a CPU as the list of its tensor operations, run without the Python, vmap and autograd that led to them.

The list is taken down while the program runs once on copies. torch has a tracer that gives the same list, but using it loads
torch's compiler, which takes seconds and much memory.
"""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from fedselect.core.tree import State

Body = Callable[[State], Any]
"""A program: works on tensors, by group and name, in place."""
_SAME = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
_LOOKS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Traced:
    """Does what `body` did, `times` over, on any inputs of the same names and shapes."""

    def __init__(self, body: Body, inputs: State) -> None:
        own = _copy(inputs)
        tape = _Tape(_tensors(own))
        with tape:
            body(own)
        self._run = tape.program()
        self._check(body, inputs)

    def __call__(self, inputs: State, times: int) -> None:
        tensors = list(_tensors(inputs))
        with torch.no_grad():
            for _ in range(times):
                self._run(*tensors)

    def _check(self, body: Body, inputs: State) -> None:
        """On other numbers the trace must do what the body does; it would not if the model computed outside torch."""
        others = _copy(inputs)
        for v in others["tree"].values():
            v.mul_(0.99)
        others["sums"]["at"] += 1
        ours = _copy(others)
        body(others)
        self(ours, 1)
        for a, b in zip(_tensors(others), _tensors(ours), strict=True):
            if not torch.equal(a.nan_to_num(), b.nan_to_num()):
                raise RuntimeError("part of it is computed outside torch")


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes down each operation as a line of Python: v7 = k3(v1, v5, k2)."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and skipping would import the compiler

    def __init__(self, inputs: Iterator[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names: Any = WeakTensorKeyDictionary()
        self._count = count()
        self._lines: list[tuple[str, list[str], list[str]]] = []  # the call, the tensors it makes, those it needs
        self._fixed: dict[str, Any] = {}  # operations, and what else is the same each time
        self._known: dict[Any, str] = {}
        self._inputs = [self._new(v) for v in inputs]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _LOOKS.intersection(func.tags) and func is not torch.ops.aten.index.Tensor:
            raise RuntimeError(f"{func.overloadpacket.__name__} depends on the values of a tensor")
        used: list[str] = []
        given = ", ".join([*(self._say(v, used) for v in args), *(f"{n}={self._say(v, used)}" for n, v in kwargs.items())])
        out = func(*args, **kwargs)
        if func in _SAME or (func is torch.ops.aten.permute.default and list(args[1]) == sorted(args[1])):
            self._names[out] = used[0]
            return out
        several = isinstance(out, tuple | list)
        made = [self._names.get(v) or self._new(v) if isinstance(v, Tensor) else "_" for v in (out if several else (out,))]
        call = f"{self._fix(func)}({given})"
        if several or not (made[0] == "_" or made[0] in used):  # what is changed in place keeps its name
            call = f"{', '.join(made)}{',' * several} = {call}"
        self._lines.append((call, made, used))
        return out

    def program(self) -> Callable[..., None]:
        """A function of the inputs that runs all lines, and lets go of each tensor after its last use."""
        body: list[str] = []
        needed = set(self._inputs)
        for call, made, used in reversed(self._lines):
            done = sorted({*made, *used} - needed - {"_"} - self._fixed.keys())
            needed.update(done)
            body.append(call + "".join(f"; {n} = None" for n in done))
        source = f"def run({', '.join([*self._inputs, *(f'{n}={n}' for n in self._fixed)])}):\n "
        found: dict[str, Any] = {}
        exec(source + "\n ".join([*reversed(body), "return None"]), dict(self._fixed), found)
        return found["run"]  # type: ignore[no-any-return]

    def _new(self, v: Tensor) -> str:
        name = self._names[v] = f"v{next(self._count)}"
        return name

    def _say(self, value: Any, used: list[str]) -> str:
        if isinstance(value, Tensor):
            used.append(self._names.get(value) or self._fix(value))
            return used[-1]
        if isinstance(value, list | tuple):
            return f"[{', '.join(self._say(v, used) for v in value)}]"
        return repr(value) if value is None or type(value) in (int, bool) else self._fix(value)

    def _fix(self, value: Any) -> str:
        name = self._known.setdefault(id(value), f"k{len(self._known)}")
        self._fixed[name] = value
        return name


def _tensors(inputs: State) -> Iterator[Tensor]:
    return (v for tree in inputs.values() for v in tree.values())


def _copy(inputs: State) -> State:
    return {k: {n: v.clone() for n, v in tree.items()} for k, tree in inputs.items()}
