"""Metrics: numbers that say how good a client's model is on a client's data."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedselect.core.errors import InputError

LOSS = "test_loss"


def is_number(value: Any) -> bool:
    """Whether it is a plain number that a float32 can hold, so that a mean of such numbers is one too."""
    return type(value) in (int, float) and abs(value) <= torch.finfo(torch.float32).max


def known(value: float) -> float | None:
    """A number as it is recorded; None where it is not defined: NaN, infinite or too large."""
    return round(value, 6) if is_number(value) else None


@dataclass(frozen=True)
class Measure:
    """What a number is called, the range it lies in and which way is better: all that tables and pages need."""

    name: str
    more_is_better: bool = True
    low: float = -math.inf
    high: float = math.inf

    @property
    def percent(self) -> bool:
        """Numbers from 0 to 1 are shown in percent."""
        return (self.low, self.high) == (0.0, 1.0)

    @property
    def title(self) -> str:
        """The name as the head of a column."""
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
        """Why a recorded value cannot be this number, in words; nothing where it can. None stands for an undefined one."""
        if value is None or (is_number(value) and self.low <= value <= self.high):
            return ""
        mend = (
            'if this loss may be negative, set lowest_loss = float("-inf") in the task.'
            if self.name == LOSS
            else "correct the metric, or low and high of its fs.Metric."
        )
        return f"{self.name} {value!r}, which does not lie in {self.low:g} to {self.high:g}; {mend}"

    def to_json(self) -> dict[str, Any]:
        low, high = (v if math.isfinite(v) else None for v in (self.low, self.high))
        return {"name": self.name, "more_is_better": self.more_is_better, "low": low, "high": high}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> "Measure":
        low, high = (sign * math.inf if said[k] is None else float(said[k]) for k, sign in (("low", -1), ("high", 1)))
        return cls(str(said["name"]), bool(said["more_is_better"]), low, high)


Each = Tensor | tuple[Tensor, Tensor]
"""One number for each sample, or two: what is added up, and what that sum is divided by."""


@dataclass(frozen=True)
class Metric(Measure):
    """A measure and how to compute it for one client: `of(outputs, targets)`, each with a row for each sample.

    It returns one number; or, with `by_sample`, one for each sample, whose mean is the metric. Prefer that where it is
    possible: it is computed for all clients at once. Where samples count for more or less, as texts of other lengths do, it
    returns two for each: what is added up, and what that sum is divided by. A metric that is not defined on some data
    returns NaN there.
    """

    of: Callable[[Tensor, Tensor], Each] = None  # type: ignore[assignment]
    by_sample: bool = False

    def __post_init__(self) -> None:
        if not callable(self.of):
            raise InputError(f"the metric {self.name} needs of=..., a function of outputs and targets.")
        if not self.name.isidentifier():
            raise InputError(f"the name of a metric is a column of files: letters, digits and _, not {self.name!r}.")

    def each(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """By sample: what is added up, and what that sum is divided by; None where every sample counts once."""
        found = self.of(outputs, targets)
        return (found[0].double(), found[1].double()) if isinstance(found, tuple) else (found.double(), None)

    def value(self, outputs: Tensor, targets: Tensor) -> float:
        """The metric of one client with these outputs and targets."""
        if not self.by_sample:
            return float(self.of(outputs, targets))  # type: ignore[arg-type]
        value, count = self.each(outputs, targets)
        return float(value.sum() / (len(value) if count is None else count.sum()))
