"""The ring: a client's update as whole numbers that add up exactly, with the number of senders in the same number.

An entry is one number modulo 2^32 (2^64 for more than 127 clients): [senders | value]. The value is the update, rounded to a
multiple of a step; a personal entry is 0, so the mask is hidden together with the values. Sums of up to as many clients as the
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
"""Most bits of one client's value, sign included; a float32 holds no more."""
NARROW = 127
"""Most clients whose sum fits 32 bits, with at least 18 bits for a value."""
BLOCK = 1 << 15
"""Entries per block on a CPU, so that they stay in its cache."""
NEAR = 8
"""A value beyond this part of its range counts as near the end."""
CLIENTS, OVER, IS_NEAR = "~clients", "~over", "~near"
"""What every client sends with its entries: 1, and for each tensor how many values were cut off and how many were near."""


@dataclass(frozen=True)
class Ring:
    """Numbers for the sum of this many clients; `counted`: whether they also count the senders of an entry."""

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

        reach: for each tensor the largest update that is not cut off. keys: each client's random key for rounding up or down
        without bias. The result includes CLIENTS, OVER and IS_NEAR.
        """
        found: Tree = {}
        over, near = [], []
        for name, limit in reach.items():
            marks, key, scale = sent[name], random.fold(keys, name), self.top / limit.double()
            after, before = rows(values[name]), params[name].flatten()
            found[name] = torch.empty(after.shape, device=after.device)
            outside = torch.zeros(2, len(keys), dtype=torch.int64, device=keys.device)
            step = BLOCK if after.device.type == "cpu" else max(1, len(before))
            for at in range(0, len(before), step):
                part = slice(at, at + step)
                exact = (after[:, part].double() - before[part].double()).mul_(scale)
                draw = random.uniform(key, exact.shape[1], at)
                if isinstance(marks, Tensor):
                    here = rows(marks)[:, part]
                    exact, draw = (torch.where(here, v, 0.0) for v in (exact, draw))
                outside += torch.stack([(exact.abs() > end).sum(1) for end in (self.top, self.top / NEAR)])
                found[name][:, part] = exact.add_(draw).floor_().clamp_(-self.top, self.top)
            found[name] = found[name].view(values[name].shape)
            over.append(outside[0])
            near.append(outside[1])
        counts = {n: torch.stack(v, 1).clamp_max(self.top).float() for n, v in ((OVER, over), (IS_NEAR, near)) if v}
        return {**found, CLIENTS: torch.ones(len(keys), 1, device=keys.device), **counts}

    def pack(self, codes: Tree, sent: Mask) -> "np.ndarray[Any, Any]":
        """One client's whole numbers (no client axis) as one line of ring elements."""
        signed = np.dtype(f"<i{self.dtype.itemsize}")
        parts = []
        for name, v in codes.items():
            line = v.flatten().cpu().numpy().astype(np.int64).astype(signed)  # through 64 bits, to wrap around
            if self.counted:
                marks = sent.get(name, True)
                line += np.asarray(marks.flatten().cpu() if isinstance(marks, Tensor) else marks).astype(signed) << self.field
            parts.append(line)
        return np.concatenate(parts).view(self.dtype)

    def unpack(self, total: "np.ndarray[Any, Any]", like: Mapping[str, torch.Size]) -> tuple[Tree, Tree]:
        """The sums of values and the numbers of senders (all clients, if not counted) from a sum of lines."""
        values, senders = (np.empty(len(total)) for _ in range(2))
        half, inside = (self.dtype.type(n) for n in (1 << (self.field - 1), (1 << self.field) - 1))
        for at in range(0, len(total), BLOCK):
            part = total[at : at + BLOCK]
            low = ((part & inside) ^ half) - half
            values[at : at + BLOCK] = low.view(f"<i{self.dtype.itemsize}")
            if self.counted:
                senders[at : at + BLOCK] = (part - low) >> self.dtype.type(self.field)
        ends = np.cumsum([shape.numel() for shape in like.values()])
        if not self.counted:
            senders.fill(values[ends[list(like).index(CLIENTS)] - 1])
        found = [
            {n: torch.from_numpy(v).view(s) for (n, s), v in zip(like.items(), np.split(line, ends[:-1]), strict=True)}
            for line in (values, senders)
        ]
        return found[0], found[1]


def untold(tensors: int, keys: Tensor) -> Tree:
    """What clients send with private entries: that they take part, and nothing about what was cut off."""
    nothing = torch.zeros(len(keys), tensors, device=keys.device)
    return {CLIENTS: torch.ones(len(keys), 1, device=keys.device), OVER: nothing, IS_NEAR: nothing}


def shapes(entries: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
    """The parts of a line: the tensors that are sent, and every client's counters for them."""
    said = {OVER: torch.Size([len(entries)]), IS_NEAR: torch.Size([len(entries)])} if entries else {}
    return {**entries, CLIENTS: torch.Size([1]), **said}
