"""A client's network as a standalone module, from raw inputs to predictions in the units of the targets."""

from typing import Any

import torch
from torch import Tensor, nn

from fedselect.data import Schema
from fedselect.models import Layout, Model
from fedselect.tasks import Task
from fedselect.training.batches import Split

BESIDE = ("input.scale", "input.shift", "output.scale", "output.shift")
"""Tensors stored beside a network's parameters."""


class Standalone(nn.Module):
    """The network with input scaling before it and output scaling after it."""

    scale: Tensor | None
    shift: Tensor | None
    out_scale: Tensor | None
    out_shift: Tensor | None

    def __init__(self, model: Model, net: nn.Module, split: Split, task: Task) -> None:
        super().__init__()
        self.net, self._outputs_of = net, model.outputs_of
        out_scale, out_shift = (None, None) if task.units is None else map(torch.tensor, task.units)
        ends = {"scale": split.scale, "shift": split.shift, "out_scale": out_scale, "out_shift": out_shift}
        for name, numbers in ends.items():
            if numbers is None:
                setattr(self, name, None)  # torch.export fails if a None buffer is registered before others
            else:
                self.register_buffer(name, numbers)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is not None and self.shift is not None:
            x = x.to(self.scale.dtype) * self.scale + self.shift
        return self.in_units(self._outputs_of(self.net(x)))

    def given(self, x: Tensor) -> tuple[Tensor, ...]:
        """The arguments of `forward`, from inputs as stored in a federation."""
        return (x,)

    @property
    def names(self) -> list[str]:
        return ["x"]

    def shapes(self) -> Any:
        """Dynamic shapes for torch.export: any batch size."""
        return ({0: torch.export.Dim("batch")},)

    def in_units(self, y: Tensor) -> Tensor:
        return y if self.out_scale is None or self.out_shift is None else y * self.out_scale + self.out_shift

    @property
    def beside(self) -> dict[str, Tensor]:
        """Tensors to store beside the parameters in a file without a graph."""
        found = zip(BESIDE, (self.scale, self.shift, self.out_scale, self.out_shift), strict=True)
        return {name: v for name, v in found if v is not None}


class Several(Standalone):
    """A standalone module with several inputs, which are positional here even if the network takes them by name."""

    def __init__(self, layout: Layout, dtype: torch.dtype, *args: Any) -> None:
        super().__init__(*args)
        self.layout, self.dtype = layout, dtype

    def forward(self, *parts: Tensor) -> Tensor:
        named = dict(zip(self.layout.names, parts, strict=True)) if self.layout.named else {}
        return self.in_units(self._outputs_of(self.net(*(() if named else parts), **named)))

    def given(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.layout.parts(x, self.dtype))

    @property
    def names(self) -> list[str]:
        return self.layout.names

    def shapes(self) -> Any:
        batch = torch.export.Dim("batch")
        return (tuple({0: batch} for _ in self.names),)


class OfRows(Standalone):
    """A standalone module for rows of a table, with one number per column, as made by `Schema.numbers`.

    It scales numbers, fills missing values and one-hot encodes categories, so users of the graph need no schema.
    """

    number_at: Tensor
    mean: Tensor
    deviation: Tensor
    unknown: Tensor
    category_at: Tensor
    place: Tensor
    order: Tensor

    def __init__(self, schema: Schema, *args: Any) -> None:
        super().__init__(*args)
        self.schema = schema
        numeric = [(i, c) for i, c in enumerate(schema.columns) if c.kind != "category"]
        spread = [
            (i, place) for i, c in enumerate(schema.columns) if c.kind == "category" for place in range(len(c.categories))
        ]
        scales = [(c.mean, (c.variance or 0.0) ** 0.5 or 1.0) for _, c in numeric]
        self.register_buffer("number_at", torch.tensor([i for i, _ in numeric], dtype=torch.int64))
        self.register_buffer("mean", torch.tensor([0.0 if m is None else m for m, _ in scales], dtype=torch.float64))
        self.register_buffer("deviation", torch.tensor([d for _, d in scales], dtype=torch.float64))
        self.register_buffer("unknown", torch.tensor([m is None for m, _ in scales], dtype=torch.bool))  # nothing to scale by
        self.register_buffer("category_at", torch.tensor([i for i, _ in spread], dtype=torch.int64))
        self.register_buffer("place", torch.tensor([at for _, at in spread], dtype=torch.float64))
        self.register_buffer("order", torch.tensor(self._order(schema), dtype=torch.int64))

    @staticmethod
    def _order(schema: Schema) -> list[int]:
        """The index of each input in the concatenation of scaled numbers, missing-value flags and categories."""
        numbers = sum(c.kind != "category" for c in schema.columns)
        at, category = 0, 2 * numbers
        order: list[int] = []
        for column in schema.columns:
            if column.kind == "category":
                order += range(category, category + len(column.categories))
                category += len(column.categories)
            else:
                order += [at, numbers + at] if column.gaps else [at]
                at += 1
        return order

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        values = x[:, self.number_at]
        gaps = torch.isnan(values) | self.unknown
        scaled = torch.where(gaps, 0.0, (values - self.mean) / self.deviation)
        marks = x[:, self.category_at] == self.place
        parts = torch.cat([scaled.float(), gaps.float(), marks.float()], 1)
        return parts[:, self.order]

    def given(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.schema.numbers_of(x),)


def standalone(
    model: Model, net: nn.Module, split: Split, task: Task, layout: Layout | None, schema: Schema | None
) -> Standalone:
    """The standalone module for the network's kind of input."""
    ends = (model, net, split, task)
    if schema is not None:
        return OfRows(schema, *ends).eval()
    return (Standalone(*ends) if layout is None else Several(layout, next(net.parameters()).dtype, *ends)).eval()
