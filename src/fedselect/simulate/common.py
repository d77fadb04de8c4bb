"""What several runs have in common: what one has prepared and others use, and the data of a stack of runs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedselect.training.batches import Split

if TYPE_CHECKING:
    from fedselect.simulate.engine import Simulation

Pools = dict[tuple[int, ...], tuple[Tensor, Tensor, list[Split]]]
"""Inputs and targets of several splits, one split after another, with these splits, by their identities."""


def prepared(run: "Simulation", like: "Simulation") -> bool:
    """Whether `like` has prepared and tried all that `run` needs: they may differ in method, seed, and how they are evaluated.

    Never on a GPU, where recordings hold memory, and how many clients fit depends on what is free.
    """
    if run.device.type != "cpu" or like.device.type != "cpu" or run.private or like.private:
        return False
    if run.model is not like.model or run.data is not like.data or not torch.equal(run._from, like._from):
        return False
    mine, theirs = (
        (r.training, r.asked, [m.name for m in r.metrics], r.precision, r.recompute) for r in (run, like)
    )
    return mine == theirs


def pool(splits: Sequence[Split], pools: Pools) -> Split:
    """One pool of the data of several runs. What runs share is in it once, and another stack of the same data has the same pool.

    So what one stack has recorded, which reads the pool, serves others too.
    """
    if len(splits) == 1:
        return splits[0]
    own = {id(s): s for s in splits}
    if tuple(own) not in pools:
        one, several = splits[0], list(own.values())
        whole = (one.x, one.y) if len(own) == 1 else (torch.cat([s.x for s in several]), torch.cat([s.y for s in several]))
        pools[tuple(own)] = *whole, several
    x, y, several = pools[tuple(own)]
    ends = torch.tensor([0, *(len(s.x) for s in several)]).cumsum(0).tolist()
    first = dict(zip(own, ends, strict=False))
    start = torch.cat([s.start + first[id(s)] for s in splits]).clamp_max(max(0, len(x) - 1))
    sizes = tuple(n for s in splits for n in s.sizes or ())
    return replace(splits[0], x=x, y=y, start=start, n=torch.cat([s.n for s in splits]), sizes=sizes)
