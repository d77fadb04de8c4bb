"""Aggregators that need all values of an entry at once; uploads wait on disk until the end of the round."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedselect.aggregate.aggregator import Aggregator, Fold
from fedselect.aggregate.spool import Spool
from fedselect.core.errors import InputError
from fedselect.core.tree import Mask, State, Tree


@dataclass(frozen=True)
class Median(Aggregator):
    """The median of each entry over the clients that sent it; for an even number, the mean of the middle two.

    Weights are ignored: every client counts once. Uploads are stored in a temporary file until the end of the round. An entry
    with fewer than least_senders senders keeps its value.
    """

    least_senders: int = 1

    def __post_init__(self) -> None:
        _check_least(self.least_senders)

    def fold(self, state: State, params: Tree) -> Fold:
        return EntrywiseFold(median, self.least_senders)


@dataclass(frozen=True)
class TrimmedMean(Aggregator):
    """The mean of each entry over its senders, without the largest and smallest values (Yin et al. 2018).

    `trim` is the share of senders dropped at each end, rounded up; one or two values always remain. Weights are ignored: every
    client counts once. Uploads are stored in a temporary file until the end of the round. An entry with fewer than
    least_senders senders keeps its value.
    """

    trim: float = 0.2
    least_senders: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.trim, Tensor) or not 0.0 <= self.trim < 0.5:
            raise InputError(f"trim, the share dropped at each end, must be in [0, 0.5), not {self.trim}.")
        _check_least(self.least_senders)

    def fold(self, state: State, params: Tree) -> Fold:
        return EntrywiseFold(lambda values, sent: trimmed(values, sent, self.trim), self.least_senders)


class EntrywiseFold(Fold):
    """Uploads on disk, aggregated in blocks of entries."""

    def __init__(self, rule: Callable[[Tensor, Tensor], Tensor], least: int) -> None:
        self._spool, self._rule, self._least = Spool(), rule, least

    def add(self, values: Tree, sent: Mask, weight: Tensor) -> None:
        self._spool.add(values, sent)

    def finish(self) -> tuple[Tree, Mask, State]:
        found, heard = self._spool.reduce(self._rule, self._least)
        return found, heard, {}


def median(values: Tensor, sent: Tensor) -> Tensor:
    """The median of each entry of (clients, entries) over its senders, 0 without senders; NaN counts as the largest value."""
    ordered, count = _ordered(values, sent)
    low, high = (ordered.gather(0, at)[0] for at in ((count - 1).clamp_min(0) // 2, count // 2))
    return ((low + high) / 2).masked_fill(count[0] == 0, 0.0)


def trimmed(values: Tensor, sent: Tensor, trim: float) -> Tensor:
    """The mean of each entry over its senders without the share `trim` at each end; 0 without senders."""
    ordered, count = _ordered(values, sent)
    off = count.new_tensor([cut(n, trim) for n in range(len(values) + 1)])[count]
    place = torch.arange(len(values), device=values.device).unsqueeze(1)
    kept = (place >= off) & (place < count - off)
    return ordered.masked_fill(~kept, 0.0).sum(0) / (count - 2 * off)[0].clamp_min(1)


def cut(senders: int, trim: float) -> int:
    """How many values to drop at each end: the share, rounded up, but never the middle ones."""
    return max(0, min(math.ceil(trim * senders - 1e-9), (senders - 1) // 2))


def _ordered(values: Tensor, sent: Tensor) -> tuple[Tensor, Tensor]:
    """The values of each entry in ascending order, those not sent last; and the number sent, (1, entries)."""
    return values.masked_fill(~sent, float("nan")).sort(0).values, sent.sum(0, keepdim=True)


def _check_least(least: int) -> None:
    if not isinstance(least, int) or isinstance(least, bool) or least < 1:
        raise InputError(f"least_senders must be an integer of at least 1, not {least!r}.")
