"""Matrix products of C clients at once that round the same in any company."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

LONG = 96
"""Longer rows or columns of a result are cut into parts where MKL has more threads than clients."""
FOUR = 4
"""MKL rounds a part of a long result like the whole if its number of rows is a multiple of this, as measured."""


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """A batched matrix product whose rows do not depend on how many clients are stacked.

    On a CPU a batch of one is summed in another order than a longer batch, so a single client is run as two. Where in memory a
    client's matrices begin may also decide how MKL sums: each result is padded with rows of zeros until the next one begins at
    a multiple of 64 bytes, and factors of odd sizes are stored as they are multiplied. Long results are padded so that MKL can
    cut them into parts of the same kind.
    """
    if a.device.type != "cpu":
        return torch.bmm(a, b)
    if a.dtype == torch.bfloat16:  # oneDNN may sum in another order for another number of clients
        return torch.stack([x @ y for x, y in zip(a, b, strict=True)])
    rows, columns, line = a.shape[1], b.shape[2], 64 // a.element_size()
    if columns > LONG and columns % line:
        return bmm(a, F.pad(b, (0, -columns % line)))[..., :columns].contiguous()
    if b.stride(2) != 1 and b.shape[1] % line:
        b = b.contiguous()
    whole = max(line // math.gcd(columns, line), FOUR if rows > LONG else 1)
    if rows % whole:
        return bmm(F.pad(a, (0, 0, 0, -rows % whole)), b)[:, :rows].contiguous()
    if len(a) == 1:
        return torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
    return torch.bmm(a, b)
