"""Running one client's forward pass for all clients at once: vmap, with our own rules where the stock ones are slow
(convolution) or not keyed by client (dropout).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedselect import random
from fedselect.errors import InputError

_CHANNEL_DROPOUTS = {F.dropout1d, F.dropout2d, F.dropout3d}


class Forward(TorchFunctionMode):
    """In force while a model runs: keyed dropout always, batched convolution when clients are stacked."""

    def __init__(self, key: Tensor | None, stacked: bool) -> None:
        super().__init__()
        self.key = key
        self.stacked = stacked
        self.calls = 0

    def __enter__(self) -> "Forward":
        self._drawn = _generators()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        super().__exit__(kind, value, trace)  # type: ignore[no-untyped-call]
        if kind is None and self.key is not None and not all(map(torch.equal, _generators(), self._drawn)):
            raise InputError(
                "the model draws random numbers other than by dropout while training; its numbers would depend on how "
                "clients are stacked. Use nn.Dropout, or draw before training."
            )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.conv2d:
            return _conv2d(self.stacked, *args, **kwargs)
        if func is F.batch_norm:
            return _batch_norm(*args, **kwargs) if self.stacked else _native_batch_norm(*args, **kwargs)
        if self.stacked and func is F.group_norm:
            return _group_norm(*args, **kwargs)
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if func in _CHANNEL_DROPOUTS:
            return self._dropout(*args, **{**kwargs, "channels": True})
        return func(*args, **kwargs)

    def _dropout(
        self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, channels: bool = False
    ) -> Tensor:
        if not training or p == 0.0:
            return x
        if self.key is None:
            raise InputError("dropout is on outside training; call the model in eval mode.")
        self.calls += 1
        shape = (*x.shape[:2], *([1] * (x.ndim - 2))) if channels else tuple(x.shape)
        count = 1
        for side in shape:
            count *= side
        keep = random.uniform(random.fold(self.key, self.calls), count).view(shape) >= p
        return x * keep / (1.0 - p) if p < 1.0 else x * 0.0


def _generators() -> list[Tensor]:
    """Where torch's own generators stand."""
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_gpu else [])]


