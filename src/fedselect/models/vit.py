"""Vision transformers, tiny and small, with timm's names for their parameters."""

import math
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedselect.core.errors import InputError
from fedselect.core.tree import Tree
from fedselect.models.model import Model
from fedselect.models.shapes import Shaped, check_positive, image_shape
from fedselect.models.steps import Steps
from fedselect.models.weights import fitting, read_tensors

DEPTH = 12


def vit_tiny(
    data: Shaped,
    patch: int | None = None,
    dropout: float = 0.0,
    drop_path: float = 0.0,
    weights: str | None = None,
    *,
    outputs: int | None = None,
) -> Model:
    """A vision transformer of 5.5 million parameters: 12 blocks of width 192, 3 heads; timm's vit_tiny.

    patch: side of the square patches; none: as in the weights, else 16 from 112 pixels on, 8 from 64, else 4
    dropout: dropout after attention and within the MLPs
    drop_path: stochastic depth: probability that a sample skips the last block's branches; lower in earlier blocks
    weights: a .safetensors or .pth file with timm's names to start from; position embeddings are interpolated to the image
      size and the head is always new
    """
    sizes, drops = [192, DEPTH, 3], [dropout, drop_path]
    return _model("vit_tiny", sizes, data, patch, drops, weights=weights, classes=outputs or data.classes)


def vit_small(
    data: Shaped,
    patch: int | None = None,
    dropout: float = 0.0,
    drop_path: float = 0.0,
    weights: str | None = None,
    *,
    outputs: int | None = None,
) -> Model:
    """A vision transformer of 22 million parameters: 12 blocks of width 384, 6 heads; timm's vit_small.

    patch: side of the square patches; none: as in the weights, else 16 from 112 pixels on, 8 from 64, else 4
    dropout: dropout after attention and within the MLPs
    drop_path: stochastic depth: probability that a sample skips the last block's branches; lower in earlier blocks
    weights: a .safetensors or .pth file with timm's names to start from; position embeddings are interpolated to the image
      size and the head is always new
    """
    sizes, drops = [384, DEPTH, 6], [dropout, drop_path]
    return _model("vit_small", sizes, data, patch, drops, weights=weights, classes=outputs or data.classes)


def _model(
    name: str, sizes: list[int], data: Shaped, patch: int | None, drops: list[float], *, weights: str | None, classes: int
) -> Model:
    channels, height, wide = image_shape(data)
    found = None if weights is None else read_tensors(Path(weights))
    side = patch or _patch_of(found or {}) or next(p for p, least in ((16, 112), (8, 64), (4, 0)) if min(height, wide) >= least)
    check_positive(patch=side)
    if height % side or wide % side:
        raise InputError(
            f"{name} cuts images into patches of {side}x{side}, and {height}x{wide} is not a multiple of that; give a side "
            "that divides both, as patch (--patch)."
        )
    for option, p in zip(("dropout", "drop_path"), drops, strict=True):
        if not 0.0 <= p < 1.0:
            raise InputError(f"{option} must be in [0, 1), not {p}.")
    args = (channels, [height // side, wide // side], side, sizes, classes, drops)
    start = {} if found is None else fitting(found, build_vit(*args), "head", weights, adapt=_fit_positions)
    return Model(partial(build_vit, *args, start=start), head="head", name=name)


def build_vit(
    channels: int,
    grid: list[int],
    patch: int,
    sizes: list[int],
    classes: int,
    drops: list[float],
    *,
    start: Tree | None = None,
) -> nn.Module:
    """`grid`: patches in rows and columns; `sizes`: width, depth and heads; `drops`: dropout and stochastic depth."""
    net = _ViT(channels, grid, patch, sizes, classes, drops)
    net.load_state_dict(start or {}, strict=False)  # checked before; the head keeps its random values
    return net


def _patch_of(found: Tree) -> int | None:
    """The side of the patches in these weights."""
    kernel = found.get("patch_embed.proj.weight")
    return None if kernel is None else kernel.shape[-1]


def _fit_positions(found: Tree, net: nn.Module) -> Tree:
    """Position embeddings for the network's grid of patches, interpolated from those of the file's square images."""
    assert isinstance(net, _ViT)
    name, grid = "pos_embed", net.grid
    old = found.get(name)
    if old is None or old.ndim != 3 or old.shape[1] == 1 + grid[0] * grid[1]:
        return found
    side = math.isqrt(old.shape[1] - 1)
    if side * side != old.shape[1] - 1:
        return found  # not a class token and a square grid: refused later by its shape
    square = old[:, 1:].float().view(1, side, side, -1).permute(0, 3, 1, 2)
    new = F.interpolate(square, grid, mode="bicubic", antialias=True, align_corners=False)
    return {**found, name: torch.cat([old[:, :1].float(), new.flatten(2).transpose(1, 2)], 1)}


class _Patches(nn.Module):
    def __init__(self, channels: int, width: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch, patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.proj_drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.proj_drop(self.proj(x))  # type: ignore[no-any-return]


class _MLP(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(F.gelu(self.fc1(x)))))  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, drop_path: float) -> None:
        super().__init__()
        self.drop_path = drop_path
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = _Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = _MLP(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._dropped(self.attn(self.norm1(x)))
        return x + self._dropped(self.mlp(self.norm2(x)))

    def _dropped(self, branch: Tensor) -> Tensor:
        """Stochastic depth: the branch of some samples is left out."""
        if not self.drop_path or not self.training:
            return branch
        return branch * F.dropout(branch.new_ones(len(branch), 1, 1), self.drop_path)


class _ViT(Steps):
    order = (("embed", "cls_token", "pos_embed", "patch_embed"), ("blocks",), ("features", "norm"), ("head",))

    def __init__(self, channels: int, grid: list[int], patch: int, sizes: list[int], classes: int, drops: list[float]) -> None:
        super().__init__()
        (width, depth, heads), (dropout, drop_path) = sizes, drops
        self.grid = (grid[0], grid[1])
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + grid[0] * grid[1], width))
        self.patch_embed = _Patches(channels, width, patch)
        skips = [drop_path * i / max(1, depth - 1) for i in range(depth)]
        self.blocks = nn.ModuleList(_Block(width, heads, dropout, p) for p in skips)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.normal_(self.cls_token, std=1e-6)
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.trunc_normal_(m.weight, std=0.02)
                nn.init.zeros_(m.bias)

    def embed(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        return torch.cat([self.cls_token.expand(x.shape[0], -1, -1).to(x.dtype), x], 1) + self.pos_embed

    def features(self, x: Tensor) -> Tensor:
        return self.norm(x)[:, 0]  # type: ignore[no-any-return]
