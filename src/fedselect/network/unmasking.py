"""The server's side of secure aggregation: masked updates are added up as they arrive, and the survivors' sum is unmasked."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedselect.aggregate.aggregator import Fold
from fedselect.core.errors import DataError
from fedselect.core.files import read_json, write_json
from fedselect.core.tree import Tree
from fedselect.network.letters import LONGEST, Letter, quoted
from fedselect.network.masking import agreement
from fedselect.secret.mean import SecretFold
from fedselect.secret.protocol import Cohort, Opening
from fedselect.secret.ring import CLIENTS, Ring, shapes

KEY = 64
"""Characters of a public key, in hexadecimal."""
Ask = Callable[[str, Iterator[tuple[int, Letter]]], Iterator[tuple[int, Letter]]]
"""Sends clients their messages and yields replies of this kind as they arrive."""


class Unmasking:
    """What a server keeps between rounds: clients' newest keys, and a round that it has begun to open.

    Clients open a round once. So the server records for whom before it asks; when resumed, it asks for the same again.
    """

    def __init__(self, ring: Ring, like: Tree, address: dict[str, str], folder: Path) -> None:
        self.ring, self.address, self._file = ring, address, folder / "opening.json"
        self.names, self.shapes = list(like), shapes({n: v.shape for n, v in like.items()})
        self.keys: dict[int, list[str]] = {}  # by client: public key and signature

    def begin(self, round: int, cohort: list[int], folded: Fold, down: Letter) -> "Round":
        """Start a round with these clients, or return to the one that is being opened, with its own clients.

        `down`: what every client gets; they agree on it, so that no client can be sent anything else.
        """
        assert isinstance(folded, SecretFold)
        begun = read_json(self._file, "delete it to start this round again.") if self._file.exists() else {}
        if begun.get("round") != round:
            return Round(self, round, {i: self.keys[i] for i in cohort}, folded, down)
        signed = {int(i): pair for i, pair in begun["list"].items()}
        return Round(self, round, signed, folded, down, announced=begun["survivors"])

    def announce(self, round: int, signed: dict[int, list[str]], survivors: list[int]) -> None:
        write_json(self._file, {"round": round, "list": signed, "survivors": survivors})


class Round:
    """One round: the sum of the masked updates so far, and who sent them."""

    def __init__(
        self, of: Unmasking, round: int, signed: dict[int, list[str]], folded: SecretFold, down: Letter,
        *, announced: list[int] | None = None,
    ) -> None:  # fmt: skip
        self._of, self._round, self._signed, self._folded, self.announced = of, round, signed, folded, announced
        self._reach = [float(folded.reach[n]) for n in of.names]
        agreed = agreement(down, round, self._reach)
        self.cohort = Cohort({**of.address, **agreed}, {i: public for i, (public, _) in signed.items()})
        self._total = np.zeros(sum(s.numel() for s in of.shapes.values()), dtype=of.ring.dtype)
        self._bundles: dict[int, dict[int, bytes]] = {}

    @property
    def head(self) -> dict[str, Any]:
        """What secure aggregation adds to the head of a training message."""
        return {"secret": {"list": [[i, *pair] for i, pair in sorted(self._signed.items())], "reach": self._reach}}

    def take(self, client: int, reply: Letter) -> None:
        """Add one client's masked update; nothing of it can be checked but its size."""
        line, sealed = (_bytes(reply, name) for name in ("line", "bundles"))
        others, size = self.cohort.neighbours(client), self.cohort.sealed_size(client)
        if set(reply.parts) != {"line", "bundles"} or len(line) != self._total.nbytes or len(sealed) != size * len(others):
            raise DataError(
                f"it sent {len(line)} and {len(sealed)} bytes, expected {self._total.nbytes} and {size * len(others)}"
            )
        self._of.keys[client] = key_of(reply)
        if self.announced is not None and client not in self.announced:
            raise DataError("it comes too late: the sum without it is being opened")
        self._total += np.frombuffer(line, dtype=self._of.ring.dtype)
        self._bundles[client] = {v: sealed[k * size : (k + 1) * size] for k, v in enumerate(others)}

    def open(self, base: list[int], ask: Ask, sizes: dict[int, dict[str, Any]], least: int) -> str:
        """Open the sums over all clients that sent their values and add them to the fold; or say why that failed.

        `base`: the last accepted round of each client. `sizes`: bytes up and down by client, to which this adds. `least`: how
        many clients the round needs. With fewer nothing is opened, because a round whose sum was opened cannot be repeated
        with more.
        """
        survivors = sorted(self._bundles)
        if self.announced is not None and survivors != self.announced:
            away = ", ".join(str(i) for i in self.announced if i not in survivors)
            return f"the sum of an interrupted round must still be opened, and client {away} is away: start it again"
        if len(survivors) < self.cohort.least:
            return (
                f"{len(survivors)} of {len(self.cohort.ids)} clients sent their values, and --secret needs at least "
                f"{self.cohort.least} to open a sum"
            )
        if self.announced is None and len(survivors) < least:
            return f"{len(survivors)} of {len(self.cohort.ids)} clients sent their values, and this run needs {least}"
        if not self.cohort.joins(survivors):
            return (
                "too many clients were lost that are next to each other in the round's list, so no client would open this sum"
            )
        self._of.announce(self._round, self._signed, survivors)
        opening = Opening(self.cohort, survivors)
        refused: list[str] = []
        agreed: list[list[Any]] = []
        for i, reply in ask("agreed", self._agreeing(survivors, base)):
            try:
                agreed.append([i, signature_of(reply)])
            except DataError as e:
                refused.append(f"client {i}: {quoted(str(e))}")
        if len(agreed) < self.cohort.least:
            return _few("agreed for whom to open the sum", refused)
        for i, reply in ask("opened", self._letters(survivors, sorted(agreed), base, sizes)):
            try:
                opening.take(i, _ids(reply), _bytes(reply, "shares"))
                sizes[i]["bytes_up"] += reply.nbytes
            except DataError as e:
                refused.append(f"client {i}: {quoted(str(e))}")
        if short := opening.short():
            said = f" for client {', '.join(map(str, short))}, who may have sent shares that nobody can read"
            return _few(f"opened the sum{said if len(short) < len(survivors) else ''}", refused)
        try:
            opening.unmask(self._total)
        except DataError as e:
            return str(e)
        return self._settle(len(survivors))

    def _head(self, kind: str, client: int, survivors: list[int], base: list[int]) -> dict[str, Any]:
        head = {**self._of.address, "kind": kind, "client": client, "round": self._round, "base": base[client]}
        return {**head, "list": self.cohort.digest.hex(), "survivors": survivors}

    def _agreeing(self, survivors: list[int], base: list[int]) -> Iterator[tuple[int, Letter]]:
        return ((i, Letter(self._head("agree", i, survivors, base))) for i in survivors)

    def _letters(
        self, survivors: list[int], agreed: list[list[Any]], base: list[int], sizes: dict[int, dict[str, Any]]
    ) -> Iterator[tuple[int, Letter]]:
        for i, _ in agreed:
            sealed = b"".join(self._bundles[u][i] for u in self.cohort.neighbours(i) if u in self._bundles)
            parts = {"bundles": torch.from_numpy(np.frombuffer(sealed, dtype=np.uint8).copy())} if sealed else {}
            letter = Letter({**self._head("open", i, survivors, base), "agreed": agreed}, parts)
            sizes[i]["bytes_down"] += letter.nbytes
            yield i, letter

    def _settle(self, clients: int) -> str:
        """Hand over the sums, unless a check entry, which is 1 for every client, shows that one sent something invalid."""
        total, senders = self._of.ring.unpack(self._total, self._of.shapes)
        counts = [float(v.max()) for v in senders.values() if v.numel()]
        if float(total[CLIENTS]) != clients or max(counts) > clients:
            return (
                "what clients sent does not add up: one of them sent invalid data, and --secret hides which; start a new run "
                "without the client that you doubt"
            )
        self._folded.put(total, senders)
        return ""


