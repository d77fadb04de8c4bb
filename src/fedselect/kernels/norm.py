"""BatchNorm of stacked clients in two kernels each way: sums by block, then everything else, a ReLU behind it included.

Activations are (C, rows, channels) in memory and read once for their moments. Means and variances are merged from blocks, each
summed around the mean of its first rows, so next to nothing cancels. The running statistics are updated
in place, as the layer does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _moments(x, part, rows, channels, blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr, CH: tl.constexpr):
    """part (C, blocks, 2, channels): the mean of a block of rows, and the sum of squares around it."""
    client, block = tl.program_id(2).to(tl.int64), tl.program_id(0)
    c = tl.program_id(1) * CH + tl.arange(0, CH)
    known = c < channels
    first = block * ROWS
    count = tl.minimum(rows - first, ROWS)
    r = first + tl.arange(0, BLOCK)
    ahead = tl.load(x + (client * rows + r)[:, None] * channels + c[None, :], (r < rows)[:, None] & known[None, :], 0.0)
    near = tl.sum(ahead.to(tl.float32), 0) / tl.minimum(count, BLOCK)  # the mean of the first rows, near that of all
    total = tl.zeros((CH,), tl.float32)
    squares = tl.zeros((CH,), tl.float32)
    for at in range(0, ROWS, BLOCK):
        r = first + at + tl.arange(0, BLOCK)
        there = (r < rows)[:, None] & known[None, :]
        v = tl.load(x + (client * rows + r)[:, None] * channels + c[None, :], there, 0.0).to(tl.float32)
        v = tl.where(there, v - near[None, :], 0.0)
        total += tl.sum(v, 0)
        squares += tl.sum(v * v, 0)
    off = total / count
    mean, spread = near + off, tl.maximum(squares - total * off, 0.0)
    to = part + (client * blocks + block) * 2 * channels + c
    tl.store(to, mean, known)
    tl.store(to + channels, spread, known)


@triton.jit
def _normalise(
    x, part, weight, bias, y, saved, mean_run, var_run, rows, channels, blocks, momentum, eps,
    AFFINE: tl.constexpr, TRACK: tl.constexpr, RELU: tl.constexpr, MANY: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CH: tl.constexpr,
):  # fmt: skip
    """y = normalised x, scaled; saved (C, 2, channels): mean and 1 / deviation."""
    client, block = tl.program_id(2).to(tl.int64), tl.program_id(0)
    c = tl.program_id(1) * CH + tl.arange(0, CH)
    known = c < channels
    b = tl.arange(0, MANY)
    at_part = part + (client * blocks + b)[:, None] * 2 * channels + c[None, :]
    real = (b < blocks)[:, None] & known[None, :]
    count = tl.where(b < blocks, tl.minimum(rows - b * ROWS, ROWS), 0).to(tl.float32)[:, None]
    means = tl.load(at_part, real, 0.0)
    mean = tl.sum(means * count, 0) / rows
    off = means - mean[None, :]
    var = tl.sum(tl.load(at_part + channels, real, 0.0) + tl.where(real, count * off * off, 0.0), 0) / rows
    scale = 1.0 / tl.sqrt(var + eps)
    if block == 0:
        tl.store(saved + client * 2 * channels + c, mean, known)
        tl.store(saved + (client * 2 + 1) * channels + c, scale, known)
        if TRACK:
            spot = client * channels + c
            old = tl.load(mean_run + spot, known)
            tl.store(mean_run + spot, old * (1 - momentum) + mean * momentum, known)
            old = tl.load(var_run + spot, known)
            tl.store(var_run + spot, old * (1 - momentum) + var * (momentum * (rows / (rows - 1.0))), known)
    shift = -mean * scale
    if AFFINE:
        w = tl.load(weight + client * channels + c, known, 0.0)
        scale = scale * w
        shift = shift * w + tl.load(bias + client * channels + c, known, 0.0)
    for at in range(0, ROWS, BLOCK):
        r = block * ROWS + at + tl.arange(0, BLOCK)
        there = (r < rows)[:, None] & known[None, :]
        spot = (client * rows + r)[:, None] * channels + c[None, :]
        v = tl.load(x + spot, there, 0.0).to(tl.float32) * scale[None, :] + shift[None, :]
        if RELU:
            v = tl.maximum(v, 0.0)
        tl.store(y + spot, v.to(y.dtype.element_ty), there)


@triton.jit
def _let_through(d, v, mean, scale, weight, bias, AFFINE: tl.constexpr):
    """The gradients d where a ReLU let the values made of v pass."""
    shift = -mean * scale
    if AFFINE:
        scale = scale * weight
        shift = shift * weight + bias
    return tl.where(v * scale[None, :] + shift[None, :] > 0, d, 0.0)


@triton.jit
def _slopes(
    x, g, saved, part, weight, bias, rows, channels, blocks, AFFINE: tl.constexpr, RELU: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CH: tl.constexpr,
):  # fmt: skip
    """part (C, blocks, 2, channels): sums over a block of rows of g and of g times the normalised x."""
    client, block = tl.program_id(2).to(tl.int64), tl.program_id(0)
    c = tl.program_id(1) * CH + tl.arange(0, CH)
    known = c < channels
    mean = tl.load(saved + client * 2 * channels + c, known, 0.0)
    scale = tl.load(saved + (client * 2 + 1) * channels + c, known, 0.0)
    w = tl.load(weight + client * channels + c, known, 0.0) if AFFINE else mean
    b = tl.load(bias + client * channels + c, known, 0.0) if AFFINE else mean
    one = tl.zeros((CH,), tl.float32)
    two = tl.zeros((CH,), tl.float32)
    for at in range(0, ROWS, BLOCK):
        r = block * ROWS + at + tl.arange(0, BLOCK)
        there = (r < rows)[:, None] & known[None, :]
        spot = (client * rows + r)[:, None] * channels + c[None, :]
        d = tl.load(g + spot, there, 0.0).to(tl.float32)
        v = tl.load(x + spot, there, 0.0).to(tl.float32)
        if RELU:
            d = _let_through(d, v, mean, scale, w, b, AFFINE)
        one += tl.sum(d, 0)
        two += tl.sum(d * (v - mean[None, :]) * scale[None, :], 0)
    to = part + (client * blocks + block) * 2 * channels + c
    tl.store(to, one, known)
    tl.store(to + channels, two, known)


@triton.jit
def _back(
    x, g, saved, part, weight, bias, dx, dweight, dbias, rows, channels, blocks,
    AFFINE: tl.constexpr, RELU: tl.constexpr, MANY: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CH: tl.constexpr,
):  # fmt: skip
    client, block = tl.program_id(2).to(tl.int64), tl.program_id(0)
    c = tl.program_id(1) * CH + tl.arange(0, CH)
    known = c < channels
    b = tl.arange(0, MANY)
    at_part = part + (client * blocks + b)[:, None] * 2 * channels + c[None, :]
    real = (b < blocks)[:, None] & known[None, :]
    one = tl.sum(tl.load(at_part, real, 0.0), 0)
    two = tl.sum(tl.load(at_part + channels, real, 0.0), 0)
    mean = tl.load(saved + client * 2 * channels + c, known, 0.0)
    scale = tl.load(saved + (client * 2 + 1) * channels + c, known, 0.0)
    w = tl.load(weight + client * channels + c, known, 0.0) if AFFINE else mean
    shift = tl.load(bias + client * channels + c, known, 0.0) if AFFINE else mean
    factor = scale
    if AFFINE:
        if block == 0:
            tl.store(dbias + client * channels + c, one, known)
            tl.store(dweight + client * channels + c, two, known)
        factor = scale * w
    for at in range(0, ROWS, BLOCK):
        r = block * ROWS + at + tl.arange(0, BLOCK)
        there = (r < rows)[:, None] & known[None, :]
        spot = (client * rows + r)[:, None] * channels + c[None, :]
        d = tl.load(g + spot, there, 0.0).to(tl.float32)
        v = tl.load(x + spot, there, 0.0).to(tl.float32)
        if RELU:
            d = _let_through(d, v, mean, scale, w, shift, AFFINE)
        hat = (v - mean[None, :]) * scale[None, :]
        out = factor[None, :] * (d - (one[None, :] + hat * two[None, :]) / rows)
        tl.store(dx + spot, out.to(dx.dtype.element_ty), there)


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, momentum: float, eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x (C, rows, channels) in order -> the same, and what `backward` needs; updates the running mean and var in place."""
    clients, rows, channels = x.shape
    grid, how, blocks = _blocks(x)
    part = torch.empty(clients, blocks, 2, channels, device=x.device)
    y, saved = torch.empty_like(x), torch.empty(clients, 2, channels, device=x.device)
    many = triton.next_power_of_2(blocks)
    _moments[grid](x, part, rows, channels, blocks, **how)
    _normalise[grid](
        x, part, _or(weight, x), _or(bias, x), y, saved, _or(mean, x), _or(var, x), rows, channels, blocks,
        momentum, eps, weight is not None, mean is not None, relu, many, **how,
    )  # fmt: skip
    return y, saved


