"""Client states as flat rows of bytes, and back: what a client carries from round to round, and nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from fedselect.core.errors import InputError
from fedselect.core.tree import State, matrix, together
from fedselect.methods.method import Carried
from fedselect.simulate import ragged

Count = TypeVar("Count", int, Tensor)
ALIGN = 8
"""Sections of a row start at multiples of the widest dtype."""


@dataclass(frozen=True)
class Section:
    """Adjacent tensors of one tree with the same dtype and the same rule for which entries are carried."""

    key: str
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    under: str | bool  # all entries or none; or those marked in the tree of this name

    @property
    def sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes]

    def nbytes(self, count: Count) -> Count:
        """Bytes for this many entries, padded to where the next section may start."""
        size = (count + 7) // 8 if self.dtype == torch.bool else count * self.dtype.itemsize
        return (size + ALIGN - 1) // ALIGN * ALIGN


@dataclass(frozen=True)
class Layout:
    """The sections of a row, in order: a tree that marks entries of another comes before it."""

    sections: tuple[Section, ...]
    names: tuple[tuple[str, str], ...]  # the state's own order

    @property
    def whole(self) -> bool:
        """Whether rows hold the whole state; masks are always whole."""
        return all(s.under is True or s.dtype == torch.bool for s in self.sections)

    def part_of(self, other: "Layout") -> bool:
        """Whether rows of this layout are rows of the other without some of its trees."""
        keys = {key for key, _ in self.names}
        return self.sections == tuple(s for s in other.sections if s.key in keys)

    @property
    def fixed(self) -> Tensor:
        """How many entries of each section a row holds, as far as known without looking at values: (sections,)."""
        return torch.tensor([sum(s.sizes) if s.under is True else 0 for s in self.sections])

    @property
    def longest(self) -> int:
        """Most bytes of a row: all entries of all sections."""
        return sum(s.nbytes(sum(s.sizes)) for s in self.sections if s.under is not False)

    def nbytes(self, counts: Tensor) -> Tensor:
        """Bytes of every row by section, from the number of entries it holds: both (C, sections)."""
        return torch.stack([s.nbytes(count) for s, count in zip(self.sections, counts.T, strict=True)], 1)

    def starts(self, counts: Tensor) -> Tensor:
        """Where each section of each row starts, with rows placed end to end: (sections, C)."""
        sizes = self.nbytes(counts)
        return (sizes.flatten().cumsum(0).view_as(sizes) - sizes).T


def layout(state: State, carried: Mapping[str, Carried]) -> Layout:
    """The layout of the rows of such states."""

    def under(key: str, name: str) -> str | bool:
        return carried[key].get(name, False) if key in carried else True

    def depth(key: str, name: str) -> int:
        holder = under(key, name)
        return 1 + depth(holder, name) if isinstance(holder, str) else 0

    names = [(key, name) for key, tree in state.items() for name in tree]
    groups: dict[tuple[str, torch.dtype, str | bool], list[str]] = {}
    for key, name in sorted(names, key=lambda at: depth(*at)):
        groups.setdefault((key, state[key][name].dtype, under(key, name)), []).append(name)
    sections = [
        Section(key, tuple(group), tuple(state[key][n].shape[1:] for n in group), dtype, holder)
        for (key, dtype, holder), group in groups.items()
    ]
    return Layout(tuple(sections), tuple(names))


def pack(plan: Layout, state: State) -> tuple[Tensor, Tensor]:
    """All rows end to end in one buffer, and how many entries each holds: (C, sections), on the host.

    A row holds nothing of a tree that the state no longer has. The host waits once, for the counts, and only if there are
    masks.
    """
    marks = _Marks(state)
    counts = _counts(plan, state, marks)
    out = torch.zeros(int(plan.nbytes(counts).sum()), dtype=torch.uint8, device=_first(state).device)
    for section, count, start in zip(plan.sections, counts.T, plan.starts(counts), strict=True):
        if section.under is False or section.key not in state:
            continue
        values = _matrix(state, section.key, section.names)
        if section.under is not True:
            values = ragged.tighten(values, *marks.of(section))
        ragged.lay(values, count, out, start)
    return out, counts


def unpack(plan: Layout, packed: Tensor, counts: Tensor) -> State:
    """The states that these rows hold; entries that are not carried are zero."""
    state: State = {}
    marks = _Marks(state)
    for section, count, start in zip(plan.sections, counts.T, plan.starts(counts), strict=True):
        size = sum(section.sizes)
        if section.under is False:
            values = torch.zeros(len(counts), size, dtype=section.dtype, device=packed.device)
        else:
            values = ragged.lift(packed, count, start, size, section.dtype)
            if section.under is True and int(count.min()) < size:  # a tree that some no longer have
                values[(count < size).to(values.device)] = 0
        if isinstance(section.under, str):
            values = ragged.spread(values, *marks.of(section))
        tree = state.setdefault(section.key, {})
        for name, shape, part in zip(section.names, section.shapes, torch.split(values, section.sizes, 1), strict=True):
            tree[name] = part.view(len(counts), *shape)
    out: State = {}
    for key, name in plan.names:
        out.setdefault(key, {})[name] = state[key][name]
    return {key: together(tree) for key, tree in out.items()}


class _Marks:
    """Which entries of a section are carried, as a matrix (C, entries), with their counts; made once for each mask."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._made: dict[tuple[str, tuple[str, ...]], tuple[Tensor, Tensor]] = {}

    def of(self, section: Section) -> tuple[Tensor, Tensor]:
        at = str(section.under), section.names
        if at not in self._made:
            marks = _matrix(self._state, *at)
            self._made[at] = marks, ragged.found(marks)
        return self._made[at]


def _counts(plan: Layout, state: State, marks: _Marks) -> Tensor:
    """How many entries of each section each row holds. Refuses to drop marked entries of a mask, which would change it."""
    masked = [i for i, s in enumerate(plan.sections) if isinstance(s.under, str)]
    counts = plan.fixed.repeat(len(_first(state)), 1)
    counts[:, [i for i, s in enumerate(plan.sections) if s.key not in state]] = 0
    masked = [i for i in masked if plan.sections[i].key in state]
    if not masked:
        return counts
    numbers = []
    for section in (plan.sections[i] for i in masked):
        carried, found = marks.of(section)
        numbers.append(found.sum(1))
        if section.dtype == torch.bool:
            numbers[-1] = torch.where((_matrix(state, section.key, section.names) & ~carried).any(1), -1, numbers[-1])
    counts[:, masked] = torch.stack(numbers, 1).cpu()
    if bool((counts < 0).any()):
        section = plan.sections[int((counts < 0).any(0).nonzero()[0])]
        raise InputError(
            f"a client's {section.key!r} marks entries that {section.under!r} does not, so they would be lost; "
            "the method's `carries` must name them."
        )
    return counts


def _matrix(state: State, key: str, names: tuple[str, ...]) -> Tensor:
    return matrix({n: state[key][n] for n in names}).contiguous()


def _first(state: State) -> Tensor:
    return next(v for tree in state.values() for v in tree.values())
