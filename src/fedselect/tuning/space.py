"""What is tried where a user does not say: methods, and for each a few values of the options that matter most.

By what was chosen on held-out data before (results/tuned.json): of 80 tuned settings three in five have a rate of 0.1 and
one in three 0.01; fine-tuning wants a rate of its own, and on naturally federated data more passes than three.
"""

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedselect.core.options import options

TRIED = ("fedalike", "fedavg+ft", "fedbabu", "fedpersist", "fedselect", "fedper", "ditto", "local")
"""Methods, where none are named."""
VALUES: dict[str, tuple[Any, ...]] = {
    "lr": (0.01, 0.03, 0.1),
    "finetune_lr": (0.01, 0.1),
    "finetune": (3, 20),
    "personal_lr": (0.01, 0.1),
    "limit": (0.1, 0.3),
    "lam": (0.25, 0.75),
    "head_lr": (0.01, 0.1),
    "mu": (0.01, 0.1),
}
"""Options and what is tried for each."""
OPTIONS: dict[str, tuple[str, ...]] = {
    "fedalike": ("lr", "finetune_lr", "finetune"),
    "fedavg+ft": ("lr", "finetune_lr", "finetune"),
    "fedbabu": ("lr", "finetune_lr", "finetune"),
    "fedpersist": ("lr", "finetune_lr", "finetune"),
    "fedselect": ("lr", "personal_lr", "limit"),
    "fedper": ("lr", "personal_lr"),
    "fedrep": ("lr", "personal_lr"),
    "lg-fedavg": ("lr", "personal_lr"),
    "ditto": ("lr", "lam"),
    "fedpac": ("lr", "head_lr"),
    "fedprox": ("lr", "mu"),
}
"""Which options are tried for a method; for any other, its rate."""


def values(method: str, given: Iterable[str] = ()) -> dict[str, tuple[Any, ...]]:
    """What is tried for the options of a method, but for those that are given."""
    from fedselect.methods import METHODS  # not above, for help texts name what is TRIED

    known = options(METHODS[method])
    tried = [name for name in OPTIONS.get(method, ("lr",)) if name in known and name not in given]
    return {name: VALUES[name] for name in tried}


def grid(tried: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of values."""
    return [dict(zip(tried, row, strict=True)) for row in itertools.product(*tried.values())]


def order(settings: Mapping[str, str], seed: int) -> list[str]:
    """Settings, given with their methods, in the order in which they are taken where a budget does not allow for all.

    Methods take turns, and each gives its settings in an order that the seed draws.
    """
    by: dict[str, list[str]] = {}
    for name, method in settings.items():
        by.setdefault(method, []).append(name)
    for names in by.values():
        names.sort(key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())
    turns = itertools.zip_longest(*by.values())
    return [name for turn in turns for name in turn if name is not None]
