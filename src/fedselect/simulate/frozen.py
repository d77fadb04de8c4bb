"""A simulation of a frozen base: the outputs of its first layers take the place of the samples."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from fedselect.simulate import ranks
from fedselect.simulate.inputs import deterministic
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


def run_ahead(s: "Simulation", x: Tensor) -> Frozen | None:
    """Run the layers that never change on all samples, and let clients train the rest of the network on their outputs.

    x: some inputs of the model
    """
    if s.data.augment != "none":
        return None
    samples = sum(len(split.x) for split in s._split.values())
    room = SHARE * memory(s.device) / ranks.world()
    with deterministic(s.deterministic):
        found = find(s.fitted, x, s.task, s.data, samples=samples, room=room)
        if found is None:
            return None
        try:
            s._split = {part: found.split(s.data, part, raw) for part, raw in s._split.items()}
        except IndexError as e:
            if not s.whole_inputs:
                raise
            raise s.out_of_rows(range(s.clients)) from e
    s.raw = replace(s.raw, x=s.raw.x[:1].clone())  # one shows what they are like; the others need not stay on the device
    s.fitted = found.rest
    return Frozen(s.model.name, found.before, samples * found.size)
