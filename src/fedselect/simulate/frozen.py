"""A simulation of a frozen base: the outputs of its first layers take the place of the samples."""

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedselect.core.errors import RunError
from fedselect.simulate import ranks
from fedselect.simulate.embedded import has_whole_inputs, no_row
from fedselect.simulate.inputs import deterministic
from fedselect.simulate.trial import TOO_LARGE
from fedselect.training.batches import Split
from fedselect.training.fitted import Fitted
from fedselect.training.prefix import SHARE, Prefix, find, memory

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
        while (found := _found(s, fitted, x, samples, room)) is not None:
            made = _outputs(s, found, split)
            if made is not None:
                return Frozen(s.model.name, found.before, samples * found.size), found.rest, made
            torch.cuda.empty_cache()
            said = (
                f"the outputs of {s.model.name} before {found.before} do not fit into the GPU's memory; keeping fewer or none."
            )
            warnings.warn(said, stacklevel=2)
            room = samples * found.size - 1
    return None


def _found(s: "Simulation", fitted: Fitted, x: Tensor, samples: int, room: float) -> Prefix | None:
    try:
        return find(fitted, x, s.task, s.data, samples=samples, room=room)
    except torch.cuda.OutOfMemoryError:
        raise RunError(TOO_LARGE) from None


def _outputs(s: "Simulation", prefix: Prefix, split: dict[str, Split]) -> dict[str, Split] | None:
    """The data with the outputs in place of the samples; None if the GPU is full."""
    try:
        return {part: prefix.split(s.data, part, raw) for part, raw in split.items()}
    except torch.cuda.OutOfMemoryError:
        return None
    except IndexError as e:
        if not has_whole_inputs(s.data):
            raise
        raise no_row(s, range(s.clients)) from e
