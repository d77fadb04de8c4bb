"""Find groups of clients whose targets look the same to a given model.

A client's profile says what its targets look like: for each class, the mean of the features of its samples, for each half of
the samples. Halves share no sample, so noise has mean zero in products between them, as in products between clients. Clients
are compared in the classes that both have, after subtracting the mean over these classes. Hence three things do not count as
a difference: a class that one client lacks, different class counts, and a shift of all features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedselect.core.tree import Tree
from fedselect.tasks import Sequences
from fedselect.training.products import bmm
from fedselect.training.work import Work

LEAST = 0.1
"""Lower limit of a feature's noise, relative to the mean noise: quiet features count more, but none may dominate."""


def profiles(work: Work) -> Tree:
    """Profiles computed by the common initial model: "first" and "second" per half; "has" marks rows that both halves have."""
    first, second = (profile(work.half(half), work.initial) for half in (0, 1))
    has = first["has"] & second["has"] & (work.n > 1).unsqueeze(1)  # a single sample has no halves
    halves = {"first": first["rows"], "second": second["rows"]}
    return {**{n: torch.where(has.unsqueeze(-1), rows, 0.0) for n, rows in halves.items()}, "has": has}


def profile(work: Work, tree: Tree) -> Tree:
    """What each target looks like to a model: "rows" (C, R, D), and "has" (C, R), which rows a client has.

    A class has one row: the mean of its features. A numeric target (also a 0/1 label) has two rows: half the slope of the
    features on it, upwards and downwards, so that 0 and 1 have the rows of two classes.
    """
    total: Tree = {}
    for outputs, features, y, inside in work.seen(tree):
        classes = y.shape != outputs.shape and outputs.shape[-1] > 1
        y = y if classes or y.ndim == outputs.ndim else y.unsqueeze(-1)
        places = y.shape[: y.ndim if classes else -1]  # (C, b), and positions if there are any
        counts = inside.view(*inside.shape, *[1] * (len(places) - 2)).expand(places)
        if classes:
            counts = counts & (y >= 0) & (y < outputs.shape[-1])
            if isinstance(work.task, Sequences):
                counts = counts & work.task.counted(y)
            marks = F.one_hot(torch.where(counts, y, 0), outputs.shape[-1]).double()
        else:
            marks = y.double()
        vectors = _vectors(features, places)
        each = counts.flatten(1).unsqueeze(-1).double()
        marks = marks.flatten(1, -2) * each
        parts = {
            "count": each.sum(1),
            "marks": marks.sum(1),
            "squares": marks.square().sum(1),
            "features": (vectors * each).sum(1),
            "products": bmm(marks.transpose(1, 2), vectors),
        }
        total = {n: total[n] + v if total else v for n, v in parts.items()}
    if classes:
        has = total["marks"] > 0
        rows = total["products"] / total["marks"].clamp_min(1).unsqueeze(-1)
    else:
        many = total["count"].clamp_min(1)
        mean, features = total["marks"] / many, total["features"] / many
        spread = total["squares"] / many - mean.square()
        has = spread > 1e-9 * total["squares"] / many
        slope = total["products"] / many.unsqueeze(-1) - mean.unsqueeze(-1) * features.unsqueeze(1)
        half = torch.where(has, 0.5 / spread, 0.0).unsqueeze(-1) * slope
        rows, has = torch.cat([half, -half], 1), torch.cat([has, has], 1)
    return {"rows": torch.where(has.unsqueeze(-1), rows, 0.0).float(), "has": has}


def _vectors(features: Tensor, places: torch.Size) -> Tensor:
    """Features as vectors, one per position: (C, positions, D). Without positions, each gets the features of its sample."""
    if features.ndim > len(places) and features.shape[: len(places)] == places:
        return features.double().flatten(len(places)).flatten(1, -2)
    own = features.double().flatten(2)
    own = own.view(*own.shape[:2], *[1] * (len(places) - 2), -1)
    return own.expand(*places, own.shape[-1]).flatten(1, -2)


def alike(first: Tensor, second: Tensor, has: Tensor) -> Tensor:
    """The group of each client, by its first member: (M,). Profiles (M, R, D) and `has` (M, R) as from `profiles`."""
    return merged(votes(first, second, has))


def votes(first: Tensor, second: Tensor, has: Tensor) -> Tensor:
    """How strongly each pair of clients should share a head, (M, M); 0 for pairs with fewer than two rows in common.

    Two clients vote for sharing if their rows differ by less than half as much as rows differ among themselves:
    |x_i - x_j|^2 < (|x_i|^2 + |x_j|^2) / 2, that is x_i x_j > (|x_i|^2 + |x_j|^2) / 4.
    """
    between, own = products(first, second, has)
    common = has.double() @ has.double().T
    return torch.where(common > 1, between - (own + own.T) / 4, 0.0).fill_diagonal_(0.0)


def products(first: Tensor, second: Tensor, has: Tensor) -> tuple[Tensor, Tensor]:
    """x_i x_j and x_i x_i for each pair of clients, over the centered rows that both have; both (M, M).

    The second is the product of the halves of i, so noise has mean zero in it too. Features with less noise count more.
    """
    mine = has.double()
    away = ((first - second).double().square() * mine.unsqueeze(-1)).sum((0, 1))
    scale = (away + LEAST * away.mean()).clamp_min(1e-300).rsqrt()
    a, b = (half.double() * scale * mine.unsqueeze(-1) for half in (first, second))
    mean, flat = (a + b) / 2, ((a + b) / 2).flatten(1)
    between, own = flat @ flat.T, (a * b).sum(-1) @ mine.T
    for j in range(len(mine)):
        both = mine * mine[j]  # (M, R)
        many = both.sum(1).clamp_min(1)
        x, y = (torch.einsum("r,ird->id", mine[j], half) for half in (a, b))
        between[:, j] -= ((x + y) / 2 * (mine @ mean[j])).sum(1) / many
        own[:, j] -= (x * y).sum(1) / many
    return between, own


def merged(votes: Tensor) -> Tensor:
    """Groups found by greedy merging on votes: (M,), each client's group identified by its first member.

    Merge the two groups with the most votes between them while that is not negative; ties go to the largest groups.
    """
    between, many = votes.clone(), len(votes)
    members, group = torch.ones(many, device=votes.device), torch.arange(many, device=votes.device)
    gone = torch.eye(many, dtype=torch.bool, device=votes.device)
    for _ in range(many - 1):
        between[gone] = -torch.inf
        if float(between.max()) < 0:
            break
        size = torch.where(between == between.max(), members.unsqueeze(1) + members, 0.0)
        at = int(size.argmax())
        i, j = sorted((at // many, at % many))
        both = between[i] + between[j]
        between[i] = between[:, i] = both
        members[i] += members[j]
        gone[j] = gone[:, j] = True
        group[group == j] = i
    return group
