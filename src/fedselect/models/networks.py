"""The small networks of this package, mlp, conv1d, gru and small_cnn, and how its networks are built again.

`outputs`: numbers that a network returns per input; by default one per class.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedselect.core.errors import InputError
from fedselect.models.huggingface import build_hf
from fedselect.models.model import Model
from fedselect.models.resnet import build_resnet18, build_resnet50
from fedselect.models.shapes import Shaped, check_positive, image_shape
from fedselect.models.steps import Steps
from fedselect.models.vit import build_vit


def mlp(data: Shaped, hidden: int = 64, *, outputs: int | None = None) -> Model:
    """One hidden layer with ReLU over the flattened input."""
    inputs = 1
    for side in data.shape:
        inputs *= side
    check_positive(hidden=hidden)
    classes = outputs or data.classes
    return Model(partial(_mlp, inputs, hidden, classes), name="mlp")


def _mlp(inputs: int, hidden: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def conv1d(data: Shaped, width: int = 32, *, outputs: int | None = None) -> Model:
    """Three convolutions with stride 2 over time, for signals (channels, time), their mean, and one layer."""
    if len(data.shape) != 2:
        raise InputError(f"conv1d needs signals of shape (channels, time), not {data.shape}; for images use small_cnn.")
    check_positive(width=width)
    classes = outputs or data.classes
    return Model(partial(_Conv1d, data.shape[0], width, classes), name="conv1d")


def gru(data: Shaped, width: int = 64, tokens: int | None = None, *, outputs: int | None = None) -> Model:
    """A GRU over rows of integers, such as characters; returns scores for every position.

    tokens: number of different inputs; by default the number of classes, as for predicting the next one
    """
    if len(data.shape) != 1:
        raise InputError(f"gru needs rows of integers, inputs of shape (positions,), not {data.shape}.")
    known = tokens or data.classes
    check_positive(width=width, tokens=known)
    return Model(partial(_GRU, known, width, outputs or data.classes), name="gru")


def small_cnn(
    data: Shaped, width: int = 16, norm: Literal["none", "batch", "group"] = "none", *, outputs: int | None = None
) -> Model:
    """Two 3x3 convolutions with pooling and one hidden layer; norm is none, batch or group."""
    channels, _, _ = image_shape(data)
    if min(data.shape[1:]) < 4:
        raise InputError(f"small_cnn halves its input twice and needs images of at least 4x4, not {data.shape[1:]}.")
    if norm not in ("none", "batch", "group"):
        raise InputError(f"norm is none, batch or group, not {norm!r}.")
    check_positive(width=width)
    area = (data.shape[1] // 4) * (data.shape[2] // 4)
    classes = outputs or data.classes
    return Model(partial(_SmallCNN, channels, width, norm, area, classes), name="small_cnn")


def _norm(kind: str, channels: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(math.gcd(4, channels), channels) if kind == "group" else nn.Identity()


class _Conv1d(Steps):
    order = (("layer1", "conv1"), ("layer2", "conv2"), ("features", "conv3"), ("fc",))

    def __init__(self, channels: int, width: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(channels, width, 5, 2, 2)
        self.conv2 = nn.Conv1d(width, 2 * width, 5, 2, 2)
        self.conv3 = nn.Conv1d(2 * width, 2 * width, 3, 2, 1)
        self.fc = nn.Linear(2 * width, classes)

    def layer1(self, x: Tensor) -> Tensor:
        return F.relu(self.conv1(x))

    def layer2(self, x: Tensor) -> Tensor:
        return F.relu(self.conv2(x))

    def features(self, x: Tensor) -> Tensor:
        return F.relu(self.conv3(x)).mean(-1)


class _GRU(Steps):
    """The GRU of torch, as products that run for all clients at once; nn.GRU would run client by client."""

    order = (("embed",), ("states", "gates", "back"), ("fc",))

    def __init__(self, tokens: int, width: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.gates = nn.Linear(width, 3 * width)  # of the input: reset, update, new
        self.back = nn.Linear(width, 3 * width)  # of the previous state
        self.fc = nn.Linear(width, classes)

    def states(self, x: Tensor) -> Tensor:
        gates = self.gates(x)
        state = torch.zeros_like(gates[:, 0, : self.back.in_features])
        states = []
        for step in range(gates.shape[1]):
            reset, update, new = gates[:, step].chunk(3, -1)
            was_reset, was_update, was_new = self.back(state).chunk(3, -1)
            fresh = torch.tanh(new + torch.sigmoid(reset + was_reset) * was_new)
            state = torch.lerp(fresh, state, torch.sigmoid(update + was_update))
            states.append(state)
        return torch.stack(states, 1)


class _SmallCNN(Steps):
    order = (("layer1", "conv1", "norm1"), ("layer2", "conv2", "norm2"), ("features", "hidden"), ("fc",))

    def __init__(self, channels: int, width: int, norm: str, area: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.norm1 = _norm(norm, width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.norm2 = _norm(norm, 2 * width)
        self.hidden = nn.Linear(2 * width * area, 4 * width)
        self.fc = nn.Linear(4 * width, classes)

    def layer1(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)

    def layer2(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)

    def features(self, x: Tensor) -> Tensor:
        return F.relu(self.hidden(x.flatten(1)))


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "mlp": _mlp,
    "conv1d": _Conv1d,
    "gru": _GRU,
    "small_cnn": _SmallCNN,
    "resnet18": build_resnet18,
    "resnet50": build_resnet50,
    "vit": build_vit,
    "hf": build_hf,
}
"""The functions that build the networks, from numbers and texts."""


def recipe(model: Model) -> dict[str, Any] | None:
    """How to build a network of this package again, without its values; None for other networks."""
    build = model.build_from
    name = next((n for n, f in NETWORKS.items() if isinstance(build, partial) and build.func is f), None)
    return None if name is None or not isinstance(build, partial) else {"network": name, "args": list(build.args)}


def rebuilt(recipe: Mapping[str, Any]) -> Callable[[], nn.Module]:
    """A function that builds the network of a recipe."""
    return partial(NETWORKS[recipe["network"]], *recipe["args"])
