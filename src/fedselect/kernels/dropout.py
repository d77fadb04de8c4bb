"""Dropout of every client by its own key, in one pass: the random numbers are those of `random`, and no mask is kept.

The twin is in `training.drawn`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedselect.kernels.batch import _mix

BLOCK = 1024


@triton.jit
def _dropout(x, keys, out, size, p, BLOCK: tl.constexpr):
    """Entry e of a client's `size` is dropped if the e-th number that its key gives is below p."""
    client = tl.program_id(1).to(tl.int64)
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = e < size
    drawn = _mix(_mix(tl.load(keys + client) + (e + 1) * -0x61C8864680B583EB))
    uniform = ((drawn >> 40) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08  # 2 ** -24
    v = tl.load(x + client * size + e, there, 0.0).to(tl.float32)
    tl.store(out + client * size + e, tl.where(uniform >= p, v / (1.0 - p), 0.0), there)


def dropout(x: Tensor, keys: Tensor, p: float) -> Tensor:
    """x (C, ...), keys (C,)."""
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = x[0].numel()
    _dropout[(triton.cdiv(size, BLOCK), len(x))](x, keys.contiguous(), out, size, p, BLOCK, num_warps=4)
    return out
