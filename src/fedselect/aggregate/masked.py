"""MaskedSum: the mean of each entry over exactly its senders, accumulated as uploads arrive."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedselect import kernels
from fedselect.core.tree import Mask, Tree, blocks, lay, line, matrix


@dataclass
class MaskedSum:
    """Accumulates uploads as they arrive; gives, per entry, the weighted mean over the clients that sent it.

    Sums are kept in float64, where float32 values of similar size add up exactly, so the result depends neither on the order
    of clients nor on how a cohort was split into chunks. Memory does not grow with the number of clients.
    """

    total: Tree = field(default_factory=dict)
    weight: Tree = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)

    def add(self, values: Tree, sent: Mask, weight: Tensor) -> None:
        w = weight.double().contiguous()
        if values and kernels.serve(next(iter(values.values()))):
            self._fold(values, sent, w)
            return
        for name, v in values.items():
            s = sent.get(name, False)
            if s is False:
                continue
            row = w.view(-1, *([1] * (v.ndim - 1)))
            if isinstance(s, Tensor):
                # where, not multiplication: entries that were not sent may be NaN
                part = torch.where(s, v.double() * row, 0.0).sum(0)
                heavy = torch.where(s, row, 0.0).sum(0)
            else:
                scaled = v.double() * row
                part = scaled[0] if len(scaled) == 1 else scaled.sum(0)
                heavy = w.sum().expand(v.shape[1:]).clone()
            if name in self.total:
                self.total[name] += part
                self.weight[name] += heavy
            else:
                self.total[name], self.weight[name], self.dtypes[name] = part, heavy, v.dtype

    def _fold(self, values: Tree, sent: Mask, weight: Tensor) -> None:
        """`add` by a kernel, in one pass over values and masks, and over all names at once if they lie in blocks."""
        from fedselect.kernels.fold import fold

        marks = {n: m for n in values if isinstance(m := sent.get(n), Tensor)}
        whole = {n: v for n, v in values.items() if sent.get(n) is True}
        for lot in filter(None, ({n: values[n] for n in marks}, whole)):
            for part in [lot] if self._in_blocks(lot, marks) else [{n: v} for n, v in lot.items()]:
                so_far = None
                if part.keys() <= self.total.keys():
                    so_far = line({n: self.total[n] for n in part}), line({n: self.weight[n] for n in part})
                mask = True if lot is whole else matrix({n: marks[n] for n in part})
                for tree, sums in zip((self.total, self.weight), fold(matrix(part), mask, weight, so_far), strict=True):
                    tree.update(lay(sums, part))
                self.dtypes.update({n: v.dtype for n, v in part.items()})

    def _in_blocks(self, values: Tree, marks: Tree) -> bool:
        """Whether these names can be added at once: they lie in blocks, and so do their sums, if there are any."""
        given = [values, {n: marks[n] for n in values if n in marks}]
        so_far = [{n: t[n] for n in values if n in t} for t in (self.total, self.weight)]
        if blocks(*filter(None, given)) is None or len(so_far[0]) not in (0, len(values)):
            return False
        return blocks(*filter(None, so_far), clients=False) is not None

    def mean(self) -> tuple[Tree, Mask]:
        """The mean of every entry that at least one client sent, and the mask of these entries."""
        if not self.total:
            return {}, {}
        whole, kinds = blocks(self.total, self.weight, clients=False), set(self.dtypes.values())
        if whole is not None and len(kinds) == 1:
            quotient = (whole[0] / whole[1].clamp_min(1e-300)).to(kinds.pop())
            return lay(quotient, self.total, clients=False), lay(whole[1] > 0, self.total, clients=False)
        quotients = torch._foreach_div(list(self.total.values()), torch._foreach_clamp_min(list(self.weight.values()), 1e-300))
        mean = {n: q.to(self.dtypes[n]) for n, q in zip(self.total, quotients, strict=True)}
        return mean, {n: w > 0 for n, w in self.weight.items()}
