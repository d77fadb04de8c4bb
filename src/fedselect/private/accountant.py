"""Privacy accounting: epsilon of repeated noisy sums over random samples, and the least noise that keeps a budget.

The numbers come from dp-accounting's privacy loss distributions of the Gaussian mechanism under Poisson sampling. Neighboring
data sets differ by one client, or one sample (add or remove one).
"""

import math
from functools import cache, lru_cache
from typing import Any

from fedselect.core.errors import InputError, RunError

STEP = 2e-3
"""Privacy losses are rounded up to multiples of this, so epsilon is never too small."""
CLOSE = 1e-3
"""Precision of the search for the least noise, relative to the noise."""
LEAST, MOST = 0.1, 1e6
"""Smallest noise in the search, as a multiple of the clip: accounting for less would need ever finer steps."""

MISSING = "differential privacy needs dp-accounting; install it with: pip install 'fedselect[private]'"


def epsilon(noise: float, share: float, sums: int, delta: float, whole: bool = False) -> float:
    """Epsilon of `sums` releases; `noise`: standard deviation over clip, `share`: the probability of being in a sum.

    `whole`: the noise is whole numbers (discrete Gaussian) in every entry, so its divergence is bounded as a whole.
    """
    if sums == 0:
        return 0.0
    if noise == 0.0:
        return math.inf
    if whole:
        return _concentrated(sums / (2 * noise**2), delta)
    return float(_composed(noise, share, sums).get_epsilon_for_delta(delta))


@cache
def least_noise(epsilon_: float, delta: float, share: float, sums: int, whole: bool = False) -> float:
    """The least noise, as a multiple of the clip, with which this many releases stay within the budget."""
    if math.isinf(epsilon_):
        return 0.0
    low = high = 1.0
    while epsilon(high, share, sums, delta, whole) > epsilon_:
        low, high = high, 2.0 * high
        if high > MOST:
            raise InputError(f"no noise gives epsilon {epsilon_:g} with delta {delta:g}; use a larger epsilon or delta.")
    while low == high and high > LEAST:  # less may do; small steps, because less noise takes longer to account for
        low = max(LEAST, 0.7 * high)
        high = low if epsilon(low, share, sums, delta, whole) <= epsilon_ else high
    while high - low > CLOSE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if epsilon(middle, share, sums, delta, whole) <= epsilon_ else (middle, high)
    return high


@lru_cache(64)
def _one(noise: float, share: float) -> Any:
    """The privacy loss of one release."""
    try:
        from dp_accounting.pld import privacy_loss_distribution
    except ImportError:
        raise RunError(MISSING) from None
    return privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=share, value_discretization_interval=STEP, use_connect_dots=True
    )


def _composed(noise: float, share: float, sums: int) -> Any:
    one = _one(noise, share)
    return one if sums == 1 else one.self_compose(sums)


def _concentrated(rho: float, delta: float) -> float:
    """Epsilon of rho-zCDP: its Rényi divergence of every order a is at most rho a (Bun and Steinke 2016)."""
    try:
        from dp_accounting import ZCDpEvent
        from dp_accounting.rdp.rdp_privacy_accountant import RdpAccountant
    except ImportError:
        raise RunError(MISSING) from None
    return float(RdpAccountant().compose(ZCDpEvent(rho)).get_epsilon(delta))
