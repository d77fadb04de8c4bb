"""What to call runs that stand beside each other: the method's name, and whatever else tells them apart."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fedselect.simulate.checkpoint import as_first_written

COLOURS = {  # of each method: on light paper, on dark
    "fedselect": ("#1d4ed8", "#86a9ff"),
    "local": ("#6b7280", "#a3abb8"),
    "fedavg": ("#b45309", "#f0b25a"),
    "fedavg+ft": ("#be123c", "#ff8096"),
    "fedper": ("#7e22ce", "#cba3ff"),
    "fedrep": ("#0f766e", "#4fcfc2"),
    "fedbabu": ("#4d7c0f", "#a5d85f"),
    "lg-fedavg": ("#a21caf", "#f090f2"),
    "fedprox": ("#7c4a2d", "#d8a98c"),
    "ditto": ("#0e7490", "#5fcbe0"),
    "fedpac": ("#8a6d00", "#e3cb5b"),
    "fedbn": ("#9d174d", "#ff9ecb"),
    "lotteryfl": ("#334155", "#c3cfdf"),
    "fedpersist": ("#15803d", "#7fe0a4"),
    "fedalike": ("#111827", "#f3f4f6"),
    "apfl": ("#c2410c", "#ffa07a"),
    "scaffold": ("#57534e", "#d6cfc7"),
}
APART = (  # fields in which runs of one label may differ
    "seed", "device", "chunk", "rows", "precision", "deterministic", "eval_every", "metrics", "cross", "preset", "plugins",
)  # fmt: skip


def labels(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """One label for each configuration; equal ones (the seed aside) have the same.

    Options of a method, of training and of an aggregator are named where runs of that method differ in them; data, model and
    rounds where they are not what most of the runs have.
    """
    known = [flat(settings(c)) for c in configs]
    out = []
    for own in known:
        alike = [f for f in known if f["method.name"] == own["method.name"]]
        told = [
            f"{key.rpartition('.')[2] if not key.endswith('.name') else key.partition('.')[0]}={value}"
            for key, value in own.items()
            if key != "method.name"
            and (
                any(f.get(key) != value for f in alike)
                if key.startswith(("method.", "training.", "aggregate."))
                else 2 * sum(f.get(key) == value for f in known) <= len(known)
            )
        ]
        out.append(" ".join([own["method.name"], *([", ".join(told)] if told else [])]))
    return out


def same(config: Mapping[str, Any]) -> str:
    """Equal for runs that would count as the same seed of the same label."""
    return json.dumps([config.get("seed"), settings(config)], sort_keys=True)


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What tells runs apart; a run from before a setting existed is one with its default."""
    return {k: v for k, v in as_first_written(config).items() if k not in APART}


def colours(methods: Sequence[str]) -> list[tuple[str, str]]:
    """A colour for each label by its method: a method's own, then those that nobody here has."""
    free = [c for m, c in COLOURS.items() if m not in methods] + list(COLOURS.values())
    taken: set[str] = set()
    out = []
    for method in methods:
        own = method in COLOURS and method not in taken
        out.append(COLOURS[method] if own else free.pop(0) if len(free) > 1 else free[0])
        taken.add(method)
    return out


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """{"method": {"limit": 0.3}} as {"method.limit": 0.3}."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        out.update({f"{key}.{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {key: value})
    return out
