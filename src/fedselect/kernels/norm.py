"""BatchNorm of stacked clients, with what follows it: adding another tensor, as a residual block does, and a ReLU.

Activations are (C, rows, channels) in memory. A client with few rows fits into one program, and each direction is one kernel;
many rows take two: sums by block, then everything else. Means and variances are merged from blocks, each summed around the mean
of its first rows, so next to nothing cancels. The running statistics are updated in place, as the layer does.
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
def _remember(saved, mean_run, var_run, client, rows, channels, c, known, mean, var, scale, momentum, TRACK: tl.constexpr):
    """Store what the backward pass needs, and update the running statistics."""
    tl.store(saved + client * 2 * channels + c, mean, known)
    tl.store(saved + (client * 2 + 1) * channels + c, scale, known)
    if TRACK:
        spot = client * channels + c
        old = tl.load(mean_run + spot, known)
        tl.store(mean_run + spot, old * (1 - momentum) + mean * momentum, known)
        old = tl.load(var_run + spot, known)
        tl.store(var_run + spot, old * (1 - momentum) + var * (momentum * (rows / (rows - 1.0))), known)


@triton.jit
def _line(mean, scale, weight, bias, spot, known, AFFINE: tl.constexpr):
    """The factor and the shift that normalize and scale a value."""
    shift = -mean * scale
    if AFFINE:
        w = tl.load(weight + spot, known, 0.0)
        scale = scale * w
        shift = shift * w + tl.load(bias + spot, known, 0.0)
    return scale, shift


@triton.jit
def _end(v, other, there, ADD: tl.constexpr, RELU: tl.constexpr):
    """Apply what follows: add the other tensor, then the ReLU."""
    if ADD:
        v += tl.load(other, there, 0.0).to(tl.float32)
    if RELU:
        v = tl.maximum(v, 0.0)
    return v


@triton.jit
def _let_through(d, v, y, there, factor, shift, ADD: tl.constexpr, RELU: tl.constexpr):
    """The gradients d that the ReLU lets through, judged by its result y or, if nothing was added, by v."""
    if ADD and RELU:
        d = tl.where(tl.load(y, there, 0.0).to(tl.float32) > 0, d, 0.0)
    elif RELU:
        d = tl.where(v * factor[None, :] + shift[None, :] > 0, d, 0.0)
    return d


@triton.jit
def _normalise(
    x, other, part, weight, bias, y, saved, mean_run, var_run, rows, channels, blocks, momentum, eps,
    AFFINE: tl.constexpr, TRACK: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr, MANY: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CH: tl.constexpr,
):  # fmt: skip
    """y = normalized x, scaled; saved (C, 2, channels): mean and 1 / deviation."""
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
        _remember(saved, mean_run, var_run, client, rows, channels, c, known, mean, var, scale, momentum, TRACK)
    scale, shift = _line(mean, scale, weight, bias, client * channels + c, known, AFFINE)
    for at in range(0, ROWS, BLOCK):
        r = block * ROWS + at + tl.arange(0, BLOCK)
        there = (r < rows)[:, None] & known[None, :]
        spot = (client * rows + r)[:, None] * channels + c[None, :]
        v = tl.load(x + spot, there, 0.0).to(tl.float32) * scale[None, :] + shift[None, :]
        tl.store(y + spot, _end(v, other + spot, there, ADD, RELU).to(y.dtype.element_ty), there)


@triton.jit
def _slopes(
    x, g, y, saved, part, weight, bias, passed, rows, channels, blocks,
    AFFINE: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CH: tl.constexpr,
):  # fmt: skip
    """part (C, blocks, 2, channels): sums over a block of rows of g and of g times the normalized x; passed: the gradient of
    what was added."""
    client, block = tl.program_id(2).to(tl.int64), tl.program_id(0)
    c = tl.program_id(1) * CH + tl.arange(0, CH)
    known = c < channels
    mean = tl.load(saved + client * 2 * channels + c, known, 0.0)
    scale = tl.load(saved + (client * 2 + 1) * channels + c, known, 0.0)
    factor, shift = _line(mean, scale, weight, bias, client * channels + c, known, AFFINE)
    one = tl.zeros((CH,), tl.float32)
    two = tl.zeros((CH,), tl.float32)
    for at in range(0, ROWS, BLOCK):
        r = block * ROWS + at + tl.arange(0, BLOCK)
        there = (r < rows)[:, None] & known[None, :]
        spot = (client * rows + r)[:, None] * channels + c[None, :]
        d = tl.load(g + spot, there, 0.0).to(tl.float32)
        v = tl.load(x + spot, there, 0.0).to(tl.float32)
        d = _let_through(d, v, y + spot, there, factor, shift, ADD, RELU)
        if ADD and RELU:
            tl.store(passed + spot, d.to(passed.dtype.element_ty), there)
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
    """g: if something was added, the part that the ReLU let through."""
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
    factor, shift = _line(mean, scale, weight, bias, client * channels + c, known, AFFINE)
    if AFFINE and block == 0:
        tl.store(dbias + client * channels + c, one, known)
        tl.store(dweight + client * channels + c, two, known)
    for at in range(0, ROWS, BLOCK):
        r = block * ROWS + at + tl.arange(0, BLOCK)
        there = (r < rows)[:, None] & known[None, :]
        spot = (client * rows + r)[:, None] * channels + c[None, :]
        d = tl.load(g + spot, there, 0.0).to(tl.float32)
        v = tl.load(x + spot, there, 0.0).to(tl.float32)
        d = _let_through(d, v, x, there, factor, shift, False, RELU)
        hat = (v - mean[None, :]) * scale[None, :]
        out = factor[None, :] * (d - (one[None, :] + hat * two[None, :]) / rows)
        tl.store(dx + spot, out.to(dx.dtype.element_ty), there)


@triton.jit
def _forward_few(
    x, other, weight, bias, y, saved, mean_run, var_run, rows, channels, momentum, eps,
    AFFINE: tl.constexpr, TRACK: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, CH: tl.constexpr,
):  # fmt: skip
    """All rows of a client at once."""
    client = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * CH + tl.arange(0, CH)
    r = tl.arange(0, ROWS)
    known = c < channels
    there = (r < rows)[:, None] & known[None, :]
    spot = (client * rows + r)[:, None] * channels + c[None, :]
    v = tl.load(x + spot, there, 0.0).to(tl.float32)
    mean = tl.sum(v, 0) / rows
    off = tl.where(there, v - mean[None, :], 0.0)
    var = tl.sum(off * off, 0) / rows
    scale = 1.0 / tl.sqrt(var + eps)
    _remember(saved, mean_run, var_run, client, rows, channels, c, known, mean, var, scale, momentum, TRACK)
    factor, shift = _line(mean, scale, weight, bias, client * channels + c, known, AFFINE)
    v = _end(v * factor[None, :] + shift[None, :], other + spot, there, ADD, RELU)
    tl.store(y + spot, v.to(y.dtype.element_ty), there)


@triton.jit
def _back_few(
    x, g, y, saved, weight, bias, dx, passed, dweight, dbias, rows, channels,
    AFFINE: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, CH: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * CH + tl.arange(0, CH)
    r = tl.arange(0, ROWS)
    known = c < channels
    there = (r < rows)[:, None] & known[None, :]
    spot = (client * rows + r)[:, None] * channels + c[None, :]
    mean = tl.load(saved + client * 2 * channels + c, known, 0.0)
    scale = tl.load(saved + (client * 2 + 1) * channels + c, known, 0.0)
    factor, shift = _line(mean, scale, weight, bias, client * channels + c, known, AFFINE)
    d = tl.load(g + spot, there, 0.0).to(tl.float32)
    v = tl.load(x + spot, there, 0.0).to(tl.float32)
    d = _let_through(d, v, y + spot, there, factor, shift, ADD, RELU)
    if ADD and RELU:
        tl.store(passed + spot, d.to(passed.dtype.element_ty), there)
    hat = (v - mean[None, :]) * scale[None, :]
    one, two = tl.sum(d, 0), tl.sum(d * hat, 0)
    if AFFINE:
        tl.store(dbias + client * channels + c, one, known)
        tl.store(dweight + client * channels + c, two, known)
    out = factor[None, :] * (d - (one[None, :] + hat * two[None, :]) / rows)
    tl.store(dx + spot, out.to(dx.dtype.element_ty), there)


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, momentum: float, eps: float,
    relu: bool, other: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x (C, rows, channels) in order -> the same, and what `backward` needs; updates the running mean and var in place.

    other: a tensor of the shape of x, added before the ReLU.
    """
    clients, rows, channels = x.shape
    y, saved = torch.empty_like(x), torch.empty(clients, 2, channels, device=x.device)
    given = _or(weight, x), _or(bias, x), y, saved, _or(mean, x), _or(var, x), rows, channels
    what = weight is not None, mean is not None, other is not None, relu
    if rows <= FEW:
        few, how = _at_once(x)
        _forward_few[few](x, _or(other, x), *given, momentum, eps, *what, **how)
        return y, saved
    grid, how, blocks = _blocks(x)
    part = torch.empty(clients, blocks, 2, channels, device=x.device)
    many = triton.next_power_of_2(blocks)
    _moments[grid](x, part, rows, channels, blocks, **how)
    _normalise[grid](x, _or(other, x), part, *given, blocks, momentum, eps, *what, many, **how)
    return y, saved


