"""Max-pooling of channels-last pictures. The gradient is gathered, not scattered, so that it is the same each time."""

import torch
import triton
import triton.language as tl
from torch import Tensor

Pair = tuple[int, int]


@triton.jit
def _forward(
    x, y, tap, size, HIGH: tl.constexpr, WIDE: tl.constexpr, H: tl.constexpr, W: tl.constexpr, CH: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """y and tap (pictures, HIGH, WIDE, CH) from x (pictures, H, W, CH); tap is the winning place in each window."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c, q, p, picture = e % CH, e // CH % WIDE, e // (CH * WIDE) % HIGH, e // (CH * WIDE * HIGH)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    won = tl.full((BLOCK,), -1, tl.int32)
    for v in tl.static_range(KH):
        for u in tl.static_range(KW):
            i, j = p * SH - PH + v, q * SW - PW + u
            inside = (e < size) & (i >= 0) & (i < H) & (j >= 0) & (j < W)
            here = tl.load(x + ((picture * H + i) * W + j) * CH + c, inside, float("-inf")).to(tl.float32)
            better = inside & ((here > best) | (here != here) | (won < 0))
            best = tl.where(better, here, best)
            won = tl.where(better, v * KW + u, won)
    tl.store(y + e, best.to(y.dtype.element_ty), e < size)
    tl.store(tap + e, won.to(tl.uint8), e < size)


@triton.jit
def _backward(
    g, tap, dx, size, HIGH: tl.constexpr, WIDE: tl.constexpr, H: tl.constexpr, W: tl.constexpr, CH: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Each place of dx (pictures, H, W, CH) checks the windows that cover it for those it won."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c, j, i, picture = e % CH, e // CH % W, e // (CH * W) % H, e // (CH * W * H)
    total = tl.zeros((BLOCK,), tl.float32)
    for v in tl.static_range((KH + SH - 1) // SH):
        for u in tl.static_range((KW + SW - 1) // SW):
            p, q = (i + PH) // SH - v, (j + PW) // SW - u
            a, b = i + PH - p * SH, j + PW - q * SW
            inside = (e < size) & (a < KH) & (b < KW) & (p >= 0) & (p < HIGH) & (q >= 0) & (q < WIDE)
            at = ((picture * HIGH + p) * WIDE + q) * CH + c
            won = tl.load(tap + at, inside, 255).to(tl.int32) == a * KW + b
            total += tl.load(g + at, inside & won, 0.0).to(tl.float32)
    tl.store(dx + e, total.to(dx.dtype.element_ty), e < size)


def forward(x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> tuple[Tensor, Tensor]:
    """x (C, B, H, W, channels) in order -> the pooled values and the winning places, in the same layout."""
    clients, batch, height, width, channels = x.shape
    high, wide = ((s + 2 * p - k) // t + 1 for s, k, t, p in zip((height, width), kernel, stride, padding, strict=True))
    y = torch.empty(clients, batch, high, wide, channels, dtype=x.dtype, device=x.device)
    tap = torch.empty_like(y, dtype=torch.uint8)
    _forward[(triton.cdiv(y.numel(), 1024),)](
        x, y, tap, y.numel(), high, wide, height, width, channels, *kernel, *stride, *padding, 1024
    )
    return y, tap


def backward(g: Tensor, tap: Tensor, size: Pair, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    clients, batch, high, wide, channels = g.shape
    dx = torch.empty(clients, batch, *size, channels, dtype=g.dtype, device=g.device)
    _backward[(triton.cdiv(dx.numel(), 1024),)](
        g, tap, dx, dx.numel(), high, wide, *size, channels, *kernel, *stride, *padding, 1024
    )
    return dx
