"""Guarantee: the noise with which a run keeps its promise, and how much of the budget its rounds take."""

import math
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field

from fedselect.private import accountant
from fedselect.private.settings import Private

COUNT_SHARE = 0.1
"""Largest part of the budget for the count of unclipped updates, if the clip adapts."""


@dataclass(frozen=True)
class Lot:
    """Sums that are released in the same way: their noise, the random share of the data in each, and how many per round."""

    noise: float  # standard deviation over clip
    share: float
    sums: int
    delta: float
    many: float  # average number of clients or samples in a sum
    _: KW_ONLY
    whole: bool = False  # noise of whole numbers, of which every client adds a share
    more: float = 1.0  # factor by which a sum has more noise if no client is lost

    def epsilon(self, rounds: int) -> float:
        return accountant.epsilon(self.noise, self.share, self.sums * rounds, self.delta, self.whole)


def of_clients(private: Private, clients: int, fraction: float, rounds: int) -> Lot:
    """One sum per round over the cohort, drawn client by client with probability `fraction`."""
    delta = private.delta_for(clients)
    noise = accountant.least_noise(private.epsilon, delta, fraction, rounds)
    return Lot(noise, fraction, 1, delta, fraction * clients)


def of_samples(private: Private, samples: int, batch_size: int, passes: int, rounds: int) -> Lot:
    """One sum per step of a client with this many samples, each drawn into a batch with the same probability."""
    batch = min(batch_size, samples)
    sums, delta = passes * math.ceil(samples / batch), private.delta_for(samples)
    noise = accountant.least_noise(private.epsilon, delta, batch / samples, sums * rounds)
    return Lot(noise, batch / samples, sums, delta, batch)


def split(noise: float, many: float) -> tuple[float, float]:
    """Split noise between the sum of updates and the count of unclipped ones; together they cost as much as `noise` alone.

    Andrew et al. 2021, theorem 1: a count of numbers +-1/2 with deviation s is a release of noise 2s, and inverse squares of
    noises add up. They take s = many / 20; where that would cost more than a tenth of the budget, s is larger.
    """
    count = max(many / 20, noise / (2 * math.sqrt(COUNT_SHARE)))
    return (noise**-2 - (2 * count) ** -2) ** -0.5 if noise else 0.0, count if noise else 0.0


def of_shares(private: Private, clients: int, cohort: int, rounds: int) -> Lot:
    """One sum per round to which the cohort adds shares of noise; the server may choose the same clients every time."""
    delta = private.delta_for(clients)
    noise = accountant.least_noise(private.epsilon, delta, 1.0, rounds, whole=True)
    return Lot(noise, 1.0, 1, delta, cohort, whole=True, more=math.sqrt(cohort / counted_on(private, cohort)))


def counted_on(private: Private, cohort: int) -> int:
    """Shares of noise that nobody can subtract from a sum: of the fewest clients for which --secret opens one (more than two
    thirds), minus the colluding ones."""
    return 2 * cohort // 3 + 1 - private.colluding


@dataclass(frozen=True)
class Guarantee:
    """What a run of this many rounds promises; sample-level privacy has one lot for each number of samples a client has."""

    private: Private
    lots: tuple[Lot, ...]
    rounds: int
    size: int  # number of noised entries
    _spent: dict[int, float] = field(default_factory=dict, compare=False, repr=False)

    def epsilon(self, rounds: int) -> float:
        """What this many rounds cost: the maximum over clients."""
        if rounds not in self._spent:
            self._spent[rounds] = max(lot.epsilon(rounds) for lot in self.lots)
        return self._spent[rounds]

    @property
    def delta(self) -> float:
        return max(lot.delta for lot in self.lots)

    @property
    def ratio(self) -> float:
        """Length of the noise in the mean of a round (step), relative to the longest update (gradient), at worst."""
        return max(lot.noise * lot.more * math.sqrt(self.size) / lot.many for lot in self.lots)


def sample_guarantee(
    private: Private, sizes: Iterable[int], batch_size: int, passes: int, rounds: int, entries: int
) -> Guarantee:
    """The promise to the samples of clients with these numbers of samples."""
    lots = tuple(of_samples(private, n, batch_size, passes, rounds) for n in sorted(set(sizes)))
    return Guarantee(private, lots, rounds, entries)


def client_guarantee(private: Private, clients: int, fraction: float, rounds: int, entries: int) -> Guarantee:
    """The promise to clients."""
    return Guarantee(private, (of_clients(private, clients, fraction, rounds),), rounds, entries)


def shared_guarantee(private: Private, clients: int, cohort: int, rounds: int, entries: int) -> Guarantee:
    """The promise to clients that add the noise themselves."""
    return Guarantee(private, (of_shares(private, clients, cohort, rounds),), rounds, entries)
