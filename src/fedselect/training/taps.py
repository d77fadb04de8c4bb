"""Taps of a convolution's kernel that never meet the input, only padding: they need not be read, and their gradient is zero."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Taps:
    """The part of a convolution kernel that ever meets the input: rows top to bottom, columns left to right."""

    top: int
    bottom: int
    left: int
    right: int

    def of(self, kernel: Tensor) -> Tensor:
        return kernel[..., self.top : self.bottom, self.left : self.right]


def live_taps(size: int, kernel: int, stride: int, padding: int, dilation: int) -> tuple[int, int, int, int]:
    """The first and last taps of a kernel that ever meet the input, and the padding that these still need on each side."""
    out = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    met = [t for t in range(kernel) if any(0 <= o * stride - padding + t * dilation < size for o in range(out))]
    if not met:  # nothing but padding: leave it unchanged
        return 0, kernel, padding, padding
    first, last = met[0], met[-1] + 1
    before = padding - first * dilation
    behind = (out - 1) * stride + (last - 1 - first) * dilation + 1 - size - before
    return first, last, before, behind  # negative: the input's edge is never reached


class Crop(torch.autograd.Function):
    """The live taps of a kernel; the gradient of the rest is zero, written at once."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, taps: Taps) -> Tensor:
        return taps.of(weight).clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        weight, t = inputs
        ctx.rest = (t.left, weight.shape[-1] - t.right, t.top, weight.shape[-2] - t.bottom)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return F.pad(grad, ctx.rest), None
