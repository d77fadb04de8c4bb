"""Adapters: the trainable part of a model with a frozen base: low-rank adapters, some of its own layers, or both.

An adapter of a layer with weight W adds scale * B A to it, with rank r: rank j is a row of A and a column of B. B starts at
zero, so training starts from the base. Merged weights, W + scale * B A, need no adapter and no code of this package.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from fedselect.core import random
from fedselect.core.errors import InputError
from fedselect.core.tree import Tree

A, B = "lora_a", "lora_b"
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)


class AdaptedLinear(nn.Linear):
    """A Linear with an adapter: lora_a (r, inputs), lora_b (outputs, r)."""

    lora_a: Tensor
    lora_b: Tensor
    scale: float

    def forward(self, x: Tensor) -> Tensor:
        return adapted_linear(x, self.weight, self.bias, self.lora_a, self.lora_b, self.scale)


def adapted_linear(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """x W + scale * x A B; replaced by a rule for stacked clients if one is active."""
    given = (x, weight, a, b)
    if has_torch_function(given):
        return handle_torch_function(adapted_linear, given, x, weight, bias, a, b, scale)
    return adapted_as_written(x, weight, bias, a, b, scale)


def adapted_as_written(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
    return F.linear(x, weight, bias) + F.linear(F.linear(x, a) * scale, b)


class _AdaptedConvolution:
    """A convolution with an adapter: lora_a (r, inputs, *kernel), lora_b (outputs, r)."""

    def forward(self: Any, x: Tensor) -> Tensor:
        low = self._conv_forward(x, self.lora_a, None) * self.scale
        up = self.lora_b.view(*self.lora_b.shape, *[1] * (self.weight.ndim - 2))
        convolve = F.conv2d if self.weight.ndim == 4 else F.conv1d
        found: Tensor = self._conv_forward(x, self.weight, self.bias) + convolve(low, up)
        return found


class AdaptedConv1d(_AdaptedConvolution, nn.Conv1d): ...


class AdaptedConv2d(_AdaptedConvolution, nn.Conv2d): ...


class AdaptedAttention(nn.MultiheadAttention):
    """An nn.MultiheadAttention with adapters of its two projection matrices."""

    in_proj_lora_a: Tensor
    in_proj_lora_b: Tensor
    out_proj_lora_a: Tensor
    out_proj_lora_b: Tensor
    scale: float

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None, need_weights: bool = True,
        attn_mask: Tensor | None = None, average_attn_weights: bool = True, is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        swap = self.batch_first and query.dim() == 3
        q, k, v = (t.transpose(0, 1) for t in (query, key, value)) if swap else (query, key, value)
        y, weights = F.multi_head_attention_forward(
            q, k, v, self.embed_dim, self.num_heads,
            self.in_proj_weight + self.scale * self.in_proj_lora_b @ self.in_proj_lora_a, self.in_proj_bias,
            self.bias_k, self.bias_v, self.add_zero_attn, self.dropout,
            self.out_proj.weight + self.scale * self.out_proj_lora_b @ self.out_proj_lora_a, self.out_proj.bias,
            training=self.training, key_padding_mask=key_padding_mask, need_weights=need_weights, attn_mask=attn_mask,
            average_attn_weights=average_attn_weights, is_causal=is_causal,
        )  # fmt: skip
        return (y.transpose(0, 1) if swap else y), weights


_ADAPTED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: AdaptedLinear,
    nn.Conv1d: AdaptedConv1d,
    nn.Conv2d: AdaptedConv2d,
    nn.MultiheadAttention: AdaptedAttention,
}
"""Layers that can have an adapter, and the class that replaces them."""
_PLAIN = {adapted: plain for plain, adapted in _ADAPTED.items()}


@dataclass(frozen=True)
class Adapters:
    """Which layers have an adapter and which parameters train directly; everything else is the frozen base."""

    layers: tuple[str, ...] = ()
    trains: tuple[str, ...] = ()
    rank: int = 0
    scale: float = 1.0

    def put_into(self, module: nn.Module, seed: int) -> nn.Module:
        """The module with its base frozen and its adapters in place."""
        for name, p in module.named_parameters():
            p.requires_grad_(p.requires_grad and (name in self.trains or name.endswith((A, B))))
        for path in self.layers:
            self._adapt(module.get_submodule(path), path, seed)
        for m in module.modules() if self.layers else ():
            if isinstance(m, nn.TransformerEncoderLayer):
                m.activation_relu_or_gelu = 0  # its fast path for evaluation would ignore the adapters
            if isinstance(m, nn.TransformerEncoder):
                m.use_nested_tensor = False
        return module

    def _adapt(self, layer: nn.Module, path: str, seed: int) -> None:
        if type(layer) not in _ADAPTED:  # it already has its adapter, with values
            return
        layer.__class__ = _ADAPTED[type(layer)]
        layer.scale = self.scale  # type: ignore[assignment]
        for prefix, weight in _weights(layer):
            key = random.fold(torch.tensor(seed), "adapter", path, prefix)
            low = (self.rank, *weight.shape[1:])
            bound = weight[0].numel() ** -0.5
            start = (random.uniform(key, low[0] * weight[0].numel()).view(low) * 2 - 1) * bound
            like: Any = {"dtype": weight.dtype, "device": weight.device}
            layer.register_parameter(prefix + A, nn.Parameter(start.to(**like)))
            layer.register_parameter(prefix + B, nn.Parameter(torch.zeros(len(weight), self.rank, **like)))

    def taken_from(self, module: nn.Module) -> nn.Module:
        """The module without its adapters."""
        for path in self.layers:
            layer = module.get_submodule(path)
            if type(layer) in _PLAIN:
                for prefix, _ in _weights(layer):
                    del layer._parameters[prefix + A], layer._parameters[prefix + B]
                layer.__class__ = _PLAIN[type(layer)]
        return module

    def pairs(self, module: nn.Module) -> dict[str, tuple[str, str]]:
        """For each weight with an adapter, the names of its A and B."""
        found: dict[str, tuple[str, str]] = {}
        for path in self.layers:
            layer = module.get_submodule(path)
            dot = f"{path}." if path else ""
            for prefix, _ in _weights(layer):
                weight = {"": "weight", "in_proj_": "in_proj_weight", "out_proj_": "out_proj.weight"}[prefix]
                found[dot + weight] = (f"{dot}{prefix}{A}", f"{dot}{prefix}{B}")
        return found

    def merged(self, values: Tree, pairs: Mapping[str, tuple[str, str]]) -> Tree:
        """Values of the module without adapters: each weight plus its adapter's product, added in float64."""
        inside = {n for pair in pairs.values() for n in pair}
        out = {n: v for n, v in values.items() if n not in inside}
        for weight, (a, b) in pairs.items():
            added = values[b].double() @ values[a].double().flatten(1)
            w = values[weight]
            out[weight] = (w.double() + self.scale * added.view(w.shape)).to(w.dtype)
        return out

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> "Adapters":
        return cls(tuple(said["layers"]), tuple(said["trains"]), int(said["rank"]), float(said["scale"]))


