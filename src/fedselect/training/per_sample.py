"""Steps with sample-level privacy (DP-SGD): gradients of single samples are clipped and summed, and noise is added to the sum.

The gradient of one sample is that of a client with only this sample, so samples of all clients are stacked like clients.
Batches are drawn sample by sample with equal probability, and the sum is divided by the expected batch size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from fedselect.core import random
from fedselect.core.entropy import Entropy
from fedselect.core.errors import InputError, RunError
from fedselect.core.tree import State, Tree, clone, put, rows, take, take_mask
from fedselect.tasks.losses import Goal
from fedselect.training.batches import Split
from fedselect.training.fitted import Fitted
from fedselect.training.settings import Training
from fedselect.training.stacked import Forward
from fedselect.training.step import Aim, Batch, losses, move, one_by_one, precision, take_rate, trained

if TYPE_CHECKING:
    from fedselect.training.work import Pass, Work

ROOM = 1 << 28
"""Bytes that the gradients of single samples may use at a time."""
LOOKS = (
    "this method uses training or validation data outside its gradients, which noise on gradients does not cover; with "
    "private samples (unit=sample) use one that does not, such as fedavg, fedprox, fedper or fedselect."
)
TUNES = (
    "fine-tuning would use training data again at every evaluation, outside the budget; with private samples (unit=sample) use "
    "finetune=0, or a method without it, such as fedavg, fedper or fedselect."
)


class Guard(Protocol):
    """Stands between a method and the data: training passes only through it.

    `opens`: whether a method may also look at the data otherwise. If samples are private, it may not.
    """

    @property
    def opens(self) -> bool: ...

    def train(
        self, work: "Work", data: Split, tree: Tree, passes: "Sequence[Pass]", *, goal: Goal, ctx: State, key: str
    ) -> Tree:
        """`Work.train` for these clients, whose data is `data`."""


class Counting:
    """Trains nothing and counts the local epochs that a method trains in a round."""

    def __init__(self, opens: bool = False) -> None:
        self.opens, self.passes = opens, 0

    def train(
        self, work: "Work", data: Split, tree: Tree, passes: "Sequence[Pass]", *, goal: Goal, ctx: State, key: str
    ) -> Tree:
        _check_key(key)
        self.passes += len(passes)
        return clone(tree)


@dataclass(frozen=True)
class PerSample:
    """Trains with a clipped gradient for each sample and noise on their sum.

    `noise`: its standard deviation over the clip, by how many samples a client has. `passes`: most local epochs in a round.
    """

    fitted: Fitted
    training: Training
    clip: float
    noise: Callable[[int], float]
    passes: int
    entropy: Entropy
    opens = False

    def train(
        self, work: "Work", data: Split, tree: Tree, passes: "Sequence[Pass]", *, goal: Goal, ctx: State, key: str
    ) -> Tree:
        _check_key(key)
        keys = random.fold(work.keys(key), "private", work.walked)
        work.walked += len(passes)
        if work.walked > self.passes:
            raise RunError(
                f"this method trained more than the {self.passes} local epochs per round that the noise is made for."
            )
        out = clone(tree)
        memory = {k: {n: torch.zeros_like(out[n]) for n in work.model.params} for k in self.training.the_optimizer.memory}
        for at, p in enumerate(passes):
            walk = random.fold(keys, at)
            for here, first, last, size in work.stretches(p.only):
                index = here.to(work.ids.device) if isinstance(here, Tensor) else here
                mine, past = take(out, index), {k: take(t, index) for k, t in memory.items()}
                aim = Aim(take_mask(p.only, index), take_rate(p.lr, index), goal, {n: take(t, index) for n, t in ctx.items()})
                own = data.rows(here)
                std = self._deviations(own)
                for s in range(first, last):
                    # all that is random for a sample must not depend on which others are there, so nobody may know these keys
                    batch, inside = self._drawn(own, size, self.entropy.keys(random.fold(walk[index], s)))
                    self._step(mine, past, batch, inside, aim, std=std, size=size)
                if isinstance(index, Tensor):
                    put(out, index, mine)
                    for k, t in memory.items():
                        put(t, index, past[k])
        return out

    def _deviations(self, data: Split) -> Tensor:
        """The standard deviation of the noise on each client's sum: (C,)."""
        noise = [self.noise(n) for n in data.sizes or ()]
        return torch.tensor([self.clip * z if z else 0.0 for z in noise], dtype=torch.float64, device=data.n.device)

    def _drawn(self, data: Split, size: int, keys: Tensor) -> tuple[Batch, Tensor]:
        """Poisson batches side by side, (C, most), and which of their rows count; the others are arbitrary padding."""
        there = torch.arange(data.longest, device=data.n.device) < data.n.unsqueeze(1)
        chosen = there & (self.entropy.uniform(random.fold(keys, "batch"), data.longest) < (size / data.n).unsqueeze(1))
        count = chosen.sum(1)
        most = max(1, int(count.max()))
        index = (~chosen).long().argsort(dim=1, stable=True)[:, :most]
        inside = torch.arange(most, device=count.device) < count.unsqueeze(1)
        index = torch.where(inside, index, 0)
        x, y = data.batch(index, keys)
        return Batch(x, y, keys), inside

    def _step(self, tree: Tree, memory: State, batch: Batch, inside: Tensor, aim: Aim, *, std: Tensor, size: int) -> None:
        names = trained(self.fitted.model, aim.only)
        marks = {n: m for n in names if isinstance(m := aim.only[n], Tensor)}
        total = self._clipped_sums(tree, batch, inside, aim, names)
        noisy = self.entropy.noised(torch.cat([rows(total[n]) for n in names], 1), std, random.fold(batch.keys, "noise")) / size
        parts = torch.split(noisy, [total[n][0].numel() for n in names], dim=1)
        grads = {n: g.view_as(tree[n]).to(tree[n].dtype) for n, g in zip(names, parts, strict=True)}
        grads = {n: torch.where(marks[n], g, 0.0) if n in marks else g for n, g in grads.items()}
        with torch.no_grad():
            move(tree, memory, grads, aim, self.training)

    def _clipped_sums(self, tree: Tree, batch: Batch, inside: Tensor, aim: Aim, names: list[str]) -> Tree:
        """The sum over each client's samples of their gradients, none longer than the clip: (C, ...) float64.

        A gradient that is not finite counts as zero: a sum that is NaN would show that this sample is there.
        """
        total = {n: torch.zeros(tree[n].shape, dtype=torch.float64, device=inside.device) for n in names}
        whose, which = inside.nonzero(as_tuple=True)
        at_once = max(1, ROOM // (4 * sum(tree[n][0].nbytes for n in names)))
        for c, j in zip(torch.split(whose, at_once), torch.split(which, at_once), strict=True):
            if not len(c):
                continue
            one = Batch(batch.x[c, j].unsqueeze(1), batch.y[c, j].unsqueeze(1), random.fold(batch.keys[c], j))
            own = Aim(take_mask(aim.only, c), 0.0, aim.goal, {k: take(t, c) for k, t in aim.ctx.items()})
            grads = _gradients(self.fitted, take(tree, c), one, own, names)
            masked = {n: torch.where(m, g, 0.0) if isinstance(m := own.only[n], Tensor) else g for n, g in grads.items()}
            length = torch.as_tensor(sum(rows(g).double().square().sum(1) for g in masked.values())).sqrt()
            scale = (self.clip / length).clamp_max(1.0)
            for n, g in masked.items():
                alone = [-1, *[1] * (g.ndim - 1)]
                clipped = torch.where(length.isfinite().view(alone), g.double() * scale.view(alone), 0.0)
                total[n].index_add_(0, c, clipped)
        return total


def _gradients(fitted: Fitted, tree: Tree, batch: Batch, aim: Aim, names: list[str]) -> Tree:
    """The gradient of each row of a stack of clients."""
    leaves = {n: tree[n].detach().requires_grad_() for n in names}
    forward = Forward(None, True, fitted.precision, not fitted.steady, fitted.compiling)
    with torch.enable_grad(), precision(fitted.precision):
        with forward as mode:
            found = losses(mode, fitted, leaves, tree, batch, aim)
        grads = torch.autograd.grad(found.sum(), list(leaves.values()), materialize_grads=True)
    return dict(zip(names, grads, strict=True))


def check_model(fitted: Fitted, device: torch.device) -> None:
    """Refuse a network whose samples have no separate gradients, or that is too large for one gradient per sample."""
    model = fitted.model
    if model.stats:
        raise InputError(
            f"in {model.name} BatchNorm mixes the samples of a batch, so samples have no separate gradients; with private "
            "samples (unit=sample) use a network without it, such as mlp, conv1d or small_cnn (--norm group)."
        )
    if one_by_one(fitted, device):
        raise InputError(
            f"{model.name} is too large, or cannot be stacked, for a gradient per sample; with private samples "
            "(unit=sample) use a smaller network, such as mlp, conv1d or small_cnn."
        )


def _check_key(key: str) -> None:
    if key == "finetune":
        raise InputError(TUNES)
