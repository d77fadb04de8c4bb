"""Copies convolution kernels between their usual order (C, O, I, kh, kw) and channels last, a tile of all taps at a time."""

from collections.abc import Collection, Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _relay(
    src, dst, channels, sc, si, st, dc, di, dt, outs, TAPS: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # this axis may be longer than 65,535
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t = tl.arange(0, T)
    there = (t < TAPS)[:, None] & (i < channels)[None, :]
    from_ = src + row // outs * sc + row % outs * (channels * TAPS)
    to = dst + row // outs * dc + row % outs * (channels * TAPS)
    tl.store(to + t[:, None] * dt + i[None, :] * di, tl.load(from_ + t[:, None] * st + i[None, :] * si, there), there)


def fits(dst: Tensor, src: Tensor) -> bool:
    """Whether these are two orders of the same kernels, each without gaps except along the client axis."""
    return dst.ndim == 5 and src.dtype == dst.dtype and _taps(dst) is not None and _taps(src) is not None


def relay(dst: Tensor, src: Tensor) -> None:
    clients, outs, channels, kh, kw = dst.shape
    (si, st), (di, dt) = _taps(src) or (0, 0), _taps(dst) or (0, 0)
    block = min(128, max(16, triton.next_power_of_2(channels)))
    _relay[(clients * outs, triton.cdiv(channels, block))](
        src, dst, channels, src.stride(0), si, st, dst.stride(0), di, dt, outs, kh * kw, triton.next_power_of_2(kh * kw), block
    )


@triton.jit
def _move(block, room, table, step, TAPS: tl.constexpr, T: tl.constexpr, TILE: tl.constexpr, BACK: tl.constexpr):
    """A tile of a client: where it begins in the client's row of the block and in the room, the stride between the clients of
    its tensor there, how many channels a tap has, and how many of them the tile takes."""
    client = tl.program_id(1).to(tl.int64)
    table += tl.program_id(0) * 5
    i, t = tl.arange(0, TILE)[None, :], tl.arange(0, T)[:, None]
    usual = block + client * step + tl.load(table) + i * TAPS + t
    last = room + tl.load(table + 1) + client * tl.load(table + 2) + t * tl.load(table + 3) + i
    there = (t < TAPS) & (i < tl.load(table + 4))
    if BACK:
        tl.store(usual, tl.load(last, there), there)
    else:
        tl.store(last, tl.load(usual, there), there)


def tables(tensors: Mapping[str, Tensor], places: Mapping[str, int], last: Collection[str]) -> dict[int, Tensor]:
    """The tiles of all tensors, by number of taps; see `_move`.

    In a block the tensors are adjacent in each client's row; in a room they follow each other from these places on.
    """
    found: dict[int, list[Tensor]] = {}
    at = 0
    for name, v in tensors.items():
        size = v[0].numel()
        taps = v.shape[3] * v.shape[4] if name in last else 1
        outs, channels = v.shape[1:3] if taps > 1 else (1, size)  # with one tap both orders are the same
        tile = _tile(taps)
        o, i = torch.meshgrid(torch.arange(outs), torch.arange(0, channels, tile), indexing="ij")
        begin = o.flatten() * channels * taps, i.flatten()
        columns = at + begin[0] + begin[1] * taps, places[name] + begin[0] + begin[1], size, channels, channels - begin[1]
        found.setdefault(taps, []).append(torch.stack([torch.as_tensor(c).expand(len(begin[0])) for c in columns], 1))
        at += size
    device = next(iter(tensors.values())).device
    return {taps: torch.cat(tiles).to(device) for taps, tiles in found.items()}


def move(block: Tensor, room: Tensor, tables: Mapping[int, Tensor], back: bool) -> None:
    """Copy all tensors of the block (C, N) to their places in the room, or back."""
    if block.dtype == torch.bool:
        block, room = block.view(torch.uint8), room.view(torch.uint8)
    for taps, table in tables.items():
        _move[(len(table), len(block))](
            block, room, table, block.stride(0), taps, triton.next_power_of_2(taps), _tile(taps), back
        )


def _tile(taps: int) -> int:
    return max(16, 2048 // triton.next_power_of_2(taps))


def _taps(v: Tensor) -> tuple[int, int] | None:
    """The strides of input channels and taps, in one of the two orders."""
    _, _, channels, kh, kw = v.shape
    if v[0].is_contiguous():
        return kh * kw, 1
    return (1, channels) if v[0].permute(0, 2, 3, 1).is_contiguous() else None
