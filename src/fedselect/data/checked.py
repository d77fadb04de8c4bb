"""Whether samples fit a federation: the shape, type and values of inputs and targets, client by client."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedselect.core.errors import DataError
from fedselect.data.pooled import Pooled

if TYPE_CHECKING:
    from fedselect.data.federation import Federation


def check_samples(data: "Federation") -> None:
    """Refuse samples that cannot be used, and name the client."""
    if isinstance(data.clients, Pooled) and _fine(data, data.clients):
        return
    for i, client in enumerate(data.clients):
        for part, pair in (("training", client.train), ("test", client.test), ("validation", client.val)):
            if pair is not None:
                _check(data, f"client {client.name or i}", part, *pair)


def _fine(data: "Federation", clients: Pooled) -> bool:
    """Whether all of an array can be used; if not, the check of each client says whose data cannot."""
    try:
        for x, y in clients.blocks():
            _check(data, "x", "pooled", x, y)
    except DataError:
        return False
    return True


def _check(data: "Federation", who: str, part: str, x: Tensor, y: Tensor) -> None:
    if len(x) == 0:
        raise DataError(f"{who} has no {part} data; leave it out or give it some.")
    home = data.clients[0].train[0].device
    if x.device != home or y.device != home:
        raise DataError(f"{who} has {part} data on {x.device} and {y.device}; put all of it on {home}, as the first client's.")
    if tuple(x.shape[1:]) != data.shape:
        raise DataError(f"{who} has {part} inputs of shape {tuple(x.shape[1:])}; the first client has {data.shape}.")
    kind, first = kind_of(x), kind_of(data.clients[0].train[0])
    if kind is None:
        raise DataError(
            f"{who} has {part} inputs of type {x.dtype}; give floats, images as uint8 (N, channels, H, W), or int64 "
            "for an embedding."
        )
    if kind == "images" and x.shape[1] == x.shape[2] > x.shape[3] and x.shape[3] in (1, 3):
        raise DataError(
            f"{who} has {part} images of shape {tuple(x.shape[1:])}; channels come first: x.transpose(0, 3, 1, 2) of an "
            "array, x.permute(0, 3, 1, 2) of a tensor."
        )
    _check_targets(data, who, part, y)
    if kind != first:
        raise DataError(
            f"{who} has {part} inputs of type {x.dtype}; the first client trains on {data.clients[0].train[0].dtype}."
        )
    if x.is_floating_point() and not bool(torch.isfinite(x).all()):
        row = int((~torch.isfinite(x.flatten(1)).all(1)).nonzero()[0])
        raise DataError(f"{who} has NaN or Inf in its {part} inputs, first in sample {row}; correct or remove it.")


def _check_targets(data: "Federation", who: str, part: str, y: Tensor) -> None:
    if data.classes and not are_labels(y):
        raise DataError(
            f"{who} has {part} labels of type {y.dtype} and shape {tuple(y.shape)}; give a vector of whole numbers, or a "
            "row of them for each sample."
        )
    like = data.clients[0].train[1]
    if tuple(y.shape[1:]) != data.target_shape or y.is_floating_point() != like.is_floating_point():
        raise DataError(
            f"{who} has {part} targets of type {y.dtype} and shape {tuple(y.shape[1:])}; the first client trains on "
            f"{like.dtype} and {data.target_shape}."
        )
    if y.is_floating_point() and not bool(torch.isfinite(y).all()):
        row = int((~torch.isfinite(y.view(len(y), -1)).all(1)).nonzero()[0])
        raise DataError(f"{who} has NaN or Inf in its {part} targets, first in sample {row}; correct or remove it.")
    if not data.classes:
        return
    low = 0 if data.target_shape else int(y.min())  # in a row, labels below 0 are none
    if low < 0 or int(y.max()) >= data.classes:
        bad = low if low < 0 else int(y.max())
        mend = "; number the classes from 0" if low < 0 else ", or give classes=... if there are more"
        raise DataError(f"{who} has the {part} label {bad}; labels must lie in 0 to {data.classes - 1}{mend}.")


def are_labels(y: Tensor) -> bool:
    """Whether targets are whole numbers, one per sample or a row of them."""
    return not y.is_floating_point() and (y.ndim == 1 or (y.ndim == 2 and y.shape[1] > 1))


def kind_of(x: Tensor) -> str | None:
    """The kind of inputs: numbers in the model's type, images, or integers."""
    if x.is_floating_point():
        return "floats"
    if x.dtype == torch.uint8 and x.ndim == 4:
        return "images"
    return "integers" if x.dtype in (torch.int16, torch.int32, torch.int64) else None
