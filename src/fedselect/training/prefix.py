"""The outputs of frozen layers, computed once per sample.

Layers before the first one that trains compute the same numbers for a sample in every epoch, unless the sample is augmented, or
the layers draw random numbers or mix the samples of a batch. So they run once, and clients train the rest of the network on
their outputs. Parameters keep their names, so that nothing outside training sees the difference.
"""

import copy
import math
import os
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fedselect.core.errors import InputError
from fedselect.models import steps
from fedselect.models.networks import recipe
from fedselect.tasks.task import Targets, Task
from fedselect.training.batches import Split
from fedselect.training.fitted import Fitted
from fedselect.training.stacked import Forward
from fedselect.training.step import precision

CHUNK = 64
"""Samples of a client that run at once, in simulations and deployments alike, so that both get the same bits."""
LEAST = 0.05
"""The share of a network's work below which its frozen layers are not worth the memory of their outputs."""
SHARE = 0.25
"""The share of the memory that outputs may take."""
CLOSE = {"float32": 1e-4, "tf32": 1e-2, "bf16": 1e-1}
"""How closely the two parts must compute what the whole network does, by precision."""
Run = Callable[[Tensor, bool], Tensor | None]
"""The outputs of layers for some inputs, in training or evaluation; None if the network cannot be cut after them."""


@dataclass(frozen=True, eq=False)
class Prefix:
    """The frozen layers of a network up to `before`, and the rest of it as a model of their outputs."""

    before: str
    rest: Fitted
    _whole: Fitted
    _run: Run
    _like: Tensor  # outputs of no samples

    @property
    def size(self) -> int:
        """Bytes of the outputs of one sample."""
        return math.prod(self._like.shape[1:]) * self._like.element_size()

    def split(self, owner: object, part: str, raw: Split) -> Split:
        """A part of the data of `owner` with the outputs in place of the inputs; computed again only if something changed."""
        model, built = self._whole.model, recipe(self._whole.model)
        whose = str(built) if built else weakref.ref(model)
        key = (whose, model.base, self.before, self._whole.precision, raw.x.device)
        if owner not in _MADE or _MADE[owner][0] != key:
            _MADE[owner] = (key, {})
        made, seen = _MADE[owner][1], (_checksum(raw.x), _checksum(raw.y), raw.sizes)
        before, there = made.get(part, (None, None))
        found = there() if there is not None and before == seen else None
        if found is None:
            found = self.of(raw)
            # a GPU's memory is for runs: there the outputs are kept only as long as a run uses them
            made[part] = (seen, weakref.ref(found) if found.x.is_cuda else partial(_itself, found))
        return found

    def of(self, split: Split) -> Split:
        """The data with the outputs in place of the inputs, client by client."""
        made = self._like.new_empty(len(split.x), *self._like.shape[1:])
        for i, (start, n) in enumerate(zip(split.start.tolist(), split.sizes or (), strict=True)):
            for at in range(0, n, CHUNK):
                index = torch.arange(at, min(at + CHUNK, n), device=split.n.device)
                x, _ = split.rows(slice(i, i + 1)).batch(index.unsqueeze(0))
                made[start + at : start + at + len(index)] = self.outputs(x[0])
        return replace(split, x=made, scale=None, shift=None)

    def outputs(self, x: Tensor) -> Tensor:
        found = _ran(self._whole, self._run, x)
        assert found is not None
        return found


_MADE: weakref.WeakKeyDictionary[Any, tuple[Any, dict[str, tuple[Any, Callable[[], Split | None]]]]] = (
    weakref.WeakKeyDictionary()
)
"""By owner of the data: of which layers, and by part checksums of the samples, and the outputs. Only the last are kept."""


def _itself(split: Split) -> Split:
    return split


def _checksum(v: Tensor) -> int:
    if not v.numel():  # whose strides may be anything, even of a contiguous tensor
        return 0
    return zlib.crc32(v.cpu().contiguous().flatten().view(torch.uint8).numpy().data)


@dataclass(frozen=True)
class _Place:
    """Where a network can be cut: the name of what follows, how to run what comes before, and what is left."""

    before: str
    run: Run
    rest: Callable[[], nn.Module]
    work: float  # of what comes before
    outputs: Tensor
    bare: bool = False  # whether the rest returns a single tensor even if the network does not


