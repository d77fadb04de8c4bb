"""Makes a batch of pictures of every client in one kernel: gathered from the pool, shifted and mirrored, converted to floats.

The twin is `Split.batch` with `transforms.crop_flip`; the random numbers are those of `random`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _mix(z):
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit
def _drawn(key, i: tl.constexpr):
    for _ in tl.static_range(i):
        key += -0x61C8864680B583EB
    return _mix(_mix(key)) & 0x7FFFFFFFFFFFFFFF


@triton.jit
def _pictures(
    pool, places, index, keys, scale, shift, out, batch,
    CH: tl.constexpr, H: tl.constexpr, W: tl.constexpr, AUGMENT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out (pictures, H, W, CH); picture i is row places[i] of the pool (N, CH, H, W)."""
    i = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c, x, y = e % CH, e // CH % W, e // (CH * W)
    there = e < H * W * CH
    if AUGMENT:
        key = _mix(tl.load(keys + i // batch) + -0x61C8864680B583EB)
        key = _mix(key ^ tl.load(index + i))
        down = (_drawn(key, 1) % (2 * (H // 8) + 1) - H // 8).to(tl.int32)
        right = (_drawn(key, 2) % (2 * (W // 8) + 1) - W // 8).to(tl.int32)
        x = tl.where(_drawn(key, 3) % 2 != 0, W - 1 - x, x) + right
        y = y + down
        inside = there & (x >= 0) & (x < W) & (y >= 0) & (y < H)
    else:
        inside = there
    v = tl.load(pool + tl.load(places + i) * (CH * H * W) + (c * H + y) * W + x, inside, 0).to(tl.float32)
    if SCALE:
        v = v * tl.load(scale + c) + tl.load(shift + c)
    tl.store(out + i * (H * W * CH) + e, v, there)


def pictures(
    pool: Tensor, places: Tensor, index: Tensor, keys: Tensor | None, scale: Tensor | None, shift: Tensor | None
) -> Tensor:
    """Rows `places` (C, b) of the pool -> (C, b, CH, H, W) float32, channels last in memory; with keys, crop and flip."""
    (clients, batch), (channels, height, width) = places.shape, pool.shape[1:]
    out = torch.empty(clients, batch, height, width, channels, device=pool.device)
    size, block = height * width * channels, 1024
    none = scale is None or shift is None
    _pictures[(clients * batch, triton.cdiv(size, block))](
        pool, places.contiguous(), index.contiguous(), places if keys is None else keys.contiguous(),
        out if none else scale, out if none else shift, out, batch,
        channels, height, width, keys is not None, not none, block,
    )  # fmt: skip
    return out.permute(0, 1, 4, 2, 3)
