"""Presets: named sets of option values, published or our own. Flags and files override them.

paper    FedSelect's comparison: three local epochs, one tuned rate for every method and data set
authors  the values published for each method; for FedSelect, those closest to its released code (docs/methods/fedselect.md)
ours     the FedSelect variant that did best on held-out images in our experiments (docs/reproduction.md)
"""

from typing import Any

from fedselect.core.errors import InputError, unknown
from fedselect.core.options import options
from fedselect.methods import METHODS

Values = dict[str, dict[str, Any]]
"""Options by table: method, training."""

PAPER_RATES = {"cifar10": 0.01, "cifar10c": 0.01, "miniimagenet": 0.001, "officehome": 0.001}
PAPER: dict[str, dict[str, Any]] = {
    "fedselect": {"lr": 0.001, "personal_lr": 0.1, "rate": 0.05, "limit": 0.30},
    "layers": {"lr": 0.001, "personal_lr": 0.1},
    "ditto": {"lam": 0.75},
}
AUTHORS: dict[str, Values] = {
    "fedselect": {
        "method": {
            "lr": 0.05, "personal_lr": 0.05, "scope": "tensor", "weights_only": True, "strict": False,
            "since": "update", "every": 3, "first": 3,
        },
        "training": {"momentum": 0.0},
    },
    "fedavg+ft": {"method": {"finetune": 5, "finetune_lr": 0.001}},
    "fedrep": {"method": {"head_epochs": 10, "epochs": 1, "lr": 0.01}, "training": {"momentum": 0.5}},
    "fedbabu": {"method": {"finetune": 5, "finetune_lr": 0.001}, "training": {"momentum": 0.9}},
    "fedpac": {
        "method": {"head_epochs": 1, "head_lr": 0.1, "epochs": 5, "lr": 0.02, "lam": 1.0},
        "training": {"momentum": 0.5, "weight_decay": 5e-4},
    },
    "lg-fedavg": {"method": {"shared": "convolutions"}},
    "lotteryfl": {"method": {"rate": 0.2, "floor": 0.5, "above": 0.2}},
}  # fmt: skip

OURS: dict[str, Values] = {
    "fedselect": {
        "method": {
            "limit": 0.002, "start_with": "norms", "freeze": "head", "lr": 0.1, "personal_lr": 0.01,
            "finetune": 3, "finetune_lr": 0.01, "view": "merged",
        }
    },
}  # fmt: skip
NAMES = ("paper", "authors", "ours")

SUITED: dict[str, Values] = {
    "digits": {
        "method": {"lr": 0.1, "personal_lr": 0.1}, "fedbabu": {"finetune_lr": 0.01}, "training": {"batch_size": 16},
        "fedalike": {"finetune": 20, "finetune_lr": 0.1},
    },
    "audiomnist": {
        "method": {"lr": 0.1, "personal_lr": 0.1}, "training": {"batch_size": 16}, "fedavg+ft": {"finetune": 20},
        "fedbabu": {"finetune": 20, "finetune_lr": 0.01}, "fedpersist": {"finetune": 20, "finetune_lr": 0.1},
        "fedalike": {"finetune": 20, "finetune_lr": 0.1},
    },
    "har": {
        "method": {"lr": 0.1, "personal_lr": 0.1}, "training": {"batch_size": 16}, "fedavg+ft": {"finetune": 20},
        "fedbabu": {"finetune": 20}, "fedpersist": {"finetune": 20, "finetune_lr": 0.1},
        "fedalike": {"finetune": 20, "finetune_lr": 0.1},
    },
    "officehome": {"method": {"lr": 0.01, "personal_lr": 0.01}},
    "domains": {"method": {"lr": 0.01, "personal_lr": 0.01}},
}  # fmt: skip
"""Defaults by data set: learning rates for all methods, and options of single methods. The rates were chosen on held-out
samples (for domains on those of PACS, see results/tuned.json; for audiomnist and har in a few trials of FedAvg + FT). Other
data sets use the methods' own defaults: the paper's values for CIFAR, except FedSelect's rates, which were chosen on held-out
images. Both also do better on Mini-ImageNet than the paper's 0.001."""


def suited(method: str, data: str) -> Values:
    """The defaults of a method on a data set. Rates that default to another rate (such as FedPer's personal_lr) stay unset."""
    table = SUITED.get(data, {})
    known = {k: o.default for k, o in options(METHODS[method]).items()}
    common = {k: v for k, v in table.get("method", {}).items() if known.get(k) is not None}
    chosen = {**common, **{k: v for k, v in table.get(method, {}).items() if k in known}}
    return {"method": chosen, "training": table.get("training", {})}


def preset(name: str, method: str, data: str) -> Values:
    """The option values that a preset sets for a method on a data set."""
    if name == "paper":
        common = {"epochs": 3, "lr": PAPER_RATES.get(data, 0.01)}
        known = options(METHODS[method])
        return {"method": {k: v for k, v in {**common, **PAPER.get(method, {})}.items() if k in known}}
    if name not in NAMES:
        raise unknown("preset", name, NAMES)
    table, whose = (AUTHORS, "authors") if name == "authors" else (OURS, "ours")
    if method not in table:
        raise InputError(f"the preset {whose} does not cover {method}; it covers {', '.join(table)}.")
    return table[method] if name == "authors" else {**suited(method, data), **table[method]}


def describe(name: str, method: str, data: str) -> str:
    """One line: the values of the preset, or "none"."""
    try:
        values = preset(name, method, data)
    except InputError:
        return "none"
    said = {
        k: {True: "yes", False: "no"}[v] if isinstance(v, bool) else v for table in values.values() for k, v in table.items()
    }
    return ", ".join(f"{k}={v}" for k, v in said.items())
