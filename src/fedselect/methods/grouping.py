"""Who is alike: clients whose training pulls a layer the same way, in whichever half of their samples.

A client's pull is what it trained less the mean of all, once on each half of its samples. Halves share no sample, so products
between the pulls of different halves have no noise in the mean: they say how clients truly differ. What halves of one client
differ in says how noisy its pulls are. A group saves noise and costs difference; clients are merged while that lowers the sum.
"""

import torch
from torch import Tensor

SAVED = 0.7
"""What noise counts beside difference. 1 would be even; of 1, 0.7, 0.5 and 0.35 this did best on held-out samples of digits
and CIFAR-10: a head that does not fit is paid for in every later round."""
FLOOR = 0.1
"""Of the mean noise of an entry, added to that of each: with few clients some entries look quiet by chance."""


def alike(first: Tensor, second: Tensor) -> Tensor:
    """The group of each client, named by its first member: (M,). first, second: mean pulls of either half, (M, D)."""
    if len(first) < 2:
        return torch.arange(len(first))
    products, noise = differences(first.double().cpu(), second.double().cpu())
    return merged(products, SAVED * noise)


def differences(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Products of the clients' true pulls (M, M), and the noise of each one's pull (M,); quiet entries count more."""
    known = (first != second).any(1)  # one sample has no halves: nothing is known of its noise, so it does not count
    many = int(known.sum())
    if many < 2:  # nobody to tell from others
        return torch.zeros(len(first), len(first), dtype=first.dtype), torch.ones(len(first), dtype=first.dtype)
    first, second = (torch.where(known.unsqueeze(1), v - v[known].mean(0), 0.0) for v in (first, second))
    each = (first - second).square().mean(0)
    scale = (each + FLOOR * each.mean()).clamp_min(1e-300).rsqrt()
    first, second = first * scale, second * scale
    noise = (first - second).square().sum(1) / 4 * many / (many - 1)
    noise = torch.where(known, noise, noise[known].mean())
    return shrunk(first @ second.T), noise


def shrunk(products: Tensor) -> Tensor:
    """Noisy products (M, M) drawn towards "all differ alike", as far as their noise explains how they depart from it.

    The true products are symmetric, so what is not symmetric is noise, of the same size as the noise in the rest.
    """
    many = len(products)
    symmetric, rest = (products + products.T) / 2, (products - products.T) / 2
    target = (torch.eye(many, dtype=products.dtype) - 1 / many) * symmetric.trace() / (many - 1)
    noise = rest.square().sum() / (many * (many - 1)) * (many * (many - 1) + 2 * many)  # twice as much on the diagonal
    share = (noise / (symmetric - target).square().sum().clamp_min(1e-300)).clamp_max(1.0)
    return torch.lerp(symmetric, target, share)


def merged(products: Tensor, noise: Tensor) -> Tensor:
    """Merge the two groups that gain most by it, until none do: (M,), each client's group named by its first member.

    A group of n clients costs their squared distance from its mean, and the noise of that mean counts once instead of n times.
    """
    many = len(products)
    sums, size, noises = products.clone(), torch.ones_like(noise), noise.clone()
    group = torch.arange(many)
    own = sums.diagonal().clone() - noises
    off = torch.eye(many, dtype=torch.bool)
    for _ in range(many - 1):
        total = size.unsqueeze(1) + size
        inside = sums.diagonal()
        both = (inside.unsqueeze(1) + inside + 2 * sums - noises.unsqueeze(1) - noises) / total
        gain = (both - own.unsqueeze(1) - own).masked_fill(off, -torch.inf)
        best = int(gain.argmax())
        i, j = sorted((best // many, best % many))
        if not float(gain[i, j]) > 0:
            break
        sums[i] += sums[j]
        sums[:, i] += sums[:, j]
        size[i] += size[j]
        noises[i] += noises[j]
        own[i] = (sums[i, i] - noises[i]) / size[i]
        off[j] = off[:, j] = True
        group[group == j] = i
    return group
