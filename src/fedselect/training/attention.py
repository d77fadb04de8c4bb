"""Attention and layer norms of all clients at once: the client axis is folded into the batch, so one fused call serves all."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedselect.training import layers


class Attention(torch.autograd.Function):
    """`F.scaled_dot_product_attention` as vmap sees it."""

    @staticmethod
    def forward(*args: Any) -> Any:
        raise RuntimeError("attention was called on tensors without a client axis")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        *_, mask, causal, scale, grouped = args
        q, k, v = (_front(t, d, info.batch_size) for t, d in zip(args[:3], in_dims[:3], strict=True))
        if mask is not None:
            mask = mask.unsqueeze(0) if in_dims[3] is None else mask.movedim(in_dims[3], 0)
            mask = mask.reshape(len(mask), *[1] * (q.ndim - mask.ndim), *mask.shape[1:])
            mask = _folded(mask.expand(*q.shape[:2], *mask.shape[2:])) if max(mask.shape[:2]) > 1 else _folded(mask)
            mask = mask.to(q.dtype) if mask.is_floating_point() else mask
        y = F.scaled_dot_product_attention(
            _folded(q), _folded(k), _folded(v), mask, 0.0, causal, scale=scale, enable_gqa=grouped
        )
        return y.view(*q.shape[:-1], v.shape[-1]) if q.ndim > 4 else y, 0


def _front(v: Tensor, dim: int | None, clients: int) -> Tensor:
    return v.expand(clients, *v.shape) if dim is None else v.movedim(dim, 0)


def _folded(v: Tensor) -> Tensor:
    """(C, B, heads, ...) as (C * B, heads, ...); unchanged without a batch."""
    return v.flatten(0, 1) if v.ndim > 4 else v


class LayerNorm(torch.autograd.Function):
    """`F.layer_norm` as vmap sees it."""

    @staticmethod
    def forward(*args: Any) -> Any:
        raise RuntimeError("a layer norm was called on tensors without a client axis")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        x, weight, bias, shape, eps = args
        x = _front(x, in_dims[0], info.batch_size)
        if in_dims[1] is None and in_dims[2] is None:
            return layer_norm(x, weight, bias, shape, eps), 0
        weight, bias = (
            v if v is None else _front(v, d, info.batch_size) for v, d in zip((weight, bias), in_dims[1:3], strict=True)
        )
        return layers.LayerNorm.apply(x, weight, bias, shape, eps), 0  # type: ignore[no-untyped-call]


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int], eps: float) -> Tensor:
    """In the dtype of x, whatever the dtype of the weights."""
    weight, bias = (v if v is None else v.to(x.dtype) for v in (weight, bias))
    return F.layer_norm(x, shape, weight, bias, eps)


def _opened(func: Any) -> FunctionType:
    """torch's own code of a function, run so that our rules see every operation inside it."""
    return FunctionType(
        func.__code__, {**vars(F), "has_torch_function": _no, "has_torch_function_unary": _no}, argdefs=func.__defaults__
    )


def _no(_: Any) -> bool:
    return False


OPENED: dict[Callable[..., Any], Callable[..., Any]] = {
    f: _opened(f) for f in (F.multi_head_attention_forward, F.gumbel_softmax)
}
