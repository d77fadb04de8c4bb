"""Products: average what low-rank adapters add to weights. The mean of products B A is not the product of means."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedselect.aggregate.aggregator import Aggregator, Fold
from fedselect.aggregate.masked import MaskedSum
from fedselect.core.errors import InputError
from fedselect.core.tree import Mask, State, Tree
from fedselect.models.adapters import A, B

MARK = " product"
"""Suffix to the name of an adapter's A for the sum of products."""


@dataclass(frozen=True)
class Products(Aggregator):
    """For adapters, the mean of their products B A, factored again at their rank; for other parameters, the mean.

    The server needs memory for one product as large as each adapted weight. Adapters that clients share only in part, such as
    only A, are averaged entry by entry.
    """

    def start(self, params: Tree) -> State:
        _pairs(params)  # raises if there are none
        return {}

    def fold(self, state: State, params: Tree) -> Fold:
        return ProductFold(_pairs(params))


class ProductFold(Fold):
    """Sums of products, besides the sums of entries."""

    sums: MaskedSum

    def __init__(self, pairs: dict[str, str]) -> None:
        self.sums, self._pairs = MaskedSum(), pairs

    def add(self, values: Tree, sent: Mask, weight: Tensor) -> None:
        self.sums.add(values, sent, weight)
        w = weight.double()
        for a, b in self._pairs.items():
            if sent.get(a) is True and sent.get(b) is True:
                name, low, up = a + MARK, values[a].double().flatten(2), values[b].double() * w.view(-1, 1, 1)
                total = torch.einsum("cor,crk->ok", up, low)
                before = self.sums.total.get(name)
                self.sums.total[name] = total if before is None else before + total
                heavy = w.sum().expand(total.shape)
                self.sums.weight[name] = heavy.clone() if before is None else self.sums.weight[name] + heavy
                self.sums.dtypes[name] = torch.float64

    def finish(self) -> tuple[Tree, Mask, State]:
        mean, heard = self.sums.mean()
        out = {n: v for n, v in mean.items() if not n.endswith(MARK)}
        for a, b in self._pairs.items():
            if (product := mean.get(a + MARK)) is not None and bool(torch.isfinite(product).all()):
                low, up = factored(product, out[a].double().flatten(1))
                out[a], out[b] = low.view(out[a].shape).to(out[a].dtype), up.to(out[b].dtype)
        return out, {n: heard[n] for n in out}, {}


def factored(product: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """The A and B, (r, inputs) and (outputs, r), whose product is nearest to this one.

    The rows of A are orthogonal and have the root mean square length of the rows of `like`, so that training continues at the
    same pace. If the product has lower rank, A keeps rows of `like`, with zeros in B.
    """
    rank = len(like)
    _, vectors = torch.linalg.eigh(product @ product.T if len(product) <= product.shape[1] else product.T @ product)
    near = vectors[:, -rank:].flip(1)
    left = near if len(product) <= product.shape[1] else product @ near
    left = left / left.norm(dim=0, keepdim=True).clamp_min(1e-300)
    right = left.T @ product  # of length sigma
    sigma = right.norm(dim=1)
    size = like.square().sum(1).mean().sqrt()
    there = (sigma > 1e-9 * sigma.max().clamp_min(1e-300)) & (size > 0)
    sign = torch.sign(left.gather(0, left.abs().argmax(0, keepdim=True))[0])  # an eigenvector does not determine its sign
    low = torch.where(there.unsqueeze(1), sign.unsqueeze(1) * right * (size / sigma.clamp_min(1e-300)).unsqueeze(1), like)
    up = torch.where(there, sign * left * (sigma / size.clamp_min(1e-300)), 0.0)
    return low, up


def _pairs(params: Tree) -> dict[str, str]:
    """The names of the adapters: A to B."""
    found = {n: n.removesuffix(A) + B for n in params if n.endswith(A) and n.removesuffix(A) + B in params}
    if not found:
        raise InputError(
            "the aggregator product is for low-rank adapters, and this model has none; add --adapt lora (in Python: "
            "fs.lora(model)), or use mean."
        )
    return found
