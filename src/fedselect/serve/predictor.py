"""Predictor: from raw inputs to predictions, with one client's parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedselect.core.errors import DataError, InputError
from fedselect.core.tree import Tree
from fedselect.data import Schema, arrays
from fedselect.models import Layout
from fedselect.models.inputs import are_several
from fedselect.models.outputs import outputs_of
from fedselect.simulate import Simulation
from fedselect.tasks import Task

BATCH = 256  # samples at a time


@dataclass(frozen=True)
class Inputs:
    """A model's inputs: shape and type of one input, the scaling of bytes (pixel * scale + shift, by channel), and the
    layout of several inputs in one tensor."""

    shape: tuple[int, ...]
    kind: torch.dtype
    scale: Tensor | None = None
    shift: Tensor | None = None
    layout: Layout | None = None

    @classmethod
    def of(cls, simulation: Simulation) -> "Inputs":
        split = simulation.raw
        scale, shift = (None if v is None else v.cpu() for v in (split.scale, split.shift))
        return cls(tuple(split.x.shape[1:]), split.x.dtype, scale, shift, simulation.data.layout)

    def made(self, x: Any) -> Tensor:
        """Raw inputs as one scaled tensor."""
        found = self.checked(x)
        if self.scale is not None and self.shift is not None:
            return found.to(self.scale.dtype) * self.scale + self.shift
        return found

    def checked(self, x: Any) -> Tensor:
        """Raw inputs as one tensor on the CPU. Images stay bytes."""
        if self.layout is not None and not _lie_in(self.layout, x):
            x = self.layout.pack(arrays.inputs(x, "x"))
        if are_several(x):
            raise DataError(
                f"x is a {type(x).__name__}, but the model takes one input; pass an array or a list, one row per sample."
            )
        found: Tensor = arrays.inputs(x, "x")
        shape = ", ".join(map(str, ("N", *self.shape)))
        if tuple(found.shape) == self.shape:
            raise DataError(f"x is a single sample of shape {self.shape}; pass one row per sample, ({shape}), such as x[None].")
        if tuple(found.shape[1:]) != self.shape or not found.ndim:
            raise DataError(f"x has the shape {tuple(found.shape)}, but the model takes ({shape}); reshape it.")
        if (self.kind == torch.uint8) != (found.dtype == torch.uint8) or (
            self.kind == torch.int64 and found.is_floating_point()
        ):
            said = str(self.kind).removeprefix("torch.")
            raise DataError(
                f"x has the type {str(found.dtype).removeprefix('torch.')}, but the model was trained on {said}; convert it."
            )
        return found.detach().cpu().to(self.kind)

    def given(self, made: Tensor, floats: torch.dtype) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """The positional and keyword arguments of the network. `floats`: the type of floating-point inputs."""
        if self.layout is not None:
            return self.layout.unpack(made, floats)
        return (made.to(floats) if made.is_floating_point() else made,), {}


def _lie_in(layout: Layout, x: Any) -> bool:
    """Whether inputs are already packed, as in a federation."""
    return isinstance(x, Tensor) and x.ndim == 2 and x.shape[1] == layout.width


@dataclass(frozen=True)
class Meaning:
    """The meaning of a model's outputs."""

    task: Task
    target_shape: tuple[int, ...]
    class_names: tuple[str, ...]

    def predicted(self, outputs: Tensor) -> NDArray[Any]:
        """Predictions: classes (by name if they have names), or numbers in the units of the targets."""
        said = self.task.decided(outputs)
        if said.is_floating_point():
            return said.reshape(len(said), *self.target_shape).numpy()
        return self._named(said.numpy())

    def probabilities(self, outputs: Tensor) -> NDArray[Any]:
        return self.task.probabilities(outputs).numpy()

    def _named(self, classes: NDArray[Any]) -> NDArray[Any]:
        """Class numbers as the data's classes: strings, integers or booleans."""
        names = self.class_names
        if not names or self.target_shape:
            return classes
        if set(names) <= {"False", "True"}:
            return np.array([n == "True" for n in names]).take(classes)
        whole = all(n.lstrip("-").isdecimal() and str(int(n)) == n for n in names)
        return np.array([int(n) for n in names] if whole else list(names)).take(classes)


@dataclass(frozen=True)
class Predictor:
    """A network without parameters, and the description of its inputs and outputs."""

    build: Callable[[], nn.Module]
    output: str | int | None  # which of the network's return values to use
    inputs: Inputs
    meaning: Meaning
    schemas: Sequence[Schema | None]  # by client, for tables

    def predict(self, values: Tree, client: int, x: Any) -> NDArray[Any]:
        return self.meaning.predicted(self._outputs(values, client, x))

    def probabilities(self, values: Tree, client: int, x: Any) -> NDArray[Any]:
        return self.meaning.probabilities(self._outputs(values, client, x))

    def _outputs(self, values: Tree, client: int, x: Any) -> Tensor:
        net = self.build()
        load_values(net, values)
        return outputs(net, self.output, self.inputs, self.schemas[client], x)


def load_values(net: nn.Module, values: Tree) -> None:
    """Load parameters into a network, which must be the one that was trained."""
    try:
        net.load_state_dict(values)
    except RuntimeError as e:
        why = " ".join(str(e).split())
        raise InputError(f"this is not the network that was trained; pass that network ({why}).") from None


def outputs(net: nn.Module, output: str | int | None, inputs: Inputs, schema: Schema | None, x: Any) -> Tensor:
    """The outputs of a network for raw inputs."""
    net.eval()
    if schema is not None and not isinstance(x, Tensor | np.ndarray):
        x = schema.features(x)
    made = inputs.made(x)
    kind = next(v.dtype for v in net.parameters() if v.is_floating_point())
    parts = []
    with torch.no_grad():
        for some in torch.split(made, BATCH):
            args, named = inputs.given(some, kind)
            parts.append(outputs_of(net(*args, **named), output, type(net).__name__))
    return torch.cat(parts)
