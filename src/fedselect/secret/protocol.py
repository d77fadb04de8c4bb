"""The protocol (Bonawitz et al. 2017, neighbors as in Bell et al. 2020), as functions of keys and message contents.

A client hides its line x of ring elements under a pad of its own and one for each neighbor:

    y_u = x_u + pad(b_u) + sum over neighbors v of +-pad(k_uv)      (+ for u < v)

k_uv is the secret that u and v agree on. In the sum over all clients those pads cancel. With y_u a client sends shares of b_u
and of every k_uv to its neighbors, sealed. Then the server names the clients whose lines arrived (the survivors). Once they
agree on that, each of them opens its shares: of b_u for survivors u, and of k_uv for survivors u and lost neighbors v. Nobody
opens the own pad of a lost client, nor a pad between two survivors, so the sum over survivors comes out and nothing else does.

All keys are bound to the digest of the round's list, so another list, or another round, has different pads.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedselect.core.errors import DataError
from fedselect.secret import keys, pads, shamir
from fedselect.secret.shamir import SHARE

NEIGHBOURS = 64
"""Pads per client in a large cohort; in one of at most 65 clients all are neighbors."""
CUT = 8
"""Survivors that any stretch of a large cohort's circle must hold, as long as a client's neighbors on one side."""
TAG = 16
"""Bytes that sealing adds."""


@dataclass(frozen=True)
class Cohort:
    """A round's list: its clients with their public keys, and what else all of them must agree on."""

    address: Mapping[str, Any]  # federation, run, plan, round and range
    keys: Mapping[int, str]  # by client, in hexadecimal

    @cached_property
    def digest(self) -> bytes:
        listed = [[i, self.keys[i]] for i in self.ids]
        return hashlib.sha256(keys.said("round", list=listed, **self.address)).digest()

    @cached_property
    def ids(self) -> list[int]:
        return sorted(self.keys)

    @property
    def least(self) -> int:
        """Fewest survivors: more than two thirds."""
        return 2 * len(self.ids) // 3 + 1

    @property
    def complete(self) -> bool:
        return len(self.ids) <= NEIGHBOURS + 1

    @cached_property
    def _around(self) -> dict[int, list[int]]:
        """Every client's neighbors."""
        if self.complete:
            return {i: [j for j in self.ids if j != i] for i in self.ids}
        circle = self.circle
        steps = [d for d in range(-NEIGHBOURS // 2, NEIGHBOURS // 2 + 1) if d]
        return {i: sorted(circle[(at + d) % len(circle)] for d in steps) for at, i in enumerate(circle)}

    @cached_property
    def circle(self) -> list[int]:
        """The clients of a large cohort in an order that nobody chose."""
        return sorted(self.ids, key=lambda i: hashlib.sha256(self.digest + i.to_bytes(8, "little")).digest())

    def joins(self, survivors: Iterable[int]) -> bool:
        """Whether only one sum can come out for these survivors.

        In a large cohort two gaps on the circle, as long as neighbors reach, would cut it into two parts with a sum of each. So
        every stretch of that length must hold some survivors; whoever cuts it must collude with all of them, at both gaps.
        """
        there, length = set(survivors), NEIGHBOURS // 2
        marks = [i in there for i in self.circle]
        return self.complete or min(map(sum, zip(*(marks[d:] + marks[:d] for d in range(length)), strict=True))) >= CUT

    def neighbours(self, client: int) -> list[int]:
        """The clients that share a pad with this one: all, or in a large cohort the nearest on the circle."""
        return self._around[client]

    @property
    def threshold(self) -> int:
        """Shares that recover a secret. A client's neighbors and itself hold them: more than two thirds, in a large cohort more
        than half."""
        return self.least if self.complete else (NEIGHBOURS + 1) // 2 + 1

    def sealed_size(self, client: int) -> int:
        """Bytes that a client seals for one holder."""
        return (1 + len(self.neighbours(client))) * SHARE + TAG


class Member:
    """One client of a cohort with its secret key, from which, with the list, everything it does follows."""

    def __init__(self, cohort: Cohort, client: int, secret: bytes) -> None:
        self.cohort, self.client, self._secret = cohort, client, secret
        self._agreed: dict[int, bytes] = {}

    def mask(self, line: "np.ndarray[Any, Any]") -> None:
        """Mask a line of ring elements, in place."""
        pads.add(line, pad_key(self._own), 1)
        for v in self.cohort.neighbours(self.client):
            pads.add(line, pad_key(self._pair(v)), 1 if self.client < v else -1)

    def bundles(self) -> dict[int, bytes]:
        """Its neighbors' shares of this client's secrets, sealed, by neighbor."""
        return {v: keys.seal(self._box(self.client, v), b"".join(self._shares(v))) for v in self._others}

    def open(self, survivors: Iterable[int], bundles: Mapping[int, bytes]) -> dict[int, list[bytes]]:
        """Its shares, by survivor, of the survivors' own pads and of their pads with lost neighbors.

        A survivor whose bundle was changed after sealing is left out.
        """
        there = set(survivors)
        opened: dict[int, list[bytes]] = {}
        for u in sorted(there):
            if u == self.client:
                shares = self._shares(u)
            elif u in bundles and (plain := keys.unseal(self._box(u, self.client), bundles[u])) is not None:
                shares = [plain[at : at + SHARE] for at in range(0, len(plain), SHARE)]
            else:
                continue
            lost = [v not in there for v in self.cohort.neighbours(u)]
            if len(shares) == 1 + len(lost):
                opened[u] = [shares[0], *(s for s, gone in zip(shares[1:], lost, strict=True) if gone)]
        return opened

    @property
    def _others(self) -> list[int]:
        return self.cohort.neighbours(self.client)

    @cached_property
    def _own(self) -> bytes:
        return keys.derive(self._secret, self.cohort.digest, "own pad", keys.SEED)

    def _pair(self, other: int) -> bytes:
        low, high = sorted((self.client, other))
        return keys.derive(self._agree(other), self.cohort.digest, f"pad {low} {high}", keys.SEED)

    def _box(self, sender: int, receiver: int) -> bytes:
        """The key for what one client seals for another."""
        other = receiver if sender == self.client else sender
        return keys.derive(self._agree(other), self.cohort.digest, f"shares {sender} {receiver}", 32)

    def _agree(self, other: int) -> bytes:
        if other not in self._agreed:
            self._agreed[other] = keys.agree(self._secret, bytes.fromhex(self.cohort.keys[other]))
        return self._agreed[other]

    @cached_property
    def _polynomials(self) -> list[tuple[int, list[int]]]:
        """Each secret with its coefficients: first for its own pad, then for the pads with its neighbors."""
        source = pads.stream(keys.derive(self._secret, self.cohort.digest, "shares", 32))
        secrets = [self._own, *map(self._pair, self._others)]
        return [(_number(s), [_number(source.update(bytes(64))) for _ in range(self.cohort.threshold - 1)]) for s in secrets]

    def _shares(self, holder: int) -> list[bytes]:
        return [shamir.share(s, c, holder + 1).to_bytes(SHARE, "little") for s, c in self._polynomials]


def pad_key(seed: bytes) -> bytes:
    return hashlib.sha256(b"fedselect pad" + seed).digest()


class Opening:
    """Recovers from the survivors' shares the pads that remain in the sum of their lines."""

    def __init__(self, cohort: Cohort, survivors: Iterable[int]) -> None:
        self.cohort, self.survivors = cohort, sorted(survivors)
        there = set(self.survivors)
        self._lost = {u: [v for v in cohort.neighbours(u) if v not in there] for u in self.survivors}
        self._shares: dict[int, dict[int, list[int]]] = {u: {} for u in self.survivors}

    def expected(self, holder: int, of: Iterable[int]) -> int:
        """Bytes of a client's shares of these survivors; refused if it holds none of theirs."""
        if not set(of) <= {holder, *self.cohort.neighbours(holder)} & self._lost.keys():
            raise DataError("it opened shares that it was not asked for")
        return sum(1 + len(self._lost[u]) for u in of) * SHARE

    def take(self, holder: int, of: list[int], shares: bytes) -> None:
        """Take one client's shares, in the order of the survivors they belong to."""
        if len(shares) != self.expected(holder, of):
            raise DataError(f"it opened {len(shares)} bytes, expected {self.expected(holder, of)}")
        at = 0
        for u in of:
            count = 1 + len(self._lost[u])
            self._shares[u][holder] = [_number(shares[at + k * SHARE : at + (k + 1) * SHARE]) for k in range(count)]
            at += count * SHARE

    def short(self) -> list[int]:
        """Survivors for whom too few shares arrived."""
        return [u for u in self.survivors if len(self._shares[u]) < self.cohort.threshold]

    def unmask(self, total: "np.ndarray[Any, Any]") -> None:
        """Subtract the remaining pads from the sum of the survivors' lines, in place."""
        for u in self.survivors:
            held = dict(list(self._shares[u].items())[: self.cohort.threshold])
            counts = shamir.weights([h + 1 for h in held])
            secrets = [
                sum(w * s for w, s in zip(counts, of, strict=True)) % shamir.PRIME for of in zip(*held.values(), strict=True)
            ]
            pads.add(total, pad_key(_seed(secrets[0])), -1)
            for v, found in zip(self._lost[u], secrets[1:], strict=True):
                pads.add(total, pad_key(_seed(found)), -1 if u < v else 1)


def _number(seed: bytes) -> int:
    return int.from_bytes(seed, "little") % shamir.PRIME


def _seed(number: int) -> bytes:
    if number >= 1 << (8 * keys.SEED):
        raise DataError("the opened shares do not belong together: a client sent false ones")
    return number.to_bytes(keys.SEED, "little")
