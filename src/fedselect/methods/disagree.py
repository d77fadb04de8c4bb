"""Selection by persistent disagreement: a layer becomes personal if the client's pull in it repeats."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedselect.core.checks import check_choice, check_not_negative, check_shares
from fedselect.core.errors import InputError
from fedselect.core.shown import Shown
from fedselect.core.tree import Mask, Scalar, State, Tree, rows
from fedselect.methods.common import per_row
from fedselect.methods.select import Train, empty
from fedselect.methods.units import Units, last_of, units_of
from fedselect.models import Model
from fedselect.training.work import Work

WINDOW = ("first", "second", "trained", "energy", "pulls", "units")
"""Stored until a client is tested: the sum of the pulls of either half, the model it trained last, the size and number of its
pulls, and their size per rank."""


@dataclass(frozen=True)
class Disagreement(Shown):
    """Share everything for `window` rounds; then each client keeps the last layer in which it persistently disagrees.

    In these rounds a client trains on each half of its samples as if they were two clients, and shares the mean. A pull is the
    model that a half trained, minus the aggregate of that round. Pulls d are taken from the two halves in turn. With m and m'
    the mean pulls of the halves, persistence is <m, m'> / E|d|^2: the part of a pull that repeats in other rounds and other
    samples. It is 1 for a constant pull. The noise of training, and pulls caused by single samples, have mean 0.

    Of the layers above the threshold the last one becomes personal, the nearest to the output: while it is shared, clients
    also disagree in the layers below it, and once it is personal they need not.

    With unit=rank, persistence is computed per rank of an adapter (a column of B with a row of A). In the last layer with a
    rank above the threshold, these ranks become personal; a layer without an adapter counts as one rank.
    """

    window: int = 10
    threshold: Scalar = 0.05
    unit: Literal["layer", "rank"] = "layer"

    def __post_init__(self) -> None:
        check_choice(("layer", "rank"), unit=self.unit)
        check_not_negative(window=self.window)
        check_shares(threshold=self.threshold)
        if self.window == 1:
            raise InputError("window must be 0 or at least 2: each half of the samples needs a round.")

    def start(self, work: Work, params: Tree) -> State:
        memory: State = {"mask": empty(work, params)}
        units = units_of(work.model, "FedPersist") if self.unit == "rank" else None
        if not self.window:
            return memory
        zero = torch.zeros(len(work.ids), dtype=torch.float64, device=work.ids.device)
        names = work.model.params
        return memory | {
            "first": {n: torch.zeros_like(params[n]) for n in names},
            "second": {n: torch.zeros_like(params[n]) for n in names},
            "trained": {n: torch.zeros_like(params[n]) for n in names},
            "energy": {n: zero.clone() for n in names},
            "pulls": {"count": zero.clone(), "open": zero.clone()},  # open: 1 until the aggregate of the last pull is known
            "persistence": {n: torch.full_like(zero, torch.nan) for n in names},
            **({"units": units.sums({n: torch.zeros_like(params[n]) for n in names})} if units else {}),
        }

    def mask(self, model: Model, memory: State) -> Mask:
        return dict(memory["mask"])

    def begin(self, work: Work, memory: State, received: Tree) -> State:
        if "pulls" not in memory:
            return memory
        memory = _close(work.model, memory, received)
        if work.round < self.window:  # no client has enough pulls yet
            return memory
        memory = self._test(work, memory)
        left = _untested(memory)
        if not bool(left.any()):
            return {k: v for k, v in memory.items() if k not in WINDOW}
        return {k: {n: v * _along(left, v) for n, v in t.items()} if k in WINDOW else t for k, t in memory.items()}

    def grow(self, work: Work, memory: State, before: Tree, train: Train) -> tuple[Tree, State]:
        if "pulls" not in memory:
            return train(work), memory
        left = _untested(memory)
        whose = left if work.round >= self.window else None  # None: all clients, which is known without waiting for the GPU
        halves = work.half(0, whose), work.half(1, whose)
        a, b = (train(half) for half in halves)
        work.loss = (halves[0].loss + halves[1].loss) / 2
        after = {n: torch.lerp(v, b[n], 0.5) for n, v in a.items()}
        count = memory["pulls"]["count"]
        second = count % 2
        return after, {
            **memory,
            "first": {n: v + a[n] * _along(left * (1 - second), v) for n, v in memory["first"].items()},
            "second": {n: v + b[n] * _along(left * second, v) for n, v in memory["second"].items()},
            "trained": {n: after[n] * _along(left, after[n]) for n in memory["trained"]},
            "energy": {n: v + left * _square(a[n] - b[n]) / 4 for n, v in memory["energy"].items()},
            "pulls": {"count": count + left, "open": left.to(count.dtype)},
            **_by_unit(work.model, memory, {n: a[n] - b[n] for n in memory["trained"]}, left / 4),
        }

    def _test(self, work: Work, memory: State) -> State:
        """Clients that have all their pulls select their personal layer."""
        due = _untested(memory) & (memory["pulls"]["count"] >= self.window)
        some = work.n > 1  # a single sample has no halves
        kept = self._chosen(work.model, memory, some)
        found = {n: torch.where(some, v, 0.0) for n, v in persistence(memory, {n: n for n in work.model.params}).items()}
        return {
            **memory,
            "mask": {n: m | (_along(due, m) & kept[n]) for n, m in memory["mask"].items()},
            "persistence": {n: torch.where(due, found[n], v) for n, v in memory["persistence"].items()},
        }

    def _chosen(self, model: Model, memory: State, some: Tensor) -> Tree:
        """The new mask of each parameter."""
        mask = memory["mask"]
        if self.unit == "layer":
            kept = self._choose(persistence(memory, layers(model.params)), some)
            return {n: _along(kept[layer_of(n)], m) for n, m in mask.items()}
        found = persistence_of_ranks(model, memory)
        above = {u: (v > per_row(self.threshold, v).view(-1, 1)) & some.unsqueeze(1) for u, v in found.items()}
        return Units(model).spread(last_of(above), mask)

    def _choose(self, found: Tree, some: Tensor) -> Tree:
        """The last layer above the threshold: (C,) by layer."""
        above = torch.stack(list(found.values()), 1)
        above = (above > per_row(self.threshold, above).unsqueeze(1)) & some.unsqueeze(1)
        later = above.flip(1).cumsum(1).flip(1)  # number of layers above the threshold from here on
        return {layer: above[:, i] & (later[:, i] == 1) for i, layer in enumerate(found)}


def layer_of(name: str) -> str:
    """The layer that a tensor belongs to: its name without the last part."""
    return name.rpartition(".")[0] or name


def layers(names: Iterable[str]) -> dict[str, str]:
    """The layer of each tensor."""
    return {n: layer_of(n) for n in names}


def persistence(memory: State, groups: Mapping[str, str]) -> Tree:
    """<m, m'> / E|d|^2 from the sums of a window, at most 1, for groups of tensors: (C,) by group."""
    count = memory["pulls"]["count"]
    pairs = ((count / 2).ceil() * (count / 2).floor()).clamp_min(1)
    same: Tree = {}
    energy: Tree = {}
    for n, group in groups.items():
        product = (rows(memory["first"][n]).double() * rows(memory["second"][n]).double()).sum(1)
        same[group] = same.get(group, 0.0) + product / pairs
        energy[group] = energy.get(group, 0.0) + memory["energy"][n] / count.clamp_min(1)
    return {g: (v / energy[g].clamp_min(1e-300)).clamp_max(1) for g, v in same.items()}


