"""Spread: the distribution of one metric over the clients of a federation."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedselect.tasks.metrics import Measure


@dataclass(frozen=True)
class Spread:
    """A metric over clients. It is defined for `defined` of `clients`; the others are left out."""

    mean: float | None
    worst_tenth: float | None  # mean over the worst tenth of clients, at least one
    weighted: float | None  # mean weighted by test samples; None if their numbers are unknown
    defined: int
    clients: int

    @classmethod
    def of(cls, measure: Measure, values: Sequence[float | None], tested: Sequence[int | None] | None = None) -> "Spread":
        """values: one per client, None if undefined; tested: the clients' numbers of test samples."""
        there = [v for v in values if v is not None]
        worst = sorted(there, reverse=not measure.more_is_better)[: math.ceil(len(there) / 10)]
        pairs = [(v, n) for v, n in zip(values, tested or [None] * len(values), strict=True) if v is not None]
        known = [(v, n) for v, n in pairs if n is not None]
        weighted = sum(v * n for v, n in known) / sum(n for _, n in known) if known and len(known) == len(pairs) else None
        return cls(_mean(there), _mean(worst), None if weighted is None else round(weighted, 6), len(there), len(values))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 6) if values else None
