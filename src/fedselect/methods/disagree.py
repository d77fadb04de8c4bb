"""Selection by persistent disagreement: personal is where a client goes on wanting to be elsewhere than the others."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedselect.core.checks import check_not_negative, check_shares
from fedselect.core.errors import InputError
from fedselect.core.tree import Mask, Scalar, State, Tree, rows
from fedselect.methods.common import per_row
from fedselect.methods.select import Again, empty
from fedselect.models import Model
from fedselect.training.work import Work

WINDOW = ("first", "second", "half", "pulls", "energy")
"""Stored until a client is tested: sums of its halves' pulls, the half it trained last, numbers of pulls, their squared size."""


@dataclass(frozen=True)
class Disagreement:
    """For `window` rounds everything is shared; then each client keeps the tensors whose pull is the same in every round.

    A pull is what a client trained less the aggregate of that round. Beside its own training, a client trains in turn on
    either half of its samples. With the mean pulls of both halves, m and m', and the mean size of a pull, E|d|^2, the
    persistence of a tensor is <m, m'> / E|d|^2: 1 for a pull that is always the same, 0 for noise of training and for a
    difference that only this sample has. Tensors above the threshold become personal, the highest first, as long as they
    hold no more than `limit` of the parameters.
    """

    window: int = 10
    threshold: Scalar = 0.1
    limit: Scalar = 0.30

    def __post_init__(self) -> None:
        check_not_negative(window=self.window)
        check_shares(threshold=self.threshold, limit=self.limit)
        if self.window == 1:
            raise InputError("window must be at least 2 rounds, one for each half of the samples, or 0 for none; not 1.")

    def start(self, work: Work, params: Tree) -> State:
        memory: State = {"mask": empty(work, params)}
        if not self.window:
            return memory
        zero = torch.zeros(len(work.ids), dtype=torch.float64, device=work.ids.device)
        own = {n: params[n] for n in work.model.params}
        memory |= {key: {n: torch.zeros_like(v) for n, v in own.items()} for key in ("first", "second", "half")}
        return memory | {
            "pulls": {name: zero.clone() for name in ("first", "second", "open")},
            "energy": {n: zero.clone() for n in own},
            "persistence": {n: torch.full_like(zero, torch.nan) for n in own},
        }

    def mask(self, model: Model, memory: State) -> Mask:
        return dict(memory["mask"])

    def begin(self, work: Work, memory: State, received: Tree) -> State:
        if "half" not in memory:
            return memory
        memory = self._count(memory, received)
        if work.round < self.window:  # nobody has so many pulls yet
            return memory
        pulls, past = memory["pulls"], memory["persistence"]
        enough = (pulls["first"] + pulls["second"] >= self.window) & (pulls["first"] > 0) & (pulls["second"] > 0)
        due = enough & past[work.model.params[0]].isnan()
        found = self._persistence(memory)
        chosen = self._choose(found, {n: m[0].numel() for n, m in memory["mask"].items()})
        memory["mask"] = {n: m | _along(due & chosen[n], m) for n, m in memory["mask"].items()}
        memory["persistence"] = {n: torch.where(due, found[n], v) for n, v in past.items()}
        if bool(memory["persistence"][work.model.params[0]].isnan().any()):
            return memory
        return {k: v for k, v in memory.items() if k not in WINDOW}

    def grow(self, work: Work, memory: State, before: Tree, after: Tree, again: Again) -> State:
        if "half" not in memory:
            return memory
        half = again(work.half(work.round % 2))
        opened = torch.full_like(memory["pulls"]["open"], 1 + work.round % 2)
        return {**memory, "half": {n: half[n] for n in memory["half"]}, "pulls": {**memory["pulls"], "open": opened}}

    def _count(self, memory: State, received: Tree) -> State:
        """Add the pull of the half that was trained last, now that its round's aggregate is known."""
        pulls, energy = memory["pulls"], {}
        sums: dict[str, Tree] = {"first": {}, "second": {}}
        to = {name: (pulls["open"] == i).double() for i, name in enumerate(sums, 1)}
        for n, half in memory["half"].items():
            pull = half - received[n]
            energy[n] = memory["energy"][n] + (pulls["open"] > 0) * rows(pull).double().square().sum(1)
            for name, whose in to.items():
                sums[name][n] = memory[name][n] + pull * _along(whose, pull)
        counts = {name: pulls[name] + whose for name, whose in to.items()}
        return {**memory, **sums, "energy": energy, "pulls": {**counts, "open": torch.zeros_like(pulls["open"])}}

    def _persistence(self, memory: State) -> Tree:
        """<m, m'> / E|d|^2 of every tensor: (C,)."""
        first, second = memory["pulls"]["first"], memory["pulls"]["second"]
        scale = (first + second) / (first * second).clamp_min(1)
        return {
            n: scale * (rows(a).double() * rows(memory["second"][n]).double()).sum(1) / memory["energy"][n].clamp_min(1e-300)
            for n, a in memory["first"].items()
        }

    def _choose(self, found: Tree, sizes: dict[str, int]) -> Tree:
        """Tensors above the threshold, the most persistent first, as long as they fit into the limit."""
        score = torch.stack(list(found.values()), 1)
        order = score.argsort(dim=1, descending=True, stable=True)
        size = torch.tensor(list(sizes.values()), dtype=torch.float64, device=score.device).expand_as(score).gather(1, order)
        wanted = score.gather(1, order) > per_row(self.threshold, score).unsqueeze(1)
        room = per_row(self.limit, score) * sum(sizes.values()) + 1e-9
        taken, held = torch.zeros_like(wanted), torch.zeros_like(room)
        for k in range(score.shape[1]):
            fits = wanted[:, k] & (held + size[:, k] <= room)
            held = held + fits * size[:, k]
            taken[:, k] = fits
        chosen = torch.zeros_like(wanted).scatter(1, order, taken)
        return {n: chosen[:, i] for i, n in enumerate(found)}


def _along(each: Tensor, like: Tensor) -> Tensor:
    """One value for each client, shaped to meet its tensor."""
    kind = like.dtype if each.dtype != torch.bool else torch.bool
    return each.to(kind).view(-1, *[1] * (like.ndim - 1))