def persistence_of_ranks(model: Model, memory: State) -> Tree:
    """Persistence per rank of an adapter, or of a whole layer without one: (C, r) by unit."""
    count = memory["pulls"]["count"].unsqueeze(1)
    pairs = ((count / 2).ceil() * (count / 2).floor()).clamp_min(1)
    same = Units(model).sums({n: v.double() * memory["second"][n].double() for n, v in memory["first"].items()})
    energy = {u: (v / count.clamp_min(1)).clamp_min(1e-300) for u, v in memory["units"].items()}
    return {u: (v / pairs / energy[u]).clamp_max(1) for u, v in same.items()}


def _by_unit(model: Model, memory: State, apart: Tree, weight: Tensor) -> State:
    """The size of pulls per rank (if it is stored), with the squares of these pulls added."""
    if "units" not in memory:
        return {}
    found = Units(model).sums({n: v.double().square() for n, v in apart.items()})
    return {"units": {u: v + weight.unsqueeze(1) * found[u] for u, v in memory["units"].items()}}


def _close(model: Model, memory: State, received: Tree) -> State:
    """Subtract the aggregate, now that it is known, from the last pull.

    The squared size of a pull is the part from the difference of the halves, added during training, plus that from their mean,
    added here.
    """
    count, last = memory["pulls"]["count"], memory["pulls"]["open"]
    whose = {"first": last * (count % 2), "second": last * (1 - count % 2)}  # the count includes the last
    sums = {k: {n: v - received[n] * _along(own, v) for n, v in memory[k].items()} for k, own in whose.items()}
    energy = {n: v + last * _square(memory["trained"][n] - received[n]) for n, v in memory["energy"].items()}
    by_unit = _by_unit(model, memory, {n: v - received[n] for n, v in memory["trained"].items()}, last)
    return {**memory, **sums, **by_unit, "energy": energy, "pulls": {"count": count, "open": torch.zeros_like(last)}}


def _untested(memory: State) -> Tensor:
    """Which clients are still in their window: (C,)."""
    return next(iter(memory["persistence"].values())).isnan()


def _square(v: Tensor) -> Tensor:
    return rows(v).double().square().sum(1)


def _along(each: Tensor, like: Tensor) -> Tensor:
    """One value per client, with the dtype of the tensor and a shape that broadcasts with it."""
    return each.to(like.dtype).view(-1, *[1] * (like.ndim - 1))
