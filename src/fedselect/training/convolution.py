"""Convolutions of C clients at once, each with its own kernel, forward and backward.

On a GPU our kernels compute them. On a CPU there are three ways. The work of one client's batch decides which, never how many
clients there are, so a client gets the same bits in any company:

- little work: every window is copied into a row, and one batched product multiplies the rows of all clients;
- more: one convolution of torch's, in which every client is a group of channels, and the same for the gradient of its input.
  Only forward convolutions round the same whatever the number of groups is, so this gradient is computed as one;
- much: client by client, as torch convolves for one client. Then calls cost nothing beside the work.
"""

import math
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedselect import kernels
from fedselect.training.products import bmm

Pair = tuple[int, int]
GROUPED = 500_000
"""Products of a client from which clients become groups of one convolution, as measured on CPUs with AVX2 and AVX-512."""
EVEN = 8
"""For groups, channels in and out must be multiples of this."""
ALONE = 4_000_000
"""Products of a client from which clients are convolved one after another; half as many where they cannot be groups."""
FEW = 8
"""Below this many channels, a CPU copies windows number by number: their rows are too short for anything else."""


class How(NamedTuple):
    """Stride, padding and dilation of a convolution, by height and width."""

    stride: Pair
    padding: Pair
    dilation: Pair

    def sides(self, picture: Pair, kernel: Pair) -> Pair:
        """Height and width of the result."""
        high, wide = (
            (p + 2 * pad - d * (k - 1) - 1) // s + 1
            for p, k, s, pad, d in zip(picture, kernel, self.stride, self.padding, self.dilation, strict=True)
        )
        return high, wide

    def keeps(self, picture: Pair, kernel: Pair) -> bool:
        """Whether results are as large as pictures, and kernels not larger. Then the gradient of the input is a convolution
        like this one, with kernels turned around.
        """
        fits = all(d * (k - 1) < p for p, k, d in zip(picture, kernel, self.dilation, strict=True))
        return fits and self.stride == (1, 1) and self.sides(picture, kernel) == picture


