"""A program on a CPU as the list of its tensor operations, run without the Python, vmap and autograd that led to them.

The list is taken down while the program runs once on copies. torch has a tracer that gives the same list, but using it loads
torch's compiler, which takes seconds and much memory. What is left out of the list changes no number: operations whose results
nobody uses, views of the same tensor a second time, and tensors that depend on nothing but shapes.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache, partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedselect.core.tree import State

Body = Callable[[State], Any]
"""A program: works on tensors, by group and name, in place."""
_aten = torch.ops.aten
_SAME = {_aten.detach.default, _aten.alias.default}
_SHAPED = {_aten.view.default, _aten._unsafe_view.default, _aten.expand.default, _aten.permute.default, _aten.slice.Tensor}
"""Views that change nothing if shape and strides stay the same."""
_FILLED = {
    _aten.arange.default, _aten.arange.start, _aten.arange.start_step, _aten.zeros.default, _aten.ones.default,
    _aten.full.default, _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default, _aten.new_zeros.default,
    _aten.new_ones.default, _aten.new_full.default,
}  # fmt: skip
"""Operations whose result depends on shapes only."""
_QUICK: dict[Any, Callable[..., Any]] = {
    _aten.add.Tensor: torch.add, _aten.sub.Tensor: torch.sub, _aten.mul.Tensor: torch.mul, _aten.div.Tensor: torch.div,
    _aten.add_.Tensor: Tensor.add_, _aten.sub_.Tensor: Tensor.sub_, _aten.mul_.Tensor: Tensor.mul_,
    _aten.bmm.default: torch.bmm, _aten.sum.dim_IntList: torch.sum, _aten.relu.default: torch.relu,
    _aten.exp.default: torch.exp, _aten.gather.default: torch.gather, _aten.unsqueeze.default: torch.unsqueeze,
    _aten.transpose.int: torch.transpose, _aten.permute.default: torch.permute, _aten.view.default: Tensor.view,
    _aten.expand.default: Tensor.expand, _aten.select.int: torch.select, _aten.index_select.default: torch.index_select,
}  # fmt: skip
"""The same operations as Python calls them, which is quicker than by their schema."""
_LOOKS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_SMALL = 1 << 16
"""Constants of at most this many numbers are computed once."""
_tapes = count()


class Traced:
    """Does what `body` did, `times` over, on any inputs of the same names and shapes."""

    def __init__(self, body: Body, inputs: State) -> None:
        own = _copy(inputs)
        tape = _Tape(_tensors(own))
        with tape:
            body(own)
        self._run = tape.program()
        self._check(body, inputs, own)

    def __call__(self, inputs: State, times: int) -> None:
        with torch.no_grad():
            self._run(times, *_tensors(inputs))

    def _check(self, body: Body, inputs: State, others: State) -> None:
        """On other numbers the trace must do what the body does; it would not if the model computed outside torch."""
        for v, now in zip(_tensors(others), _tensors(inputs), strict=True):
            v.copy_(now)
        for v in others["tree"].values():
            v.mul_(0.99)
        others["sums"]["at"] += 1
        ours = _copy(others)
        body(others)
        self(ours, 1)
        for a, b in zip(_tensors(others), _tensors(ours), strict=True):
            if not (torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num())):
                raise RuntimeError("part of it is computed outside torch")


class _Kind(NamedTuple):
    """What an operation does, by its schema."""

    writes: tuple[tuple[int, str], ...]  # the arguments that it changes: position and name
    views: bool  # its results share memory with its first tensor
    looks: bool  # what follows may depend on the values of a tensor
    moves: bool  # it changes the shape or strides of a tensor in place
    draws: bool
    same: bool  # its result is its argument
    shapes: bool  # so it is if shape and strides stay the same
    fills: bool  # its result depends on shapes only
    call: Callable[..., Any]  # what does the same with the least overhead


@cache
def _kind(func: Any) -> _Kind:
    schema, tags = func._schema, func.tags
    written = tuple((i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write)
    return _Kind(
        writes=written,
        views=not written and (any(r.alias_info for r in schema.returns) or func is _aten._unsafe_view.default),
        looks=bool(_LOOKS.intersection(tags)) and func is not _aten.index.Tensor,
        moves=torch.Tag.inplace_view in tags,
        draws=torch.Tag.nondeterministic_seeded in tags,
        same=func in _SAME,
        shapes=func in _SHAPED,
        fills=func in _FILLED,
        call=_QUICK.get(func, func._op),  # calling `func` itself costs as much again as a small operation
    )


class _Line(NamedTuple):
    """An operation: the call, the tensors it makes, those it needs, and whether it can be left out or done once."""

    call: str
    made: list[str]
    used: list[str]
    writes: list[str]  # whose memory it changes
    kind: _Kind
    constant: Tensor | None  # its result, if that follows from shapes only


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes down each operation as a line of Python: v7 = k3(v1, v5, k2)."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and skipping would import the compiler

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mark = f"_name_on_tape_{next(_tapes)}"  # the attribute with a tensor's name
        self._count = count()
        self._lines: list[_Line] = []
        self._fixed: dict[str, Any] = {}  # operations, and what else is the same each time
        self._known: dict[Any, str] = {}
        self._views: dict[tuple[Any, ...], list[str]] = {}  # what a call made
        self._home: dict[str, str] = {}  # of a view: whose memory it is
        self._moved = False  # whether the shape or strides of a tensor were changed in place
        self._written: set[str] = set()  # whose memory is changed
        self._constants: set[str] = set()  # tensors that follow from shapes, unless written
        self._inputs = [self._new(v) for v in inputs]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = _kind(func)
        if kind.looks:
            raise RuntimeError(f"{func.overloadpacket.__name__} depends on the values of a tensor")
        if kind.same:
            out = func._op(*args, **kwargs)
            setattr(out, self._mark, self._name(args[0]) or self._fix(args[0]))
            return out
        used: list[str] = []
        given = ", ".join([self._say(v, used) for v in args] + [f"{n}={self._say(v, used)}" for n, v in kwargs.items()])
        out = func._op(*args, **kwargs)
        several = isinstance(out, tuple | list)
        outs = out if several else (out,)
        doing = f"{self._fix(kind.call)}({given})"
        view = (func, *used, *(str(v) for v in (*args, *kwargs.values()) if not isinstance(v, Tensor))) if kind.views else ()
        if kind.views:
            twin = used[:1] if kind.shapes and _alike(out, args[0]) else self._views.get(view)
            if twin is not None:
                for v, name in zip(outs, twin, strict=True):
                    setattr(v, self._mark, name)
                return out
        written = [
            n for place, name in kind.writes for n in self._homes(args[place] if place < len(args) else kwargs.get(name))
        ]
        self._written.update(written)
        made = [self._name(v) or self._new(v) if isinstance(v, Tensor) else "_" for v in outs]
        if kind.views:
            self._views[view] = made
            self._home.update(dict.fromkeys(made, self._home_of(used[0])))
        elif kind.moves:
            self._moved = True
            self._views.clear()
        constant = kind.fills or (bool(used) and self._constants.issuperset(used) and not (kind.writes or kind.draws))
        if constant := constant and isinstance(out, Tensor) and out.numel() <= _SMALL:
            self._constants.add(made[0])
        # what is changed in place keeps its name
        call = f"{', '.join(made)}{',' * several} = {doing}" if several or not (made[0] == "_" or made[0] in used) else doing
        self._lines.append(_Line(call, made, used, written, kind, out if constant else None))
        return out

    def program(self) -> Callable[..., None]:
        """A function of how often and of the inputs, which runs all lines and lets go of each tensor after its last use.

        Views of the inputs are taken once, before the first time.
        """
        wanted = self._needed()
        still = {*self._inputs, *self._fixed}  # the same tensors each time
        once, lines = list[_Line](), list[_Line]()
        for line in wanted:
            first = line.kind.views and not self._moved and still.issuperset(line.used)
            (once if first else lines).append(line)
            still.update(line.made if first else ())
        body: list[str] = []
        needed = {*still, "_"}
        for line in reversed(lines):
            done = sorted({*line.made, *line.used} - needed)
            needed.update(done)
            body.append("  " + line.call + "".join(f"; {n} = None" for n in done))
        head = f"def run(times, {', '.join([*self._inputs, *(f'{n}={n}' for n in self._fixed)])}):"
        source = [head, *(f" {line.call}" for line in once), " for _ in range(times):", *reversed(body), "  pass"]
        found: dict[str, Any] = {}
        exec(_compiled("\n".join(source)), dict(self._fixed), found)
        return found["run"]  # type: ignore[no-any-return]

    def _needed(self) -> list[_Line]:
        """The lines that change a tensor, and those that they need; what follows from shapes becomes a constant."""
        lines, constants = list[_Line](), set[str]()
        for line in self._lines:
            follows = line.constant is not None and (line.kind.fills or constants.issuperset(line.used))
            if follows and self._home_of(line.made[0]) not in self._written:
                constants.add(line.made[0])
                self._fixed[line.made[0]] = line.constant
            else:
                lines.append(line)
        wanted, kept = set[str](), list[_Line]()
        homes = {*self._inputs, *self._fixed}  # whose memory is read later
        for line in reversed(lines):
            if line.kind.draws or not (wanted.isdisjoint(line.made) and homes.isdisjoint(line.writes)):
                wanted.update(line.used)
                homes.update(map(self._home_of, line.used))
                kept.append(line)
        return kept[::-1]

    def _homes(self, value: Any) -> list[str]:
        """Whose memory these tensors are in."""
        several = value if isinstance(value, list | tuple) else (value,)
        return [self._home_of(self._name(v) or self._fix(v)) for v in several if isinstance(v, Tensor)]

    def _home_of(self, name: str) -> str:
        return self._home.get(name, name)

    def _name(self, v: Tensor) -> str | None:
        return getattr(v, self._mark, None) or self._known.get(id(v))

    def _new(self, v: Tensor) -> str:
        name = f"v{next(self._count)}"
        setattr(v, self._mark, name)
        return name

    def _say(self, value: Any, used: list[str]) -> str:
        if isinstance(value, Tensor):
            used.append(self._name(value) or self._fix(value))
            return used[-1]
        if isinstance(value, list | tuple):
            if all(type(v) is int for v in value):  # a shape: the text does not depend on the number of clients
                return self._fix(value)
            return f"[{', '.join([self._say(v, used) for v in value])}]"
        return repr(value) if value is None or type(value) in (int, bool) else self._fix(value)

    def _fix(self, value: Any) -> str:
        name = self._known.setdefault(id(value), f"k{len(self._known)}")
        self._fixed[name] = value
        return name


_compiled = lru_cache(64)(partial(compile, filename="<trace>", mode="exec"))
"""Steps of the same model with other numbers of clients have the same text."""


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()


def _tensors(inputs: State) -> Iterator[Tensor]:
    return (v for tree in inputs.values() for v in tree.values())


def _copy(inputs: State) -> State:
    return {k: {n: v.clone() for n, v in tree.items()} for k, tree in inputs.items()}
