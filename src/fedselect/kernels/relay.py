"""Convolution kernels copied between their usual order (C, O, I, kh, kw) and channels last, a tile of all taps at a time."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _relay(
    src, dst, channels, sc, si, st, dc, di, dt, outs, TAPS: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t = tl.arange(0, T)
    there = (t < TAPS)[:, None] & (i < channels)[None, :]
    from_ = src + row // outs * sc + row % outs * (channels * TAPS)
    to = dst + row // outs * dc + row % outs * (channels * TAPS)
    tl.store(to + t[:, None] * dt + i[None, :] * di, tl.load(from_ + t[:, None] * st + i[None, :] * si, there), there)


def fits(dst: Tensor, src: Tensor) -> bool:
    """Two orders of the same kernels, each without gaps but for the client axis."""
    return dst.ndim == 5 and src.dtype == dst.dtype and _taps(dst) is not None and _taps(src) is not None


def relay(dst: Tensor, src: Tensor) -> None:
    clients, outs, channels, kh, kw = dst.shape
    (si, st), (di, dt) = _taps(src) or (0, 0), _taps(dst) or (0, 0)
    block = min(128, max(16, triton.next_power_of_2(channels)))
    _relay[(triton.cdiv(channels, block), clients * outs)](
        src, dst, channels, src.stride(0), si, st, dst.stride(0), di, dt, outs, kh * kw, triton.next_power_of_2(kh * kw), block
    )


def _taps(v: Tensor) -> tuple[int, int] | None:
    """How far apart input channels and taps lie, in one of the two orders."""
    _, _, channels, kh, kw = v.shape
    if v[0].is_contiguous():
        return kh * kw, 1
    return (1, channels) if v[0].permute(0, 2, 3, 1).is_contiguous() else None