class Conv(torch.autograd.Function):
    """x (C, B, I, H, W), w (C, O, I, kh, kw), b (C, O). Activations are kept with channels last; the result is a view of them
    in the usual order, so the next layer gets the layout that it needs.
    """

    @staticmethod
    def shared(
        x: Tensor, w: Tensor, b: Tensor | None, stride: Pair, padding: Pair, dilation: Pair, precision: str = "float32"
    ) -> Tensor:
        """The same if all clients have one frozen w (O, I, kh, kw): one convolution for all of them."""
        if x.device.type == "cpu":
            whole = w.expand(len(x), *w.shape)
            return Conv.apply(x, whole, b if b is None else b.expand(len(x), -1), stride, padding, dilation, precision)  # type: ignore[no-any-return, no-untyped-call]
        flat = x.flatten(0, 1).contiguous(memory_format=torch.channels_last)
        kernel = w.to(x.dtype).contiguous(memory_format=torch.channels_last)
        y = torch.convolution(flat, kernel, None, stride, padding, dilation, False, (0, 0), 1)
        y = y.view(*x.shape[:2], *y.shape[1:])
        return y if b is None else y + b.to(x.dtype).view(-1, 1, len(w), 1, 1)

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        stride: Pair,
        padding: Pair,
        dilation: Pair,
        precision: str = "float32",
    ) -> Tensor:
        ctx.how, ctx.precision, ctx.x, ctx.w = How(stride, padding, dilation), precision, x.shape, w.shape
        ctx.kernels = kernels.serve(x) and dilation == (1, 1)
        w = w.to(x.dtype)  # bf16: once, not in every program that reads it
        if ctx.kernels:
            from fedselect.kernels import conv

            ctx.save_for_backward(x, w)
            return conv.forward(x, w, b, stride, padding, dilation, precision)
        ctx.way = _way(x, w, ctx.how)
        x = _channels_last(x)
        if ctx.way == "windows":
            x = _windows(x, (w.shape[3], w.shape[4]), ctx.how)
            y = bmm(x.flatten(1, 3).flatten(2), _rows(w)).view(*x.shape[:4], -1)
        else:
            y = (_alone if ctx.way == "alone" else _grouped)(x, w, ctx.how)
        if b is not None:
            y += b.view(len(b), 1, 1, 1, -1)
        ctx.save_for_backward(x, w)
        return y.movedim(-1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        how: How = ctx.how
        x, w = ctx.saved_tensors
        dx = dw = db = None
        g = grad.movedim(2, -1)
        if ctx.needs_input_grad[2]:
            rows = g.flatten(1, 3)
            if g.device.type == "cpu":  # a sum of everything to one number may be cut among threads
                rows = rows.expand(max(2, len(g)), -1, -1)
            db = rows.sum(1, dtype=torch.promote_types(g.dtype, torch.float32))[: len(g)]
        if ctx.kernels:
            from fedselect.kernels import conv

            g = g.contiguous()
            if ctx.needs_input_grad[1]:
                dw = conv.to_kernel(x, g, ctx.w[3:], how.stride, how.padding, how.dilation, ctx.precision)
            if ctx.needs_input_grad[0]:
                dx = conv.to_input(g, w, ctx.x, how.stride, how.padding, ctx.precision)
            return dx, dw, db, None, None, None, None
        g = _canonical(g.contiguous())
        if ctx.way == "alone":
            return *_alone_backward(g, x, w, how, ctx.needs_input_grad[:2]), db, None, None, None, None
        if ctx.needs_input_grad[1]:
            rows = x if ctx.way == "windows" else _windows(x, ctx.w[3:], how)
            dw = _to_kernel(rows, g)
        if ctx.needs_input_grad[0]:
            dx = _spread(g, w, ctx.x, how) if ctx.way == "windows" else _grouped(g, w.flip(3, 4).transpose(1, 2), how)
            dx = dx.movedim(-1, 2)
        return dx, dw, db, None, None, None, None


def _way(x: Tensor, w: Tensor, how: How) -> Literal["windows", "grouped", "alone"]:
    # the other ways are oneDNN's; without it, torch's own convolution copies windows, too, client by client
    there = x.device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not there or x.dtype == torch.float64:
        return "windows"
    if x.dtype == torch.bfloat16:  # only measured for large work, for which it is meant
        return "alone"
    picture, kernel = (x.shape[3], x.shape[4]), (w.shape[3], w.shape[4])
    work = math.prod(how.sides(picture, kernel)) * x.shape[1] * w[0].numel()
    # other shapes make oneDNN's choice depend on how many groups there are
    if w.shape[1] % EVEN or w.shape[2] % EVEN or kernel == (1, 1) or not how.keeps(picture, kernel):
        return "windows" if work < ALONE // 2 else "alone"
    return "windows" if work < GROUPED else "grouped" if work < ALONE else "alone"


def _channels_last(x: Tensor) -> Tensor:
    """(C, B, I, H, W) as (C, B, H, W, I), contiguous."""
    return _canonical(x.movedim(2, -1).contiguous())


def _canonical(x: Tensor) -> Tensor:
    """A contiguous tensor with strides that say so: those of an axis of length one may be anything."""
    return x.view(-1).view(x.shape)


def _alone(x: Tensor, w: Tensor, how: How) -> Tensor:
    """Client by client; x and the result (C, B, H, W, channels)."""
    each = (torch.convolution(a.movedim(-1, 1), k, None, *how, False, (0, 0), 1) for a, k in zip(x, w, strict=True))
    return torch.stack([y.movedim(1, -1) for y in each])


def _alone_backward(
    g: Tensor, x: Tensor, w: Tensor, how: How, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of input and kernel."""
    back = torch.ops.aten.convolution_backward
    each = [
        back(d.movedim(-1, 1), a.movedim(-1, 1), k, None, *how, False, (0, 0), 1, (*wanted, False))
        for d, a, k in zip(g, x, w, strict=True)
    ]
    dx = torch.stack([d.movedim(1, -1) for d, _, _ in each]).movedim(-1, 2) if wanted[0] else None
    return dx, torch.stack([d for _, d, _ in each]) if wanted[1] else None


def _grouped(x: Tensor, w: Tensor, how: How) -> Tensor:
    """Every client a group of channels; x and the result (C, B, H, W, channels)."""
    together = _canonical(x.permute(1, 2, 3, 0, 4).contiguous().flatten(3)).movedim(-1, 1)
    y = _by_onednn(together, w.flatten(0, 1), how, len(x))
    return y.movedim(1, -1).reshape(*y.shape[:1], *y.shape[2:], len(x), -1).movedim(3, 0).contiguous()


def _by_onednn(x: Tensor, w: Tensor, how: How, groups: int) -> Tensor:
    """By oneDNN, which rounds one group like many; torch may prefer something else for one. It has no float64."""
    if x.dtype == torch.float64:
        return torch.convolution(x, w, None, *how, False, (0, 0), groups)
    return torch.mkldnn_convolution(x, w, None, how.padding, how.stride, how.dilation, groups)


def _windows(x: Tensor, kernel: Pair, how: How) -> Tensor:
    """Every window of x (C, B, H, W, I), copied: (C, B, Ho, Wo, kh, kw, I)."""
    clients, batch, height, width, inside = x.shape
    high, wide = how.sides((height, width), kernel)
    (down, across), (above, before), (apart, beside) = how
    x = F.pad(x, (0, 0, before, before, above, above)).contiguous()
    c, n, h, w, i = x.stride()
    shape, strides = (high, wide, *kernel, inside), (h * down, w * across, h * apart, w * beside, i)
    if x.device.type == "cpu" and inside < FEW:
        places = torch.arange(n, device=x.device).as_strided(shape, strides).reshape(-1)
        return x.view(-1, n).index_select(1, places).view(clients, batch, *shape)
    return x.as_strided((clients, batch, *shape), (c, n, *strides), x.storage_offset()).contiguous()


def _rows(w: Tensor) -> Tensor:
    """Kernels (C, O, I, kh, kw) as factors of windows: (C, kh*kw*I, O)."""
    return w.permute(0, 3, 4, 2, 1).reshape(len(w), -1, w.shape[1])


def _to_kernel(rows: Tensor, g: Tensor) -> Tensor:
    """The gradient of the kernels, from windows (C, B, Ho, Wo, kh, kw, I) and g (C, B, Ho, Wo, O)."""
    (_, _, _, _, kh, kw, inside), out = rows.shape, g.shape[-1]
    a, b = rows.flatten(4).flatten(1, 3), g.flatten(1, 3)
    if out >= a.shape[2]:  # products are fastest if their last axis is the longer one
        return bmm(a.transpose(1, 2), b).view(-1, kh, kw, inside, out).permute(0, 4, 3, 1, 2)
    return bmm(b.transpose(1, 2), a).view(-1, out, kh, kw, inside).movedim(-1, 2)


def _spread(g: Tensor, w: Tensor, shape: torch.Size, how: How) -> Tensor:
    """The gradient of the input (C, B, H, W, I): every window's, added up where windows overlap."""
    clients, batch, inside, height, width = shape
    high, wide = g.shape[2:4]
    each = bmm(g.flatten(1, 3), _rows(w).transpose(1, 2)).view(clients, batch, high, wide, *w.shape[3:], inside)
    (down, across), (above, before), (apart, beside) = how
    full = g.new_zeros(clients, batch, height + 2 * above, width + 2 * before, inside)
    for i in range(w.shape[3]):
        for j in range(w.shape[4]):
            top, left = i * apart, j * beside
            full[:, :, top : top + high * down : down, left : left + wide * across : across].add_(each[:, :, :, :, i, j])
    return full[:, :, above : above + height, before : before + width]
