"""Whole numbers as inputs: the error for one that has no row in an embedding."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from fedselect.core.errors import InputError
from fedselect.data import Federation

if TYPE_CHECKING:
    from fedselect.simulate.engine import Simulation


def has_whole_inputs(data: Federation) -> bool:
    """Whether the inputs include whole numbers, as for an embedding."""
    layout = data.layout
    return data.whole if layout is None else any(f.kind == "integers" for f in layout.fields)


def no_row(run: "Simulation", ids: Iterable[int]) -> InputError:
    """The error for an embedding that has no row for an input of these clients."""
    low, high = _ends(run.data, list(ids))
    return InputError(
        f"{run.model.name} has no row for one of its inputs, which range from {low} to {high}; use a larger embedding, "
        "or other inputs."
    )


def _ends(data: Federation, ids: list[int]) -> tuple[str, str]:
    """The smallest and the largest whole number among the inputs of these clients, and which client has it."""
    layout = data.layout
    splits = [data.split(part, torch.float32) for part in ("train", "val", "test")]
    parts = [(i, s.x[s.of(i)]) for i in ids for s in splits if s.n[i]]
    given = [(i, v) for i, x in parts for v in ([x] if layout is None else layout.parts(x)) if v.dtype == torch.int64]
    found = [(int(end), data.clients[i].name or i) for i, v in given if v.numel() for end in v.aminmax()]
    (low, a), (high, b) = min(found, key=lambda f: f[0]), max(found, key=lambda f: f[0])
    return f"{low} (client {a})", f"{high} (client {b})"