def backward(
    x: Tensor, g: Tensor, saved: Tensor, weight: Tensor | None, bias: Tensor | None, relu: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, weight and bias."""
    clients, rows, channels = x.shape
    grid, how, blocks = _blocks(x)
    part = torch.empty(clients, blocks, 2, channels, device=x.device)
    dx, many = torch.empty_like(x), triton.next_power_of_2(blocks)
    dweight, dbias = (None, None) if weight is None else (torch.empty_like(saved[:, 0]) for _ in "wb")
    affine = _or(weight, x), _or(bias, x)
    _slopes[grid](x, g, saved, part, *affine, rows, channels, blocks, weight is not None, relu, **how)
    _back[grid](
        x, g, saved, part, *affine, dx, _or(dweight, x), _or(dbias, x), rows, channels, blocks,
        weight is not None, relu, many, **how,
    )  # fmt: skip
    return dx, dweight, dbias


def _or(v: Tensor | None, other: Tensor) -> Tensor:
    return other if v is None else v


def _blocks(
    x: Tensor, at_once: int | None = None, programs: int = 1056, warps: int = 4
) -> tuple[tuple[int, int, int], dict[str, int], int]:
    """How the rows are cut: the grid, what the kernels are told of it, and into how many blocks."""
    clients, rows, channels = x.shape
    ch = min(64, max(16, triton.next_power_of_2(channels)))
    block = min(at_once or (128 if x.dtype == torch.bfloat16 else 32), max(1, triton.next_power_of_2(rows)))
    wide = triton.cdiv(channels, ch)
    blocks = max(1, min(64, -(-programs // (clients * wide)), triton.cdiv(rows, block)))
    per = triton.cdiv(triton.cdiv(rows, blocks), block) * block
    blocks = triton.cdiv(rows, per)
    return (blocks, wide, clients), {"ROWS": per, "BLOCK": block, "CH": ch, "num_warps": warps}, blocks