def key_of(reply: Letter) -> list[str]:
    """The signed key that a client offers for the next round; the other clients check the signature."""
    said = reply.head.get("key")
    if not isinstance(said, list) or len(said) != 2 or not all(map(_is_hex, said)) or len(said[0]) != KEY:
        raise DataError("it sent no key for the next round")
    return said


def signature_of(reply: Letter) -> str:
    """A client's signature, which the other clients check."""
    said = reply.head.get("signature")
    if not _is_hex(said):
        raise DataError("it sent no signature")
    return str(said)


def _is_hex(said: Any) -> bool:
    """Whether this is a key or a signature as clients can read it; if not, all of them would refuse the round."""
    return isinstance(said, str) and len(said) <= LONGEST and re.fullmatch(r"([0-9a-f]{2})+", said) is not None


def _few(did: str, refused: list[str]) -> str:
    why = f" ({'; '.join(refused)})" if refused else ""
    return f"too few clients {did}{why}"


def _ids(reply: Letter) -> list[int]:
    said = reply.head.get("of")
    if not isinstance(said, list) or not all(type(i) is int for i in said) or said != sorted(set(said)):
        raise DataError(f"it opened shares of {said!r}")
    return said


def _bytes(reply: Letter, name: str) -> bytes:
    part = reply.parts.get(name)
    if part is None or part.dtype != torch.uint8 or part.ndim != 1:
        raise DataError(f"it sent no {name}")
    return part.numpy().tobytes()
