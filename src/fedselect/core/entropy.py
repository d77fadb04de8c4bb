"""Random numbers that nobody can predict, from the operating system, for noise and samples that privacy depends on.

With `seeded` they are hashed from keys as in `random`, so that a test can repeat a run. Anyone who knows the seed then
knows the noise, so such a run is not private.
"""

import math
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from fedselect.core import random

GRID = 20
"""Noisy numbers are rounded to a power of two this many bits below the standard deviation of their noise."""


@dataclass(frozen=True)
class Entropy:
    """The source of random numbers. Keys, (C,), are used only if it is seeded."""

    seeded: bool = False

    def keys(self, keys: Tensor) -> Tensor:
        """Keys that nobody can guess in place of these: (C,)."""
        return keys if self.seeded else self._words(keys, 1)[..., 0]

    def uniform(self, keys: Tensor, count: int) -> Tensor:
        """`count` uniform numbers in (0, 1] per key: (C, count) float64."""
        return _open(self._words(keys, count))

    def normal(self, keys: Tensor, count: int) -> Tensor:
        """`count` standard normal numbers per key, by the Box-Muller method."""
        half = -(-count // 2)
        u, v = torch.split(self.uniform(keys, 2 * half), half, dim=-1)
        radius, angle = (-2.0 * u.log()).sqrt(), 2.0 * math.pi * v
        return torch.cat([radius * angle.cos(), radius * angle.sin()], -1)[..., :count]

    def noised(self, values: Tensor, std: Tensor, keys: Tensor) -> Tensor:
        """Values (C, k) in float64 plus normal noise with a standard deviation per row (C,), rounded to a grid.

        Rounding hides which floating-point numbers the sampler can produce.
        """
        if not bool((std > 0).any()):
            return values
        std = std.double().unsqueeze(-1)
        noisy = values + std * self.normal(keys, values.shape[-1])
        grid = torch.exp2(std.clamp_min(1e-300).log2().floor() - GRID)
        return torch.where(std > 0, (noisy / grid).round() * grid, values)

    def whole(self, std: float, keys: Tensor, count: int) -> Tensor:
        """`count` integers per key with probability proportional to exp(-k² / (2 std²)): (C, count) float64.

        Canonne, Kamath and Steinke 2020: |k| = low + t high is drawn with weight exp(-|k| / t) and accepted with probability
        exp(-(|k| - std² / t)² / (2 std²)). Probabilities are exact up to float64 rounding.
        """
        found = torch.zeros(keys.numel() * count, dtype=torch.float64, device=keys.device)
        if std <= 0:
            return found.view(-1, count)
        t = 1 << max(0, round(math.log2(std)))
        waiting, tries = torch.arange(len(found), device=keys.device), 0
        while len(waiting):
            own = random.fold(keys[waiting // count], tries, waiting % count) if self.seeded else waiting
            first, second, third = (self._one_each(own, name) for name in ("low", "high", "taken"))
            low, negative = (first & (t - 1)).double(), first < 0
            size = low + t * (-_open(second).log()).floor()
            chance = torch.exp(-low / t - (size - std * std / t).square() / (2 * std * std))
            taken = (_open(third) <= chance) & ~(negative & (size == 0))
            found[waiting[taken]] = torch.where(negative, -size, size)[taken]
            waiting, tries = waiting[~taken], tries + 1
        return found.view(-1, count)

    def _one_each(self, keys: Tensor, purpose: str) -> Tensor:
        """One random word per key."""
        return random.fold(keys, purpose) if self.seeded else self._words(keys[:1], len(keys))[0]

    def _words(self, keys: Tensor, count: int) -> Tensor:
        if self.seeded:
            return random.bits(keys, count)
        drawn = bytearray(os.urandom(8 * keys.numel() * count)) or bytearray(8)
        words = torch.frombuffer(drawn, dtype=torch.int64)[: keys.numel() * count]
        return words.view(*keys.shape, count).to(keys.device)


def _open(words: Tensor) -> Tensor:
    """Words as numbers in (0, 1]."""
    return ((words >> 11) & 0x1FFFFFFFFFFFFF).double().add(0.5) * 2.0**-53
