"""Trees of tensors with a leading client axis, and masks over them.

On a GPU a tree lies in one block: its tensors are views of one matrix (C, N), one after another. An operation on all entries
is then one kernel instead of one per tensor. Any other tree gives the same numbers, tensor by tensor.
"""

from collections.abc import Callable, Mapping
from functools import cache
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import Tensor

from fedselect import kernels

Tree = dict[str, Tensor]
"""Flat names as in a state_dict; in client functions every tensor has a leading client axis C."""
State = dict[str, Tree]
Mask = Mapping[str, bool | Tensor]
"""True = personal. A bool covers a whole tensor; a tensor has one bool per entry and client."""
GATHERED = {"cuda"}
"""Devices on which new trees lie in one block; on a CPU many operations are cheap, and aligned tensors faster."""
Rows = slice | Tensor | int
Scalar = float | Tensor
"""A number, or one number per client as a tensor (C,)."""


def along(per_row: Scalar, like: Tensor) -> Scalar:
    """Shape a (C,) tensor so that it multiplies `like` per client; a plain number is returned unchanged."""
    if isinstance(per_row, Tensor) and per_row.ndim == 1:
        return per_row.to(like.dtype).view(-1, *([1] * (like.ndim - 1)))
    return per_row


def rows(tensor: Tensor) -> Tensor:
    """Each client's entries as a row: (C, k), even if the parameter is a single number."""
    return tensor.reshape(len(tensor), -1)


def block(tree: Tree, clients: bool = True) -> Tensor | None:
    """The matrix (C, N) that a tree's tensors are views of, in order and without gaps; else None.

    Without a client axis, the vector (N,). Compares only memory addresses, so it is almost free.
    """
    first = next(iter(tree.values()), None)
    if first is None or first.is_meta or first.ndim < clients or not first.numel():
        return None
    many, step = (len(first), first.stride(0)) if clients else (1, 0)
    dtype, width = first.dtype, first.element_size()
    try:
        begin = at = first.data_ptr()
        for v in tree.values():
            shape, strides = v.shape, v.stride()
            size, usual = _usual(shape, clients)
            if v.data_ptr() != at or v.dtype != dtype or strides[clients:] != usual or v.requires_grad:
                return None
            if clients and (not shape or shape[0] != many or (strides[0] != step and many > 1)):
                return None
            at += size * width
    except RuntimeError:  # inside `per_client` a client's tensor has no address
        return None
    size = (at - begin) // width
    step = size if many == 1 else step
    memory = first.untyped_storage()
    if at + (many - 1) * step * width > memory.data_ptr() + memory.nbytes():  # neighbors by chance
        return None
    return first.as_strided((many, size) if clients else (size,), (step, 1) if clients else (1,))


def blocks(*trees: Tree, clients: bool = True) -> list[Tensor] | None:
    """The blocks of these trees; None unless every tree has one."""
    found: list[Tensor] = []
    for tree in trees:
        whole = block(tree, clients)
        if whole is None:
            return None
        found.append(whole)
    return found


def lay(whole: Tensor, like: Tree, clients: bool = True) -> Tree:
    """A matrix (C, N) as a tree of views with the names and shapes of `like`; a vector (N,) gives one without clients.

    `clients`: whether `like` has a client axis.
    """
    lead, steps, at = tuple(whole.shape[:-1]), whole.stride()[:-1], whole.storage_offset()
    out: Tree = {}
    for name, v in like.items():
        size, strides = _usual(v.shape, clients)
        # hidden from autograd, which would take a change of one view for a change of all
        out[name] = whole.data.as_strided(lead + v.shape[clients:], steps + strides, at)
        at += size
    assert at == whole.storage_offset() + whole.shape[-1]
    return out


def matrix(tree: Tree) -> Tensor:
    """All entries of each client as a row, (C, N): the block if there is one, else a copy."""
    whole = block(tree)
    return torch.cat([rows(v) for v in tree.values()], 1) if whole is None else whole


