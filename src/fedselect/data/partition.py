"""Who gets which samples. The same seed gives the same test sets whatever the training size, and larger training
sets contain the smaller ones.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedselect.errors import DataError, InputError

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """One client's sample numbers."""

    train: Indices
    test: Indices
    val: Indices


def rng(seed: int, *purpose: int) -> np.random.Generator:
    return np.random.default_rng([seed, *purpose])


def deal_classes(clients: int, classes: int, each: int, seed: int) -> list[list[int]]:
    """Classes for every client: `each` different ones, every class held by as nearly as many clients as any other."""
    if clients < 1:
        raise InputError(f"there must be at least one client, not {clients}.")
    if not 1 <= each <= classes:
        raise InputError(f"classes_per_client must lie in 1 to {classes} (the classes there are), not {each}.")
    draw = rng(seed, 1)
    holders = np.zeros(classes)
    hands: list[list[int]] = []
    for _ in range(clients):
        hand = np.argsort(holders + draw.random(classes) / 2)[:each]  # fewest holders first, ties at random
        holders[hand] += 1
        hands.append(sorted(int(c) for c in hand))
    return hands


def by_class(labels: Indices, clients: int, classes_per_client: int, train: int, test: int, val: int, seed: int) -> list[Part]:
    """The paper's partition: `classes_per_client` classes each, fixed sizes, no sample given twice.

    `val` samples are held out of the training samples.
    """
    for name, size in (("train", train), ("test", test)):
        if size < 1:
            raise InputError(f"{name} must be at least 1 sample a client, not {size}.")
    if not 0 <= val < train:
        raise InputError(f"val is held out of train and must lie in 0 to {train - 1}, not {val}.")
    classes = int(labels.max()) + 1
    hands = deal_classes(clients, classes, classes_per_client, seed)
    trains: list[list[Indices]] = [[] for _ in hands]
    tests: list[list[Indices]] = [[] for _ in hands]
    for c in range(classes):
        holders = [i for i, hand in enumerate(hands) if c in hand]
        pool = rng(seed, 2, c).permutation(np.flatnonzero(labels == c))
        quota = {i: (_portion(train, hands[i], c), _portion(test, hands[i], c)) for i in holders}
        reserve = max((q[1] for q in quota.values()), default=0) * len(holders)
        need = max((q[0] for q in quota.values()), default=0) * len(holders) + reserve
        if need > len(pool):
            raise DataError(
                f"class {c} has {len(pool)} samples, but its {len(holders)} clients ask for {need}; lower train or test, "
                "or raise classes_per_client."
            )
        for at, i in enumerate(holders):
            tests[i].append(pool[:reserve][at :: len(holders)][: quota[i][1]])
            trains[i].append(pool[reserve:][at :: len(holders)][: quota[i][0]])
    parts = []
    for i in range(clients):
        mine = rng(seed, 3, i).permutation(np.concatenate(trains[i]))
        parts.append(Part(mine[: len(mine) - val], np.concatenate(tests[i]), mine[len(mine) - val :]))
    return parts


def _portion(total: int, hand: list[int], c: int) -> int:
    """A client's samples of one class when `total` are spread evenly over its classes."""
    return total // len(hand) + (hand.index(c) < total % len(hand))
