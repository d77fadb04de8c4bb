"""Convolution of stacked clients as an implicit matrix product: no patches are ever written to memory.

A kernel's entries are traversed tap by tap, input channels fastest, as in channels-last memory. All strides are arguments, so a
cropped kernel (its taps that ever meet the input) and any layout are read in place.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fedselect.kernels import INTERPRETED

Pair = tuple[int, int]


@triton.jit
def _forward(
    x, w, b, y, rows, n_out, xc, xb, xi, xh, xw, wc, wo, wi, wh, ww, yc,
    HIGH: tl.constexpr, WIDE: tl.constexpr, H: tl.constexpr, W: tl.constexpr, I: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, BIAS: tl.constexpr, DOT: tl.constexpr, KIND: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y (C, rows, O), rows = pictures * HIGH * WIDE; one program computes BM x BN of one client."""
    client = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(n_out, BN)
    m = tl.program_id(0) // across * BM + tl.arange(0, BM)
    n = tl.program_id(0) % across * BN + tl.arange(0, BN)
    picture, place = m // (HIGH * WIDE), m % (HIGH * WIDE)
    top, left = place // WIDE * SH - PH, place % WIDE * SW - PW
    here = m < rows
    x += client * xc + picture.to(tl.int64)[:, None] * xb
    w += client * wc + n.to(tl.int64)[None, :] * wo
    total = tl.zeros((BM, BN), tl.float32)
    for at in range(0, KH * KW * I, BK):  # a block lies within one tap
        tap, i = at // I, at % I + tl.arange(0, BK)
        i = tl.max_contiguous(tl.multiple_of(i, BK), BK)
        v, u = tap // KW, tap % KW
        p, q = top + v * DH, left + u * DW
        inside = here & (p >= 0) & (p < H) & (q >= 0) & (q < W)
        left_tile = tl.load(x + (p * xh + q * xw)[:, None] + i[None, :] * xi, inside[:, None], 0.0)
        right_tile = tl.load(w + (v * wh + u * ww) + i[:, None] * wi, (n < n_out)[None, :], 0.0)
        total = tl.dot(left_tile.to(KIND), right_tile.to(KIND), total, input_precision=DOT)
    if BIAS:
        total += tl.load(b + client * n_out + n, n < n_out, 0.0)[None, :]
    out = y + client * yc + m.to(tl.int64)[:, None] * n_out + n[None, :]
    tl.store(out, total.to(y.dtype.element_ty), here[:, None] & (n < n_out)[None, :])


