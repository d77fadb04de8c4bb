"""A simulation of a frozen base: the outputs of its first layers take the place of the samples."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fedselect.simulate import ranks
from fedselect.simulate.inputs import deterministic
from fedselect.training.batches import Split
from fedselect.training.fitted import Fitted
from fedselect.training.prefix import SHARE, find, memory

if TYPE_CHECKING:
    from fedselect.simulate.engine import Simulation


@dataclass(frozen=True)
class Frozen:
    """The layers of a model whose outputs are computed once per sample: those before this one; and the outputs' bytes."""

    model: str
    before: str
    size: int

    def __str__(self) -> str:
        size = f"{self.size / 1e6:,.1f} MB" if self.size > 1e5 else f"{self.size / 1e3:,.1f} kB"
        return f"{self.model}: the layers before {self.before} are frozen; their outputs are computed once per sample ({size})."


def run_ahead(
    s: "Simulation", fitted: Fitted, split: dict[str, Split], x: Tensor
) -> tuple[Frozen, Fitted, dict[str, Split]] | None:
    """Run the layers that never change on all samples: which they are, the rest of the network, and the data that it trains on.

    x: some inputs of the model
    """
    if s.data.augment != "none" or any(raw.index is not None for raw in split.values()):  # a pool in a file is not read whole
        return None
    samples = sum(len(raw.x) for raw in split.values())
    room = SHARE * memory(s.device) / ranks.world()
    with deterministic(s.deterministic):
        found = find(fitted, x, s.task, s.data, samples=samples, room=room)
        if found is None:
            return None
        try:
            made = {part: found.split(s.data, part, raw) for part, raw in split.items()}
        except IndexError as e:
            if not s.whole_inputs:
                raise
            raise s.out_of_rows(range(s.clients)) from e
    return Frozen(s.model.name, found.before, samples * found.size), found.rest, made
