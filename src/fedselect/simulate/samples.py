"""The outputs of models sample by sample, not only in the mean."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fedselect.core.tree import Tree
from fedselect.simulate.engine import Simulation
from fedselect.training.step import precision
from fedselect.training.work import predictions


def outputs(simulation: Simulation, models: Tree, ids: Tensor, part: str) -> list[Tensor]:
    """The outputs of stacked models, each on the data of its client in `ids`: (samples, ...) each, on the host."""
    split = simulation._split[part].rows(ids)
    with precision(simulation.precision), torch.no_grad():
        parts = [said.cpu().clone() for said, *_ in predictions(simulation._programs, models, split)]
    return list(_rows(parts, split.sizes or ()))


def _rows(parts: list[Tensor], sizes: tuple[int, ...]) -> Iterator[Tensor]:
    whole = torch.cat(parts, 1) if parts else torch.empty(len(sizes), 0)
    yield from (row[:n] for row, n in zip(whole, sizes, strict=True))