@triton.jit
def _to_input(
    g, w, dx, rows, n_in, gc, wc, wo, wi, wh, ww, dc,
    HIGH: tl.constexpr, WIDE: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DOT: tl.constexpr, KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dx (C, B, H, W, I) from g (C, B, HIGH, WIDE, O). Input places with the same residue by the stride meet the same taps, so
    each residue is a separate product; `rows` counts the places of the largest."""
    client = tl.program_id(1).to(tl.int64)
    residue = tl.program_id(2)
    ry, rx = residue // SW, residue % SW
    across = tl.cdiv(n_in, BN)
    m = tl.program_id(0) // across * BM + tl.arange(0, BM)
    n = tl.program_id(0) % across * BN + tl.arange(0, BN)
    tall, broad = (H + SH - 1) // SH, (W + SW - 1) // SW
    picture, place = m // (tall * broad), m % (tall * broad)
    y0, x0 = place // broad, place % broad
    here = (m < rows) & (y0 * SH + ry < H) & (x0 * SW + rx < W)
    v0, u0 = (ry + PH) % SH, (rx + PW) % SW
    down, right = (ry + PH) // SH, (rx + PW) // SW
    taps_v, taps_u = (KH - v0 + SH - 1) // SH, (KW - u0 + SW - 1) // SW
    g += client * gc + picture.to(tl.int64)[:, None] * (HIGH * WIDE * O)
    w += client * wc + n.to(tl.int64)[None, :] * wi
    total = tl.zeros((BM, BN), tl.float32)
    for at in range(taps_v * taps_u * tl.cdiv(O, BK)):
        tap, o = at // tl.cdiv(O, BK), at % tl.cdiv(O, BK) * BK + tl.arange(0, BK)
        v, u = tap // taps_u, tap % taps_u
        p, q = y0 + down - v, x0 + right - u
        inside = here & (p >= 0) & (p < HIGH) & (q >= 0) & (q < WIDE)
        v, u = v0 + v * SH, u0 + u * SW
        if O % BK == 0:
            o = tl.max_contiguous(tl.multiple_of(o, BK), BK)
            left_tile = tl.load(g + ((p * WIDE + q) * O)[:, None] + o[None, :], inside[:, None], 0.0)
            right_tile = tl.load(w + (v * wh + u * ww) + o[:, None] * wo, (n < n_in)[None, :], 0.0)
        else:
            left_tile = tl.load(g + ((p * WIDE + q) * O)[:, None] + o[None, :], inside[:, None] & (o < O)[None, :], 0.0)
            right_tile = tl.load(w + (v * wh + u * ww) + o[:, None] * wo, (o < O)[:, None] & (n < n_in)[None, :], 0.0)
        total = tl.dot(left_tile.to(KIND), right_tile.to(KIND), total, input_precision=DOT)
    spot = (picture.to(tl.int64) * H + y0 * SH + ry) * W + x0 * SW + rx
    tl.store(dx + client * dc + spot[:, None] * n_in + n[None, :], total.to(dx.dtype.element_ty),
             here[:, None] & (n < n_in)[None, :])  # fmt: skip


@triton.jit
def _to_kernel(
    x, g, dw, rows, n_out, part, xc, xb, xi, xh, xw, gc, dp, dc,
    HIGH: tl.constexpr, WIDE: tl.constexpr, H: tl.constexpr, W: tl.constexpr, I: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, DOT: tl.constexpr, KIND: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dw (parts, C, O, KH, KW, I): BM output channels by BN of (tap, input channel), summed over `part` rows."""
    client = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(2)
    across = tl.cdiv(KH * KW * I, BN)
    o = tl.program_id(0) // across * BM + tl.arange(0, BM)
    first = tl.program_id(0) % across * BN
    n = first + tl.arange(0, BN)
    tap, i = first // I, first % I + tl.arange(0, BN)  # a block lies within one tap
    i = tl.max_contiguous(tl.multiple_of(i, BN), BN)
    x += client * xc
    g += client * gc
    total = tl.zeros((BM, BN), tl.float32)
    for at in range(piece * part, tl.minimum(piece * part + part, rows), BK):
        m = at + tl.arange(0, BK)
        picture, place = m // (HIGH * WIDE), m % (HIGH * WIDE)
        top, left = place // WIDE * SH - PH, place % WIDE * SW - PW
        there = m < tl.minimum(piece * part + part, rows)
        left_tile = tl.load(g + m.to(tl.int64)[None, :] * n_out + o[:, None], there[None, :] & (o < n_out)[:, None], 0.0)
        p, q = top + tap // KW * DH, left + tap % KW * DW
        inside = there & (p >= 0) & (p < H) & (q >= 0) & (q < W)
        spot = picture.to(tl.int64) * xb + p * xh + q * xw
        right_tile = tl.load(x + spot[:, None] + (i * xi)[None, :], inside[:, None], 0.0)
        total = tl.dot(left_tile.to(KIND), right_tile.to(KIND), total, input_precision=DOT)
    out = dw + piece.to(tl.int64) * dp + client * dc + o.to(tl.int64)[:, None] * (KH * KW * I) + n[None, :]
    tl.store(out, total, (o < n_out)[:, None] & (n < KH * KW * I)[None, :])


def forward(x: Tensor, w: Tensor, b: Tensor | None, stride: Pair, padding: Pair, dilation: Pair, precision: str) -> Tensor:
    """x (C, B, I, H, W), w (C, O, I, kh, kw) -> (C, B, O, Ho, Wo) with channels last in memory."""
    if _few(x, w.shape[4], dilation[1]):
        x, w = _runs(x, w.shape[4], stride[1], padding[1]), _as_runs(w)
        stride, padding = (stride[0], 1), (padding[0], 0)
    x, w = _whole(x), _whole(w)
    clients, batch, inside, height, width = x.shape
    out, (kh, kw) = w.shape[1], w.shape[3:]
    high = (height + 2 * padding[0] - dilation[0] * (kh - 1) - 1) // stride[0] + 1
    wide = (width + 2 * padding[1] - dilation[1] * (kw - 1) - 1) // stride[1] + 1
    rows = batch * high * wide
    y = torch.empty(clients, batch, high, wide, out, dtype=x.dtype, device=x.device)
    how = _forward_tiles(rows, out, inside, clients, x.dtype)
    grid = (triton.cdiv(rows, how["BM"]) * triton.cdiv(out, how["BN"]), clients)
    _forward[grid](
        x, w, w if b is None else b.contiguous(), y, rows, out, *x.stride(), *w.stride(), y.stride(0),
        high, wide, height, width, inside, kh, kw, *stride, *padding, *dilation, b is not None,
        **_kind(precision, x.dtype), **how,
    )  # fmt: skip
    return y.permute(0, 1, 4, 2, 3)


def to_input(g: Tensor, w: Tensor, shape: torch.Size, stride: Pair, padding: Pair, precision: str) -> Tensor:
    """The gradient of the input, of `shape`, for a convolution that is not dilated; g (C, B, Ho, Wo, O) in order."""
    clients, batch, inside, height, width = shape
    _, _, high, wide, out = g.shape
    dx = torch.empty(clients, batch, height, width, inside, dtype=g.dtype, device=g.device)
    rows = batch * -(-height // stride[0]) * -(-width // stride[1])
    how = _input_tiles(rows, inside, out, clients * stride[0] * stride[1], g.dtype)
    grid = (triton.cdiv(rows, how["BM"]) * triton.cdiv(inside, how["BN"]), clients, stride[0] * stride[1])
    _to_input[grid](
        g, w, dx, rows, inside, g.stride(0), *w.stride(), dx.stride(0),
        high, wide, height, width, out, w.shape[3], w.shape[4], *stride, *padding, **_kind(precision, g.dtype), **how,
    )  # fmt: skip
    return dx.permute(0, 1, 4, 2, 3)


def to_kernel(x: Tensor, g: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, precision: str) -> Tensor:
    """The gradient of the kernel (C, O, I, kh, kw), float32, input channels last in memory; g (C, B, Ho, Wo, O) in order."""
    given = x.shape[2]
    if _few(x, kernel[1], dilation[1]):
        x = _runs(x, kernel[1], stride[1], padding[1])
        runs = to_kernel(x, g, (kernel[0], 1), (stride[0], 1), (padding[0], 0), dilation, precision)
        last = runs.permute(0, 1, 3, 4, 2)[..., : kernel[1] * given]
        return last.reshape(*last.shape[:3], kernel[1], given).permute(0, 1, 4, 2, 3)
    x = _whole(x)
    clients, _, inside, height, width = x.shape
    _, batch, high, wide, out = g.shape
    rows, columns = batch * high * wide, kernel[0] * kernel[1] * inside
    how = _kernel_tiles(out, rows, inside, x.dtype)
    tiles = triton.cdiv(out, how["BM"]) * triton.cdiv(columns, how["BN"])
    wanted = 3 * PROGRAMS if how["num_warps"] == 2 else PROGRAMS  # long sums are split, so that all units have work
    parts = max(1, min(wanted // (tiles * clients), rows // 128))
    part = -(-rows // (parts * how["BK"])) * how["BK"]
    parts = -(-rows // part)
    dw = torch.empty(parts, clients, out, *kernel, inside, device=x.device)
    _to_kernel[(tiles, clients, parts)](
        x, g, dw, rows, out, part, *x.stride(), g.stride(0), dw.stride(0), dw.stride(1),
        high, wide, height, width, inside, *kernel, *stride, *padding, *dilation, **_kind(precision, x.dtype), **how,
    )  # fmt: skip
    return (dw[0] if parts == 1 else dw.sum(0))[..., :given].permute(0, 1, 4, 2, 3)


PROGRAMS = 264
"""Programs that keep every unit of the GPU busy: two for each of an H200's 132."""


def _tiles(bm: int, bn: int, bk: int, warps: int) -> dict[str, int]:
    return {"BM": bm, "BN": bn, "BK": bk, "num_warps": warps, "num_stages": 3}


def _whole(v: Tensor) -> Tensor:
    """Channels (the third axis) last in memory, padded with zeros to a multiple of 16.

    So a vector of them never reaches into the next tap. Otherwise its entries would need separate masks, which the compiler
    (Triton 3.6) gets wrong for some shapes.
    """
    last, lack = v.permute(0, 1, 3, 4, 2), -v.shape[2] % 16
    if lack:
        last = F.pad(last, (0, lack))
    return (last if last.stride(-1) == 1 else last.contiguous()).permute(0, 1, 4, 2, 3)


def _few(x: Tensor, wide: int, dilation: int) -> bool:
    """Whether the taps of a kernel's row are better treated as channels; those of a dilated kernel are not adjacent."""
    return x.shape[2] < 16 and wide > 1 and dilation == 1


def _runs(x: Tensor, wide: int, stride: int, padding: int) -> Tensor:
    """With few channels, the taps of a kernel's row as channels: they are adjacent, so this is a view of the padded input.

    (C, B, I, H, W) -> (C, B, wide * I and more, H, Wo). The extra channels reach into the next pixels of the same row, where
    the kernel has zeros.
    """
    inside, width = x.shape[2], x.shape[4]
    many = -(-wide * inside // 16) * 16
    slack = -(-(many - wide * inside) // inside)
    last = F.pad(x.permute(0, 1, 3, 4, 2), (0, 0, padding, padding + slack)).contiguous()
    c, b, h, w, _ = last.stride()
    size = (*last.shape[:3], (width + 2 * padding - wide) // stride + 1, many)
    return last.as_strided(size, (c, b, h, stride * w, 1)).permute(0, 1, 4, 2, 3)


def _as_runs(w: Tensor) -> Tensor:
    """(C, O, I, kh, kw) -> (C, O, kw * I, kh, 1), with channels as in `_runs`."""
    clients, out, inside, kh, kw = w.shape
    return w.permute(0, 1, 3, 4, 2).reshape(clients, out, kh, 1, kw * inside).permute(0, 1, 4, 2, 3)


def _part(channels: int, most: int) -> int:
    """The longest block, a power of two, that divides the channels."""
    return next((b for b in (64, 32, 16) if b <= most and channels % b == 0), 16)


def _power(n: int, least: int, most: int) -> int:
    return min(most, max(least, triton.next_power_of_2(n)))


# The choices below were measured on an H200 over the layers of ResNet18 with 10 and 80 clients (docs/performance.md), those
# for bfloat16 with 20 clients and images of 84x84 (benchmarks/conv.py).
# In the two backward products neither operand is contiguous along the sum, which the chip's widest TF32 instruction needs;
# two warps make the compiler use the narrower one, at two to four times the speed.


def _forward_tiles(m: int, n: int, k: int, clients: int, dtype: torch.dtype) -> dict[str, int]:
    if _large(m, n, k, clients, dtype):
        return _tiles(128, 128, 64, 8)
    bm, bn = _power(m, 16, 128), _power(n, 16, 64)
    while bm > 64 and triton.cdiv(m, bm) * triton.cdiv(n, bn) * clients < PROGRAMS:
        bm //= 2
    few = triton.cdiv(m, bm) * triton.cdiv(n, bn) * clients < PROGRAMS // 2
    if few and m >= 32 and n >= 64 and k % 64 == 0 and dtype == torch.float32 and _roomy():
        return {**_tiles(64, 64, 64, 4), "num_stages": 4}  # with few programs, more loads in flight hide memory latency
    return _tiles(bm, bn, _part(k, _depth(dtype)), 8 if few and bm * bn >= 4096 else 4)


def _input_tiles(m: int, n: int, k: int, clients: int, dtype: torch.dtype) -> dict[str, int]:
    if _large(m, n, k, clients, dtype):
        return _tiles(128, 128, 64, 8)
    bm, bn, bk = _power(m, 16, 64), _power(n, 16, 64), _part(k, _depth(dtype))
    if bm == 64 and triton.cdiv(m, bm) * triton.cdiv(n, bn) * clients < 1000:
        bm = 32
    if bn == 64 and triton.cdiv(m, bm) * triton.cdiv(n, bn) * clients < 400:
        bn, bk = 32, _part(k, 64)
    return _tiles(bm, bn, bk, 2 if dtype == torch.float32 else 4)


def _kernel_tiles(m: int, k: int, inside: int, dtype: torch.dtype) -> dict[str, int]:
    if dtype == torch.bfloat16 and m % 128 == 0:
        return _tiles(128, _part(inside, 64), _power(k, 16, 64), 4)
    return _tiles(_power(m, 16, 64), _part(inside, 64), _power(k, 16, 32), 2)


def _large(m: int, n: int, k: int, clients: int, dtype: torch.dtype) -> bool:
    """Whether a bfloat16 product is worth the largest tiles: it needs enough rows and columns, and a tile for most units."""
    fits = dtype == torch.bfloat16 and m >= 128 and n % 128 == 0 and k % 64 == 0
    return fits and triton.cdiv(m, 128) * (n // 128) * clients >= PROGRAMS // 2


@cache
def _roomy() -> bool:
    """Whether a unit of the GPU has shared memory for 128 KiB of tiles."""
    if INTERPRETED:
        return True
    chip = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(getattr(chip, "shared_memory_per_block_optin", 0)) >= 160 * 1024


def _depth(dtype: torch.dtype) -> int:
    return 64 if dtype == torch.bfloat16 else 32


def _kind(precision: str, dtype: torch.dtype) -> dict[str, Any]:
    return {"DOT": "tf32" if precision == "tf32" else "tf32x3", "KIND": tl.bfloat16 if dtype == torch.bfloat16 else tl.float32}
