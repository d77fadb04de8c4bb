"""Dropout of every client by its own key, in one pass: the random numbers are those of `random`, and no mask is stored.

The twin is in `training.drawn`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedselect.kernels.batch import _mix

BLOCK = 1024


@triton.jit
def _dropout(x, keys, out, size, threshold, kept, BLOCK: tl.constexpr):
    """Four entries of a client's `size` share a word of its key, 16 bits each; those below the threshold are dropped."""
    client = tl.program_id(1).to(tl.int64)
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = e < size
    word = _mix(_mix(tl.load(keys + client) + (e // 4 + 1) * -0x61C8864680B583EB))
    drawn = (word >> (e % 4 * 16)).to(tl.int16)
    v = tl.load(x + client * size + e, there, 0.0).to(tl.float32)
    tl.store(out + client * size + e, tl.where(drawn >= threshold, v / kept, 0.0), there)


def dropout(x: Tensor, keys: Tensor, threshold: int, kept: float) -> Tensor:
    """x (C, ...), keys (C,); entries that are kept are divided by `kept`, the share of them."""
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = x[0].numel()
    _dropout[(triton.cdiv(size, BLOCK), len(x))](x, keys.contiguous(), out, size, threshold, kept, BLOCK, num_warps=4)
    return out
