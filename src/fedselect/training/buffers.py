"""Room: memory at fixed addresses, in the layout that kernels want, with copies to it and back."""

from typing import Any

import torch
from torch import Tensor

from fedselect import kernels
from fedselect.core.tree import Tree, block, fresh

ALIGN = 512
"""Alignment of tensors that share memory, in bytes, as if each had been allocated alone."""


class Room:
    """Memory at fixed addresses for one group of tensors, each for all clients; kernels have their channels last."""

    def __init__(self, like: Tree, convolutions: frozenset[str]) -> None:
        first = next(iter(like.values()))
        self.clients, self.device = len(first), first.device
        self.last = {n for n, v in like.items() if n in convolutions and v.ndim == 5}
        self.starts, end = {}, 0
        for n, v in like.items():
            self.starts[n] = end
            end += -(-v.nbytes // ALIGN) * ALIGN
        self.memory = torch.empty(end, dtype=torch.uint8, device=self.device)
        self.tensors = {n: self._view(n, v) for n, v in like.items()}
        self._of: dict[int, Tree] = {}
        self._tables: Any = None

    def of(self, clients: int) -> Tree:
        """The tensors for this many clients."""
        if clients not in self._of:
            self._of[clients] = {n: v[:clients] for n, v in self.tensors.items()}
        return self._of[clients]

    def write(self, tree: Tree) -> Tree:
        here = self.of(len(next(iter(tree.values()))))
        if not self._moved(block(tree) if list(tree) == list(here) else None, back=False):
            copy(here, tree)
        return here

    def read(self, clients: int) -> Tree:
        here = self.of(clients)
        out = fresh(here, clients, self.device)
        if not self._moved(block(out), back=True):
            copy(out, here)
        return out

    def _moved(self, whole: Tensor | None, back: bool) -> bool:
        """Move all tensors between here and the block of a tree, one launch per kernel size, if possible."""
        if whole is None or not kernels.serve(whole):
            return False
        from fedselect.kernels.layout import move, tables

        if self._tables is None:
            self._tables = tables(self.tensors, {n: at // whole.element_size() for n, at in self.starts.items()}, self.last)
        move(whole, self.memory.view(whole.dtype), self._tables, back)
        return True

    def _view(self, name: str, like: Tensor) -> Tensor:
        # `data`: not views to autograd, which would treat a change of one as a change of all
        flat = self.memory.data[self.starts[name] :][: like.nbytes].view(like.dtype)
        if name not in self.last:
            return flat.view(like.shape)
        return flat.view([like.shape[i] for i in (0, 1, 3, 4, 2)]).permute(0, 1, 4, 2, 3)


def copy(into: Tree, tree: Tree) -> None:
    """Copy values into tensors of the same names; kernels may have another memory order there."""
    alike = []
    for n, v in tree.items():
        if v.ndim == 5 and kernels.serve(v) and v.stride() != into[n].stride():
            from fedselect.kernels.layout import fits, relay

            if fits(into[n], v):
                relay(into[n], v)
                continue
        alike.append(n)
    if alike:
        torch._foreach_copy_([into[n] for n in alike], [tree[n] for n in alike])


def ordered(tree: Tree) -> Tree:
    """A copy with every tensor in its usual memory order."""
    first = next(iter(tree.values()))
    out = fresh(tree, len(first), first.device)
    copy(out, tree)
    return out
