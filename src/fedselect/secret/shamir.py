"""Shamir's secret sharing over the prime 2^255 - 19: so many shares give a secret, fewer say nothing of it."""

from collections.abc import Mapping, Sequence

PRIME = 2**255 - 19
SHARE = 32
"""Bytes of a share."""


def share(secret: int, coefficients: Sequence[int], at: int) -> int:
    """The share at a place (not 0) of the polynomial that has the secret at 0; as many places as coefficients + 1 give it."""
    value = 0
    for c in reversed(coefficients):
        value = (value + c) * at % PRIME
    return (value + secret) % PRIME


def weights(places: Sequence[int]) -> list[int]:
    """What the share at each of these places counts in the secret."""
    found = []
    for i in places:
        over = under = 1
        for j in places:
            if j != i:
                over, under = over * j % PRIME, under * (j - i) % PRIME
        found.append(over * pow(under, -1, PRIME) % PRIME)
    return found


def secret(shares: Mapping[int, int]) -> int:
    """The secret from shares by place; they must be as many as the threshold."""
    return sum(w * s for w, s in zip(weights(list(shares)), shares.values(), strict=True)) % PRIME
