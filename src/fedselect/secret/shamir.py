"""Shamir's secret sharing over the prime 2^255 - 19: enough shares recover a secret, fewer reveal nothing about it."""

from collections.abc import Mapping, Sequence

PRIME = 2**255 - 19
SHARE = 32
"""Bytes of a share."""


def share(secret: int, coefficients: Sequence[int], at: int) -> int:
    """The share at a place (not 0) of the polynomial with the secret at 0; coefficients + 1 places recover it."""
    value = 0
    for c in reversed(coefficients):
        value = (value + c) * at % PRIME
    return (value + secret) % PRIME


def weights(places: Sequence[int]) -> list[int]:
    """The weight of the share at each of these places in the secret."""
    found = []
    for i in places:
        over = under = 1
        for j in places:
            if j != i:
                over, under = over * j % PRIME, under * (j - i) % PRIME
        found.append(over * pow(under, -1, PRIME) % PRIME)
    return found


def secret(shares: Mapping[int, int]) -> int:
    """The secret from shares by place; there must be at least as many as the threshold."""
    return sum(w * s for w, s in zip(weights(list(shares)), shares.values(), strict=True)) % PRIME
