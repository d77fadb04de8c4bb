"""Attention and layer norms of all clients at once: the client axis is folded into the batch, so one fused call serves all."""

from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedselect.training import layers


class Attention(torch.autograd.Function):
    """What vmap sees of `F.scaled_dot_product_attention`."""

    @staticmethod
    def forward(*args: Any) -> Any:
        raise RuntimeError("attention of tensors that no client has a share in")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None,
        grouped: bool,
    ) -> tuple[Tensor, int]:  # fmt: skip
        q, k, v = (_front(t, d, info.batch_size) for t, d in zip((q, k, v), in_dims, strict=False))
        folded = (_folded(t) for t in (q, k, v))
        if mask is not None:
            mask = mask.unsqueeze(0) if in_dims[3] is None else mask.movedim(in_dims[3], 0)
            mask = mask.reshape(len(mask), *[1] * (q.ndim - mask.ndim), *mask.shape[1:])
            mask = _folded(mask.expand(*q.shape[:2], *mask.shape[2:])) if max(mask.shape[:2]) > 1 else _folded(mask)
            mask = mask.to(q.dtype) if mask.is_floating_point() else mask
        y = F.scaled_dot_product_attention(*folded, mask, 0.0, causal, scale=scale, enable_gqa=grouped)
        return y.unflatten(0, (info.batch_size, -1)) if q.ndim > 4 else y, 0


def _front(v: Tensor, dim: int | None, clients: int) -> Tensor:
    return v.expand(clients, *v.shape) if dim is None else v.movedim(dim, 0)


def _folded(v: Tensor) -> Tensor:
    """(C, B, heads, ...) as (C * B, heads, ...); without a batch as it is."""
    return v.flatten(0, 1) if v.ndim > 4 else v


class LayerNorm(torch.autograd.Function):
    """What vmap sees of `F.layer_norm`."""

    @staticmethod
    def forward(*args: Any) -> Any:
        raise RuntimeError("a layer norm of tensors that no client has a share in")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int], eps: float
    ) -> tuple[Tensor, int]:
        x = _front(x, in_dims[0], info.batch_size)
        if in_dims[1] is None and in_dims[2] is None:
            return layer_norm(x, weight, bias, shape, eps), 0
        weight, bias = (
            v if v is None else _front(v, d, info.batch_size) for v, d in zip((weight, bias), in_dims[1:3], strict=True)
        )
        return layers.LayerNorm.apply(x, weight, bias, shape, eps), 0  # type: ignore[no-untyped-call]


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int], eps: float) -> Tensor:
    """In the type of x, whatever that of the weights."""
    weight, bias = (v if v is None else v.to(x.dtype) for v in (weight, bias))
    return F.layer_norm(x, shape, weight, bias, eps)


multi_head = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda _: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)
"""torch's own code of multi-head attention, in which every operation is seen by our rules: it does not hide behind its name."""
