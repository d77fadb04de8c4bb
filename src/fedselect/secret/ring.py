"""The ring: a client's update as whole numbers that add up exactly, with the number of senders in the same number.

An entry is one number modulo 2^32 (2^64 for more than 127 clients): [senders | value]. The value is the update, rounded to a
multiple of a step; an entry that a client keeps is 0, so the mask is hidden with the values. Sums of as many clients as the
ring is made for do not overflow.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedselect.core import random
from fedselect.core.tree import Mask, Tree, rows

VALUE_BITS = 24
"""Bits of one client's value, its sign among them, where there is room for as many; a float32 holds no more."""
NARROW = 127
"""As many clients add up in 32 bits, with at least 18 bits for a value."""
NEAR = 8
"""A value is near the end of the range if it is beyond this part of it."""
CLIENTS, OVER, IS_NEAR = "~clients", "~over", "~near"
"""What every client sends beside its entries: 1, and for each tensor how many values were cut, and how many were near."""


@dataclass(frozen=True)
class Ring:
    """Numbers for the sum of so many clients; `counted`: whether they also say how many sent an entry."""

    clients: int
    counted: bool = True

    @property
    def dtype(self) -> "np.dtype[Any]":
        return np.dtype("<u4" if self.clients <= NARROW else "<u8")

    @property
    def field(self) -> int:
        """Bits for the sum of values; those above it count senders."""
        return self.dtype.itemsize * 8 - (self.clients.bit_length() if self.counted else 0)

    @property
    def value_bits(self) -> int:
        return min(VALUE_BITS, self.field - self.clients.bit_length())

    @cached_property
    def top(self) -> int:
        """The largest value of one client."""
        return (1 << (self.value_bits - 1)) - 1

    def code(self, values: Tree, sent: Mask, params: Tree, reach: Tree, keys: Tensor) -> Tree:
        """Updates from `params` of stacked clients as whole numbers, in float32; what is not sent is 0.

        reach: of each tensor the largest update that is not cut. keys: randomness of each client, which rounds up or down such
        that the mean is right. CLIENTS, OVER and IS_NEAR come along.
        """
        found: Tree = {}
        over, near = [], []
        for name, limit in reach.items():
            draw = random.uniform(random.fold(keys, name), values[name][0].numel())
            exact = rows(values[name].double() - params[name].double()) * (self.top / limit.double())
            marks = sent[name]
            if isinstance(marks, Tensor):
                exact = torch.where(rows(marks), exact, 0.0)
            size = exact.abs()
            over.append((size > self.top).sum(1))
            near.append((size > self.top / NEAR).sum(1))
            whole = (exact + draw).floor_().clamp_(-self.top, self.top)
            if isinstance(marks, Tensor):
                whole = torch.where(rows(marks), whole, 0.0)
            found[name] = whole.float().view(values[name].shape)
        said = {OVER: over, IS_NEAR: near}
        counts = {n: torch.stack(v, 1).clamp_max(self.top).float() for n, v in said.items() if v}
        return {**found, CLIENTS: torch.ones(len(keys), 1, device=keys.device), **counts}

    def pack(self, codes: Tree, sent: Mask) -> "np.ndarray[Any, Any]":
        """One client's whole numbers (no client axis) as one line of ring elements."""
        signed = np.dtype(f"<i{self.dtype.itemsize}")
        parts = []
        for name, v in codes.items():
            line = v.flatten().cpu().numpy().astype(signed)
            if self.counted:
                marks = sent.get(name, True)
                line += np.asarray(marks.flatten().cpu() if isinstance(marks, Tensor) else marks).astype(signed) << self.field
            parts.append(line)
        return np.concatenate(parts).view(self.dtype)

    def unpack(self, total: "np.ndarray[Any, Any]", like: Mapping[str, torch.Size]) -> tuple[Tree, Tree]:
        """The sums of values and the numbers of senders (all clients, where they are not counted) from a sum of lines."""
        one = self.dtype.type(1)
        half, field = one << self.dtype.type(self.field - 1), self.dtype.type(self.field)
        inside = self.dtype.type((1 << self.field) - 1)
        low = ((total & inside) ^ half) - half
        values = low.view(np.dtype(f"<i{self.dtype.itemsize}")).astype(np.float64)
        clients = values[sum(s.numel() for n, s in self._before(like))]
        senders = ((total - low) >> field).astype(np.float64) if self.counted else np.full_like(values, clients)
        out: tuple[Tree, Tree] = ({}, {})
        at = 0
        for name, shape in like.items():
            for tree, line in zip(out, (values, senders), strict=True):
                tree[name] = torch.from_numpy(line[at : at + shape.numel()].copy()).view(shape)
            at += shape.numel()
        return out

    @staticmethod
    def _before(like: Mapping[str, torch.Size]) -> list[tuple[str, torch.Size]]:
        names = list(like)
        return [(n, like[n]) for n in names[: names.index(CLIENTS)]]


def shapes(entries: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
    """The parts of a line: the tensors that travel, and what every client says of them."""
    said = {OVER: torch.Size([len(entries)]), IS_NEAR: torch.Size([len(entries)])} if entries else {}
    return {**entries, CLIENTS: torch.Size([1]), **said}
