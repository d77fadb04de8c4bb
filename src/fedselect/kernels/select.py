"""Finds the largest entries of each row: their threshold by radix, each pass counting a few more bits; then ties.

Entries already taken count as minus infinity; with a base, an entry counts by its distance from there. `tl.histogram` costs
about as much as it has bins, so a pass takes six bits; after three of them so few entries are left that the last pass adds up
the other fourteen bits in memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, DEEP = 4096, 8
"""Entries per block, and blocks per program."""
DIGITS = ((26, 6), (20, 6), (14, 6), (0, 14))
"""From the top: how far to shift a number, and how many bits to look at."""


@triton.jit
def _value(values, taken, base, row, e, size, step, held, from_, TAKEN: tl.constexpr, BASE: tl.constexpr):
    """Entries of a row; beyond its end NaN, which is neither above nor equal to anything."""
    v = tl.load(values + row * step + e, e < size, float("nan"))
    if BASE:
        v = tl.abs(v - tl.load(base + row * from_ + e, e < size, 0.0))
    if TAKEN:
        v = tl.where(tl.load(taken + row * held + e, e < size, 0) != 0, float("-inf"), v)
    return v


@triton.jit
def _count(
    values, taken, base, wanted, prefix, counts, size, step, held, from_,
    SHIFT: tl.constexpr, BITS: tl.constexpr, TAKEN: tl.constexpr, BASE: tl.constexpr, BLOCK: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """How many of the entries that begin with the row's prefix have each next digit; digits rise with the value."""
    row = tl.program_id(1).to(tl.int64)
    counts += row * (1 << BITS)
    found = tl.zeros((1 << BITS if SHIFT else 1,), tl.int32)
    lowest, highest = 0, 0
    if tl.load(wanted + row) > 0:
        for at in range(DEEP):
            e = (tl.program_id(0) * DEEP + at) * BLOCK + tl.arange(0, BLOCK)
            bits = _value(values, taken, base, row, e, size, step, held, from_, TAKEN, BASE).to(tl.int32, bitcast=True)
            bits = (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)  # in order as whole numbers
            here = e < size
            if SHIFT + BITS < 32:
                here = here & ((bits >> (SHIFT + BITS)) == tl.load(prefix + row).to(tl.uint32))
            digit = ((bits >> SHIFT) & ((1 << BITS) - 1)).to(tl.int32)
            if SHIFT:
                found += tl.histogram(digit, 1 << BITS, mask=here)
            else:  # zeros and taken entries are very common, and fall into these two bins
                lowest += tl.sum((here & (digit == 0)).to(tl.int32))
                highest += tl.sum((here & (digit == (1 << BITS) - 1)).to(tl.int32))
                tl.atomic_add(counts + digit, 1, here & (digit > 0) & (digit < (1 << BITS) - 1))
        if SHIFT:
            tl.atomic_add(counts + tl.arange(0, 1 << BITS), found, found > 0)
        else:
            tl.atomic_add(counts, lowest, lowest > 0)
            tl.atomic_add(counts + (1 << BITS) - 1, highest, highest > 0)


def largest(values: Tensor, k: Tensor, taken: Tensor | None = None, base: Tensor | None = None) -> Tensor:
    """The k[i]-th largest (from 1) of the entries not taken in each row of float32 values (C, N): (C,). A row with k[i] = 0 is
    not read, and its result is undefined."""
    rows, size = values.shape
    marks, start = values if taken is None else taken.view(torch.uint8), values if base is None else base
    left = k.clone()
    prefix = torch.zeros(rows, dtype=torch.int64, device=values.device)
    for shift, bits in DIGITS:
        counts = torch.zeros(rows, 1 << bits, dtype=torch.int32, device=values.device)
        _count[(triton.cdiv(size, DEEP * BLOCK), rows)](
            values, marks, start, k, prefix, counts, size, values.stride(0), marks.stride(0), start.stride(0),
            shift, bits, taken is not None, base is not None, BLOCK, DEEP, num_warps=8,
        )  # fmt: skip
        above = counts.flip(1).cumsum(1)  # as large or larger, from the largest digit down
        place = (above < left.unsqueeze(1)).sum(1)
        before = torch.cat([torch.zeros_like(above[:, :1]), above], 1).gather(1, place.unsqueeze(1)).squeeze(1)
        left = left - before
        prefix = (prefix << bits) + ((1 << bits) - 1 - place)
    whole = torch.where(prefix >= 2**31, prefix - 2**32, prefix).to(torch.int32)
    return torch.where(whole < 0, whole ^ -(2**31), ~whole).view(torch.float32)


@triton.jit
def _ties(
    values, taken, base, wanted, cut, count, size, blocks, step, held, from_,
    TAKEN: tl.constexpr, BASE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many entries of each block are above the row's cut, and how many equal it: count (C, 2, blocks)."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    e = block * BLOCK + tl.arange(0, BLOCK)
    end = tl.where(tl.load(wanted + row) > 0, size, 0)
    v = _value(values, taken, base, row, e, end, step, held, from_, TAKEN, BASE)
    level = tl.load(cut + row)
    tl.store(count + (row * 2) * blocks + block, tl.sum((v > level).to(tl.int32)))
    tl.store(count + (row * 2 + 1) * blocks + block, tl.sum((v == level).to(tl.int32)))


@triton.jit
def _mark(
    values, taken, base, wanted, cut, before, short, out, size, blocks, step, held, from_,
    TAKEN: tl.constexpr, BASE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mark entries above the cut, and the first `short` of those equal to it; before: equal ones in earlier blocks."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    e = block * BLOCK + tl.arange(0, BLOCK)
    end = tl.where(tl.load(wanted + row) > 0, size, 0)
    v = _value(values, taken, base, row, e, end, step, held, from_, TAKEN, BASE)
    level = tl.load(cut + row)
    same = (v == level).to(tl.int32)
    place = tl.load(before + row * blocks + block) + tl.cumsum(same, 0)
    chosen = (v > level) | ((same != 0) & (place <= tl.load(short + row)))
    if TAKEN:
        chosen = chosen | (tl.load(taken + row * held + e, e < size, 0) != 0)
    tl.store(out + row * size + e, chosen.to(tl.uint8), e < size)


def top(values: Tensor, count: Tensor, taken: Tensor | None = None, base: Tensor | None = None) -> Tensor:
    """The count[i] largest entries of each row as a mask, in addition to those taken; of equal ones the earlier wins."""
    values = values if values.stride(1) == 1 else values.contiguous()
    taken, base = (v if v is None or v.stride(1) == 1 else v.contiguous() for v in (taken, base))
    marks, start = values if taken is None else taken.view(torch.uint8), values if base is None else base
    rows, size = values.shape
    count = count.clamp(0, size)
    cut = largest(values, count, taken, base)
    blocks = triton.cdiv(size, BLOCK)
    found = torch.empty(rows, 2, blocks, dtype=torch.int32, device=values.device)
    out = torch.empty(rows, size, dtype=torch.bool, device=values.device)
    how = (size, blocks, values.stride(0), marks.stride(0), start.stride(0), taken is not None, base is not None, BLOCK)
    _ties[(blocks, rows)](values, marks, start, count, cut, found, *how, num_warps=8)
    before = found[:, 1].cumsum(1) - found[:, 1]
    short = count - found[:, 0].sum(1)
    _mark[(blocks, rows)](values, marks, start, count, cut, before, short, out.view(torch.uint8), *how, num_warps=8)
    return out
