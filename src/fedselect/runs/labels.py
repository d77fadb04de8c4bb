"""Labels, colors and markers for runs shown together. A label is the method's name and whatever distinguishes the run."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fedselect.simulate.checkpoint import as_first_written

BLUE, GREY, INK = ("#1d4ed8", "#86a9ff"), ("#6b7280", "#a3abb8"), ("#111827", "#f3f4f6")  # on light paper, on dark
ORANGE, MAROON, GREEN = ("#b45a0f", "#e17800"), ("#781e00", "#f02d4b"), ("#3c784b", "#b4f078")
LILAC, INDIGO, PLUM = ("#965ab4", "#965aff"), ("#3c1e87", "#00e196"), ("#5a2d69", "#ffe12d")
PALETTE = (BLUE, GREY, INK, ORANGE, MAROON, GREEN, LILAC, INDIGO, PLUM)
"""Distinguishable with color blindness, too; a test simulates it."""
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star")
LOOKS = {  # color and marker of each method
    "fedselect": (BLUE, "circle"),
    "local": (GREY, "square"),
    "fedalike": (INK, "diamond"),
    "fedavg": (ORANGE, "triangle-up"),
    "fedavg+ft": (MAROON, "triangle-down"),
    "fedper": (LILAC, "cross"),
    "fedrep": (GREEN, "x"),
    "fedbabu": (INDIGO, "star"),
    "lg-fedavg": (PLUM, "circle"),
    "fedprox": (ORANGE, "circle"),
    "ditto": (GREEN, "square"),
    "fedpac": (MAROON, "diamond"),
    "fedbn": (LILAC, "triangle-up"),
    "lotteryfl": (GREY, "triangle-down"),
    "fedpersist": (BLUE, "star"),
    "apfl": (PLUM, "x"),
    "scaffold": (INDIGO, "cross"),
}
APART = (  # fields in which runs with the same label may differ
    "seed", "device", "chunk", "rows", "precision", "deterministic", "eval_every", "eval_fraction", "metrics", "cross",
    "preset", "plugins",
)  # fmt: skip


def labels(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """One label for each configuration. Configurations that differ only in the seed have the same label.

    Options of the method, training and aggregator are part of the label if runs of that method differ in them; data, model
    and rounds, if most of the runs have another value.
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
    """A key that is equal for runs with the same seed and settings."""
    return json.dumps([config.get("seed"), settings(config)], sort_keys=True)


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that distinguish runs. A run from before a setting existed has its default."""
    return {k: v for k, v in as_first_written(config).items() if k not in APART}


def looks(methods: Sequence[str]) -> list[tuple[tuple[str, str], str]]:
    """A color and a marker for each label: first those of its method, then unused pairs."""
    taken = [LOOKS[m] for m in dict.fromkeys(methods) if m in LOOKS]
    seen: set[str] = set()
    out = []
    for method in methods:
        if method in LOOKS and method not in seen:
            out.append(LOOKS[method])
        else:
            free = [(c, s) for s in SYMBOLS for c in PALETTE if (c, s) not in taken] or [
                (c, s) for s in SYMBOLS for c in PALETTE
            ]
            used = [c for c, _ in taken]
            out.append(min(free, key=lambda look: used.count(look[0])))
            taken.append(out[-1])
        seen.add(method)
    return out


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """{"method": {"limit": 0.3}} as {"method.limit": 0.3}."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        out.update({f"{key}.{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {key: value})
    return out
