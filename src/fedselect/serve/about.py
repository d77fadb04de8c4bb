"""The description of a model's inputs and outputs as JSON, stored with its parameters so that the file alone can predict."""

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import nn

from fedselect.core.errors import InputError
from fedselect.core.options import build
from fedselect.core.shown import made
from fedselect.data import Schema
from fedselect.models import Layout, Model
from fedselect.models.networks import rebuilt, recipe
from fedselect.serve.predictor import Inputs, Meaning
from fedselect.tasks import TASKS, Task

About = dict[str, Any]


def about(model: Model, inputs: Inputs, meaning: Meaning) -> About:
    return {
        "model": model.name,
        "recipe": recipe(model),
        **({"base": model.base} if model.adapters else {}),
        "shape": inputs.shape,
        "kind": str(inputs.kind).removeprefix("torch."),
        "scale": None if inputs.scale is None else inputs.scale.flatten().tolist(),
        "shift": None if inputs.shift is None else inputs.shift.flatten().tolist(),
        "layout": None if inputs.layout is None else inputs.layout.to_json(),
        "output": model.output,
        "target_shape": meaning.target_shape,
        "class_names": list(meaning.class_names),
        "task": entry(meaning.task, TASKS),
    }


def inputs_of(said: About) -> Inputs:
    scale, shift = (None if v is None else torch.tensor(v).view(-1, 1, 1) for v in (said["scale"], said["shift"]))
    layout = None if said["layout"] is None else Layout.from_json(said["layout"])
    return Inputs(tuple(said["shape"]), getattr(torch, said["kind"]), scale, shift, layout)


def meaning_of(said: About, task: Task | None, hint: str) -> Meaning:
    """The meaning of the outputs. `task`: the user's own task. `hint`: how to pass it, for errors."""
    return Meaning(task or _task(said["task"], hint), tuple(said["target_shape"]), tuple(said["class_names"]))


def schema_of(said: About) -> Schema | None:
    return None if said.get("schema") is None else Schema.from_json(said["schema"])


def network_of(said: About, place: object, hint: str) -> Callable[[], nn.Module]:
    """A function that builds the network, if it is one of ours. `hint`: how to pass another, for errors."""
    if said["recipe"] is None:
        raise InputError(f"{place} has the parameters of {said['model']} but not its code; pass the network: {hint}.")
    return rebuilt(said["recipe"])


def entry(thing: Any, table: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """An object as configurations write it: its name in a table, or its class, and its options."""
    how = made(thing)
    name = next((n for n, f in table.items() if getattr(f, "__name__", "") == how.name), how.name)
    given = {n: v for k, o in how.options.items() for n, v in (made(o).options if is_dataclass(o) else {k: o}).items()}
    return {"name": name, **{n: plain(v) for n, v in given.items()}}


def plain(value: Any) -> Any:
    """The value of an option as JSON."""
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def _task(said: Mapping[str, Any], hint: str) -> Task:
    name = said["name"]
    if name not in TASKS:
        raise InputError(f"the task {name} is not in fs.TASKS; pass it: {hint}.")
    return build("task", name, TASKS, {k: v for k, v in said.items() if k != "name"})
