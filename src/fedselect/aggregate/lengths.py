"""Lengths of updates, now and in recent rounds, for limiting them.

The length of an update is its root mean square over the entries that were sent, so that clients which send different numbers
of entries are comparable.
"""

import torch
from torch import Tensor

from fedselect.core.tree import Mask, Tree, rows

WINDOW = 5
"""Rounds whose lengths are stored."""


def lengths(values: Tree, sent: Mask, params: Tree) -> Tensor:
    """The length of each client's update from `params`, (C,) float64; 0 for a client that sent nothing.

    Rounded to float32, so that it does not depend on how the sum over entries was split.
    """
    first = next(iter(values.values()))
    square = torch.zeros(len(first), dtype=torch.float64, device=first.device)
    count = torch.zeros_like(square)
    for name, v in values.items():
        marks = sent.get(name, False)
        if marks is False:
            continue
        step = v.double() - params[name].double()
        if isinstance(marks, Tensor):  # where, not multiplication: entries that were not sent may be NaN
            step = torch.where(marks, step, 0.0)
            count += rows(marks).sum(1)
        else:
            count += v[0].numel()
        square += rows(step).square().sum(1)
    return (square / count.clamp_min(1.0)).sqrt().float().double()


def middle(found: Tensor) -> float | None:
    """The median of lengths, the lower one for an even number; updates of length 0 are ignored."""
    moved = found[found > 0].sort().values
    return float(moved[(len(moved) - 1) // 2]) if len(moved) else None


def usual(past: Tree) -> float | None:
    """The median over the stored rounds."""
    return middle(torch.cat(list(past.values()))) if past else None


def remembered(past: Tree, now: Tensor) -> Tree:
    """The stored lengths for the next round: those of this round, sorted, and of some rounds before."""
    moved = now[now > 0].sort().values
    if not len(moved):
        return past
    return {"1": moved, **{str(age + 1): past[str(age)] for age in range(1, WINDOW) if str(age) in past}}
