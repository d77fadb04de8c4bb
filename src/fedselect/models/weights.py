"""Pretrained weights from a file: read without running code from it, and checked name by name."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from fedselect.core import tensors
from fedselect.core.errors import InputError
from fedselect.core.tree import Tree


def read_weights(path: Path, module: nn.Module, head: str) -> Tree:
    """The tensors of a .safetensors or .pth file except those of the head, in the module's types."""
    return fitting(read_tensors(path), module, head, path)


def fitting(
    found: Tree, module: nn.Module, head: str, path: Path | str | None, adapt: Callable[[Tree, nn.Module], Tree] | None = None
) -> Tree:
    """The given tensors except those of the head, in the module's types.

    Batch counters may be missing; any other name or shape that differs is an error. `adapt` first converts tensors to what the
    module takes, such as position embeddings for another image size.
    """
    found = {n: v for n, v in found.items() if n.split(".")[0] != head}
    found = found if adapt is None else adapt(found, module)
    own = {n: v for n, v in module.state_dict().items() if n.split(".")[0] != head}
    missing = [n for n in own if n not in found and not n.endswith("num_batches_tracked")]
    foreign = [n for n in found if n not in own]
    shapes = [
        f"{n} {tuple(found[n].shape)} for {tuple(v.shape)}" for n, v in own.items() if n in found and found[n].shape != v.shape
    ]
    faults = [
        f"{what} {_some(names)}" for what, names in (("lacks", missing), ("has", foreign), ("differs in", shapes)) if names
    ]
    if faults:
        raise InputError(f"{path} does not fit the model: it {'; it '.join(faults)}.")
    if broken := [n for n, v in found.items() if v.is_floating_point() and not bool(torch.isfinite(v).all())]:
        raise InputError(f"{path} has NaN or Inf in {_some(broken)}; use another file.")
    return {n: v.to(own[n].dtype) for n, v in found.items()}


def load_values(path: str | Path) -> Tree:
    """The values of an exported model, after checking the checksum in its safetensors file."""
    return tensors.read(Path(path), "export it again.")


def read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise InputError(f"there is no weights file {path}.")
    try:
        raw = (
            tensors.read(path, "") if path.suffix == ".safetensors" else torch.load(path, map_location="cpu", weights_only=True)
        )
    except Exception:  # on other files the readers may raise almost anything
        raise InputError(
            f"{path} cannot be read as weights: it is damaged, or holds something other than tensors; "
            "give a .safetensors file, or a .pth file with the state_dict of a model."
        ) from None
    if isinstance(raw, dict) and isinstance(raw.get("state_dict"), dict):
        raw = raw["state_dict"]
    if not isinstance(raw, dict) or not all(isinstance(v, Tensor) for v in raw.values()):
        raise InputError(f"{path} contains no table of tensors; give a .safetensors file, or a state_dict as .pth.")
    return raw


def _some(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
