"""Masked SGD with momentum in one pass over values, momentum, gradient, mask and anchor; for a kernel, over its live taps."""

import itertools
from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, TOGETHER = 1024, 16
Moved = tuple[Tensor, Tensor, Tensor, bool | Tensor, Tensor | None]
"""Values, momentum, gradient, mask and anchor, each (C, ...)."""


@triton.jit
def _update(
    p, v, g, m, a, lr, scale, mu, client, e, at, there, pc, vc, mc, ac, gc, momentum, decay,
    MASK: tl.constexpr, MOMENTUM: tl.constexpr, CLIP: tl.constexpr, PULL: tl.constexpr,
):  # fmt: skip
    rate = tl.load(lr + client)
    d = tl.load(g + client * gc + e, there, 0.0)
    value = tl.load(p + client * pc + at, there, 0.0)
    if PULL:
        d += tl.load(mu + client) * (value - tl.load(a + client * ac + at, there, 0.0))
    if CLIP:
        d *= tl.load(scale + client)
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
    p, v, g, m, a, lr, scale, mu, size, pc, vc, mc, ac, momentum, decay,
    SPAN: tl.constexpr, ROW: tl.constexpr, INNER: tl.constexpr, STEP: tl.constexpr,
    MASK: tl.constexpr, MOMENTUM: tl.constexpr, CLIP: tl.constexpr, PULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Entry e of a client's `size` is in row e // SPAN; a row holds its entries in runs of INNER, STEP apart."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = e if SPAN == ROW else e // SPAN * ROW + e % SPAN // INNER * STEP + e % INNER
    _update(p, v, g, m, a, lr, scale, mu, tl.program_id(1).to(tl.int64), e, at, e < size, pc, vc, mc, ac, size, momentum, decay,
            MASK, MOMENTUM, CLIP, PULL)  # fmt: skip


@triton.jit
def _several(
    ps, vs, gs, ms, anchors, sizes, pcs, vcs, mcs, acs, lr, scale, mu, momentum, decay,
    MASK: tl.constexpr, MOMENTUM: tl.constexpr, CLIP: tl.constexpr, PULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same for small tensors, one program per tensor and client."""
    e = tl.arange(0, BLOCK)
    for i in tl.static_range(len(ps)):
        if tl.program_id(0) == i:
            _update(ps[i], vs[i], gs[i], ms[i], anchors[i], lr, scale, mu, tl.program_id(1).to(tl.int64), e, e, e < sizes[i],
                    pcs[i], vcs[i], mcs[i], acs[i], sizes[i], momentum, decay, MASK, MOMENTUM, CLIP, PULL)  # fmt: skip


def fits(moved: Moved) -> bool:
    """Whether values, momentum, mask and anchor have the memory layout that `sgd` traverses."""
    p, v, _, m, a = moved
    alike = all(t.stride() == p.stride() for t in (v, m, a) if isinstance(t, Tensor))
    return alike and p.dtype == torch.float32 and (p[0].is_contiguous() or (p.ndim == 5 and p.stride(2) == 1))


def sgd(
    moved: Iterable[Moved], lr: Tensor, scale: Tensor | None, momentum: float, decay: float, mu: Tensor | None = None
) -> None:
    """All in place. p, v, a mask and an anchor are (C, ...) in order, or kernels (C, O, I, kh, kw), cropped or not, channels
    last. With an anchor, mu times the distance to it is added to the gradient before scaling."""
    few: list[Moved] = []
    by, to = (lr if t is None else t.contiguous() for t in (scale, mu))
    for p, v, g, m, a in moved:
        size = p[0].numel()
        if size <= BLOCK and p[0].is_contiguous():
            few.append((p, v, g.contiguous(), m, a))
            continue
        span = inner = row = step = 1
        if not p[0].is_contiguous():
            p, v, g = (t.permute(0, 1, 3, 4, 2) for t in (p, v, g))
            m = m if isinstance(m, bool) else m.permute(0, 1, 3, 4, 2)
            span, inner, row, step = p[0, 0].numel(), p[0, 0, 0].numel(), p.stride(1), p.stride(2)
        mask = p if isinstance(m, bool) else m.view(torch.uint8)
        anchor = p if a is None else a
        _one[(triton.cdiv(size, BLOCK), len(p))](
            p, v, g.contiguous(), mask, anchor, lr, by, to, size, p.stride(0), v.stride(0), mask.stride(0), anchor.stride(0),
            momentum, decay, span, row, inner, step, not isinstance(m, bool), momentum != 0, scale is not None, a is not None,
            BLOCK, num_warps=8,
        )  # fmt: skip
    for masked, pulled in itertools.product((False, True), repeat=2):
        alike = [t for t in few if (isinstance(t[3], Tensor), t[4] is not None) == (masked, pulled)]
        for i in range(0, len(alike), TOGETHER):
            ps, vs, gs, ms, anchors = zip(*alike[i : i + TOGETHER], strict=True)
            marks = tuple(m.view(torch.uint8) for m in ms) if masked else ps
            anchors = anchors if pulled else ps
            sizes, strides = [p[0].numel() for p in ps], [[t.stride(0) for t in ts] for ts in (ps, vs, marks, anchors)]
            _several[(len(ps), len(ps[0]))](
                ps, vs, gs, marks, anchors, tuple(sizes), *map(tuple, strides), lr, by, to, momentum, decay,
                masked, momentum != 0, scale is not None, pulled, BLOCK, num_warps=4,
            )  # fmt: skip
