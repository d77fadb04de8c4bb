"""Guarantee: the noise with which a run keeps its promise, and how much of the budget so many rounds take."""

import math
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field

from fedselect.private import accountant
from fedselect.private.settings import Private

COUNT_SHARE = 0.1
"""The largest part of the budget that the count of clipped updates may take, where the clip adapts."""


@dataclass(frozen=True)
class Lot:
    """Sums that are released alike: with which noise, over which random share of the data, and how many a round."""

    noise: float  # standard deviation over clip
    share: float
    sums: int
    delta: float
    many: float  # clients or samples that a sum is over, on average
    _: KW_ONLY
    whole: bool = False  # noise of whole numbers, of which every client adds a share
    more: float = 1.0  # so many times that noise is in a sum where nobody is lost

    def epsilon(self, rounds: int) -> float:
        return accountant.epsilon(self.noise, self.share, self.sums * rounds, self.delta, self.whole)


def of_clients(private: Private, clients: int, fraction: float, rounds: int) -> Lot:
    """One sum a round over the clients that were drawn, each by itself with probability `fraction`."""
    delta = private.delta_for(clients)
    noise = accountant.least_noise(private.epsilon, delta, fraction, rounds)
    return Lot(noise, fraction, 1, delta, fraction * clients)


def of_samples(private: Private, samples: int, batch_size: int, passes: int, rounds: int) -> Lot:
    """A sum for each step of a client with so many samples, each in a batch by itself with the same probability."""
    batch = min(batch_size, samples)
    sums, delta = passes * math.ceil(samples / batch), private.delta_for(samples)
    noise = accountant.least_noise(private.epsilon, delta, batch / samples, sums * rounds)
    return Lot(noise, batch / samples, sums, delta, batch)


def split(noise: float, many: float) -> tuple[float, float]:
    """Noise of the sum of updates, and of the count of those that were not clipped, which together cost as `noise` alone.

    Andrew et al. 2021, theorem 1: a count of numbers +-1/2 with deviation s is a release of noise 2s, and inverse squares of
    noises add up. They take s = many / 20; where that would cost more than a tenth of the budget, s is larger.
    """
    count = max(many / 20, noise / (2 * math.sqrt(COUNT_SHARE)))
    return (noise**-2 - (2 * count) ** -2) ** -0.5 if noise else 0.0, count if noise else 0.0


def of_shares(private: Private, clients: int, cohort: int, rounds: int) -> Lot:
    """A sum a round to which the clients of a cohort add shares of noise; the server may choose the same ones every time."""
    delta = private.delta_for(clients)
    noise = accountant.least_noise(private.epsilon, delta, 1.0, rounds, whole=True)
    return Lot(noise, 1.0, 1, delta, cohort, whole=True, more=math.sqrt(cohort / counted_on(private, cohort)))


def counted_on(private: Private, cohort: int) -> int:
    """Shares of noise that nobody can take out of a sum: of the fewest clients for which --secret opens one (more than two
    thirds), less those who may work with the server."""
    return 2 * cohort // 3 + 1 - private.colluding


@dataclass(frozen=True)
class Guarantee:
    """What a run of so many rounds promises; of samples there is a lot for each number of samples that a client has."""

    private: Private
    lots: tuple[Lot, ...]
    rounds: int
    size: int  # entries that are noised
    _spent: dict[int, float] = field(default_factory=dict, compare=False, repr=False)

    def epsilon(self, rounds: int) -> float:
        """What so many rounds cost: the most for any client."""
        if rounds not in self._spent:
            self._spent[rounds] = max(lot.epsilon(rounds) for lot in self.lots)
        return self._spent[rounds]

    @property
    def delta(self) -> float:
        return max(lot.delta for lot in self.lots)

    @property
    def ratio(self) -> float:
        """How many times as long as the longest update (gradient) the noise in the mean of a round (step) is, at worst."""
        return max(lot.noise * lot.more * math.sqrt(self.size) / lot.many for lot in self.lots)


def sample_guarantee(
    private: Private, sizes: Iterable[int], batch_size: int, passes: int, rounds: int, entries: int
) -> Guarantee:
    """The promise to the samples of clients that have so many each."""
    lots = tuple(of_samples(private, n, batch_size, passes, rounds) for n in sorted(set(sizes)))
    return Guarantee(private, lots, rounds, entries)


def client_guarantee(private: Private, clients: int, fraction: float, rounds: int, entries: int) -> Guarantee:
    """The promise to clients."""
    return Guarantee(private, (of_clients(private, clients, fraction, rounds),), rounds, entries)


def shared_guarantee(private: Private, clients: int, cohort: int, rounds: int, entries: int) -> Guarantee:
    """The promise to clients that add the noise themselves."""
    return Guarantee(private, (of_shares(private, clients, cohort, rounds),), rounds, entries)