def _weights(layer: nn.Module) -> list[tuple[str, Tensor]]:
    """The weights of a layer that get an adapter, each with the prefix of the adapter's name."""
    if isinstance(layer, nn.MultiheadAttention):
        return [("in_proj_", layer.in_proj_weight), ("out_proj_", layer.out_proj.weight)]
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return [("", weight)]


def adaptable(module: nn.Module) -> list[str]:
    """The layers that can have an adapter: exactly these classes, since a subclass may compute something else."""
    return [path for path, m in module.named_modules() if type(m) in _ADAPTED and not _unfit(m)]


def _unfit(layer: nn.Module) -> bool:
    if isinstance(layer, nn.MultiheadAttention):
        return layer.in_proj_weight is None  # keys and values of other sizes, in matrices of their own
    return isinstance(layer, _CONVOLUTIONS) and layer.groups != 1


def check_rank(rank: int, module: nn.Module, layers: Collection[str]) -> None:
    if rank < 1:
        raise InputError(f"rank must be at least 1, not {rank}; 8 is usual.")
    for path in layers:
        most = min(min(len(w), w[0].numel()) for _, w in _weights(module.get_submodule(path)))
        if rank > most:
            raise InputError(
                f"rank {rank} is too large for {path}, a matrix of rank {most} at most; give a smaller rank, or leave it "
                "out of the targets."
            )
