"""Runs one client's forward pass for all clients at once: vmap, with our own rules where torch's are slow (convolution, Linear,
norms, attention) or not keyed by client (whatever draws random numbers).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fedselect import kernels
from fedselect.core.errors import InputError
from fedselect.models.adapters import adapted_as_written, adapted_linear
from fedselect.training import attention, blocks, layers, tails
from fedselect.training.convolution import Conv, Pair
from fedselect.training.drawn import Drawn
from fedselect.training.endings import Endings, looks
from fedselect.training.lifted import Lifted, batched
from fedselect.training.taps import Crop, Taps, live_taps

USUAL = 32
"""Samples of a usual batch: what a client gets must not depend on how many samples are computed at once."""
_Conv2d, _Linear, _BatchNorm, _MaxPool, _AdaptedLinear = map(
    Lifted, (Conv, layers.Linear, layers.BatchNorm, layers.MaxPool, layers.AdaptedLinear)
)
_SLOW = {torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d}


class Forward(TorchFunctionMode):
    """Active while a model runs: keyed random numbers always, our stacked rules if clients are stacked.

    `live` gives, for a kernel (by identity), the tensor of its live taps to use in its place, so that unused taps are neither
    read nor given a gradient; `held` the same for a frozen kernel, if these are its taps. `watched`, if given names by
    identity, learns which kernels allow that: those whose only use is one convolution with taps that meet nothing but padding.
    `endings` follows BatchNorms of stacked clients.
    """

    def __init__(
        self, key: Tensor | None, stacked: bool, precision: str = "float32", watch: bool = True, compiling: bool = False
    ) -> None:
        super().__init__()
        self._compiling = compiling and stacked
        watch = watch and not stacked  # vmap itself refuses to draw
        self._draws: Any = _Draws() if watch else None  # type: ignore[no-untyped-call]
        self.drawn = Drawn()
        self.drawn.key = key
        self.stacked = stacked
        self.precision = precision
        self.live: dict[int, Tensor] = {}
        self.held: dict[int, tuple[Taps, Tensor]] = {}
        self.watched: dict[int, str] = {}
        self.uses: dict[str, list[Taps | None]] = {}
        self.endings = Endings()
        self.slow: set[str] = set()  # operations that use torch's own, slow rule for all clients

    def __enter__(self) -> "Forward":
        self._before = [] if self._draws is None else _generators()
        self._told = said_to_be_compiling() if self._compiling else nullcontext()
        self._told.__enter__()
        if self._draws is not None:
            self._draws.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        super().__exit__(kind, value, trace)  # type: ignore[no-untyped-call]
        if self._draws is not None:
            self._draws.__exit__(kind, value, trace)
        self._told.__exit__(kind, value, trace)
        drew = self._draws is not None and self._draws.any and not all(map(torch.equal, _generators(), self._before))
        if kind is None and self.drawn.key is not None and drew:
            raise InputError(
                "the model draws random numbers during training in a way that cannot be keyed by client, so they would "
                "depend on how clients are stacked. Use dropout, torch.rand, torch.randn, torch.bernoulli or the like."
            )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        done = self.endings.meet(func, args, kwargs)
        if done is not None:
            return done
        if self.watched and func is not torch.conv2d:
            self._note(func, args, kwargs)
        if func is torch.conv2d:
            return self._conv2d(*args, **kwargs)
        if func is F.batch_norm:
            return self._batch_norm(*args, **kwargs) if self.stacked else _native_batch_norm(*args, **kwargs)
        if func is F.linear and (self.stacked or self.precision == "bf16"):
            return self._linear(*args, **kwargs)
        if self.stacked and func is F.max_pool2d:
            return _max_pool2d(*args, **kwargs)
        if self.stacked and func is F.adaptive_avg_pool2d:
            return _adaptive_avg_pool2d(*args, **kwargs)
        if self.stacked and func is F.group_norm:
            return _group_norm(*args, **kwargs)
        if func is F.embedding:
            return _embedding(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is adapted_linear:
            return self._adapted_linear(*args)
        if func is blocks.block:
            return self._block(*args, **kwargs)
        if func in attention.OPENED:
            with self._seeing():
                return attention.OPENED[func](*args, **kwargs)
        if func is F.layer_norm:
            return self._layer_norm(*args, **kwargs)
        if drawn := self.drawn.rule(func, kwargs):
            return drawn(*args, **kwargs)
        if self.stacked and func is torch.conv1d:
            return self._conv1d(*args, **kwargs)
        if self.stacked and tails.uneven(func, args, kwargs):
            return tails.filled(func, args, kwargs)
        if self.stacked and func in _SLOW:
            self.slow.add(func.__name__)
        return func(*args, **kwargs)

    def crops(self) -> Mapping[str, Taps]:
        """The watched kernels of which only some taps are used, with those taps."""
        return {n: uses[0] for n, uses in self.uses.items() if len(uses) == 1 and uses[0] is not None}

    def _note(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], taps: Taps | None = None) -> None:
        if looks(func):
            return
        for value in (*args, *kwargs.values()):
            for v in value if isinstance(value, list | tuple) else (value,):
                if id(v) in self.watched:
                    self.uses.setdefault(self.watched[id(v)], []).append(taps)

    @contextmanager
    def _seeing(self) -> Iterator[None]:
        """Make our rules active within a rule, for the operations inside it."""
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _block(self, inner: nn.Module, *args: Any, **named: Any) -> Any:
        """A block whose activations are recomputed with the same keys, if gradients are needed."""
        key = self.drawn.key_of_step()
        if key is None or not torch.is_grad_enabled():
            with self._seeing():
                return inner(*args, **named)
        start = self.drawn.calls

        @contextmanager
        def within(key: Tensor) -> Iterator[None]:
            self.drawn.key, self.drawn.calls = key, start
            with said_to_be_compiling() if self._compiling else nullcontext(), self._seeing():
                yield

        out = blocks.again(inner, args, named, key, within, self.stacked)
        self.drawn.key = key
        return out

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """One fused call for all clients. Dropout by key uses plain products, because the fused ones draw their own masks."""
        mask = attn_mask.to(q.dtype) if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
        if not dropout_p and not self.stacked:
            return F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        if not dropout_p:
            return attention.Attention.apply(q, k, v, mask, is_causal, scale, enable_gqa)  # type: ignore[no-any-return, no-untyped-call]
        if enable_gqa:
            k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
        scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if mask is None:
            weights = scores.softmax(-1)
        else:
            scores = torch.where(mask, scores, -torch.inf) if mask.dtype == torch.bool else scores + mask
            nothing = (scores == -torch.inf).all(-1, keepdim=True)  # rows with nothing to attend to become zeros
            weights = torch.where(nothing, 0.0, torch.where(nothing, 0.0, scores).softmax(-1))
        return self.drawn.dropout(weights.to(v.dtype), dropout_p) @ v

    def _layer_norm(
        self, x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Tensor:
        if self.stacked:
            return attention.LayerNorm.apply(x, weight, bias, list(shape), eps)  # type: ignore[no-any-return, no-untyped-call]
        return attention.layer_norm(x, weight, bias, list(shape), eps)

    def _conv2d(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        """A convolution without the taps that only ever meet padding, batched over stacked clients."""
        x = x.bfloat16() if self.precision == "bf16" else x
        if isinstance(padding, str) or x.ndim != 4:
            self._note(torch.conv2d, (weight,), {})
            return torch.conv2d(
                x, weight.to(x.dtype), bias if bias is None else bias.to(x.dtype), stride, padding, dilation, groups
            )
        stride, padding, dilation = _pair(stride), _pair(padding), _pair(dilation)
        spans = [live_taps(x.shape[2 + a], weight.shape[2 + a], stride[a], padding[a], dilation[a]) for a in (0, 1)]
        cropped = any(last - first < weight.shape[2 + a] for a, (first, last, _, _) in enumerate(spans))
        taps = Taps(*spans[0][:2], *spans[1][:2]) if cropped else None
        self._note(torch.conv2d, (weight,), {}, taps)
        if taps is not None:
            live, (held, part) = self.live.get(id(weight)), self.held.get(id(weight), (None, weight))
            if live is None:
                live = part if held == taps else Crop.apply(weight, taps)  # type: ignore[no-untyped-call]
            weight = live
            (_, _, above, below), (_, _, before, behind) = spans
            if above or below or before or behind:
                x = F.pad(x, (before, behind, above, below))
            padding = (0, 0)
        window = x.shape[2:] == weight.shape[2:] and (not x.is_cuda or tuple(x.shape[2:]) == (1, 1))
        if window and groups == 1 and padding == (0, 0) and dilation == (1, 1):
            return self._linear(x.flatten(1), weight.flatten(1), bias)[..., None, None]  # one window: a matrix product
        if self.stacked and groups == 1 and batched(x, weight, bias):
            return _Conv2d.apply(x, weight, bias, stride, padding, dilation, self.precision)
        if self.stacked and batched(weight, bias):
            self.slow.add("conv2d with groups")
        if not self.stacked and not x.is_cuda:  # torch reorders what is in another layout; the smaller part should be that
            pictures = x.shape[1:].numel() * USUAL > weight.numel()
            x = x.contiguous(memory_format=torch.channels_last if pictures else torch.contiguous_format)
        return torch.conv2d(
            x, weight.to(x.dtype), bias if bias is None else bias.to(x.dtype), stride, padding, dilation, groups
        )

    def _conv1d(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:  # fmt: skip
        """A convolution of pictures one row high."""
        if isinstance(padding, str):
            self.slow.add("conv1d with a named padding")
            return torch.conv1d(x, weight, bias, stride, padding, dilation, groups)
        stride, padding, dilation = (_pair(v)[0] for v in (stride, padding, dilation))
        row = self._conv2d(x.unsqueeze(-2), weight.unsqueeze(-2), bias, (1, stride), (0, padding), (1, dilation), groups)
        return row.squeeze(-2)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x = x.bfloat16() if self.precision == "bf16" else x
        if x.ndim < 2 or weight.ndim != 2 or not self.stacked or not batched(x, weight, bias):
            return F.linear(x, weight.to(x.dtype), bias if bias is None else bias.to(x.dtype))
        return _Linear.apply(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], -1)

    def _adapted_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        shared = not (batched(weight, bias) or weight.requires_grad or (bias is not None and bias.requires_grad))
        if not (self.stacked and x.is_cuda and x.ndim > 1 and shared and batched(x, a, b)):
            with self._seeing():
                return adapted_as_written(x, weight, bias, a, b, scale)
        x = x.bfloat16() if self.precision == "bf16" else x
        y = _AdaptedLinear.apply(x.flatten(0, -2), weight, bias, a, b, scale)
        return y.view(*x.shape[:-1], -1)

    def _batch_norm(
        self,
        x: Tensor,
        mean: Tensor | None,
        var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """BatchNorm of one client, under vmap; torch's rule reorders all activations and sums by the number of clients."""
        if weight is None and bias is not None:
            weight = torch.ones_like(bias)
        if bias is None and weight is not None:
            bias = torch.zeros_like(weight)
        if training:
            _check_count(x.numel() // x.shape[1])

            def make(relu: bool, other: Tensor | None) -> Tensor:
                return _BatchNorm.apply(x, weight, bias, mean, var, momentum, eps, relu, other)

            return self.endings.norm(x, make)
        assert mean is not None
        assert var is not None
        scale = torch.rsqrt(var + eps) if weight is None else torch.rsqrt(var + eps) * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        shape = (-1, *([1] * (x.ndim - 2)))
        return shift.view(shape).addcmul(x, scale.view(shape))


@contextmanager
def said_to_be_compiling() -> Iterator[None]:
    """Let a model's code believe that it is being compiled. Code that checks this then reads no tensor's values to decide what
    to do, which is impossible for all clients at once; Hugging Face's masks do this. The flag is torch's own: on a torch
    without it nothing changes, and such a model runs client by client."""
    flags: Any = torch.compiler
    before = getattr(flags, "_is_compiling_flag", None)
    if before is None:
        yield
        return
    flags._is_compiling_flag = True
    try:
        yield
    finally:
        flags._is_compiling_flag = before


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Detects draws from torch's generators, which other threads may use at the same time."""

    any = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and skipping would import the compiler: a second at every command's start

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.any |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _generators() -> list[Tensor]:
    """The states of torch's own generators."""
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        return [torch.get_rng_state(), torch.cuda.get_rng_state()]
    return [torch.get_rng_state()]


def _native_batch_norm(
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    if training:
        _check_count(x.numel() // x.shape[1])
    if mean is not None:  # torch wants parameters in the type of the statistics, which stay float32 in a bf16 base
        weight, bias = (v if v is None else v.to(mean.dtype) for v in (weight, bias))
    return F.batch_norm(x, mean, var, weight, bias, training, *args, **kwargs)


def _check_count(count: int) -> None:
    if count == 1:
        raise InputError(
            "BatchNorm needs more than one value per channel; leave out clients with one sample or give them more, raise "
            "batch_size, or use a model without BatchNorm."
        )


def _group_norm(x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """GroupNorm of one client, under vmap, where torch's own does not run."""
    parts = x.reshape(x.shape[0], groups, -1)
    var, mean = torch.var_mean(parts, -1, correction=0, keepdim=True)
    out = ((parts - mean) * torch.rsqrt(var + eps)).view(x.shape)
    shape = (-1, *([1] * (x.ndim - 2)))
    out = out if weight is None else out * weight.view(shape)
    return out if bias is None else out + bias.view(shape)


def _embedding(
    x: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Under vmap the tables of all clients are one: an index outside a client's own rows must not reach its neighbor's, and
    torch's rule uses the padding index of the first client only. Gradients are dense.
    """
    outside = (x < 0) | (x >= len(weight))
    y = F.embedding(torch.where(outside, 2**62, x.long()), weight, None, max_norm, norm_type, scale_grad_by_freq)
    return y if padding_idx is None else torch.where((x == padding_idx % len(weight)).unsqueeze(-1), y.detach(), y)


def _adaptive_avg_pool2d(x: Tensor, output_size: Any) -> Tensor:
    """Pooling to one value per channel is a mean; torch's own then needs a layout that vmap has no rule for."""
    if output_size in (1, (1, 1), [1, 1]):
        return x.mean((-2, -1), keepdim=True)
    return F.adaptive_avg_pool2d(x, output_size)


def _max_pool2d(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    kernel = _pair(kernel_size)
    plain = x.ndim == 4 and _pair(dilation) == (1, 1) and not ceil_mode and not return_indices and max(kernel) < 16
    if not (plain and (kernels.serve(x) or x.device.type == "cpu")):
        return F.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode, return_indices)  # type: ignore[call-overload]
    return _MaxPool.apply(x, kernel, kernel if stride is None else _pair(stride), _pair(padding))


def _pair(v: Any) -> Pair:
    if isinstance(v, int):
        return v, v
    return (v[0], v[0]) if len(v) == 1 else (v[0], v[1])
