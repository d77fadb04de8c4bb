"""Ready: a model and data, prepared and tried together once, for all runs that differ in method and seed alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedselect.simulate.frozen import Frozen
from fedselect.tasks.task import Task
from fedselect.training.batches import Split
from fedselect.training.fitted import Fitted
from fedselect.training.recorded import Programs


@dataclass
class Ready:
    """What a run prepares and tries before its first round, whatever its method and seed."""

    of: tuple[Any, ...]  # all that it depends on: the model, the data, the device, ...
    split: dict[str, Split]
    task: Task  # fitted to the data
    fitted: Fitted
    programs: Programs
    raw: Split  # training data as the whole network takes it; of a network that is cut, only the first sample
    bare: bool  # whether the whole network returns a single tensor
    frozen: Frozen | None  # layers that have run, so that `split` has their outputs and `fitted` is the rest of the network
    fits: int = 0  # how many clients fit side by side
    pools: dict[tuple[int, ...], tuple[list[Split], Tensor, Tensor]] = field(default_factory=dict)

    def serves(self, of: tuple[Any, ...]) -> bool:
        """Whether a run can use it. None can on a GPU, where recordings hold memory and what fits depends on what is free."""
        return self.of == of and all(s.n.device.type == "cpu" for s in self.split.values())

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """What runs must have in common to be stacked, as far as it depends on model and data."""
        model, train = self.fitted.model, self.split["train"]
        numbers = tuple(None if v is None else tuple(v.flatten().tolist()) for v in (train.scale, train.shift))
        ends = (repr(model.module), model.base, model.output, self.fitted.layout)
        return ends, train.x.shape[1:], train.augment, numbers

    def pool(self, splits: Sequence[Split]) -> Split:
        """The data of several runs as one split. A split that runs share is in it once. On a CPU other stacks of runs on the
        same data read the same memory, so that the steps that one stack has recorded serve all; a GPU holds no pool for later.
        """
        if len(splits) == 1:
            return splits[0]
        own = {id(s): s for s in splits}
        several = list(own.values())
        _, x, y = pool = self.pools.get(tuple(own)) or (several, *_joined(several))
        if x.device.type == "cpu":
            self.pools[tuple(own)] = pool
        at, first = 0, {}
        for s in several:
            first[id(s)], at = at, at + len(s.x)
        start = torch.cat([s.start + first[id(s)] for s in splits]).clamp_max(max(0, at - 1))
        sizes = tuple(n for s in splits for n in s.sizes or ())
        return replace(splits[0], x=x, y=y, start=start, n=torch.cat([s.n for s in splits]), sizes=sizes)


def _joined(splits: Sequence[Split]) -> tuple[Tensor, Tensor]:
    """The samples and targets of all."""
    if len(splits) == 1:
        return splits[0].x, splits[0].y
    return torch.cat([s.x for s in splits]), torch.cat([s.y for s in splits])
