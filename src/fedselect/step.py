"""The hot step: one batch of every client, forward, backward and masked SGD, for all stacked clients at once."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedselect.errors import InputError
from fedselect.models import Model
from fedselect.objectives import Objective
from fedselect.stacked import Forward
from fedselect.tree import Mask, Scalar, State, Tree, along, rows, take

Rate = Scalar | Mapping[str, Scalar]
"""A learning rate: a number, one for each client (C,), or by name of parameter, then also one for each entry."""
HEAVY = 1_000_000
"""Above this many parameters a CPU is busy with one client alone; stacking would only cost it its cache."""


@dataclass(frozen=True)
class Training:
    """How every client trains, whatever the method: SGD on shuffled batches."""

    batch_size: int = 32
    momentum: float = 0.5
    weight_decay: float = 0.0
    clip: float | None = None  # largest gradient norm over the entries in training, per client

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise InputError(f"batch_size must be at least 1, not {self.batch_size}.")
        if not 0.0 <= self.momentum < 1.0:
            raise InputError(f"momentum must be in [0, 1), not {self.momentum}.")
        if not self.weight_decay >= 0.0:
            raise InputError(f"weight_decay must not be negative, not {self.weight_decay}.")
        if self.clip is not None and not self.clip > 0.0:
            raise InputError(f"clip must be positive, not {self.clip}.")


def one_by_one(model: Model, device: torch.device) -> bool:
    """Whether clients of this model run one after the other; never depends on how many there are."""
    return not model.stackable or (device.type == "cpu" and model.size > HEAVY)


def forward(model: Model, tree: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
    """Every client's model on its own batch, in eval mode: logits (C, B, classes), and the features its head was given."""

    def one(values: Tree, batch: Tensor) -> tuple[Tensor, Tensor]:
        out, _ = model.apply(values, batch)
        return out.logits, out.logits if out.features is None else out.features

    alone = one_by_one(model, x.device)
    with torch.no_grad(), Forward(None, stacked=not alone):
        if alone:
            logits, features = zip(*(one(take(tree, i), x[i]) for i in range(len(x))), strict=True)
            return torch.stack(logits), torch.stack(features)
        return torch.func.vmap(one)(tree, x)


def step(
    model: Model,
    tree: Tree,
    velocity: Tree,
    x: Tensor,
    y: Tensor,
    keys: Tensor,
    only: Mask,
    lr: Rate,
    objective: Objective,
    ctx: State,
    training: Training,
) -> Tensor:
    """One SGD step on `tree` and `velocity`, in place; returns each client's loss (C,).

    Only entries marked in `only` move; the others keep their value and their momentum. Running statistics follow the
    data: every training pass updates them, whatever is frozen.
    """
    trained = [n for n in model.params if only.get(n, False) is not False]
    alone = one_by_one(model, x.device)
    rest = {n: v for n, v in tree.items() if n not in trained}

    def loss(params: Tree, fixed: Tree, x: Tensor, y: Tensor, key: Tensor, ctx: State) -> tuple[Tensor, Tree]:
        mode.key = key
        values = {**fixed, **params}
        out, stats = model.apply(values, x, train=True)
        return objective(out, y, values, ctx), stats

    with torch.enable_grad(), Forward(None, stacked=not alone) as mode:
        if alone:
            leaves = {n: tree[n][0].detach().requires_grad_() for n in trained}
            losses, stats = loss(leaves, *_first((rest, x, y, keys, ctx)))
        else:
            leaves = {n: tree[n].detach().requires_grad_() for n in trained}
            losses, stats = torch.func.vmap(loss)(leaves, rest, x, y, keys, ctx)
        grads = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
    with torch.no_grad():
        for n, v in stats.items():
            tree[n].copy_(v)
        moved = [(tree[n], velocity[n], g.view_as(tree[n]), only[n]) for n, g in zip(trained, grads, strict=True)]
        _sgd(moved, [lr[n] if isinstance(lr, Mapping) else lr for n in trained], training)
    return losses.detach().view(len(x))


def _first(value: Any) -> Any:
    """The first client of everything."""
    if isinstance(value, dict):
        return {n: _first(v) for n, v in value.items()}
    return tuple(map(_first, value)) if isinstance(value, tuple) else value[0]


def _sgd(moved: list[tuple[Tensor, Tensor, Tensor, bool | Tensor]], rates: list[Scalar], how: Training) -> None:
    """SGD as torch.optim.SGD does it, on the marked entries of (values, velocity, gradient, mask), in place."""
    scale: Tensor | None = None
    if how.clip is not None:
        parts = [torch.where(m, g, 0.0) if isinstance(m, Tensor) else g for _, _, g, m in moved]
        norm = torch.zeros_like(rows(parts[0])[:, 0])
        for g in parts:  # in order, so that the sum does not depend on how many clients there are
            norm = norm + rows(g).square().sum(1)
        norm = norm.sqrt()
        scale = (how.clip / (norm + 1e-6)).clamp_max(1.0)
    for (p, v, g, m), lr in zip(moved, rates, strict=True):
        if scale is not None:
            g = g * along(scale, g)
        if how.weight_decay:
            g = g.add(p, alpha=how.weight_decay)
        if isinstance(m, Tensor):  # what is not marked keeps its momentum, and its step is zero
            if how.momentum:
                g = torch.where(m, g.add(v, alpha=how.momentum), v, out=v)
            g = torch.where(m, g, 0.0)
        elif how.momentum:
            g = torch.add(g, v, alpha=how.momentum, out=v)
        if isinstance(lr, Tensor):
            p.sub_(g * along(lr, g))
        else:
            p.add_(g, alpha=-lr)
