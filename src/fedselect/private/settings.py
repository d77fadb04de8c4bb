"""Private: the privacy that a run promises, as in `--private epsilon=8`."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from fedselect.core.checks import check_choice
from fedselect.core.entropy import Entropy
from fedselect.core.errors import InputError, unknown
from fedselect.core.options import options

DELTA = 1e-5
"""Largest default for delta; with more than 35,000 clients or samples it is less, n^-1.1."""

LARGEST = 100.0
"""Largest epsilon for which noise is computed."""


@dataclass(frozen=True)
class Private:
    """Differential privacy: a bound on what all output of a run reveals about one client, or about one sample.

    Examples:
        >>> import fedselect as fs
        >>> fs.Private(epsilon=8, unit="sample").clip
        1.0

    epsilon: privacy budget of the whole run; inf clips updates without noise and promises nothing
    unit: whose data is protected: all data of one client, or one training sample
    delta: probability with which epsilon may not hold; by default 1e-5, or n^-1.1 if that is less
    clip: longest update of a client (gradient of a sample); with quantile, in the first round
    quantile: quantile of update lengths that the clip follows (0.5: the median); by default it is fixed; only for unit client
    colluding: with --secret, clients of a round that may tell the server their part of the noise; only for unit client
    seeded: draw the noise from the seed, to repeat a run in a test; such a run is not private
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
            raise InputError(f"an epsilon of {self.epsilon:g} promises nothing; use at most {LARGEST:g}, or inf for no noise.")
        if self.delta is not None and not 0 < self.delta < 1:
            raise InputError(f"delta must be a probability between 0 and 1, not {self.delta}.")
        if not 0 < self.clip < math.inf:
            raise InputError(f"clip must be positive and finite, not {self.clip}.")
        if self.quantile is not None and not 0 < self.quantile < 1:
            raise InputError(f"quantile must be between 0 and 1, not {self.quantile}.")
        if self.colluding < 0:
            raise InputError(f"colluding must be a number of clients, 0 or more, not {self.colluding}.")
        if self.quantile is not None and self.unit == "sample":
            raise InputError("quantile is for updates of clients; leave it out with unit=sample.")

    @classmethod
    def read(cls, text: str) -> "Private":
        """Parse a flag or a file's value: epsilon=8,unit=sample."""
        known = options(cls)
        given: dict[str, Any] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, equals, value = part.partition("=")
            if not equals:
                raise InputError(f"{part!r} has no value; write epsilon=8, or with more options epsilon=8,unit=sample.")
            if name not in known:
                raise unknown("option of --private", name, known)
            given[name] = known[name].parse(value)
        if "epsilon" not in given:
            raise InputError("private needs a budget: epsilon=8.")
        return cls(**given)

    def __str__(self) -> str:
        """The text that `read` parses, without defaults."""
        told = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return ",".join(f"{n}={_shown(v)}" for n, v in told.items() if n == "epsilon" or v != getattr(Private, n))

    def covers(self, other: "Private") -> bool:
        """Whether this promise is at least as strong as another, for the same unit; seeded noise promises nothing."""
        stricter = self.epsilon <= other.epsilon and (self.delta or DELTA) <= (other.delta or DELTA)
        return stricter and self.unit == other.unit and self.colluding >= other.colluding and not self.seeded

    @property
    def entropy(self) -> Entropy:
        return Entropy(self.seeded)

    def delta_for(self, n: int) -> float:
        """Delta for n clients, or for a client's n samples."""
        return self.delta if self.delta is not None else min(DELTA, n**-1.1)


def as_private(given: Private | str | None) -> Private | None:
    """The settings, given as such or as text; None if nothing was given."""
    if given is None or isinstance(given, Private):
        return given
    if isinstance(given, str):
        return Private.read(given)
    raise InputError(f"private must be fs.Private(epsilon=8), or 'epsilon=8', not {given!r}.")


def _shown(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