def find(fitted: Fitted, x: Tensor, task: Task, data: Targets, *, samples: int = 0, room: float = math.inf) -> Prefix | None:
    """The frozen layers before the first one that trains, draws random numbers or mixes samples; None if there are none.

    x: some inputs; samples: how many there are in all; room: bytes that their outputs may take, else fewer layers are taken
    """
    if not fitted.model.frozen:
        return None
    before = fitted.others()
    whole = _checked(fitted, x, task, data)
    if x.is_floating_point() and fitted.layout is None:
        x = torch.cat([x, torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)])
    try:
        total = _work(lambda: _ran(fitted, partial(_outputs, fitted), x))
        places = _between(fitted, x) or _before_the_end(fitted, x, total)
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError:  # it runs for all clients at once only, as some do in bf16, or not on a single sample
        return None
    if any(not torch.equal(b, before[n]) for n, b in fitted.others().items() if n in before):
        return None  # layers that write to buffers
    for place in reversed(places):
        size = place.outputs[0].nbytes * samples
        if place.work < LEAST * total or size > room or (rest := _rest(fitted, place)) is None:
            continue
        found = Prefix(place.before, rest, fitted, place.run, place.outputs[:0])
        if _close(_checked(rest, place.outputs[: len(whole)].clone(), task, data), whole, fitted.precision):
            return found
    return None


def _checked(fitted: Fitted, x: Tensor, task: Task, data: Targets) -> Tensor:
    """`check` in the precision that `_ran` computes in, so that the two can be compared."""
    with precision(fitted.precision):
        return fitted.check(x, task, data)


def memory(device: torch.device) -> int:
    """Bytes of memory that a process may use on a device; the same each time, so that runs repeat."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limit = Path("/sys/fs/cgroup/memory.max")
    said = limit.read_text().strip() if limit.is_file() else ""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(whole, int(said)) if said.isdigit() else whole


def _between(fitted: Fitted, x: Tensor) -> list[_Place]:
    """The places between two steps of a network that runs in steps."""
    net, found, work = fitted.model.module, list[_Place](), 0.0
    paths = steps.parts(net) if fitted.layout is None else []
    for at, path in enumerate(paths[:-1]):
        names = list(steps.used(net, path))
        if any(m == n or m.startswith(f"{n}.") for n in names for m in fitted.model.names):
            break
        one, then = partial(_through, fitted, (path,), first=at == 0), paths[at + 1]
        if (y := _fixed(fitted, one, x)) is None:
            break
        work += _work(lambda run=one, x=x: _ran(fitted, run, x))  # type: ignore[misc]
        x, after = y, next(iter([*steps.used(net, then), ".".join(then)]))
        rest = partial(_left, net, then)
        found.append(_Place(after, partial(_through, fitted, tuple(paths[: at + 1]), first=True), rest, work, x))
    return found


def _before_the_end(fitted: Fitted, x: Tensor, total: float) -> list[_Place]:
    """The places before the head, and before what holds it, in any network of which they are the last to run."""
    model, found = fitted.model, list[_Place]()
    names = model.head.split(".") if model.head else []
    for path in (".".join(names[: i + 1]) for i in range(len(names))):
        run, end = partial(_read, fitted, path), fitted.module.get_submodule(path)
        alone = all(n.startswith(f"{path}.") for n in model.names) and _ends(fitted, path, x)
        if alone and (y := _fixed(fitted, run, x)) is not None:
            left = _work(lambda end=end, y=y: _ran(fitted, partial(_alone, fitted, end), y))  # type: ignore[misc]
            found.append(_Place(path, run, partial(_end, model.module, path), total - left, y, bare=True))
    return found


def _fixed(fitted: Fitted, run: Run, x: Tensor) -> Tensor | None:
    """The outputs of layers, if they are the same in training, without random numbers, and for a sample alone."""
    y, alone = _ran(fitted, run, x), _ran(fitted, run, x[:1])
    if not isinstance(y, Tensor) or y.ndim < 2 or len(y) != len(x) or alone is None:
        return None
    mode = _forward(fitted, torch.zeros((), dtype=torch.int64, device=x.device))
    with torch.no_grad(), precision(fitted.precision), mode:
        trained = run(x.clone(), True)
    same = trained is not None and mode.drawn.calls == 0 and _close(trained, y, fitted.precision)
    return y if same and _close(alone, y[:1], fitted.precision) else None


def _ran(fitted: Fitted, run: Run, x: Tensor) -> Tensor | None:
    """The outputs in evaluation, client by client and so the same however many there are."""
    with torch.no_grad(), precision(fitted.precision), _forward(fitted, None):
        return run(x.clone(), False)


def _forward(fitted: Fitted, key: Tensor | None) -> Forward:
    return Forward(key, False, fitted.precision, False)


def _floats(fitted: Fitted) -> torch.dtype | None:
    return torch.bfloat16 if fitted.precision == "bf16" else None


def _outputs(fitted: Fitted, x: Tensor, train: bool) -> Tensor:
    return fitted.apply({}, x, train, floats=_floats(fitted)).logits


def _through(fitted: Fitted, paths: Sequence[steps.Path], x: Tensor, train: bool, *, first: bool) -> Tensor:
    """The outputs of some steps; `first`: whether they begin with the network's inputs."""
    fitted.switch(train)
    kind = _floats(fitted) if first and x.is_floating_point() else None
    x = x if kind is None else x.to(kind)
    for path in paths:
        x = steps.run(fitted.module, path, x)
    return x


