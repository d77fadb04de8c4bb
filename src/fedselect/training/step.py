"""The hot step: one batch of every client, forward, backward and a masked update, for all stacked clients at once."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedselect import kernels
from fedselect.core.tree import Mask, Rows, Scalar, State, Tree, along, expand, rows, take
from fedselect.models import Model, Output
from fedselect.tasks.losses import Objective
from fedselect.training.fitted import Fitted
from fedselect.training.lifted import for_all
from fedselect.training.optim import SGD
from fedselect.training.settings import Training
from fedselect.training.stacked import Forward
from fedselect.training.taps import Taps

Rate = Scalar | Mapping[str, Scalar]
"""A learning rate: a number, one per client (C,), or by parameter name, then optionally one per entry."""
V = TypeVar("V")
Moved = tuple[Tensor, V, Tensor, bool | Tensor, Tensor | None]
"""Value, memory, gradient, mask and, if there is one, anchor of one parameter; SGD's memory is just its momentum."""
Crops = Mapping[str, Taps]
"""Kernels of which only some taps are trained, by name."""


class Batch(NamedTuple):
    """One batch of every client: inputs, targets, and keys for random numbers, to which a `step` adds its number."""

    x: Tensor
    y: Tensor
    keys: Tensor
    step: Tensor | None = None


@dataclass(frozen=True)
class Aim:
    """What steps are for: which entries move, how fast, and what is minimized, with the method's context for each client."""

    only: Mask
    lr: Rate
    goal: Objective
    ctx: State = field(default_factory=dict)


@dataclass(frozen=True)
class Shortcuts:
    """What is known about a repeated step: taps that need not be touched, and which of its BatchNorms are followed only by a
    ReLU, or by a sum and a ReLU (see `endings`)."""

    crops: Crops = field(default_factory=dict)
    rectified: frozenset[int] = frozenset()
    joined: frozenset[int] = frozenset()


AS_WRITTEN = Shortcuts()
HEAVY = 1_000_000
"""Above this many parameters a single client keeps a CPU busy; stacking would only hurt its cache."""


def one_by_one(fitted: Fitted, device: torch.device) -> bool:
    """Whether clients of this model run one after the other; does not depend on the number of clients."""
    heavy = fitted.model.size + fitted.model.frozen > HEAVY
    return not fitted.stackable or (device.type == "cpu" and heavy)