def line(tree: Tree) -> Tensor:
    """All entries of a tree without clients, (N,): the block if there is one, else a copy."""
    whole = block(tree, clients=False)
    return torch.cat([v.flatten() for v in tree.values()]) if whole is None else whole


def fresh(like: Tree, clients: int, device: torch.device) -> Tree:
    """An uninitialized tree for this many clients: one block on a GPU if all tensors have the same type."""
    kinds = {v.dtype for v in like.values()}
    if device.type in GATHERED and len(kinds) == 1:
        size = sum(_usual(v.shape, True)[0] for v in like.values())
        return lay(torch.empty(clients, size, dtype=kinds.pop(), device=device), like)
    return {n: torch.empty(clients, *v.shape[1:], dtype=v.dtype, device=device) for n, v in like.items()}


def together(tree: Tree, clients: bool = True) -> Tree:
    """The same values in the layout of a new tree: on a GPU one block, else separate tensors."""
    kinds = {(v.device.type in GATHERED, v.dtype) for v in tree.values()}
    if len(kinds) != 1 or not kinds.pop()[0]:
        return {n: v.contiguous() for n, v in tree.items()}
    if block(tree, clients) is not None:
        return tree
    return lay(matrix(tree) if clients else line(tree), tree, clients)


@cache
def _usual(shape: torch.Size, clients: bool) -> tuple[int, tuple[int, ...]]:
    """The number of entries per client of such a tensor, and their contiguous strides."""
    own = shape[clients:]
    return prod(own), tuple(prod(own[i + 1 :]) for i in range(len(own)))


def merge(mask: Mask, own: Tree, other: Tree) -> Tree:
    """`own` where the mask is True, `other` elsewhere. A name missing from the mask counts as False."""
    marks = {name: mask.get(name, False) for name in other}
    partly = any(isinstance(m, Tensor) for m in marks.values())
    if partly or (True in marks.values() and False in marks.values()):
        for clients in (True, False):
            whole = _merged(marks, own, other, clients)
            if whole is not None:
                return lay(whole, other, clients)
    out: Tree = {}
    for name, value in other.items():
        m = marks[name]
        out[name] = torch.where(m, own[name], value) if isinstance(m, Tensor) else own[name] if m else value
    return out


def _merged(marks: Mask, own: Tree, other: Tree, clients: bool) -> Tensor | None:
    """`merge` of blocks, with one operation per run of names with the same kind of mask."""
    partly = {n: m for n, m in marks.items() if isinstance(m, Tensor)}
    asked = {n: own[n] for n, m in marks.items() if m is not False}
    if any(v.shape != other[n].shape for tree in (partly, asked) for n, v in tree.items()):
        return None
    mask, theirs = block(partly, clients), block(other, clients)
    if theirs is None or (partly and mask is None):
        return None
    alike = all(n in own and own[n].shape == v.shape for n, v in other.items())
    ours = {n: own[n] for n in other} if alike else asked
    mine = block(ours, clients)
    if mine is None:  # the needed tensors may still form a block
        ours, mine = asked, block(asked, clients)
    if mine is None or mine.dtype != theirs.dtype:
        return None
    out = torch.empty(theirs.shape, dtype=theirs.dtype, device=theirs.device)
    m = o = t = 0  # offsets into mask, own and other
    for kind, names in groupby(marks, lambda n: "partly" if isinstance(marks[n], Tensor) else marks[n]):
        stretch = list(names)
        size = sum(_usual(other[n].shape, clients)[0] for n in stretch)
        here, there = out[..., t : t + size], theirs[..., t : t + size]
        if kind == "partly":
            assert mask is not None
            torch.where(mask[..., m : m + size], mine[..., o : o + size], there, out=here)
            m += size
        else:
            here.copy_(mine[..., o : o + size] if kind else there)
        o += size if stretch[0] in ours else 0
        t += size
    return out


def negate(mask: Mask) -> Mask:
    """The opposite mask: False where the mask is True."""
    marks = {n: m for n, m in mask.items() if isinstance(m, Tensor)}
    whole = block(marks)
    turned = {n: ~m for n, m in marks.items()} if whole is None else lay(~whole, marks)
    return {n: turned[n] if isinstance(m, Tensor) else not m for n, m in mask.items()}