class _ReachedError(Exception): ...


def _read(fitted: Fitted, path: str, x: Tensor, train: bool) -> Tensor | None:
    """What a submodule is given, if that is one tensor; nothing runs after it."""
    given: list[Any] = []

    def stop(module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        given.append(args[0] if len(args) == 1 and not named else None)
        raise _ReachedError

    hook = fitted.module.get_submodule(path).register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with suppress(_ReachedError):
            _outputs(fitted, x, train)
    finally:
        hook.remove()
    return given[0] if given and isinstance(given[0], Tensor) else None


def _alone(fitted: Fitted, module: nn.Module, x: Tensor, train: bool) -> Any:
    fitted.switch(train)
    return module(x)


def _ends(fitted: Fitted, path: str, x: Tensor) -> bool:
    """Whether a submodule runs once, and what it returns is what the network returns."""
    returned: list[tuple[Any, int]] = []
    hook = fitted.module.get_submodule(path).register_forward_hook(lambda m, i, o: returned.append((o, _version(o))))
    try:
        out = _ran(fitted, partial(_outputs, fitted), x)
    finally:
        hook.remove()
    return len(returned) == 1 and returned[0][0] is out and returned[0][1] == _version(out)


def _version(value: Any) -> int:
    """How often a tensor was changed in place."""
    return value._version if isinstance(value, Tensor) else 0


def _left(net: nn.Module, path: steps.Path) -> nn.Module:
    """A copy of a network that starts with this step."""
    made = copy.deepcopy(net)
    steps.drop(made, path)
    return made


def _end(net: nn.Module, path: str) -> nn.Module:
    return steps.Tail(path, copy.deepcopy(net.get_submodule(path)))


def _rest(fitted: Fitted, place: _Place) -> Fitted | None:
    """The rest of a network, ready to run; None if it lacks anything that a client's model has."""
    model = fitted.model.behind(place.rest(), place.bare)
    if model.names != fitted.model.names:
        return None
    try:
        return Fitted(model, place.outputs.device, fitted.precision, recompute=fitted.recompute, inner=True)
    except InputError:  # the blocks to recompute are among the frozen layers
        return Fitted(model, place.outputs.device, fitted.precision, inner=True)


def _close(a: Tensor, b: Tensor, precision: str) -> bool:
    return a.shape == b.shape and bool((a - b).float().norm() <= CLOSE[precision] * b.float().norm() + 1e-6)


def _work(run: Callable[[], Any]) -> float:
    """The floating-point operations of matrix products and convolutions."""
    counted = _Counted()
    with counted:
        run()
    return counted.operations


class _Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and skipping would import the compiler

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: float = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if (rule := flop_registry.get(func.overloadpacket)) is not None:
            self.operations += float(rule(*args, **(kwargs or {}), out_val=out))
        return out