def forward(fitted: Fitted, tree: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
    """Every client's model on its own batch, in eval mode: logits (C, B, classes), and the input features of its head."""

    def one(values: Tree, batch: Tensor) -> tuple[Tensor, Tensor]:
        out = _apply(fitted, values, batch, train=False)
        return out.logits, out.logits if out.features is None else out.features

    alone = one_by_one(fitted, x.device)
    with torch.no_grad(), precision(fitted.precision), Forward(None, not alone, fitted.precision, False, fitted.compiling):
        if alone:
            logits, features = zip(*(one(take(tree, i), x[i]) for i in range(len(x))), strict=True)
            return torch.stack(logits), torch.stack(features)
        found: tuple[Tensor, Tensor] = for_all(one, len(x), tree, x)
        return found


def step(
    fitted: Fitted,
    tree: Tree,
    memory: State,
    batch: Batch,
    aim: Aim,
    training: Training,
    *,
    shortcuts: Shortcuts = AS_WRITTEN,
    held: Tree | None = None,
) -> Tensor:
    """One step of the optimizer on `tree` and its `memory`, in place; returns each client's loss (C,).

    Only entries marked in `aim.only` move; the others keep their value and their memory. Running statistics follow the data:
    every training step updates them, whatever is frozen. `held`: what `hold` returned.
    """
    crops = shortcuts.crops
    alone = one_by_one(fitted, batch.x.device)

    def part(n: str, v: Tensor) -> Tensor:
        return crops[n].of(v) if n in crops else v

    leaves = {n: part(n, tree[n][0] if alone else tree[n]).detach().requires_grad_() for n in trained(fitted.model, aim.only)}
    forward = Forward(None, not alone, fitted.precision, not fitted.steady, fitted.compiling)
    with torch.enable_grad(), precision(fitted.precision):
        with forward as mode:
            mode.endings.rectified, mode.endings.joined = shortcuts.rectified, shortcuts.joined
            found = losses(mode, fitted, leaves, tree, batch, aim, crops=crops, held=held)
        grads = torch.autograd.grad(found.sum(), list(leaves.values()), materialize_grads=True)
    fitted.slow |= mode.slow
    fitted.steady = True
    with torch.no_grad():
        move(tree, memory, dict(zip(leaves, grads, strict=True)), aim, training, crops)
    return found.detach().view(len(batch.x))


def hold(fitted: Fitted, frozen: Tree) -> Tree:
    """The live taps of a single client's frozen kernels, copied once for many steps."""
    return {n: fitted.taps[n].of(v[0]).clone() for n, v in frozen.items()}


def move(tree: Tree, memory: State, grads: Tree, aim: Aim, training: Training, crops: Crops | None = None) -> None:
    """The optimizer's step along these gradients, in place; for kernels in `crops`, on some taps only."""
    crops, ctx = crops or {}, aim.ctx

    def part(n: str, v: Tensor) -> Tensor:
        return crops[n].of(v) if n in crops else v

    anchor, mu = (ctx["anchor"], ctx["pull"]["mu"]) if "pull" in ctx else ({}, None)
    correction = ctx.get("correction", {})
    moved: list[Moved[Tree]] = []
    for n, g in grads.items():
        p, m = part(n, tree[n]), aim.only[n]
        at = part(n, anchor[n]) if n in anchor else None
        past = {k: part(n, t[n]) for k, t in memory.items()}
        g = g.view_as(p) + part(n, correction[n]) if n in correction else g.view_as(p)
        moved.append((p, past, g, part(n, m) if isinstance(m, Tensor) else m, at))
    by_name = aim.lr if isinstance(aim.lr, Mapping) else dict.fromkeys(grads, aim.lr)
    rates = [part(n, r) if isinstance(r := by_name[n], Tensor) and r.ndim > 1 else r for n in grads]
    _update(moved, rates, training, mu)


def find_shortcuts(fitted: Fitted, tree: Tree, batch: Batch, aim: Aim, how: Training) -> Shortcuts:
    """Watch one forward pass. A kernel's dead taps may be skipped if nothing but one convolution uses the kernel."""
    leaves = {n: tree[n] for n in trained(fitted.model, aim.only)}
    scratch = {n: v.clone() if n in fitted.model.stats else v for n, v in tree.items()}  # training writes its statistics
    with torch.no_grad(), Forward(None, True, fitted.precision, compiling=fitted.compiling) as mode:
        losses(mode, fitted, leaves, scratch, batch, aim, watch=True)
    # what moves every entry, or is summed over all
    whole = fitted.recompute or not how.the_optimizer.still or how.clip or not aim.ctx.keys().isdisjoint(("pull", "correction"))
    crops = {} if whole else mode.crops()
    endings = mode.endings.found() if kernels.serve(batch.x) else ()
    return Shortcuts(crops, *endings)


def try_step(fitted: Fitted, values: Tree, batch: Batch, goal: Objective, training: Training) -> str:
    """Run one step of one client from these values and discard it, to settle how clients of this model run: all at once, all at
    once with the model told that it is being compiled, or one by one, in which case the reason is returned.
    """
    why = ""
    while True:
        tree = {n: v.clone() for n, v in expand(values, 1).items()}
        memory = {k: {n: torch.zeros_like(v) for n, v in tree.items()} for k in training.the_optimizer.memory}
        aim = Aim(dict.fromkeys(fitted.model.params, True), 0.01, goal)
        try:
            if kernels.serve(batch.x):
                from fedselect.kernels.compiling import compile_for

                with torch.autograd.graph.saved_tensors_hooks(
                    lambda t: t, lambda t: t
                ):  # callers that count tensors see the step's
                    compile_for(partial(step, fitted, tree, memory, batch, aim, training))
            step(fitted, tree, memory, batch, aim, training)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as e:
            if not fitted.stackable:
                raise
            why = why or str(e).splitlines()[0]
            fitted.stackable = not fitted.compiling
            fitted.compiling = fitted.stackable
        else:
            return "" if fitted.stackable else why


@contextmanager
def precision(name: str) -> Iterator[None]:
    """Sets how float32 matrix products are computed on a GPU, within this context."""
    product: Any = torch.backends.cuda.matmul
    convolution: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = product.fp32_precision, convolution.fp32_precision
    product.fp32_precision = convolution.fp32_precision = "ieee" if name == "float32" else "tf32"
    try:
        yield
    finally:
        product.fp32_precision, convolution.fp32_precision = before


def trained(model: Model, only: Mask) -> list[str]:
    """The parameters that move."""
    return [n for n in model.params if only.get(n, False) is not False]


def _apply(fitted: Fitted, values: Tree, x: Tensor, train: bool) -> Output:
    if fitted.precision != "bf16":
        return fitted.apply(values, x, train)
    out = fitted.apply(values, x, train, floats=torch.bfloat16)
    return Output(out.logits.float(), None if out.features is None else out.features.float())


def losses(
    mode: Forward, fitted: Fitted, leaves: Tree, tree: Tree, batch: Batch, aim: Aim, *, crops: Crops | None = None,
    watch: bool = False, held: Tree | None = None,
) -> Tensor:  # fmt: skip
    """The objective that each client minimizes: (C,), or one number for a single client."""
    crops = crops or {}

    def loss(leaves: Tree, rest: Tree, x: Tensor, y: Tensor, key: Tensor, ctx: State) -> Tensor:
        mode.drawn.key, mode.drawn.step = key, batch.step
        values = {**rest, **{n: v for n, v in leaves.items() if n not in crops}}
        mode.live = {id(values[n]): leaves[n] for n in crops}
        mode.held = {id(values[n]): (fitted.taps[n], part) for n, part in (held or {}).items()}
        mode.watched = {id(values[n]): n for n in leaves} if watch else {}
        mode.endings.watching = watch
        out = _apply(fitted, values, x, train=True)
        mode.endings.follow((out.logits, out.features))
        return aim.goal(out, y, values, ctx)

    rest, given = {n: v for n, v in tree.items() if n not in leaves or n in crops}, (batch.x, batch.y, batch.keys)
    if one_by_one(fitted, batch.x.device):
        return loss(leaves, *_first((rest, *given, aim.ctx)))
    found: Tensor = for_all(loss, len(batch.x), leaves, rest, *given, aim.ctx)
    return found


def take_rate(lr: Rate, rows: Rows) -> Rate:
    """The learning rates of some clients."""
    if isinstance(lr, Mapping):
        return {n: v[rows] if isinstance(v, Tensor) and v.ndim else v for n, v in lr.items()}
    return lr[rows] if isinstance(lr, Tensor) and lr.ndim else lr


def _first(value: Any) -> Any:
    """The first client of every tensor."""
    if isinstance(value, dict):
        return {n: _first(v) for n, v in value.items()}
    return tuple(map(_first, value)) if isinstance(value, tuple) else value[0]


def _update(moved: list[Moved[Tree]], rates: list[Scalar], how: Training, mu: Tensor | None) -> None:
    """The optimizer's step on the marked entries, in place; `mu`: how strongly clients are pulled to their anchors."""
    optimizer = how.the_optimizer
    if type(optimizer) is SGD and not optimizer.nesterov:
        _sgd([(p, past["momentum"], g, m, a) for p, past, g, m, a in moved], rates, how, mu)
        return
    moved, scale = _clipped(moved, how.clip, mu)
    for (p, past, g, m, a), lr in zip(moved, rates, strict=True):
        g = _pulled(g, p, a, mu)
        if scale is not None:
            g = g * along(scale, g)
        value, memory = optimizer.update(p, g, past, along(lr, g))
        for into, new in ((p, value), *((past[n], memory[n]) for n in past)):
            if isinstance(m, Tensor):
                torch.where(m, new, into, out=into)
            else:
                into.copy_(new)


def _sgd(moved: list[Moved[Tensor]], rates: list[Scalar], how: Training, mu: Tensor | None = None) -> None:
    """The same for plain SGD, with as few operations as possible; on a GPU by a kernel."""
    sgd = how.the_optimizer
    assert isinstance(sgd, SGD)
    moved, scale = _clipped(moved, how.clip, mu)
    if moved and kernels.serve(moved[0][0]):
        moved, rates = _by_kernel(moved, rates, scale, sgd, mu)
    for (p, v, g, m, a), lr in zip(moved, rates, strict=True):
        g = _pulled(g, p, a, mu)
        if scale is not None:
            g = g * along(scale, g)
        if sgd.weight_decay:
            g = g.add(p, alpha=sgd.weight_decay)
        if isinstance(m, Tensor):  # unmarked entries keep their momentum, and their step is zero
            if sgd.momentum:
                g = torch.where(m, g.add(v, alpha=sgd.momentum), v, out=v)
            g = torch.where(m, g, 0.0)
        elif sgd.momentum:
            g = torch.add(g, v, alpha=sgd.momentum, out=v)
        p.sub_(g * along(lr, g))


def _clipped(moved: list[Moved[V]], clip: float | None, mu: Tensor | None) -> tuple[list[Moved[V]], Tensor | None]:
    """The factor on each client's gradients; clipping needs the whole gradient, including the pull."""
    if clip is None:
        return moved, None
    if mu is not None:
        moved = [(p, v, _pulled(g, p, a, mu), m, None) for p, v, g, m, a in moved]
    parts = [torch.where(m, g, 0.0) if isinstance(m, Tensor) else g for _, _, g, m, _ in moved]
    norm = torch.zeros_like(rows(parts[0])[:, 0])
    for g in parts:  # in order, so that the sum does not depend on the number of clients
        norm = norm + rows(g).square().sum(1)
    return moved, (clip / (norm.sqrt() + 1e-6)).clamp_max(1.0)


def _pulled(g: Tensor, p: Tensor, anchor: Tensor | None, mu: Tensor | None) -> Tensor:
    return g if anchor is None or mu is None else g + along(mu, g) * (p - anchor)


def _by_kernel(
    moved: list[Moved[Tensor]], rates: list[Scalar], scale: Tensor | None, how: SGD, mu: Tensor | None
) -> tuple[list[Moved[Tensor]], list[Scalar]]:
    """Update on the GPU, in one kernel each, the parameters with one rate per client; returns the others."""
    from fedselect.kernels.sgd import fits, sgd

    left: list[tuple[Moved[Tensor], Scalar]] = []
    groups: dict[int, tuple[Tensor, list[Moved[Tensor]]]] = {}
    for entry, lr in zip(moved, rates, strict=True):
        if fits(entry) and isinstance(lr, Tensor) and lr.ndim == 1:
            groups.setdefault(id(lr), (lr.to(entry[0].dtype).contiguous(), []))[1].append(entry)
        else:
            left.append((entry, lr))
    for lr, together in groups.values():
        sgd(together, lr, scale, how.momentum, how.weight_decay, mu)
    return [e for e, _ in left], [lr for _, lr in left]
