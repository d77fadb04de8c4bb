"""Models: any nn.Module as a function of a Tree, and those that come with the package."""

from collections.abc import Callable

from fedselect.models.inputs import Layout
from fedselect.models.model import Model, Output
from fedselect.models.networks import conv1d, gru, mlp, resnet18, small_cnn
from fedselect.models.weights import load_values

MODELS: dict[str, Callable[..., Model]] = {
    "conv1d": conv1d,
    "gru": gru,
    "mlp": mlp,
    "resnet18": resnet18,
    "small_cnn": small_cnn,
}

__all__ = ["MODELS", "Layout", "Model", "Output", "conv1d", "gru", "load_values", "mlp", "resnet18", "small_cnn"]
