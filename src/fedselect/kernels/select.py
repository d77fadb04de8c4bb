"""The largest entries of each row: their threshold by radix, four passes each a histogram of eight more bits; then ties."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _histogram(values, prefix, counts, size, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Of the entries that begin with the row's prefix, how many have each next digit; digits rise with the value."""
    row = tl.program_id(1).to(tl.int64)
    found = tl.zeros((256,), tl.int32)
    for at in range(8):
        e = (tl.program_id(0) * 8 + at) * BLOCK + tl.arange(0, BLOCK)
        bits = tl.load(values + row * size + e, e < size, 0)
        bits = (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)  # in order as whole numbers
        here = e < size
        if SHIFT < 24:
            here = here & ((bits >> (SHIFT + 8)) == tl.load(prefix + row).to(tl.uint32))
        found += tl.histogram(((bits >> SHIFT) & 255).to(tl.int32), 256, mask=here)
    digit = tl.arange(0, 256)
    tl.atomic_add(counts + row * 256 + digit, found, found > 0)


def largest(values: Tensor, k: Tensor) -> Tensor:
    """The k[i]-th largest, from 1 on, of each row of float32 values (C, N) in order: (C,)."""
    rows, size = values.shape
    bits = values.view(torch.int32)
    left = k.clone()
    prefix = torch.zeros(rows, dtype=torch.int64, device=values.device)
    block = 4096
    for shift in (24, 16, 8, 0):
        counts = torch.zeros(rows, 256, dtype=torch.int32, device=values.device)
        _histogram[(triton.cdiv(size, 8 * block), rows)](bits, prefix, counts, size, shift, block, num_warps=8)
        above = counts.flip(1).cumsum(1)  # as large or larger, from the largest digit down
        place = (above < left.unsqueeze(1)).sum(1)
        before = torch.cat([torch.zeros_like(above[:, :1]), above], 1).gather(1, place.unsqueeze(1)).squeeze(1)
        left = left - before
        prefix = prefix * 256 + (255 - place)
    whole = torch.where(prefix >= 2**31, prefix - 2**32, prefix).to(torch.int32)
    return torch.where(whole < 0, whole ^ -(2**31), ~whole).view(torch.float32)


@triton.jit
def _ties(values, cut, count, size, blocks, BLOCK: tl.constexpr):
    """How many entries of each block are above the row's cut, and how many equal it: count (C, 2, blocks)."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    e = block * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(values + row * size + e, e < size, float("nan"))
    level = tl.load(cut + row)
    tl.store(count + (row * 2) * blocks + block, tl.sum((v > level).to(tl.int32)))
    tl.store(count + (row * 2 + 1) * blocks + block, tl.sum((v == level).to(tl.int32)))


@triton.jit
def _mark(values, cut, before, short, out, size, blocks, BLOCK: tl.constexpr):
    """Entries above the cut, and of those equal to it the first `short`; before: equal ones in earlier blocks."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    e = block * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(values + row * size + e, e < size, float("nan"))
    level = tl.load(cut + row)
    same = (v == level).to(tl.int32)
    place = tl.load(before + row * blocks + block) + tl.cumsum(same, 0)
    chosen = (v > level) | ((same != 0) & (place <= tl.load(short + row)))
    tl.store(out + row * size + e, chosen.to(tl.uint8), e < size)


def top(values: Tensor, count: Tensor) -> Tensor:
    """The count[i] largest entries of each row as a mask; of equal ones the earlier wins."""
    values = values.contiguous()
    rows, size = values.shape
    cut, block = largest(values, count.clamp(1, size)), 4096
    blocks = triton.cdiv(size, block)
    found = torch.empty(rows, 2, blocks, dtype=torch.int32, device=values.device)
    out = torch.empty(rows, size, dtype=torch.bool, device=values.device)
    grid = (blocks, rows)
    _ties[grid](values, cut, found, size, blocks, block, num_warps=8)
    before = found[:, 1].cumsum(1) - found[:, 1]
    short = torch.where(count > 0, count - found[:, 0].sum(1), -size)
    _mark[grid](values, cut, before, short, out.view(torch.uint8), size, blocks, block, num_warps=8)
    return out & (count > 0).unsqueeze(1)
