"""Sums uploads over the clients that sent an entry, in float64, in one pass; the twin is in `MaskedSum.add`."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _fold(
    values, sent, weight, total, heavy, clients, size, vc, sc, MASK: tl.constexpr, MORE: tl.constexpr, BLOCK: tl.constexpr
):
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = e < size
    part = tl.zeros((BLOCK,), tl.float64)
    mass = tl.zeros((BLOCK,), tl.float64)
    for c in range(clients):
        w = tl.load(weight + c)
        here = there
        if MASK:
            here = there & (tl.load(sent + e, there, 0) != 0)
        part += tl.where(here, tl.load(values + e, here, 0.0).to(tl.float64) * w, 0.0)
        mass += tl.where(here, w, 0.0)
        values += vc
        sent += sc
    if MORE:
        part += tl.load(total + e, there, 0.0)
        mass += tl.load(heavy + e, there, 0.0)
    tl.store(total + e, part, there)
    tl.store(heavy + e, mass, there)


def fold(values: Tensor, sent: bool | Tensor, weight: Tensor, so_far: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Sums of values and of weights by entry, added to those so far in place: float64, in the shape of one client's values."""
    values = _walked(values)
    marks = values if isinstance(sent, bool) else _walked(sent).view(torch.uint8)
    total, heavy = so_far or (torch.empty(values.shape[1:], dtype=torch.float64, device=values.device) for _ in "th")
    size = total.numel()
    _fold[(triton.cdiv(size, 512),)](
        values, marks, weight, total, heavy, len(values), size, values.stride(0), marks.stride(0),
        not isinstance(sent, bool), so_far is not None, 512,
    )  # fmt: skip
    return total, heavy


def _walked(v: Tensor) -> Tensor:
    """With the entries of each client in order, without gaps."""
    return v if v[0].is_contiguous() else v.contiguous()
