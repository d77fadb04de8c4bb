"""Models: any nn.Module as a function of a Tree, and the networks of this package."""

from collections.abc import Callable, Mapping
from typing import Any

from fedselect.models.frozen import ADAPTERS, bias_only, head_only, layers_only, lora, norm_only
from fedselect.models.huggingface import hf
from fedselect.models.inputs import Layout
from fedselect.models.model import Model, Output
from fedselect.models.networks import conv1d, gru, mlp, small_cnn
from fedselect.models.resnet import resnet18, resnet50
from fedselect.models.vit import vit_small, vit_tiny
from fedselect.models.weights import load_values

MODELS: dict[str, Callable[..., Model]] = {
    "conv1d": conv1d,
    "gru": gru,
    "hf": hf,
    "mlp": mlp,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "small_cnn": small_cnn,
    "vit_small": vit_small,
    "vit_tiny": vit_tiny,
}

__all__ = [
    "ADAPTERS", "MODELS", "Layout", "Model", "Output", "bias_only", "conv1d", "gru", "head_only", "hf", "layers_only",
    "load_values", "lora", "mlp", "norm_only", "resnet18", "resnet50", "small_cnn", "vit_small", "vit_tiny", "with_weights",
]  # fmt: skip


def with_weights(model: Mapping[str, Any]) -> dict[str, Any]:
    """Expand hf:FOLDER to {"name": "hf", "weights": FOLDER}, and NETWORK:FILE likewise."""
    name, colon, path = str(model.get("name", "")).partition(":")
    return {**model, "name": name, "weights": path} if colon else dict(model)
