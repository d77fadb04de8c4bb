"""The codec: the marked entries of a tree as one flat array, and the mask as packed bits if the receiver does not know it.

The simulation counts bytes with `size`, the deployment sends the result of `pack`; a test compares the two. A value costs its
own width; a mask that both sides know (whole tensors, fixed by the method) costs nothing.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedselect.core.errors import DataError
from fedselect.core.tree import Mask, State, Tree, entries, expand
from fedselect.methods.method import Down, Up


@dataclass(frozen=True)
class Packet:
    """One client's tree on the wire."""

    values: Tensor  # uint8: the bytes of the marked entries, in the tree's order
    bits: Tensor  # uint8: the mask, eight entries per byte; empty if no mask is sent
    whole: tuple[str, ...]  # tensors sent whole
    partly: tuple[str, ...]  # tensors sent entry by entry

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.bits.nbytes


def outline(tree: Tree, sent: Mask) -> Packet:
    """Only the mask, which the other side needs to send these entries back; no client axis."""
    whole = tuple(n for n in tree if sent.get(n, False) is True)
    partly = tuple(n for n in tree if isinstance(sent.get(n), Tensor))
    nothing = torch.zeros(0, dtype=torch.uint8)
    marks = [m.flatten() for n in partly if isinstance(m := sent[n], Tensor)]
    return Packet(nothing, pack_bits(torch.cat(marks)) if marks else nothing, whole, partly)


def pack(tree: Tree, sent: Mask) -> Packet:
    """One client's marked entries; `tree` and `sent` without a client axis."""
    values = []
    for n, v in tree.items():
        m = sent.get(n, False)
        if isinstance(m, Tensor):
            values.append(v.masked_select(m).view(torch.uint8))
        elif m:
            values.append(v.flatten().view(torch.uint8))
    known = outline(tree, sent)
    return replace(known, values=torch.cat(values)) if values else known


def unmask(packet: Packet, like: Tree) -> Mask:
    """Which entries a packet marks; its names and the size of its mask are checked."""
    names = (*packet.whole, *packet.partly)
    for n in names:
        if n not in like:
            raise DataError(f"a packet contains {n!r}, which the model does not have; use the same model everywhere.")
    if len(set(names)) < len(names):
        raise DataError("a packet contains a tensor twice; have it sent again.")
    marked = sum(like[n].numel() for n in packet.partly)
    if packet.bits.numel() != -(-marked // 8):
        raise DataError(f"a packet has {packet.bits.numel()} bytes of mask instead of {-(-marked // 8)}; have it sent again.")
    marks = unpack_bits(packet.bits, marked)
    sent: dict[str, bool | Tensor] = {}
    at = 0
    for n, v in like.items():
        sent[n] = n in packet.whole
        if n in packet.partly:
            sent[n] = marks[at : at + v.numel()].view_as(v)
            at += v.numel()
    return sent


def unpack(packet: Packet, like: Tree) -> tuple[Tree, Mask]:
    """The tree and mask in a packet; entries that were not sent are zero. Sizes are checked first."""
    sent = unmask(packet, like)
    sizes = {n: _count(sent[n], v) * v.element_size() for n, v in like.items()}
    if packet.values.numel() != sum(sizes.values()):
        raise DataError(f"a packet has {packet.values.numel()} bytes of values, but its mask marks {sum(sizes.values())}.")
    tree: Tree = {}
    at = 0
    for n, v in like.items():
        got = packet.values[at : at + sizes[n]].clone().view(v.dtype)
        at += sizes[n]
        m = sent[n]
        if isinstance(m, Tensor):
            tree[n] = torch.zeros_like(v).masked_scatter_(m, got)
        else:
            tree[n] = got.view_as(v) if m else torch.zeros_like(v)
    return tree, sent


def _count(mark: bool | Tensor, like: Tensor) -> int:
    return int(mark.sum()) if isinstance(mark, Tensor) else like.numel() * mark


def pack_bits(marks: Tensor) -> Tensor:
    """Booleans, eight per byte, the first in the lowest bit."""
    padded = torch.zeros(-(-marks.numel() // 8) * 8, dtype=torch.uint8, device=marks.device)
    padded[: marks.numel()] = marks
    weight = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=marks.device)
    return (padded.view(-1, 8) * weight).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(1) >> shifts) & 1).flatten()[:count].bool()


def size(tree: Tree, sent: Mask, mask_travels: bool) -> Tensor:
    """The bytes of each client's packet, without creating it: (C,) int64."""
    first = next(iter(tree.values()))
    total = torch.zeros(len(first), dtype=torch.int64, device=first.device)
    for width in {v.element_size() for v in tree.values()}:
        total += entries(sent, {n: v for n, v in tree.items() if v.element_size() == width}) * width
    if mask_travels:
        marked = sum(v[0].numel() for n, v in tree.items() if isinstance(sent.get(n), Tensor))
        total += -(-marked // 8)
    return total


def up_size(up: Up) -> Tensor:
    return size(up.values, up.sent, mask_travels=True) + _rows(up.extra, len(up.weight))


def down_size(down: Down, wants: Mask, clients: int) -> Tensor:
    """The bytes of each download; it needs no mask, since the server knows it from the client's last upload."""
    rows = expand(down.shared["params"], clients)
    others = sum(v.nbytes for name, tree in down.shared.items() if name != "params" for v in tree.values())
    return size(rows, wants, mask_travels=False) + _rows(down.rows, clients) + others


def _rows(state: State, clients: int) -> int:
    return sum(v.nbytes for tree in state.values() for v in tree.values()) // clients
