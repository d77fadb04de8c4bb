"""Masked SGD with momentum in one pass over values, momentum, gradient and mask; of a kernel, over its live taps only."""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, TOGETHER = 1024, 16
Moved = tuple[Tensor, Tensor, Tensor, bool | Tensor]
"""Values, momentum, gradient and mask, each (C, ...)."""


@triton.jit
def _update(
    p, v, g, m, lr, scale, client, e, at, there, pc, vc, mc, gc, momentum, decay,
    MASK: tl.constexpr, MOMENTUM: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    rate = tl.load(lr + client)
    d = tl.load(g + client * gc + e, there, 0.0)
    if CLIP:
        d *= tl.load(scale + client)
    value = tl.load(p + client * pc + at, there, 0.0)
    d += decay * value
    if MOMENTUM:
        d += momentum * tl.load(v + client * vc + at, there, 0.0)
    if MASK:
        there = there & (tl.load(m + client * mc + at, there, 0) != 0)
    if MOMENTUM:
        tl.store(v + client * vc + at, d, there)
    tl.store(p + client * pc + at, value - rate * d, there)


@triton.jit
def _one(
    p, v, g, m, lr, scale, size, pc, vc, mc, momentum, decay,
    SPAN: tl.constexpr, ROW: tl.constexpr, INNER: tl.constexpr, STEP: tl.constexpr,
    MASK: tl.constexpr, MOMENTUM: tl.constexpr, CLIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Entry e of a client's `size` lies in row e // SPAN; a row holds its entries in runs of INNER, STEP apart."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = e if SPAN == ROW else e // SPAN * ROW + e % SPAN // INNER * STEP + e % INNER
    _update(p, v, g, m, lr, scale, tl.program_id(1).to(tl.int64), e, at, e < size, pc, vc, mc, size, momentum, decay,
            MASK, MOMENTUM, CLIP)  # fmt: skip


@triton.jit
def _several(
    ps, vs, gs, ms, sizes, pcs, vcs, mcs, lr, scale, momentum, decay,
    MASK: tl.constexpr, MOMENTUM: tl.constexpr, CLIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same for small tensors, a program each and client."""
    e = tl.arange(0, BLOCK)
    for i in tl.static_range(len(ps)):
        if tl.program_id(0) == i:
            _update(ps[i], vs[i], gs[i], ms[i], lr, scale, tl.program_id(1).to(tl.int64), e, e, e < sizes[i],
                    pcs[i], vcs[i], mcs[i], sizes[i], momentum, decay, MASK, MOMENTUM, CLIP)  # fmt: skip


def fits(p: Tensor, v: Tensor, m: bool | Tensor) -> bool:
    """Whether values, momentum and mask lie in memory as `sgd` walks them."""
    alike = p.stride() == v.stride() and (isinstance(m, bool) or m.stride() == p.stride())
    return alike and p.dtype == torch.float32 and (p[0].is_contiguous() or (p.ndim == 5 and p.stride(2) == 1))


def sgd(moved: Iterable[Moved], lr: Tensor, scale: Tensor | None, momentum: float, decay: float) -> None:
    """All in place. p, v and a mask are (C, ...) in order, or kernels (C, O, I, kh, kw), cropped or not, channels last."""
    few: list[Moved] = []
    for p, v, g, m in moved:
        size = p[0].numel()
        if size <= BLOCK and p[0].is_contiguous():
            few.append((p, v, g.contiguous(), m))
            continue
        span = inner = row = step = 1
        if not p[0].is_contiguous():
            p, v, g = (t.permute(0, 1, 3, 4, 2) for t in (p, v, g))
            m = m if isinstance(m, bool) else m.permute(0, 1, 3, 4, 2)
            span, inner, row, step = p[0, 0].numel(), p[0, 0, 0].numel(), p.stride(1), p.stride(2)
        mask = p if isinstance(m, bool) else m.view(torch.uint8)
        _one[(triton.cdiv(size, BLOCK), len(p))](
            p, v, g.contiguous(), mask, lr, p if scale is None else scale, size, p.stride(0), v.stride(0), mask.stride(0),
            momentum, decay, span, row, inner, step, not isinstance(m, bool), momentum != 0, scale is not None, BLOCK,
            num_warps=4,
        )  # fmt: skip
    for masked in (False, True):
        alike = [t for t in few if isinstance(t[3], Tensor) == masked]
        for i in range(0, len(alike), TOGETHER):
            ps, vs, gs, ms = zip(*alike[i : i + TOGETHER], strict=True)
            marks = tuple(m.view(torch.uint8) for m in ms) if masked else ps
            sizes, strides = [p[0].numel() for p in ps], [[t.stride(0) for t in ts] for ts in (ps, vs, marks)]
            _several[(len(ps), len(ps[0]))](
                ps, vs, gs, marks, tuple(sizes), *map(tuple, strides), lr, lr if scale is None else scale, momentum, decay,
                masked, momentum != 0, scale is not None, BLOCK, num_warps=4,
            )  # fmt: skip
