"""Random numbers that a model draws during training: from the client's key of the step, in place of torch's generators.

Each call gets its own key, folded from the client's key of the step and the call's number in the forward pass. So masks depend
neither on how clients are stacked nor on the device, and a recorded step draws new ones, because its key is an input.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedselect import kernels
from fedselect.core import random
from fedselect.core.errors import InputError

SELU = -1.7580993408473766
"""The value that alpha dropout writes: SELU's limit for small inputs."""


PER_WORD = 4
"""16-bit numbers that dropout takes from one hashed word. Its probability is rounded to a multiple of 2**-16."""


def threshold(p: float) -> int:
    """The signed 16-bit number below which an entry is dropped."""
    return min(round(p * 2**16), 2**16 - 1) - 2**15


class Drawn:
    """The random numbers of one forward pass; `key` is the client's key, None outside training."""

    def __init__(self) -> None:
        self.key: Tensor | None = None
        self.step: Tensor | None = None  # a number that the key does not contain yet
        self.calls = 0

    def key_of_step(self) -> Tensor | None:
        """The key with the step's number, which most models never ask for."""
        if self.key is not None and self.step is not None:
            self.key, self.step = random.fold(self.key, self.step), None
        return self.key

    def next_key(self) -> Tensor:
        key = self.key_of_step()
        if key is None:
            raise InputError("dropout is on outside training; call the model in eval mode.")
        self.calls += 1
        return random.fold(key, self.calls)

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        """float32 in [0, 1)."""
        return random.uniform(self.next_key(), math.prod(shape)).view(shape)

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        radius = (-2.0 * torch.log1p(-self.uniform(shape))).sqrt()
        return radius * torch.cos(2.0 * math.pi * self.uniform(shape))

    def dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return x
        if p >= 1.0:
            return x * 0.0
        return _Dropout.apply(x, self.next_key(), p)  # type: ignore[no-any-return, no-untyped-call]

    def channel_dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Drops whole channels of a sample."""
        if not training or p == 0.0:
            return x
        keep = self.uniform((*x.shape[:2], *([1] * (x.ndim - 2)))) >= p
        return x * keep.to(x.dtype) / (1.0 - p) if p < 1.0 else x * 0.0

    def alpha_dropout(self, x: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
        """Dropout that keeps the mean 0 and the variance 1."""
        if not training or p == 0.0:
            return x
        keep = self.uniform(tuple(x.shape)) >= p
        scale = ((1.0 - p) * (1.0 + p * SELU * SELU)) ** -0.5 if p < 1.0 else 0.0
        return scale * torch.where(keep, x, SELU) - scale * SELU * p

    def rand(self, *size: Any, **how: Any) -> Tensor:
        return _as(self.uniform(_shape(size, how)), how)

    def rand_like(self, x: Tensor, **how: Any) -> Tensor:
        return _as(self.uniform(tuple(x.shape)), {"dtype": x.dtype, **how})

    def randn(self, *size: Any, **how: Any) -> Tensor:
        return _as(self.normal(_shape(size, how)), how)

    def randn_like(self, x: Tensor, **how: Any) -> Tensor:
        return _as(self.normal(tuple(x.shape)), {"dtype": x.dtype, **how})

    def bernoulli(self, x: Tensor, p: float | None = None) -> Tensor:
        return (self.uniform(tuple(x.shape)) < (x if p is None else p)).to(x.dtype)

    def bernoulli_(self, x: Tensor, p: float | Tensor = 0.5) -> Tensor:
        return x.copy_(self.uniform(tuple(x.shape)) < p)

    def uniform_(self, x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
        return x.copy_(self.uniform(tuple(x.shape)) * (high - low) + low)

    def normal_(self, x: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
        return x.copy_(self.normal(tuple(x.shape)) * std + mean)

    def exponential_(self, x: Tensor, rate: float = 1.0) -> Tensor:
        return x.copy_(-torch.log1p(-self.uniform(tuple(x.shape))) / rate)

    def own(self, made: Tensor) -> Tensor:
        """A copy with separate memory for every stacked client, so that random numbers may be written to it."""
        assert self.key is not None
        return torch.where(self.key == self.key, made, made)

    def rule(self, func: Callable[..., Any], kwargs: Mapping[str, Any]) -> Callable[..., Tensor] | None:
        """The replacement for a function that draws random numbers, if this one does."""
        if kwargs.get("generator") is not None:
            return None
        if name := _DROPOUTS.get(func):
            return getattr(self, name)  # type: ignore[no-any-return]
        if self.key is None:
            return None
        if func in _EMPTY:
            return lambda *a, **k: self.own(func(*a, **k))
        name = _DRAWS.get(func)
        return None if name is None else getattr(self, name)


_DROPOUTS: dict[Any, str] = {
    F.dropout: "dropout", torch.dropout: "dropout", F.dropout1d: "channel_dropout", F.dropout2d: "channel_dropout",
    F.dropout3d: "channel_dropout", F.alpha_dropout: "alpha_dropout", torch.alpha_dropout: "alpha_dropout",
}  # fmt: skip
_DRAWS: dict[Any, str] = {
    torch.rand: "rand", torch.rand_like: "rand_like", torch.randn: "randn", torch.randn_like: "randn_like",
    torch.bernoulli: "bernoulli", Tensor.bernoulli: "bernoulli", Tensor.bernoulli_: "bernoulli_",
    Tensor.uniform_: "uniform_", Tensor.normal_: "normal_",
    Tensor.exponential_: "exponential_",
}  # fmt: skip
_EMPTY = {torch.empty, torch.empty_like, Tensor.new_empty}


def _shape(size: tuple[Any, ...], how: dict[str, Any]) -> tuple[int, ...]:
    size = size or (how.pop("size"),)
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size


def _as(x: Tensor, how: Mapping[str, Any]) -> Tensor:
    x = x.to(dtype=how.get("dtype") or torch.get_default_dtype(), device=how.get("device"))
    return x.requires_grad_() if how.get("requires_grad") else x


class _Dropout(torch.autograd.Function):
    """Dropout by key. The mask is not kept for the backward pass but drawn again."""

    @staticmethod
    def forward(x: Tensor, key: Tensor, p: float) -> Tensor:
        return _dropped(x.unsqueeze(0), key.view(1), p)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.key, ctx.p = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _dropped(grad.unsqueeze(0), ctx.key.view(1), ctx.p)[0], None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, key: Tensor, p: float) -> tuple[Tensor, int]:
        x = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
        key = key.expand(info.batch_size) if in_dims[1] is None else key
        return _StackedDropout.apply(x, key, p), 0  # type: ignore[no-untyped-call]


class _StackedDropout(torch.autograd.Function):
    """x (C, ...), key (C,)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, key: Tensor, p: float) -> Tensor:
        ctx.key, ctx.p = key, p
        return _dropped(x, key, p)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _dropped(grad, ctx.key, ctx.p), None, None


def _dropped(x: Tensor, key: Tensor, p: float) -> Tensor:
    """x (C, ...) with some numbers set to 0, by each client's key, and the others scaled up."""
    if kernels.serve(x):
        from fedselect.kernels.dropout import dropout

        return dropout(x, key, threshold(p), 1.0 - p)
    size = x[0].numel()
    words = random.bits(key, -(-size // PER_WORD)).view(torch.int16)[:, :size]
    return x * (words >= threshold(p)).view(x.shape).to(x.dtype) / (1.0 - p)
