"""Private: what a run promises, as `--private epsilon=8` says it."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from fedselect.core.checks import check_choice
from fedselect.core.entropy import Entropy
from fedselect.core.errors import InputError, unknown
from fedselect.core.options import options

DELTA = 1e-5
"""The largest default for delta; with more than 35,000 clients or samples it is less, n^-1.1."""

LARGEST = 100.0
"""The largest epsilon for which noise is looked for."""


@dataclass(frozen=True)
class Private:
    """Differential privacy: how much may be learned of one client, or of one sample, from all that a run gives away.

    epsilon: the budget of the whole run; inf: clipping alone, without noise and without a promise
    unit: whose data is protected: all data of one client, or one training sample
    delta: the probability with which epsilon may not hold; none: 1e-5, or n^-1.1 if that is less
    clip: the longest that a client's update (a sample's gradient) may be; with quantile, in the first round
    quantile: the clip follows this quantile of update lengths (0.5: their median); none: it stays; of unit client
    colluding: with --secret, how many clients of a round may tell the server their part of the noise; of unit client
    seeded: noise from the seed, to repeat a run in a test; such a run is not private
    """

    epsilon: float
    unit: Literal["client", "sample"] = "client"
    delta: float | None = None
    clip: float = 1.0
    quantile: float | None = None
    colluding: int = 1
    seeded: bool = False

    def __post_init__(self) -> None:
        check_choice(("client", "sample"), unit=self.unit)
        if not self.epsilon > 0:
            raise InputError(f"epsilon must be positive, not {self.epsilon}.")
        if LARGEST < self.epsilon < math.inf:
            raise InputError(f"an epsilon of {self.epsilon:g} promises nothing; give at most {LARGEST:g}, or inf for no noise.")
        if self.delta is not None and not 0 < self.delta < 1:
            raise InputError(f"delta is a probability between 0 and 1, not {self.delta}.")
        if not 0 < self.clip < math.inf:
            raise InputError(f"clip must be positive and finite, not {self.clip}.")
        if self.quantile is not None and not 0 < self.quantile < 1:
            raise InputError(f"quantile must lie between 0 and 1, not {self.quantile}.")
        if self.colluding < 0:
            raise InputError(f"colluding is a number of clients, 0 or more, not {self.colluding}.")
        if self.quantile is not None and self.unit == "sample":
            raise InputError("quantile is of the updates of clients; leave it out with unit=sample.")

    @classmethod
    def read(cls, text: str) -> "Private":
        """From a flag or a file: epsilon=8,unit=sample."""
        known = options(cls)
        given: dict[str, Any] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, equals, value = part.partition("=")
            if not equals:
                raise InputError(f"private is given as epsilon=8, more options after commas; {part!r} has no value.")
            if name not in known:
                raise unknown("option of private", name, known)
            given[name] = known[name].parse(value)
        if "epsilon" not in given:
            raise InputError("private needs a budget: --private epsilon=8.")
        return cls(**given)

    def __str__(self) -> str:
        """As `read` takes it, without what is the default."""
        told = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return ",".join(f"{n}={_shown(v)}" for n, v in told.items() if n == "epsilon" or v != getattr(Private, n))

    def covers(self, other: "Private") -> bool:
        """Whether this promise is at least as strong as another, for the same unit; noise from a seed promises nothing."""
        stricter = self.epsilon <= other.epsilon and (self.delta or DELTA) <= (other.delta or DELTA)
        return stricter and self.unit == other.unit and self.colluding >= other.colluding and not self.seeded

    @property
    def entropy(self) -> Entropy:
        return Entropy(self.seeded)

    def delta_for(self, n: int) -> float:
        """Delta where there are n clients, or samples of a client."""
        return self.delta if self.delta is not None else min(DELTA, n**-1.1)


def as_private(given: Private | str | None) -> Private | None:
    """What was given, as text too; else nothing."""
    if given is None or isinstance(given, Private):
        return given
    if isinstance(given, str):
        return Private.read(given)
    raise InputError(f"private must be fs.Private(epsilon=8), or 'epsilon=8', not {given!r}.")


def _shown(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
