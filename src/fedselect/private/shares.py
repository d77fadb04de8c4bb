"""Noise in shares: clients clip and add noise themselves, so that not even the server sees a sum without noise.

Under secure aggregation a client's update is whole numbers. It is clipped, rounded to the nearest numbers, and each client adds
its own discrete Gaussian noise (Kairouz, Liu and Steinke 2021). Sums are opened for more than two thirds of a round's clients,
so each share is sized for the fewest of them; if all clients stay, there is more noise than was promised.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from fedselect.core import random
from fedselect.core.errors import InputError
from fedselect.core.tree import Tree, along
from fedselect.private.clients import lengths
from fedselect.private.guarantee import Guarantee, counted_on
from fedselect.private.settings import Private
from fedselect.secret.mean import FEWEST
from fedselect.secret.protocol import CUT, NEIGHBOURS
from fedselect.secret.ring import Ring

ROOM = 10.0
"""Standard deviations of noise that fit in a sum: beyond, in one of 10^23 sums, it would wrap around."""
EXACT = 48
"""Most bits of a sum: floating-point numbers are exact up to 53."""
BELOW = 1 - 1e-9
"""Updates are clipped slightly below the clip, so that floating-point rounding makes none longer."""
FINE = 4.0
"""Least deviation of a share, in steps. From there on a sum of discrete Gaussians is one, up to a part of 10^-60."""


@dataclass(frozen=True)
class Shares:
    """Noise that is a multiple of the longest update, added by the clients of a round together.

    noise: standard deviation over sensitivity, of the smallest sum that is opened; ring: for the largest cohort.
    """

    private: Private
    noise: float
    ring: Ring

    @cached_property
    def step(self) -> float:
        """The value of the number 1, such that a sum of all clients' updates and noise fits into the ring."""
        clients, bits = self.ring.clients, min(self.ring.field - 1, EXACT)
        return self.private.clip * (clients + ROOM * math.sqrt(3.0) * self.noise) / 2.0**bits

    def sensitivity(self, entries: int) -> float:
        """Length of the longest update in steps: the clip, plus rounding of at most half a step in each entry."""
        return self.private.clip / self.step + math.sqrt(entries) / 2

    def deviation(self, clients: int, entries: int) -> float:
        """The standard deviation of each client's share, in steps, in a round of this many clients."""
        check_cohort(self.private, clients)
        std = self.noise * self.sensitivity(entries) / math.sqrt(counted_on(self.private, clients))
        if 0 < std < FINE:
            raise InputError(f"noise of {std:.2g} steps is too small to be rounded; use a smaller epsilon or fewer clients.")
        return std

    def code(self, values: Tree, params: Tree, keys: Tensor, clients: int) -> Tree:
        """Stacked clients' updates from `params` as whole numbers with noise, in float64; keys matter only if seeded."""
        steps = {n: v.double() - params[n].double() for n, v in values.items()}
        clip, length = self.private.clip, lengths(steps)
        scale = clip * BELOW / length.clamp_min(clip) / self.step
        std = self.deviation(clients, sum(params[n].numel() for n in steps))
        return {n: (v * along(scale, v)).round_() + self._noise(n, v, std, keys) for n, v in steps.items()}

    def _noise(self, name: str, like: Tensor, std: float, keys: Tensor) -> Tensor:
        found = self.private.entropy.whole(std, random.fold(keys, "noise", name), like[0].numel())
        return found.view_as(like)


def are_enough(private: Private, clients: int) -> bool:
    """Whether a round of so many clients has enough noise without that of those who work with the server."""
    return clients >= FEWEST and not _can_cut(private, clients) and 3 * counted_on(private, clients) >= clients


def _can_cut(private: Private, clients: int) -> bool:
    """Whether those who work with the server could cut the sum of a large cohort in two, each with less noise."""
    return clients > NEIGHBOURS + 1 and private.colluding >= 2 * CUT


def check_cohort(private: Private, clients: int) -> None:
    """Refuse cohorts whose noise is too small without that of the colluding clients."""
    if _can_cut(private, clients):
        raise InputError(
            f"in a round of more than {NEIGHBOURS + 1} clients at most {2 * CUT - 1} may work with the server, not "
            f"{private.colluding}; use a smaller colluding=, or fewer clients per round."
        )
    if not are_enough(private, clients):
        raise InputError(
            f"a round of {clients} clients is too small if the server may know the noise of {private.colluding}; "
            "use more clients per round, or a smaller colluding=."
        )


def shares(guarantee: Guarantee, ring: Ring) -> Shares:
    """The noise shares that keep a promise."""
    return Shares(guarantee.private, guarantee.lots[0].noise, ring)
