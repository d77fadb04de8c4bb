"""Units: entries that become personal together: a rank of an adapter (a row of A with a column of B), or a whole layer."""

from dataclasses import dataclass
from functools import cached_property

import torch

from fedselect.core.errors import InputError
from fedselect.core.tree import Tree, rows
from fedselect.models import Model


@dataclass(frozen=True, eq=False)
class Units:
    """A model's units. A tree of units has (C, r) for an adapter of rank r, by weight name, and (C, 1) for other layers."""

    model: Model

    @cached_property
    def of(self) -> dict[str, tuple[str, int | None]]:
        """For each parameter, the name of its units and the axis of its ranks (None: one unit)."""
        ranks = {a: (w, 0) for w, (a, _) in self.model.pairs.items()} | {b: (w, 1) for w, (_, b) in self.model.pairs.items()}
        return {n: ranks.get(n, (n.rpartition(".")[0] or n, None)) for n in self.model.params}

    def sums(self, entries: Tree) -> Tree:
        """The sum of the entries of each unit, in float64."""
        found: Tree = {}
        for n, v in entries.items():
            unit, axis = self.of[n]
            own = rows(v).unsqueeze(1) if axis is None else v.movedim(axis + 1, 1).flatten(2)
            part = own.double().sum(2)
            found[unit] = found[unit] + part if unit in found else part
        return found

    def spread(self, units: Tree, like: Tree) -> Tree:
        """A tree in which each entry has the value of its unit."""
        out: Tree = {}
        for n, v in like.items():
            unit, axis = self.of[n]
            shape = [len(v), *[1] * (v.ndim - 1)]
            if axis is not None:
                shape[axis + 1] = -1
            out[n] = units[unit].view(shape).expand(v.shape).contiguous()
        return out

    def marks(self, mask: Tree) -> Tree:
        """Which units a mask marks; it marks all entries of a unit or none."""
        found: Tree = {}
        for n, m in mask.items():
            unit, axis = self.of[n]
            found.setdefault(unit, rows(m)[:, :1] if axis is None else m.movedim(axis + 1, 1).flatten(2)[:, :, 0])
        return found

    def moved(self, before: Tree, after: Tree) -> Tree:
        """How far each unit moved: the root mean square over the entries of the weight it changes.

        A rank changes its weight by its column of B times its row of A; a factor shifted between the two makes no difference.
        """
        squares = self.sums({n: (after[n] - before[n]).double().square() for n in before})
        size = self.sums({n: torch.ones_like(v[:1]) for n, v in before.items()})
        found = {u: (v / size[u]).sqrt() for u, v in squares.items()}
        for weight, (a, b) in self.model.pairs.items():
            a0, a1 = (t[a].double().flatten(2) for t in (before, after))
            b0, b1 = (t[b].double() for t in (before, after))
            now, then = b1.square().sum(1) * a1.square().sum(2), b0.square().sum(1) * a0.square().sum(2)
            both = (b0 * b1).sum(1) * (a0 * a1).sum(2)
            count = b0.shape[1] * a0.shape[2]
            found[weight] = ((now + then - 2 * both).clamp_min(0) / count).sqrt()
        return found


def units_of(model: Model, who: str) -> Units:
    if not model.pairs:
        raise InputError(
            f"{who} with unit=rank needs a model with low-rank adapters; add --adapt lora (in Python: fs.lora(model))."
        )
    return Units(model)


def last_of(above: Tree) -> Tree:
    """The marked units of the last layer that has any: (C, r) by name."""
    some = torch.stack([m.any(1) for m in above.values()], 1)
    later = some.flip(1).cumsum(1).flip(1)
    return {u: m & (later[:, i] == 1).unsqueeze(1) & some[:, i : i + 1] for i, (u, m) in enumerate(above.items())}
