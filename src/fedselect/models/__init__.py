"""Models: any nn.Module as a function of a Tree, and those that come with the package."""

from collections.abc import Callable

from fedselect.models.frozen import ADAPTERS, bias_only, head_only, layers_only, lora, norm_only
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

__all__ = [
    "ADAPTERS", "MODELS", "Layout", "Model", "Output", "bias_only", "conv1d", "gru", "head_only", "layers_only", "load_values",
    "lora", "mlp", "norm_only", "resnet18", "small_cnn",
]  # fmt: skip
