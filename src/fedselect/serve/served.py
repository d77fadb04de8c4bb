"""Served: one client's model, loaded from a file."""

import copy
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedselect.core.errors import InputError, RunError
from fedselect.core.tree import Tree
from fedselect.data import Schema
from fedselect.models import Model
from fedselect.serve.about import About, inputs_of, meaning_of, network_of, schema_of
from fedselect.serve.formats import FORMS, Graph, read_graph, read_values
from fedselect.serve.module import BESIDE
from fedselect.serve.predictor import BATCH, Inputs, Meaning, load_values, outputs
from fedselect.tasks import Task


class Served:
    """A model loaded from a file that `fedselect export` or `fedselect deploy export` wrote."""

    def __init__(self, path: Path, about: About, meaning: Meaning, run: Callable[[Any], Tensor]) -> None:
        self.path, self.about, self._meaning, self._run = path, about, meaning, run

    def predict(self, x: Any) -> NDArray[Any]:
        """Predict from raw inputs.

        Args:
            x: An array or tensor with one row per sample; for a table, also a file, a DataFrame or a dict of columns.

        Returns:
            One row per sample: classes (by name if they have names), or numbers in the units of the targets.
        """
        return self._meaning.predicted(self.outputs(x))

    def predict_proba(self, x: Any) -> NDArray[Any]:
        """Predict class probabilities, in the order of `classes`."""
        return self._meaning.probabilities(self.outputs(x))

    def outputs(self, x: Any) -> Tensor:
        """The raw outputs of the network, such as logits."""
        return self._run(x)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, if they have names."""
        return self._meaning.class_names

    @property
    def inputs(self) -> Inputs:
        """The shape, type and scaling of the inputs."""
        return inputs_of(self.about)

    @property
    def schema(self) -> Schema | None:
        """The columns of the table, if the model takes one."""
        return schema_of(self.about)

    @property
    def targets(self) -> Sequence[str]:
        """The names of the predicted numbers, if the file has them."""
        return self.schema.target if self.schema is not None else ()

    def __repr__(self) -> str:
        card = self.about.get("card", {})
        told = f": client {card['client']} of {card['data']}, {card['method']}" if card else ""
        return f"Served({str(self.path)!r}{told})"


def load_model(path: str | Path, model: nn.Module | Model | None = None, task: Task | None = None) -> Served:
    """Load a model that `fedselect export` or `fedselect deploy export` wrote.

    Args:
        path: A safetensors, pt2 or onnx file.
        model: Your network, if a safetensors file needs it; networks of `fs.models` are known.
        task: Your own task, if the run used one.

    Returns:
        The model, ready for `predict`.
    """
    place = Path(path).expanduser()
    if place.suffix.removeprefix(".") not in FORMS:
        raise InputError(f"{place} is not an exported model; pass a file that ends in {', '.join('.' + f for f in FORMS)}.")
    if not place.is_file():
        raise InputError(f"there is no file {place}; create one with: fedselect export RUN --client N.")
    called = f"fs.load_model({str(place)!r}"
    try:
        if place.suffix == ".safetensors":
            said, values = read_values(place)
            run = _network(place, said, values, model, called)
        else:
            said, graph = read_graph(place)
            run = _graph(said, graph, meaning_of(said, task, f"{called}, task=...)").task)
        return Served(place, said, meaning_of(said, task, f"{called}, task=...)"), run)
    except (KeyError, TypeError, AttributeError) as e:
        raise RunError(f"{place} is damaged: its description cannot be read ({e!r}); export it again.") from None


def _network(place: Path, said: About, values: Tree, model: nn.Module | Model | None, called: str) -> Callable[[Any], Tensor]:
    @cache
    def net() -> nn.Module:  # built on demand: the description can be read without the network
        if model is None:
            made = network_of(said, place, f"{called}, model=...)")()
        else:
            made = model.build() if isinstance(model, Model) else copy.deepcopy(model)
        load_values(made, {n: v for n, v in values.items() if n not in BESIDE})
        return made

    inputs, schema = inputs_of(said), schema_of(said)
    return lambda x: outputs(net(), said["output"], inputs, schema, x)


def _graph(said: About, graph: Graph, task: Task) -> Callable[[Any], Tensor]:
    inputs, schema = inputs_of(said), schema_of(said)

    def given(x: Any) -> list[tuple[Tensor, ...]]:
        if schema is not None:
            ready = schema.numbers_of(inputs.checked(x)) if isinstance(x, Tensor | np.ndarray) else schema.numbers(x)
        else:
            ready = inputs.checked(x)
        some = torch.split(ready, BATCH)
        return [(s,) if inputs.layout is None else tuple(inputs.layout.parts(s, torch.float32)) for s in some]

    def run(x: Any) -> Tensor:
        with torch.no_grad():
            found = torch.cat([graph(*parts) for parts in given(x)])
        if task.units is None:
            return found
        scale, shift = (torch.tensor(v, dtype=found.dtype) for v in task.units)
        return (found - shift) / scale  # a graph returns target units, but a task expects the network's scale

    return run
