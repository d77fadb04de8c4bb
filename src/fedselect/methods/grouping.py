"""Who is alike: clients whose training pulls a layer the same way, in whichever half of their samples.

A client's pull is what it trained less the mean of all, once on each half of its samples. Halves share no sample, so products
between the pulls of different halves have no noise in the mean: they say how clients truly differ. What halves of one client
differ in says how noisy its pulls are. A group saves noise and costs difference; clients are merged while that lowers the sum.

Rows of a head are classes. Clients are compared in the rows of classes that both have: that one has a class and the other has
not is no contradiction, and one head can serve both.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedselect.core.tree import Tree
from fedselect.models import Model

SAVED = 0.7
"""What noise counts beside difference. 1 would be even; of 1, 0.7, 0.5 and 0.35 this did best on held-out samples of digits
and CIFAR-10: a head that does not fit is paid for in every later round."""
PRIOR = 4
"""How many clients the mean noise of all entries counts for beside the noise of one: with few clients some entries look quiet
by chance, and then their halves also look alike. Of 1, 2 and 4 this did best on held-out digits."""


def alike(first: Tensor, second: Tensor, has: Tensor, row: Tensor) -> Tensor:
    """The group of each client, named by its first member: (M,).

    first, second: mean pulls of either half, (M, D). has: the outputs that each client has samples of, (M, K). row: the output
    that each entry belongs to, (D,); K where it is none's in particular, and all are compared.
    """
    if len(first) < 2:
        return torch.arange(len(first))
    first, second = first.double().cpu(), second.double().cpu()
    known = (first != second).any(1, keepdim=True)  # one sample has no halves, so nothing is known of its noise
    counts = F.pad(has.cpu(), (0, 1), value=True) & known
    products, noise = differences(first, second, counts, row)
    return merged(products, SAVED * noise, counts)


def differences(first: Tensor, second: Tensor, has: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """By row: products of the clients' true pulls (K, M, M), and the noise of each one's pull (K, M); quiet entries count more.

    A client's numbers in rows that it does not have are 0.
    """
    mine = has[:, row].to(first)
    count = mine.sum(0).clamp_min(1)
    first, second = (mine * (v - (mine * v).sum(0) / count) for v in (first, second))
    each = (first - second).square().sum(0) / count
    scale = (each + PRIOR / (count - 1).clamp_min(1) * each.mean()).clamp_min(1e-300).rsqrt()
    first, second = first * scale, second * scale
    products, noise = [], []
    for k in range(has.shape[1]):
        a, b, many = first[:, row == k], second[:, row == k], int(has[:, k].sum())
        products.append(a @ b.T)
        noise.append((a - b).square().sum(1) / 4 * many / max(many - 1, 1))
    return shrunk(torch.stack(products), has), torch.stack(noise)


def shrunk(products: Tensor, has: Tensor) -> Tensor:
    """Noisy products (K, M, M) drawn towards "all differ alike", as far as their noise explains how they depart from it.

    True products are symmetric, so what is not symmetric is noise, of the same size as the noise in the rest. All rows are
    drawn by the share that their sum needs: of a single row too little is known.
    """
    mine = has.T.to(products)
    many = mine.sum(1).view(-1, 1, 1)
    symmetric, rest = (products + products.mT) / 2, (products - products.mT).sum(0) / 2
    level = symmetric.diagonal(dim1=1, dim2=2).sum(1).view(-1, 1, 1) / (many - 1).clamp_min(1)
    target = level * (torch.diag_embed(mine) - mine.unsqueeze(1) * mine.unsqueeze(2) / many.clamp_min(1))
    # noise is twice as large on the diagonal, of which `rest` says nothing
    noise = rest.square().sum() * (1 + 2 / max(int(has.any(1).sum()) - 1, 1))
    share = (noise / (symmetric - target).sum(0).square().sum().clamp_min(1e-300)).clamp_max(1.0)
    return torch.lerp(symmetric, target, share)


def merged(products: Tensor, noise: Tensor, has: Tensor) -> Tensor:
    """Merge the two groups that gain most by it, while any do: (M,), each client's group named by its first member.

    In each row, a group of n clients that have it costs their squared distance from its mean, and the noise of that mean counts
    once instead of n times. Groups that share no row lose nothing by merging, so they merge: the largest first.
    """
    many = len(has)
    sums, size, noises = products.clone(), has.T.to(products), noise.clone()
    members, group = torch.ones(many), torch.arange(many)
    gone = torch.eye(many, dtype=torch.bool)

    def gains(i: int) -> Tensor:
        """What group i gains by merging with each: (M,)."""
        inside = sums.diagonal(dim1=1, dim2=2) - noises  # (K, M)
        own = inside / size.clamp_min(1)
        both = (inside[:, i : i + 1] + inside + 2 * sums[:, i]) / (size[:, i : i + 1] + size).clamp_min(1)
        shared = (size[:, i : i + 1] > 0) & (size > 0)
        return torch.where(shared, both - own[:, i : i + 1] - own, 0.0).sum(0)

    gain = torch.stack([gains(i) for i in range(many)])
    for _ in range(many - 1):
        gain[gone] = -torch.inf
        best = gain == gain.max()
        if float(gain.max()) < 0:
            break
        at = int(torch.where(best, members.unsqueeze(1) + members, 0.0).argmax())
        i, j = sorted((at // many, at % many))
        sums[:, i] += sums[:, j]
        sums[:, :, i] += sums[:, :, j]
        size[:, i] += size[:, j]
        noises[:, i] += noises[:, j]
        members[i] += members[j]
        gone[j] = gone[:, j] = True
        group[group == j] = i
        gain[i] = gain[:, i] = gains(i)
    return group


def outputs(model: Model) -> int:
    """How many outputs the head's last layer has a row for, as a Linear has; else 0."""
    last = model.module.get_submodule([n for n in model.params if model.is_head(n)][-1].rpartition(".")[0])
    return last.out_features if isinstance(last, nn.Linear) else 0


def output_of(head: Tree, outputs: int) -> Tensor:
    """Which output each entry of stacked heads belongs to, (D,); `outputs` where it is none's in particular."""
    last = list(head)[-1].rpartition(".")[0]
    whose = []
    for n, v in head.items():
        size = v[0].numel()
        own = outputs > 0 and n.rpartition(".")[0] == last
        whose.append(torch.arange(outputs).repeat_interleave(size // outputs) if own else torch.full((size,), outputs))
    return torch.cat(whose)