def take(tree: Tree, who: Rows) -> Tree:
    """The rows of the given clients: views for a slice, copies for an index tensor."""
    if isinstance(who, slice) and who == slice(None):
        return tree
    whole = block(tree) if isinstance(who, Tensor) else None
    return {name: v[who] for name, v in tree.items()} if whole is None else lay(whole[who], tree)


def put(tree: Tree, who: Rows, values: Tree) -> None:
    """Write rows back in place; rows taken as a slice are views and need not be written."""
    ends = blocks({n: tree[n] for n in values}, values) if isinstance(who, Tensor) else None
    if ends is not None:
        ends[0][who] = ends[1]
        return
    for name, v in values.items():
        tree[name][who] = v


def take_mask(mask: Mask, who: Rows) -> Mask:
    if isinstance(who, slice) and who == slice(None):
        return mask
    return {**mask, **take({name: m for name, m in mask.items() if isinstance(m, Tensor)}, who)}


def expand(tree: Tree, clients: int) -> Tree:
    """Give each client a view of the same values."""
    return {name: v.expand(clients, *v.shape) for name, v in tree.items()}


def moved(tree: Tree, device: torch.device) -> Tree:
    """The tree on a device, as a new dict."""
    if all(v.device == device for v in tree.values()):
        return dict(tree)
    return {name: v.to(device) for name, v in tree.items()}


def clone(tree: Tree) -> Tree:
    for clients in (True, False):
        whole = block(tree, clients)
        if whole is not None:
            return lay(whole.clone(), tree, clients)
    return {name: v.clone() for name, v in tree.items()}


def zeros(tree: Tree) -> Tree:
    return {name: torch.zeros_like(v) for name, v in tree.items()}


def count(marks: Tensor) -> Tensor:
    """How many entries are marked in each row of (C, n): (C,) int64."""
    if kernels.serve(marks):  # torch would first write every mark as an int64
        from fedselect.kernels import pack

        return pack.count(marks).sum(1)
    return marks.sum(1)


def counts(marks: Tree) -> Tensor:
    """How many entries of each tensor are marked, per client: (C, tensors) int64."""
    whole = block(marks)
    if whole is None or not kernels.serve(whole):
        return torch.stack([count(rows(m)) for m in marks.values()], 1)
    from fedselect.kernels import pack

    return pack.count_parts(whole, tuple(_usual(m.shape, True)[0] for m in marks.values()))


def entries(mask: Mask, tree: Tree) -> Tensor:
    """How many entries of `tree` the mask marks, per client: (C,) int64."""
    first = next(iter(tree.values()))
    marks = {name: mask.get(name, False) for name in tree}
    whole = sum(_usual(tree[name].shape, True)[0] for name, m in marks.items() if m is True)
    partly = {name: m for name, m in marks.items() if isinstance(m, Tensor)}
    if not partly:
        return torch.full((len(first),), whole, device=first.device)
    return count(matrix(partly)) + whole


def not_finite(tree: Tree) -> str | None:
    """The name of the first tensor with NaN or Inf; None if there is none."""
    return next((n for n, v in tree.items() if v.is_floating_point() and not _finite(v)), None)


def _finite(v: Tensor) -> bool:
    """Checks minimum and maximum, which is several times as fast as checking each number; both are NaN if any number is."""
    return not v.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(v))).all())


def flat(part: str, state: State) -> Tree:
    """A state as tensors by path: part/tree/name."""
    return {f"{part}/{key}/{name}": v for key, tree in state.items() for name, v in tree.items()}


def nested(part: str, tensors: Tree) -> State:
    """The state that `flat` flattened under this part."""
    state: State = {}
    for path, v in tensors.items():
        where, _, rest = path.partition("/")
        if where == part:
            key, _, name = rest.partition("/")
            state.setdefault(key, {})[name] = v
    return state


def per_client(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Lift a function for one client over the leading client axis of all its tensors."""
    return torch.func.vmap(fn)
