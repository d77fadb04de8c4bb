"""The default search space: methods, and a few values of their most important options.

Based on earlier choices on held-out data (results/tuned.json): of 80 tuned settings, three in five have a rate of 0.1 and
one in three 0.01; fine-tuning needs its own rate, and on naturally federated data more than three epochs.
"""

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedselect.core.options import options

TRIED = ("fedalike", "fedavg+ft", "fedbabu", "fedpersist", "fedselect", "fedper", "ditto", "local")
"""Default methods."""
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
"""Values to try for each option."""
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
"""Options to vary for each method. Methods not listed vary only lr."""


def values(method: str, given: Iterable[str] = ()) -> dict[str, tuple[Any, ...]]:
    """Values to try for the options of a method, except those that the user set."""
    from fedselect.methods import METHODS  # imported late: help texts need TRIED without it

    known = options(METHODS[method])
    tried = [name for name in OPTIONS.get(method, ("lr",)) if name in known and name not in given]
    return {name: VALUES[name] for name in tried}


def grid(tried: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """All combinations of values."""
    return [dict(zip(tried, row, strict=True)) for row in itertools.product(*tried.values())]


def order(settings: Mapping[str, str], seed: int) -> list[str]:
    """Settings in order of priority, for budgets that do not allow all of them. `settings` maps names to methods.

    Methods alternate, and the settings of each are shuffled by the seed.
    """
    by: dict[str, list[str]] = {}
    for name, method in settings.items():
        by.setdefault(method, []).append(name)
    for names in by.values():
        names.sort(key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())
    turns = itertools.zip_longest(*by.values())
    return [name for turn in turns for name in turn if name is not None]
