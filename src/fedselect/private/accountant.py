"""What noise costs: epsilon of so many noisy sums over random samples, and the least noise that keeps a budget.

The numbers come from dp-accounting's privacy loss distributions of the Gaussian mechanism under Poisson sampling. Neighbours
are data with and without one client, or one sample (add or remove one).
"""

import math
from functools import cache, lru_cache
from typing import Any

from fedselect.core.errors import InputError, RunError

STEP = 2e-3
"""Privacy losses are rounded up to multiples of this, so epsilon is never too small."""
CLOSE = 1e-3
"""How near to the budget the search for the least noise comes, as a share of the noise."""
LEAST, MOST = 0.1, 1e6
"""Noise that is looked for, as a multiple of the clip: never less, for the sums over it would take ever finer steps."""


def epsilon(noise: float, share: float, sums: int, delta: float) -> float:
    """Epsilon of `sums` releases; `noise`: standard deviation over clip, `share`: the probability to be in a sum."""
    if sums == 0:
        return 0.0
    if noise == 0.0:
        return math.inf
    return float(_composed(noise, share, sums).get_epsilon_for_delta(delta))


@cache
def least_noise(epsilon_: float, delta: float, share: float, sums: int) -> float:
    """The least noise, as a multiple of the clip, with which so many releases stay within the budget."""
    if math.isinf(epsilon_):
        return 0.0
    low = high = 1.0
    while epsilon(high, share, sums, delta) > epsilon_:
        low, high = high, 2.0 * high
        if high > MOST:
            raise InputError(f"no noise keeps epsilon {epsilon_:g} with delta {delta:g}; give a larger epsilon or delta.")
    while low == high and high > LEAST:  # it may be less; small steps, for less noise takes longer to account for
        low = max(LEAST, 0.7 * high)
        high = low if epsilon(low, share, sums, delta) <= epsilon_ else high
    while high - low > CLOSE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if epsilon(middle, share, sums, delta) <= epsilon_ else (middle, high)
    return high


@lru_cache(64)
def _one(noise: float, share: float) -> Any:
    """The privacy loss of one release."""
    try:
        from dp_accounting.pld import privacy_loss_distribution
    except ImportError:
        raise RunError("--private needs dp-accounting; install it with: pip install 'fedselect[private]'") from None
    return privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=share, value_discretization_interval=STEP, use_connect_dots=True
    )


def _composed(noise: float, share: float, sums: int) -> Any:
    one = _one(noise, share)
    return one if sums == 1 else one.self_compose(sums)
