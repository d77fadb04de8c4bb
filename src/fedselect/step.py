"""The hot step: one batch of every client, forward, backward and masked SGD, for all stacked clients at once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedselect.errors import InputError
from fedselect.models import Model
from fedselect.objectives import Objective
from fedselect.stacked import Forward
from fedselect.tree import Mask, Scalar, State, Tree, along

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


def forward(model: Model, tree: Tree, x: Tensor) -> Tensor:
    """Logits of every client's model on its own batch, in eval mode: (C, B, classes)."""
    with torch.no_grad(), Forward(None, stacked=not one_by_one(model, x.device)):
        if one_by_one(model, x.device):
            return torch.stack([model.apply({n: v[i] for n, v in tree.items()}, x[i])[0].logits for i in range(len(x))])
        return torch.func.vmap(lambda t, b: model.apply(t, b)[0].logits)(tree, x)


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
    leaves = {n: tree[n].detach().requires_grad_() for n in trained}
    rest = {n: v for n, v in tree.items() if n not in leaves}

    def loss(params: Tree, fixed: Tree, x: Tensor, y: Tensor, key: Tensor, ctx: State) -> tuple[Tensor, Tree]:
        mode.key = key
        values = {**fixed, **params}
        out, stats = model.apply(values, x, train=True)
        return objective(out, y, values, ctx), stats

    alone = one_by_one(model, x.device)
    with torch.enable_grad(), Forward(None, stacked=not alone) as mode:
        losses, stats = (
            _single(loss)(leaves, rest, x, y, keys, ctx) if alone else torch.func.vmap(loss)(leaves, rest, x, y, keys, ctx)
        )
        grads = torch.autograd.grad(losses.sum(), list(leaves.values()))
    with torch.no_grad():
        for n, v in stats.items():
            tree[n].copy_(v)
        rates = [lr[n] if isinstance(lr, Mapping) else lr for n in trained]
        _sgd(
            [tree[n] for n in trained], [velocity[n] for n in trained], list(grads), [only[n] for n in trained], rates, training
        )
    return losses.detach()


def _single(fn: Callable[..., tuple[Tensor, Tree]]) -> Callable[..., tuple[Tensor, Tree]]:
    """vmap for a stack of exactly one client, without vmap."""

    def first(value: object) -> object:
        return {n: first(v) for n, v in value.items()} if isinstance(value, dict) else value[0]  # type: ignore[index]

    def call(*args: object) -> tuple[Tensor, Tree]:
        out, tree = fn(*(first(a) for a in args))
        return out.unsqueeze(0), {n: v.unsqueeze(0) for n, v in tree.items()}

    return call


def _sgd(
    params: list[Tensor],
    velocity: list[Tensor],
    grads: list[Tensor],
    masks: list[bool | Tensor],
    rates: list[Scalar],
    how: Training,
) -> None:
    """SGD as torch.optim.SGD does it, on the marked entries alone."""
    if how.clip is not None:
        squares = torch.zeros(len(params[0]), dtype=params[0].dtype, device=params[0].device)
        for g, m in zip(grads, masks, strict=True):
            squares += (torch.where(m, g, 0.0) if isinstance(m, Tensor) else g).flatten(1).square().sum(1)
        scale = (how.clip / (squares.sqrt() + 1e-6)).clamp_max(1.0)
        grads = [g * along(scale, g) for g in grads]
    if how.weight_decay:
        grads = list(torch._foreach_add(grads, params, alpha=how.weight_decay))
    for p, v, g, m, lr in zip(params, velocity, grads, masks, rates, strict=True):
        if how.momentum:
            g = v * how.momentum + g
            v.copy_(torch.where(m, g, v) if isinstance(m, Tensor) else g)
        update = g * along(lr, g)
        p.copy_(torch.where(m, p - update, p)) if isinstance(m, Tensor) else p.sub_(update)
