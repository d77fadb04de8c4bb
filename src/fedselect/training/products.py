"""Matrix products of C clients at once that round the same in any company."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """A batched matrix product whose rows do not depend on how many clients are stacked.

    On a CPU a batch of one is summed in another order than a longer batch, so a single client is run as two. Where in memory a
    client's matrices begin may also decide how MKL sums: each result is padded with rows of zeros until the next one begins at
    a multiple of 64 bytes, and factors of odd sizes are stored as they are multiplied.
    """
    if a.device.type != "cpu":
        return torch.bmm(a, b)
    rows, line = a.shape[1], 64 // a.element_size()
    if b.stride(2) != 1 and b.shape[1] % line:
        b = b.contiguous()
    if more := -rows % (line // math.gcd(b.shape[2], line)):
        return bmm(F.pad(a, (0, 0, 0, more)), b)[:, :rows].contiguous()
    if len(a) == 1:
        return torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
    return torch.bmm(a, b)
