"""Metrics: numbers that measure a client's model on a client's data."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedselect.core.errors import InputError

LOSS = "test_loss"


def is_number(value: Any) -> bool:
    """Whether a value is a number within the range of float32, so that a mean of such numbers is finite too."""
    return type(value) in (int, float) and abs(value) <= torch.finfo(torch.float32).max


def known(value: float) -> float | None:
    """A number as recorded; None if it is undefined: NaN, infinite or too large."""
    return round(value, 6) if is_number(value) else None


@dataclass(frozen=True)
class Measure:
    """The name, range and direction of a number: all that tables and pages need."""

    name: str
    more_is_better: bool = True
    low: float = -math.inf
    high: float = math.inf

    @property
    def percent(self) -> bool:
        """Whether to show it in percent: numbers from 0 to 1."""
        return (self.low, self.high) == (0.0, 1.0)

    @property
    def title(self) -> str:
        """The name as a column header."""
        return f"{self.name} %" if self.percent else self.name

    def show(self, value: float) -> str:
        """A value as text, without its unit."""
        return f"{100 * value:.2f}" if self.percent else f"{value:.4f}"

    def said(self, value: float) -> str:
        """A value as text, with its unit."""
        return self.show(value) + ("%" if self.percent else "")

    def best(self, values: Iterable[float]) -> float:
        return max(values) if self.more_is_better else min(values)

    def unfit(self, value: Any) -> str:
        """Why a recorded value cannot be this number, or an empty text. None stands for an undefined value."""
        if value is None or (is_number(value) and self.low <= value <= self.high):
            return ""
        mend = (
            'if the loss may be negative, set lowest_loss = float("-inf") in the task.'
            if self.name == LOSS
            else "correct the metric, or low and high of its fs.Metric."
        )
        return f"{self.name} {value!r}, which is outside {self.low:g} to {self.high:g}; {mend}"

    def to_json(self) -> dict[str, Any]:
        low, high = (v if math.isfinite(v) else None for v in (self.low, self.high))
        return {"name": self.name, "more_is_better": self.more_is_better, "low": low, "high": high}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> "Measure":
        low, high = (sign * math.inf if said[k] is None else float(said[k]) for k, sign in (("low", -1), ("high", 1)))
        return cls(str(said["name"]), bool(said["more_is_better"]), low, high)


Each = Tensor | tuple[Tensor, Tensor]
"""One number per sample, or two: the summand and the weight that the sum is divided by."""


@dataclass(frozen=True)
class Metric(Measure):
    """A metric and how to compute it for one client: `of(outputs, targets)`, each with one row per sample.

    `of` returns one number; or, with `by_sample=True`, one per sample, whose mean is the metric. Prefer the latter: it is
    computed for all clients at once. If samples have different weights, as texts of different lengths do, it returns two
    numbers per sample: the summand, and the weight that the sum is divided by. Where the metric is undefined, return NaN.

    Examples:
        >>> import fedselect as fs
        >>> import torch
        >>> error = fs.Metric("error", of=lambda out, y: (out.argmax(-1) != y).double(), by_sample=True)
        >>> error.value(torch.eye(3), torch.tensor([0, 1, 0]))
        0.3333333333333333
    """

    of: Callable[[Tensor, Tensor], Each] = None  # type: ignore[assignment]
    by_sample: bool = False

    def __post_init__(self) -> None:
        if not callable(self.of):
            raise InputError(f"the metric {self.name} needs a function of outputs and targets: of=...")
        if not self.name.isidentifier():
            raise InputError(f"the name of a metric must consist of letters, digits and _, not {self.name!r}.")

    def each(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Per sample: the summand and its weight; None if all samples have weight 1."""
        found = self.of(outputs, targets)
        return (found[0].double(), found[1].double()) if isinstance(found, tuple) else (found.double(), None)

    def value(self, outputs: Tensor, targets: Tensor) -> float:
        """The metric of one client with these outputs and targets."""
        if not self.by_sample:
            return float(self.of(outputs, targets))  # type: ignore[arg-type]
        value, count = self.each(outputs, targets)
        return float(value.sum() / (len(value) if count is None else count.sum()))
