"""Trees of tensors with a leading client axis, masks over them, and the mean over exactly the senders of an entry."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedselect import kernels

Tree = dict[str, Tensor]
"""Flat names as in a state_dict; in client programs every tensor carries a leading client axis C."""
State = dict[str, Tree]
Mask = Mapping[str, bool | Tensor]
"""True = personal. A bool speaks for a whole tensor, a tensor for every entry of every client."""
Rows = slice | Tensor | int
Scalar = float | Tensor
"""A number, or one number for each client as a tensor (C,)."""


def along(per_row: Scalar, like: Tensor) -> Scalar:
    """Shape a (C,) tensor so that it multiplies `like` client by client; a plain number passes through."""
    if isinstance(per_row, Tensor) and per_row.ndim == 1:
        return per_row.to(like.dtype).view(-1, *([1] * (like.ndim - 1)))
    return per_row


def rows(tensor: Tensor) -> Tensor:
    """Each client's entries in a line: (C, k), also where the parameter is a single number."""
    return tensor.reshape(len(tensor), -1)


def merge(mask: Mask, own: Tree, other: Tree) -> Tree:
    """`own` where the mask is True, `other` elsewhere. A name the mask lacks counts as False."""
    out: Tree = {}
    for name, value in other.items():
        m = mask.get(name, False)
        out[name] = torch.where(m, own[name], value) if isinstance(m, Tensor) else own[name] if m else value
    return out


def negate(mask: Mask) -> Mask:
    return {name: ~m if isinstance(m, Tensor) else not m for name, m in mask.items()}


def take(tree: Tree, who: Rows) -> Tree:
    """The given clients' rows: views for a slice, copies for an index tensor."""
    if isinstance(who, slice) and who == slice(None):
        return tree
    return {name: v[who] for name, v in tree.items()}


def put(tree: Tree, who: Rows, values: Tree) -> None:
    """Write rows back in place; rows taken as a slice are views and need no writing."""
    for name, v in values.items():
        tree[name][who] = v


def take_mask(mask: Mask, who: Rows) -> Mask:
    if isinstance(who, slice) and who == slice(None):
        return mask
    return {name: m[who] if isinstance(m, Tensor) else m for name, m in mask.items()}


def expand(tree: Tree, clients: int) -> Tree:
    """Give every client a view of the same values."""
    return {name: v.unsqueeze(0).expand(clients, *v.shape) for name, v in tree.items()}


def clone(tree: Tree) -> Tree:
    return {name: v.clone() for name, v in tree.items()}


def zeros(tree: Tree) -> Tree:
    return {name: torch.zeros_like(v) for name, v in tree.items()}


def entries(mask: Mask, tree: Tree) -> Tensor:
    """How many entries of `tree` the mask marks, per client: (C,) int64."""
    first = next(iter(tree.values()))
    marks = {name: mask.get(name, False) for name in tree}
    whole = sum(tree[name][0].numel() for name, m in marks.items() if m is True)
    partly = [rows(m) for m in marks.values() if isinstance(m, Tensor)]
    if not partly:
        return torch.full((len(first),), whole, device=first.device)
    return torch.cat(partly, 1).sum(1) + whole


def flat(part: str, state: State) -> Tree:
    """A state as tensors by path: part/tree/name."""
    return {f"{part}/{key}/{name}": v for key, tree in state.items() for name, v in tree.items()}


def nested(part: str, tensors: Tree) -> State:
    """The state that `flat` laid out under this part."""
    state: State = {}
    for path, v in tensors.items():
        where, _, rest = path.partition("/")
        if where == part:
            key, _, name = rest.partition("/")
            state.setdefault(key, {})[name] = v
    return state


def per_client(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Lift a function written for one client over the leading client axis of all its tensors."""
    return torch.func.vmap(fn)


@dataclass
class MaskedSum:
    """Folds uploads in as they come and yields, per entry, the weighted mean over the clients that sent it.

    Sums are kept in float64: float32 values of like size add up exactly there, so neither the order of clients nor
    the way a cohort was cut into chunks shows in the result. Memory is that of the model, however many clients.
    """

    total: Tree = field(default_factory=dict)
    weight: Tree = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)

    def add(self, values: Tree, sent: Mask, weight: Tensor) -> None:
        w = weight.double()
        for name, v in values.items():
            s = sent.get(name, False)
            if s is False:
                continue
            if kernels.serve(v):
                from fedselect.kernels.fold import fold

                so_far = (self.total[name], self.weight[name]) if name in self.total else None
                self.total[name], self.weight[name] = fold(v, s, w, so_far)
                self.dtypes[name] = v.dtype
                continue
            row = w.view(-1, *([1] * (v.ndim - 1)))
            if isinstance(s, Tensor):
                # where, not multiplication: what was not sent may hold anything, NaN included
                part = torch.where(s, v.double() * row, 0.0).sum(0)
                heavy = torch.where(s, row, 0.0).sum(0)
            else:
                part = (v.double() * row).sum(0)
                heavy = w.sum().expand(v.shape[1:]).clone()
            if name in self.total:
                self.total[name] += part
                self.weight[name] += heavy
            else:
                self.total[name], self.weight[name], self.dtypes[name] = part, heavy, v.dtype

    def mean(self) -> tuple[Tree, Mask]:
        """The mean of every entry that anybody sent, and the mask of those entries."""
        if not self.total:
            return {}, {}
        quotients = torch._foreach_div(list(self.total.values()), torch._foreach_clamp_min(list(self.weight.values()), 1e-300))
        mean = {n: q.to(self.dtypes[n]) for n, q in zip(self.total, quotients, strict=True)}
        return mean, {n: w > 0 for n, w in self.weight.items()}
