"""Randomness keyed by its purpose, never by call order.

A key is an int64 mixed from (seed, client, round, purpose, ...). Numbers are drawn from it by a counter-based hash of integer
operations only, so they are the same stacked or one by one, on a CPU or a GPU, in a whole or a resumed run.
"""

import hashlib

import torch
from torch import Tensor

_GOLDEN, _MIX1, _MIX2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # splitmix64, as signed int64


def _mix(z: Tensor) -> Tensor:
    """splitmix64's finalizer on int64; `>>` is arithmetic on signed integers, hence the masks."""
    z = (z >> 30).bitwise_and_(0x3FFFFFFFF).bitwise_xor_(z).mul_(_MIX1)
    z = (z >> 27).bitwise_and_(0x1FFFFFFFFF).bitwise_xor_(z).mul_(_MIX2)
    return (z >> 31).bitwise_and_(0x1FFFFFFFF).bitwise_xor_(z)


def _number(part: int | str) -> int:
    if isinstance(part, int):
        return part
    return int.from_bytes(hashlib.blake2b(part.encode(), digest_size=7).digest(), "little")


def fold(key: Tensor, *parts: int | str | Tensor) -> Tensor:
    """Derive a key from a key and parts: integers, names, or one number per client."""
    for part in parts:
        key = _mix(key + _GOLDEN)
        key = _mix(key ^ (part if isinstance(part, Tensor) else _number(part)))
    return key


def client_keys(seed: int | Tensor, ids: Tensor, round: int, purpose: str) -> Tensor:
    """One key per client: (C,)."""
    return fold(seed if isinstance(seed, Tensor) else torch.full_like(ids, seed), ids, round, purpose)


def bits(key: Tensor, count: int, first: int = 0) -> Tensor:
    """`count` hashed int64 per key, starting at index `first`: key.shape + (count,)."""
    counter = torch.arange(first + 1, first + count + 1, device=key.device) * _GOLDEN
    return _mix(_mix(key.unsqueeze(-1) + counter))


def uniform(key: Tensor, count: int, first: int = 0) -> Tensor:
    """`count` float32 in [0, 1) per key, starting at index `first`."""
    return ((bits(key, count, first) >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def permutations(key: Tensor, n: Tensor, longest: int) -> Tensor:
    """For each key (..., C) a permutation of range(n_i), as (..., C, longest); values beyond n_i are meaningless."""
    order = bits(key, longest) & 0x7FFFFFFFFFFFFFFF
    order = order.masked_fill(torch.arange(longest, device=key.device) >= n.unsqueeze(-1), 0x7FFFFFFFFFFFFFFF)
    return order.argsort(dim=-1, stable=True)


def choose(seed: int, candidates: Tensor, count: int, round: int, purpose: str) -> Tensor:
    """Draw `count` of the candidate ids, in ascending order; the draw does not depend on the candidates' order."""
    if count >= len(candidates):
        return candidates.sort().values
    keys = client_keys(seed, candidates, round, purpose)
    first = (keys <= keys.kthvalue(count).values).nonzero().flatten()  # sorting a million keys takes longer
    return candidates[first[keys[first].argsort(stable=True)[:count]]].sort().values
