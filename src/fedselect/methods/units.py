"""Units: entries that become personal together. Of an adapter its ranks, a row of A with a column of B; of other layers all."""

from dataclasses import dataclass
from functools import cached_property

import torch

from fedselect.core.errors import InputError
from fedselect.core.tree import Tree, rows
from fedselect.models import Model


@dataclass(frozen=True, eq=False)
class Units:
    """A tree of units has (C, r) for an adapter of rank r, by the name of its weight, and (C, 1) for any other layer."""

    model: Model

    @cached_property
    def of(self) -> dict[str, tuple[str, int | None]]:
        """Of each parameter, the name of its units, and along which of its own axes ranks lie."""
        ranks = {a: (w, 0) for w, (a, _) in self.model.pairs.items()} | {b: (w, 1) for w, (_, b) in self.model.pairs.items()}
        return {n: ranks.get(n, (n.rpartition(".")[0] or n, None)) for n in self.model.params}

    def sums(self, entries: Tree) -> Tree:
        """What entries add up to, unit by unit, in float64."""
        found: Tree = {}
        for n, v in entries.items():
            unit, axis = self.of[n]
            own = rows(v).unsqueeze(1) if axis is None else v.movedim(axis + 1, 1).flatten(2)
            part = own.double().sum(2)
            found[unit] = found[unit] + part if unit in found else part
        return found

    def spread(self, units: Tree, like: Tree) -> Tree:
        """Each entry with the value of its unit."""
        out: Tree = {}
        for n, v in like.items():
            unit, axis = self.of[n]
            shape = [len(v), *[1] * (v.ndim - 1)]
            if axis is not None:
                shape[axis + 1] = -1
            out[n] = units[unit].view(shape).expand(v.shape).contiguous()
        return out

    def marks(self, mask: Tree) -> Tree:
        """Which units a mask marks, whose entries it marks together."""
        found: Tree = {}
        for n, m in mask.items():
            unit, axis = self.of[n]
            found.setdefault(unit, rows(m)[:, :1] if axis is None else m.movedim(axis + 1, 1).flatten(2)[:, :, 0])
        return found

    def moved(self, before: Tree, after: Tree) -> Tree:
        """How far each unit moved: the root mean square over the entries of the weight that it moves.

        A rank moves its weight by the column of B times the row of A, whatever factor the two have shifted between them.
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
            f"{who} with unit=rank needs a model with low-rank adapters; add --adapt lora, in Python fs.lora(model)."
        )
    return Units(model)


def last_of(above: Tree) -> Tree:
    """Of units that are marked, those of the last layer that has any: (C, r) by name."""
    some = torch.stack([m.any(1) for m in above.values()], 1)
    later = some.flip(1).cumsum(1).flip(1)
    return {u: m & (later[:, i] == 1).unsqueeze(1) & some[:, i : i + 1] for i, (u, m) in enumerate(above.items())}
