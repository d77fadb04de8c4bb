"""Moves marked entries of each row to its front and back, and booleans to bits; the twins are in `simulate.ragged`.

A copy treats all dtypes alike, so entries are moved as whole numbers of their width.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _count(marks, found, size, step, BLOCK: tl.constexpr):
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    e = block * BLOCK + tl.arange(0, BLOCK)
    m = tl.load(marks + row * step + e, e < size, 0) != 0
    tl.store(found + row * tl.num_programs(0) + block, tl.sum(m.to(tl.int32)))


@triton.jit
def _count_between(marks, edges, found, step, BLOCK: tl.constexpr):
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    e = tl.load(edges + block) + tl.arange(0, BLOCK)
    m = tl.load(marks + row * step + e, e < tl.load(edges + block + 1), 0) != 0
    tl.store(found + row * tl.num_programs(0) + block, tl.sum(m.to(tl.int32)))


@triton.jit
def _move(loose, marks, before, tight, size, TIGHTEN: tl.constexpr, BLOCK: tl.constexpr):
    """before: marked entries in the row's earlier blocks."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    e = block * BLOCK + tl.arange(0, BLOCK)
    m = tl.load(marks + row * size + e, e < size, 0) != 0
    place = tl.load(before + row * tl.num_programs(0) + block) + tl.cumsum(m.to(tl.int32), 0) - 1
    here, there = loose + row * size + e, tight + row * size + place
    if TIGHTEN:
        tl.store(there, tl.load(here, m), m)
    else:
        tl.store(here, tl.load(there, m, 0), e < size)


@triton.jit
def _bits(marks, count, packed, start, size, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    byte, bit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, 8)
    e = byte[:, None] * 8 + bit[None, :]
    n = tl.load(count + row)
    m = tl.load(marks + row * size + e, e < n, 0) != 0
    tl.store(packed + tl.load(start + row) + byte, tl.sum(m.to(tl.int32) << bit[None, :], 1).to(tl.uint8), byte * 8 < n)


@triton.jit
def _unbits(marks, count, packed, start, size, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = e < tl.load(count + row)
    byte = tl.load(packed + tl.load(start + row) + e // 8, there, 0).to(tl.int32)
    tl.store(marks + row * size + e, ((byte >> (e % 8)) & 1).to(tl.uint8), there)


def count(marks: Tensor) -> Tensor:
    """How many entries are marked in each block of each row (C, n): (C, blocks)."""
    marks = marks if marks.stride(1) == 1 else marks.contiguous()
    found = torch.empty(len(marks), triton.cdiv(marks.shape[1], BLOCK), dtype=torch.int32, device=marks.device)
    _count[found.T.shape](marks.view(torch.uint8), found, marks.shape[1], marks.stride(0), BLOCK, num_warps=8)
    return found


def count_parts(marks: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """How many entries are marked in each of the consecutive parts of each row (C, n): (C, parts) int64."""
    edges, last = _edges(sizes, marks.device)
    found = torch.empty(len(marks), len(edges) - 1, dtype=torch.int32, device=marks.device)
    _count_between[found.T.shape](marks.view(torch.uint8), edges, found, marks.stride(0), BLOCK, num_warps=8)
    so_far = found.cumsum(1)[:, last]
    return torch.diff(so_far, dim=1, prepend=torch.zeros_like(so_far[:, :1]))


@cache
def _edges(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The starts of blocks that do not cross from one part into the next, and each part's last block."""
    edges, last, at = [0], [], 0
    for size in sizes:
        edges += [*range(at + BLOCK, at + size, BLOCK), at + size]
        last.append(len(edges) - 2)
        at += size
    return torch.tensor(edges, device=device), torch.tensor(last, device=device)


def tighten(values: Tensor, marks: Tensor, found: Tensor) -> Tensor:
    """Move the marked entries of each row (C, n) to its front, in order; the rest of the row is undefined."""
    out = torch.empty_like(values)
    _moved(values, marks, found, out, True)
    return out


def spread(values: Tensor, marks: Tensor, found: Tensor) -> Tensor:
    """The inverse; entries that are not marked are zero."""
    out = torch.empty_like(values)
    _moved(out, marks, found, values, False)
    return out


def _moved(loose: Tensor, marks: Tensor, found: Tensor, tight: Tensor, tighten: bool) -> None:
    width, size = WIDTHS[loose.element_size()], loose.shape[1]
    _move[found.T.shape](
        loose.view(width),
        marks.view(torch.uint8),
        found.cumsum(1) - found,
        tight.view(width),
        size,
        tighten,
        BLOCK,
        num_warps=8,
    )


def bits(marks: Tensor, count: Tensor, packed: Tensor, start: Tensor) -> None:
    """Write the first count[i] booleans of each row (C, n) to the byte buffer, eight per byte, first one in the lowest bit."""
    grid = (triton.cdiv(marks.shape[1], 8 * 512), len(marks))
    _bits[grid](marks.view(torch.uint8), count, packed, start, marks.shape[1], 512, num_warps=4)


def unbits(marks: Tensor, count: Tensor, packed: Tensor, start: Tensor) -> None:
    """The inverse; what follows a row's first count[i] booleans is unchanged."""
    grid = (triton.cdiv(marks.shape[1], BLOCK), len(marks))
    _unbits[grid](marks.view(torch.uint8), count, packed, start, marks.shape[1], BLOCK, num_warps=8)