def _batch_norm(
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """BatchNorm of one client, under vmap; the stock rule reorders all activations and sums by how many clients there are."""
    over = [0, *range(2, x.ndim)]
    count = x.numel() // x.shape[1]
    if training:
        _check_count(count)
        now_var, now_mean = torch.var_mean(x, over, correction=0)
        if mean is not None and var is not None:
            mean.mul_(1 - momentum).add_(now_mean.detach() * momentum)
            var.mul_(1 - momentum).add_(now_var.detach() * (momentum * count / (count - 1)))
        mean, var = now_mean, now_var
    assert mean is not None
    assert var is not None
    scale = torch.rsqrt(var + eps) if weight is None else torch.rsqrt(var + eps) * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    shape = (-1, *([1] * (x.ndim - 2)))
    return x * scale.view(shape) + shift.view(shape)


def _native_batch_norm(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if kwargs.get("training", args[4] if len(args) > 4 else False):
        _check_count(x.numel() // x.shape[1])
    return F.batch_norm(x, *args, **kwargs)


def _check_count(count: int) -> None:
    if count == 1:
        raise InputError("BatchNorm needs more than one value per channel: raise batch_size, or give each client two samples.")


def _group_norm(x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """GroupNorm of one client, under vmap, where the stock one does not run."""
    parts = x.reshape(x.shape[0], groups, -1)
    var, mean = torch.var_mean(parts, -1, correction=0, keepdim=True)
    out = ((parts - mean) * torch.rsqrt(var + eps)).view(x.shape)
    shape = (-1, *([1] * (x.ndim - 2)))
    out = out if weight is None else out * weight.view(shape)
    return out if bias is None else out + bias.view(shape)


def _conv2d(
    stacked: bool,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """A convolution without the taps that only ever meet padding, batched over clients when they are stacked."""
    if isinstance(padding, str) or x.ndim != 4:
        return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
    stride, padding, dilation = _pair(stride), _pair(padding), _pair(dilation)
    spans = [_live(x.shape[2 + a], weight.shape[2 + a], stride[a], padding[a], dilation[a]) for a in (0, 1)]
    if any(last - first < weight.shape[2 + a] for a, (first, last, _, _) in enumerate(spans)):
        (top, bottom, above, below), (left, right, before, behind) = spans
        weight = _Taps.apply(weight, top, bottom, left, right)  # type: ignore[no-untyped-call]
        if above or below or before or behind:
            x = F.pad(x, (before, behind, above, below))
        padding = (0, 0)
    if groups == 1 and padding == (0, 0) and dilation == (1, 1) and x.shape[2:] == weight.shape[2:]:
        return F.linear(x.flatten(1), weight.flatten(1), bias)[..., None, None]  # one window: a matrix product
    if stacked and groups == 1:
        return _StackedConv2d.apply(x, weight, bias, stride, padding, dilation)  # type: ignore[no-any-return, no-untyped-call]
    return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)


def _live(size: int, kernel: int, stride: int, padding: int, dilation: int) -> tuple[int, int, int, int]:
    """The taps first to last of a kernel that ever meet the input, and the padding that those still need on each side."""
    out = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    met = [t for t in range(kernel) if any(0 <= o * stride - padding + t * dilation < size for o in range(out))]
    if not met:  # nothing but padding: leave it as it is
        return 0, kernel, padding, padding
    first, last = met[0], met[-1] + 1
    before = padding - first * dilation
    behind = (out - 1) * stride + (last - 1 - first) * dilation + 1 - size - before
    return first, last, before, behind  # negative: the input's edge is never met


def _pair(v: Any) -> tuple[int, int]:
    if isinstance(v, int):
        return v, v
    return (v[0], v[0]) if len(v) == 1 else (v[0], v[1])


Pair = tuple[int, int]


class _Taps(torch.autograd.Function):
    """Part of a kernel; the gradient of the rest is zero, written in one go."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, top: int, bottom: int, left: int, right: int) -> Tensor:
        return weight[..., top:bottom, left:right].clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        weight, top, bottom, left, right = inputs
        ctx.rest = (left, weight.shape[-1] - right, top, weight.shape[-2] - bottom)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return F.pad(grad, ctx.rest), None, None, None, None


class _StackedConv2d(torch.autograd.Function):
    """What vmap sees of a convolution: without a client axis the stock one, with it `Conv`."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor | None, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
        return torch.conv2d(x, w, b, stride, padding, dilation)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass  # gradients flow through `Conv`, which vmap calls

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, w: Tensor, b: Tensor | None, *rest: Pair) -> tuple[Tensor, int]:
        def front(v: Tensor | None, dim: int | None) -> Tensor | None:
            if v is None:
                return None
            return v.expand(info.batch_size, *v.shape) if dim is None else v.movedim(dim, 0)

        return Conv.apply(front(x, in_dims[0]), front(w, in_dims[1]), front(b, in_dims[2]), *rest)[0], 0  # type: ignore[no-untyped-call]


class Conv(torch.autograd.Function):
    """Convolution of C clients, each with its own weights: patches, then one batched matrix product.

    x (C, B, I, H, W), w (C, O, I, kh, kw), b (C, O). Activations are kept with channels last; the result is a view
    of that in the usual order, so the next layer finds them as it wants them.
    """

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor | None, stride: Pair, padding: Pair, dilation: Pair) -> Any:
        patches, (high, wide) = _patches(x.permute(0, 1, 3, 4, 2), (w.shape[3], w.shape[4]), stride, padding, dilation)
        kernel = w.permute(0, 3, 4, 2, 1).reshape(w.shape[0], -1, w.shape[1])
        y = bmm(patches, kernel)
        if b is not None:
            y += b.unsqueeze(1)
        return y.view(x.shape[0], x.shape[1], high, wide, -1).permute(0, 1, 4, 2, 3), patches, kernel

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, b, *ctx.how = inputs
        _, patches, kernel = output
        ctx.mark_non_differentiable(patches, kernel)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(patches, kernel)
        ctx.x, ctx.w, ctx.bias = x.shape, w.shape, b is not None

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: None) -> Any:
        patches, kernel = ctx.saved_tensors
        clients, out, inside, kh, kw = ctx.w
        stride, padding, dilation = ctx.how
        dx = dw = db = None
        g = grad.permute(0, 1, 3, 4, 2)
        flat = g.reshape(clients, -1, out)
        if ctx.needs_input_grad[1]:
            dw = bmm(patches.transpose(1, 2), flat).view(clients, kh, kw, inside, out).permute(0, 4, 3, 1, 2)
        if ctx.needs_input_grad[2]:
            db = flat.sum(1)
        if ctx.needs_input_grad[0]:
            high, wide = grad.shape[-2:]
            _, batch, _, height, width = ctx.x
            spread = bmm(flat, kernel.transpose(1, 2)).view(clients, batch, high, wide, kh, kw, inside)
            room = (height + 2 * padding[0], width + 2 * padding[1])
            full = grad.new_zeros(clients, batch, *room, inside)
            for i in range(kh):
                for j in range(kw):
                    top, left = i * dilation[0], j * dilation[1]
                    full[:, :, top : top + high * stride[0] : stride[0], left : left + wide * stride[1] : stride[1]] += spread[
                        :, :, :, :, i, j
                    ]
            dx = full[:, :, padding[0] : padding[0] + height, padding[1] : padding[1] + width].permute(0, 1, 4, 2, 3)
        return dx, dw, db, None, None, None


def _patches(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> tuple[Tensor, Pair]:
    """Every window of a channels-last (C, B, H, W, I) as one row: (C, B*Ho*Wo, kh*kw*I), and (Ho, Wo)."""
    clients, batch, height, width, inside = x.shape
    high = (height + 2 * padding[0] - dilation[0] * (kernel[0] - 1) - 1) // stride[0] + 1
    wide = (width + 2 * padding[1] - dilation[1] * (kernel[1] - 1) - 1) // stride[1] + 1
    x = F.pad(x, (0, 0, padding[1], padding[1], padding[0], padding[0])).contiguous()
    c, n, h, w, i = x.stride()
    windows = x.as_strided(
        (clients, batch, high, wide, kernel[0], kernel[1], inside),
        (c, n, h * stride[0], w * stride[1], h * dilation[0], w * dilation[1], i),
        x.storage_offset(),
    )
    return windows.reshape(clients, batch * high * wide, kernel[0] * kernel[1] * inside), (high, wide)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """A batched matrix product whose rows do not depend on how many clients are stacked.

    On a CPU a batch of one is summed in another order than a longer batch; a lone client is therefore run as two.
    """
    if len(a) == 1 and a.device.type == "cpu":
        return torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
    return torch.bmm(a, b)
