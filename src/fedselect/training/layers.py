"""Layers for C clients at once, each with its own weights: Linear, norms, pooling, forward and backward.

On a GPU the products and sums run in our kernels; the plain PyTorch here computes the same, and is what a CPU runs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedselect import kernels
from fedselect.training.convolution import Pair
from fedselect.training.products import bmm


class Linear(torch.autograd.Function):
    """x (C, B, I), w (C, O, I), b (C, O)."""

    @staticmethod
    def shared(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        """The same if all clients have one frozen w (O, I): one product over all of their rows."""
        if x.device.type == "cpu":  # its rounding would depend on the number of clients
            return Linear.apply(x, w.expand(len(x), -1, -1), None if b is None else b.expand(len(x), -1))  # type: ignore[no-any-return, no-untyped-call]
        return F.linear(x.flatten(0, 1), w.to(x.dtype), None if b is None else b.to(x.dtype)).view(*x.shape[:2], -1)

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        w = w.to(x.dtype)
        ctx.save_for_backward(x, w)
        y = bmm(x, w.transpose(1, 2))
        return y if b is None else y.add_(b.unsqueeze(1))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        wide = torch.promote_types(g.dtype, torch.float32)
        dx = bmm(g, w) if ctx.needs_input_grad[0] else None
        dw = bmm(g.transpose(1, 2), x).to(wide) if ctx.needs_input_grad[1] else None
        return dx, dw, g.sum(1, dtype=wide) if ctx.needs_input_grad[2] else None


class AdaptedLinear(torch.autograd.Function):
    """x (C, B, I), shared and frozen w (O, I) and bias (O,), a (C, r, I), b (C, O, r): x W + scale * x A B.

    The adapters' part is added to the base's result in place; neither it nor x's gradient is written twice.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        w, a, b = (v.to(x.dtype) for v in (w, a, b))
        low = torch.bmm(x, a.transpose(1, 2)).mul_(scale)
        ctx.scale = scale
        ctx.save_for_backward(x, low, w, a, b)
        y = F.linear(x.flatten(0, 1), w, None if bias is None else bias.to(x.dtype)).view(*x.shape[:2], -1)
        return y.baddbmm_(low, b.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, low, w, a, b = ctx.saved_tensors
        wide = torch.promote_types(g.dtype, torch.float32)
        g = g.contiguous()
        through = torch.bmm(g, b).mul_(ctx.scale)
        dx = da = db = None
        if ctx.needs_input_grad[0]:
            dx = (g.flatten(0, 1) @ w).view(x.shape).baddbmm_(through, a)
        if ctx.needs_input_grad[3]:
            da = torch.bmm(through.transpose(1, 2), x).to(wide)
        if ctx.needs_input_grad[4]:
            db = torch.bmm(g.transpose(1, 2), low).to(wide)
        return dx, None, None, da, db, None


class BatchNorm(torch.autograd.Function):
    """Training: x (C, B, channels, ...), weight and bias (C, channels); running mean and var are updated in place.

    other: a tensor like x that is added to the result.   relu: whether a ReLU follows.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None,
        momentum: float, eps: float, relu: bool = False, other: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        ctx.over, ctx.kernels, ctx.relu, ctx.add = [1, *range(3, x.ndim)], kernels.serve(x), relu, other is not None
        if ctx.kernels:
            from fedselect.kernels import norm

            flat = _channels_last(x)
            rows = flat.view(len(x), -1, x.shape[2])
            more = None if other is None else _channels_last(other).view(rows.shape)
            y, saved = norm.forward(rows, weight, bias, mean, var, momentum, eps, relu, more)
            ctx.save_for_backward(rows, saved, weight, bias, y if ctx.add else None)
            return y.view(flat.shape).movedim(-1, 2)
        given, x = x, x.to(torch.promote_types(x.dtype, torch.float32))
        count = x[0].numel() // x.shape[2]
        now_var, now_mean = torch.var_mean(x, ctx.over, correction=0)
        if mean is not None and var is not None:
            mean.mul_(1 - momentum).add_(now_mean * momentum)
            var.mul_(1 - momentum).add_(now_var * (momentum * count / (count - 1)))
        narrow = torch.rsqrt(now_var + eps)
        scale = narrow if weight is None else narrow * weight
        shift = -now_mean * scale if bias is None else bias - now_mean * scale
        y = _across(shift, x).addcmul(x, _across(scale, x))
        y = y if other is None else y.add_(other)
        y = (y.relu_() if relu else y).to(given.dtype)
        ctx.save_for_backward(given, now_mean, narrow, weight, y if relu else None)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        if ctx.kernels:
            from fedselect.kernels import norm

            x, saved, weight, bias, y = ctx.saved_tensors
            flat = _channels_last(g)
            dx, dweight, dbias, passed = norm.backward(x, flat.view(x.shape), saved, weight, bias, ctx.relu, y)
            dx, passed = (v.view(flat.shape).movedim(-1, 2) for v in (dx, passed))
            return dx, dweight, dbias, *[None] * 5, passed if ctx.add else None
        x, mean, narrow, weight, y = ctx.saved_tensors
        kind = g.dtype
        x, g = (v.to(torch.promote_types(v.dtype, torch.float32)) for v in (x, g))
        g = torch.where(y > 0, g, 0.0) if ctx.relu else g
        hat = (x - _across(mean, x)) * _across(narrow, x)
        dbias, dweight = g.sum(ctx.over), (g * hat).sum(ctx.over)
        count = x[0].numel() // x.shape[2]
        scale = narrow if weight is None else narrow * weight
        dx = _across(scale, x) * (g - (_across(dbias, x) + hat * _across(dweight, x)) / count)
        own = (None, None) if weight is None else (dweight, dbias)
        return dx.to(kind), *own, *[None] * 5, g.to(kind) if ctx.add else None


class LayerNorm(torch.autograd.Function):
    """x (C, ..., *shape), weight and bias (C, *shape); in x's dtype. The normalized values are recomputed, not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int], eps: float) -> Tensor:
        y, mean, narrow = torch.native_layer_norm(x, shape, None, None, eps)
        ctx.save_for_backward(x, weight, mean, narrow)
        ctx.shape, ctx.has_bias = shape, bias is not None
        if weight is not None:
            y = y.mul_(_behind(weight, x).to(x.dtype))
        return y if bias is None else y.add_(_behind(bias, x).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight, mean, narrow = ctx.saved_tensors
        over = list(range(1, x.ndim - len(ctx.shape)))
        wide = torch.promote_types(g.dtype, torch.float32)
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            scaled = g if weight is None else g * _behind(weight, x).to(g.dtype)
            dx = torch.ops.aten.native_layer_norm_backward(
                scaled.contiguous(), x, ctx.shape, mean, narrow, None, None, [True, False, False]
            )[0]
        if ctx.needs_input_grad[1]:
            dweight = (g * ((x - mean) * narrow).to(g.dtype)).sum(over, dtype=wide)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            dbias = g.sum(over, dtype=wide)
        return dx, dweight, dbias, None, None


class MaxPool(torch.autograd.Function):
    """x (C, B, channels, H, W), kept with channels last in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
        ctx.how, ctx.size, flat = (kernel, stride, padding), tuple(x.shape[3:]), _channels_last(x)
        ctx.kernels = kernels.serve(x)
        if ctx.kernels:
            from fedselect.kernels import pool

            y, tap = pool.forward(flat, kernel, stride, padding)
            ctx.save_for_backward(tap)
            return y.movedim(-1, 2)
        pictures = flat.flatten(0, 1).movedim(-1, 1)
        best: Tensor
        best, index = torch.ops.aten.max_pool2d_with_indices(pictures, kernel, stride, padding)
        ctx.save_for_backward(pictures, index)
        return best.view(*x.shape[:3], *best.shape[2:])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        flat = _channels_last(g)
        if ctx.kernels:
            from fedselect.kernels import pool

            (tap,) = ctx.saved_tensors
            dx = pool.backward(flat, tap, ctx.size, *ctx.how).movedim(-1, 2)
        else:
            x, index = ctx.saved_tensors
            back = torch.ops.aten.max_pool2d_with_indices_backward
            dx = back(flat.flatten(0, 1).movedim(-1, 1), x, *ctx.how, (1, 1), False, index).view(*g.shape[:3], *ctx.size)
        return dx, None, None, None


def _across(v: Tensor, like: Tensor) -> Tensor:
    """(C, channels), broadcastable to (C, B, channels, ...)."""
    return v.view(len(v), 1, -1, *[1] * (like.ndim - 3))


def _behind(v: Tensor, like: Tensor) -> Tensor:
    """(C, *shape), broadcastable to (C, ..., *shape)."""
    return v.view(len(v), *[1] * (like.ndim - v.ndim), *v.shape[1:])


def _channels_last(x: Tensor) -> Tensor:
    """(C, B, channels, ...) as (C, B, ..., channels), contiguous in memory."""
    return x.movedim(2, -1).contiguous()
