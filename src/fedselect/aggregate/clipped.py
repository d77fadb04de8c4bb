"""The mean of updates after clipping those that are much longer than usual."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fedselect.aggregate.aggregator import Fold, Mean, MeanFold
from fedselect.aggregate.lengths import lengths, middle, remembered, usual
from fedselect.aggregate.masked import MaskedSum
from fedselect.core.errors import InputError
from fedselect.core.tree import Mask, State, Tree, along

KINDS = ("parameters", "statistics")
"""Measured separately: BatchNorm statistics have other magnitudes than parameters."""


@dataclass(frozen=True)
class ClippedMean(Mean):
    """The weighted mean of updates, each clipped to clip_factor times the median length of recent rounds.

    If no update is longer than that, the result is bit for bit the plain mean. In the first round the median is that of the
    round itself; if any update is longer than the limit then, every update is scaled to the median length.
    """

    _: KW_ONLY
    clip_factor: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.clip_factor, Real) or not self.clip_factor >= 1:
            raise InputError(f"clip_factor must be a number of at least 1, not {self.clip_factor!r}.")

    def start(self, params: Tree) -> State:
        return {**super().start(params), "parameters": {n: torch.ones((), device=v.device) for n, v in params.items()}}

    def fold(self, state: State, params: Tree) -> Fold:
        return ClippedFold(self.clip_factor, MeanFold(self.server_momentum, state, params), state, params)


class ClippedFold(Fold):
    """The mean of clipped updates; while no limit is known, also sums of their directions."""

    sums: MaskedSum

    def __init__(self, factor: float, mean: MeanFold, state: State, params: Tree) -> None:
        self.sums, self._mean, self._params = mean.sums, mean, params
        self._factor, self._trained = factor, state.get("parameters", {})
        self._past = {kind: state.get(f"{kind}_lengths", {}) for kind in KINDS}
        self._limit = {kind: None if (found := usual(past)) is None else factor * found for kind, past in self._past.items()}
        self._now: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
        self._directions = MaskedSum()
        self._exchanged = False

    def add(self, values: Tree, sent: Mask, weight: Tensor) -> None:
        kept = dict(values)
        for kind in KINDS:
            part = {n: v for n, v in values.items() if sent.get(n, False) is not False and self._kind(n) == kind}
            if not part:
                continue
            found, limit = lengths(part, sent, self._params), self._limit[kind]
            self._now[kind].append(found)
            if limit is None:
                each = torch.where(found > 0, 1 / found, 0.0)
                self._directions.add(
                    {n: (self._step(n, v) * along(each, v.double())).float() for n, v in part.items()}, sent, weight
                )
            elif bool((long := found > limit).any()):
                kept |= {n: self._shortened(n, v, long, limit / found) for n, v in part.items()}
        self.sums.add(kept, sent, weight)

    def exchange(self, everywhere: Callable[[Any], list[Any]]) -> None:
        """Exchange lengths between processes; while no limit is known, they decide which sums to use."""
        self._exchanged = True
        heard = everywhere({kind: [v.cpu() for v in found] for kind, found in self._now.items()})
        for kind in KINDS:
            found = [v for theirs in heard for v in theirs[kind]]
            self._now[kind] = [torch.cat(found)] if found else []
            step = middle(self._now[kind][0]) if found else None
            if self._limit[kind] is None and step is not None and bool((self._now[kind][0] > self._factor * step).any()):
                for n, direction in self._directions.total.items():
                    if self._kind(n) == kind:
                        self.sums.total[n] = self._params[n].double() * self.sums.weight[n] + step * direction

    def finish(self) -> tuple[Tree, Mask, State]:
        if not self._exchanged:
            self.exchange(lambda mine: [mine])
        mean, heard, memory = self._mean.finish()
        if self._trained:
            memory = {**memory, "parameters": self._trained}
        for kind, found in self._now.items():
            past = self._past[kind]
            device = next(iter(self._params.values())).device
            after = remembered(past, found[0].to(device)) if found else past
            memory |= {f"{kind}_lengths": after} if after else {}
        return mean, heard, memory

    def _kind(self, name: str) -> str:
        return KINDS[bool(self._trained) and name not in self._trained]

    def _step(self, name: str, values: Tensor) -> Tensor:
        return values.double() - self._params[name].double()

    def _shortened(self, name: str, values: Tensor, long: Tensor, scale: Tensor) -> Tensor:
        """The values, with updates that are too long clipped."""
        out = values.clone()
        short = self._params[name].double() + self._step(name, values[long]) * along(scale[long], values[long].double())
        out[long] = short.to(values.dtype)
        return out
