"""Rows with different numbers of marked entries: these are moved to the front, and fronts placed end to end in one buffer."""

import torch
from torch import Tensor

from fedselect import kernels
from fedselect.aggregate.codec import pack_bits, unpack_bits


def found(marks: Tensor) -> Tensor:
    """How many entries are marked in each row (C, n), block by block: (C, blocks)."""
    if kernels.serve(marks):
        from fedselect.kernels import pack

        return pack.count(marks)
    return marks.sum(1, keepdim=True)


def tighten(values: Tensor, marks: Tensor, found: Tensor) -> Tensor:
    """Move the marked entries of each row (C, n) to its front, in order; the rest of the row is undefined."""
    if kernels.serve(marks):
        from fedselect.kernels import pack

        return pack.tighten(values, marks, found)
    out = torch.empty_like(values)
    for v, m, o in zip(values, marks, out, strict=True):
        front = v[m]
        o[: len(front)] = front
    return out


def spread(values: Tensor, marks: Tensor, found: Tensor) -> Tensor:
    """The inverse; entries that are not marked are zero."""
    if kernels.serve(marks):
        from fedselect.kernels import pack

        return pack.spread(values, marks, found)
    out = torch.zeros_like(values)
    for v, m, o, k in zip(values, marks, out, found.sum(1).tolist(), strict=True):
        o[m] = v[:k]
    return out


def lay(values: Tensor, count: Tensor, out: Tensor, start: Tensor) -> None:
    """Copy the first count[i] entries of each row to start[i] in a buffer of bytes: booleans as bits, others as they are."""
    if values.dtype == torch.bool and kernels.serve(values):
        from fedselect.kernels import pack

        return pack.bits(values, _to(count, out), out, _to(start, out))
    for v, k, at in zip(values, count.tolist(), start.tolist(), strict=True):
        front = pack_bits(v[:k]) if v.dtype == torch.bool else v[:k].view(torch.uint8)
        out[at : at + len(front)] = front
    return None


def lift(packed: Tensor, count: Tensor, start: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """The inverse: rows of `size` entries, undefined after the first count[i]."""
    out = torch.empty(len(count), size, dtype=dtype, device=packed.device)
    if dtype == torch.bool and kernels.serve(packed):
        from fedselect.kernels import pack

        pack.unbits(out, _to(count, packed), packed, _to(start, packed))
        return out
    for o, k, at in zip(out, count.tolist(), start.tolist(), strict=True):
        if dtype == torch.bool:
            o[:k] = unpack_bits(packed[at : at + (k + 7) // 8], k)
        else:
            o[:k] = packed[at : at + k * dtype.itemsize].view(dtype)
    return out


def _to(numbers: Tensor, like: Tensor) -> Tensor:
    return numbers.contiguous().to(like.device, non_blocking=True)