def backward(
    x: Tensor, g: Tensor, saved: Tensor, weight: Tensor | None, bias: Tensor | None, relu: bool, y: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Gradients of x, weight and bias, and of what was added; y: the result, needed where something was."""
    clients, rows, channels = x.shape
    add, affine = y is not None, (_or(weight, x), _or(bias, x))
    dx, passed = torch.empty_like(x), torch.empty_like(g) if add and relu else g
    dweight, dbias = (None, None) if weight is None else (torch.empty_like(saved[:, 0]) for _ in "wb")
    to = _or(dweight, x), _or(dbias, x)
    if rows <= FEW:
        few, how = _at_once(x)
        _back_few[few](x, g, _or(y, x), saved, *affine, dx, passed, *to, rows, channels, weight is not None, add, relu, **how)
        return dx, dweight, dbias, passed
    grid, how, blocks = _blocks(x)
    part = torch.empty(clients, blocks, 2, channels, device=x.device)
    _slopes[grid](x, g, _or(y, x), saved, part, *affine, passed, rows, channels, blocks, weight is not None, add, relu, **how)
    _back[grid](
        x, passed, saved, part, *affine, dx, *to, rows, channels, blocks,
        weight is not None, relu and not add, triton.next_power_of_2(blocks), **how,
    )  # fmt: skip
    return dx, dweight, dbias, passed


FEW = 512
"""Rows of a client that one program can hold."""


def _or(v: Tensor | None, other: Tensor) -> Tensor:
    return other if v is None else v


def _at_once(x: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid and the kernels' parameters: enough channels per program for few programs, but one for every unit."""
    clients, rows, channels = x.shape
    high = triton.next_power_of_2(rows)
    ch = next((n for n in (64, 32) if high * n <= 8192 and triton.cdiv(channels, n) * clients >= 264), 16)
    return (triton.cdiv(channels, ch), clients), {"ROWS": high, "CH": ch, "num_warps": 8 if high * ch > 4096 else 4}


def _blocks(
    x: Tensor, at_once: int | None = None, programs: int = 1056, warps: int = 4
) -> tuple[tuple[int, int, int], dict[str, int], int]:
    """How the rows are split: the grid, the kernels' parameters, and the number of blocks."""
    clients, rows, channels = x.shape
    ch = min(64, max(16, triton.next_power_of_2(channels)))
    block = min(at_once or (128 if x.dtype == torch.bfloat16 else 32), max(1, triton.next_power_of_2(rows)))
    wide = triton.cdiv(channels, ch)
    blocks = max(1, min(64, -(-programs // (clients * wide)), triton.cdiv(rows, block)))
    per = triton.cdiv(triton.cdiv(rows, blocks), block) * block
    blocks = triton.cdiv(rows, per)
    return (blocks, wide, clients), {"ROWS": per, "BLOCK": block, "CH": ch, "num_warps": warps}, blocks
