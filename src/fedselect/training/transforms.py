"""Augmentation of stacked batches on the device, keyed so that it depends only on the client and the image."""

import torch
from torch import Tensor

from fedselect.core import random
from fedselect.core.errors import InputError

AUGMENTS = ("none", "crop-flip")


def check_augment(name: str) -> str:
    if name not in AUGMENTS:
        raise InputError(f"augment must be {' or '.join(AUGMENTS)}, not {name!r}.")
    return name


def crop_flip(x: Tensor, keys: Tensor, index: Tensor) -> Tensor:
    """Shift each image by up to an eighth of its side, filling with black, and mirror every other one.

    x (C, b, channels, H, W), keys (C,) of the clients' local epoch, index (C, b) the images' numbers within their client.
    """
    clients, batch, _, height, width = x.shape
    drawn = random.bits(random.fold(keys.unsqueeze(1), index), 3) & 0x7FFFFFFFFFFFFFFF  # (C, b, 3)
    down, right = (drawn[..., i] % (2 * (side // 8) + 1) - side // 8 for i, side in ((0, height), (1, width)))
    rows = torch.arange(height, device=x.device) + down.unsqueeze(-1)
    columns = torch.arange(width, device=x.device) + right.unsqueeze(-1)
    mirrored = (drawn[..., 2] % 2).bool().unsqueeze(-1)
    columns = torch.where(mirrored, columns.flip(-1), columns)
    inside = ((rows >= 0) & (rows < height)).unsqueeze(-1) & ((columns >= 0) & (columns < width)).unsqueeze(-2)
    c = torch.arange(clients, device=x.device).view(-1, 1, 1, 1)
    b = torch.arange(batch, device=x.device).view(1, -1, 1, 1)
    moved = x.permute(0, 1, 3, 4, 2)[c, b, rows.clamp(0, height - 1).unsqueeze(-1), columns.clamp(0, width - 1).unsqueeze(-2)]
    return (moved * inside.unsqueeze(-1)).permute(0, 1, 4, 2, 3)
