"""A client's side of secure aggregation: its keys, and what it has sent and opened, recorded so that a crash loses nothing.

`secret.json`, next to the snapshots of a run, holds the newest round in which values were sent, that round's lists of clients
with the survivors that this client agreed to, and secret keys. It is written before any message that follows from it is sent,
so after kill -9 a client still refuses what it refused before.
"""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedselect.core.errors import DataError
from fedselect.core.files import read_json, write_json
from fedselect.core.tree import Mask, Tree
from fedselect.network.letters import Letter, digest
from fedselect.network.vault import private
from fedselect.secret import keys
from fedselect.secret.keys import Identity
from fedselect.secret.mean import FEWEST
from fedselect.secret.protocol import Cohort, Member
from fedselect.secret.ring import Ring

LOST = "without it this client cannot know what it has sent: restore it from a copy, or start a new run."


class Masking:
    """How one client hides its values in a run; `folder` holds its states of the run."""

    def __init__(self, ring: Ring, address: dict[str, str], identity: Identity, folder: Path) -> None:
        if identity.federation != address["federation"]:
            raise DataError(
                f"client {identity.client} has the roster of {identity.federation!r}, but this run belongs to "
                f"{address['federation']!r}; start runs from the site that the client belongs to."
            )
        self.ring, self.address, self.identity, self.folder = ring, address, identity, folder

    @property
    def client(self) -> int:
        return self.identity.client

    def key(self, besides: str = "") -> list[str]:
        """A fresh public key, signed; stored here before it is sent."""
        known = self._known()
        used = {entry["key"] for entry in known["lists"].values()} | {besides}
        fresh = next((public for public in known["keys"] if public not in used), None)
        if fresh is None:
            secret = keys.new_key()
            fresh = keys.public(secret).hex()
            self._write({**known, "keys": {**known["keys"], fresh: secret.hex()}})
        return [fresh, self.identity.sign(signed_part(self.address, self.client, fresh)).hex()]

    def cohort(self, letter: Letter, round: int) -> Cohort:
        """The round's list of clients, if each key in it is signed by a client of the roster and this client's key matches."""
        said = letter.head.get("secret")
        try:
            listed = {int(i): (str(public), bytes.fromhex(signature)) for i, public, signature in said["list"]}  # type: ignore[index]
            reach = [float(r) for r in said["reach"]]  # type: ignore[index]
            whole = len(listed) == len(said["list"]) and all(len(bytes.fromhex(p)) == 32 for p, _ in listed.values())  # type: ignore[index]
        except (TypeError, ValueError, KeyError):
            raise DataError("the server sent no list of clients for secure aggregation.") from None
        if not whole or not all(0.0 < r < float("inf") for r in reach):
            raise DataError("the server sent an invalid list of clients for secure aggregation.")
        if len(listed) > self.ring.clients:
            raise DataError(f"the server's list has {len(listed)} clients; this run allows at most {self.ring.clients}.")
        if len(listed) < FEWEST:
            raise DataError(
                f"client {self.client} was listed with {len(listed) - 1} other clients; it needs at least {FEWEST - 1}."
            )
        for i, (public, signature) in listed.items():
            if not self.identity.is_of(i, signature, signed_part(self.address, i, public)):
                raise DataError(f"the key of client {i} is not signed by a client of this federation; it may be forged.")
        if self.client not in listed or listed[self.client][0] not in self._known()["keys"]:
            raise DataError(f"the server's list has an outdated key of client {self.client}; the server must greet it again.")
        return Cohort({**self.address, **agreement(letter, round, reach)}, {i: public for i, (public, _) in listed.items()})

    def check_new(self, cohort: Cohort) -> None:
        """Refuse a list under which other values were sent, and a round that this client has opened or passed."""
        known, round = self._known(), cohort.address["round"]
        opened = any(entry["survivors"] for entry in known["lists"].values())
        if round < known["round"] or (round == known["round"] and opened):
            raise DataError(
                f"client {self.client} has opened or passed round {known['round']} and joins no other sum of round "
                f"{round}; continue from the last checkpoint, or start a new run."
            )
        if round == known["round"] and cohort.digest.hex() in known["lists"]:
            raise DataError(f"client {self.client} has sent other values under this list; the server must make a new one.")

    def hide(self, cohort: Cohort, codes: Tree, sent: Mask) -> tuple[dict[str, Any], Tree]:
        """The masked part of a reply: ring elements under pads, sealed shares, and a key for the next round."""
        public = cohort.keys[self.client]
        member = self._member(cohort)
        line = self.ring.pack(codes, sent)
        member.mask(line)
        sealed = b"".join(bundle for _, bundle in sorted(member.bundles().items()))
        return {"key": self.key(public)}, {"line": _flat(line.tobytes()), "bundles": _flat(sealed)}

    def note(self, cohort: Cohort) -> None:
        """Record that values are sent under this list; drop older lists and their keys."""
        known, round, name = self._known(), cohort.address["round"], cohort.digest.hex()
        lists = known["lists"] if known["round"] == round else {}
        if name in lists:
            return
        mine = cohort.keys[self.client]
        lists |= {name: {"key": mine, "address": cohort.address, "list": cohort.keys, "survivors": None}}
        used = {entry["key"] for entry in lists.values()}
        old = {entry["key"] for entry in known["lists"].values()} - used
        self._write({"round": round, "lists": lists, "keys": {p: s for p, s in known["keys"].items() if p not in old}})

    def agree(self, letter: Letter, round: int) -> dict[str, Any]:
        """Bind this client to one list of a round and one set of its survivors, and sign that for the others."""
        return {"signature": self.identity.sign(survivors_part(*self._bound(letter, round))).hex()}

    def open(self, letter: Letter, round: int) -> tuple[dict[str, Any], Tree]:
        """The shares that unmask the sum over survivors, once enough clients have agreed on them."""
        cohort, survivors = self._bound(letter, round)
        self._check_agreed(cohort, survivors, letter.head.get("agreed"))
        opened = self._member(cohort).open(survivors, self._bundles(cohort, survivors, letter))
        return {"of": list(opened)}, {"shares": _flat(b"".join(s for shares in opened.values() for s in shares))}

    def _bound(self, letter: Letter, round: int) -> tuple[Cohort, list[int]]:
        """The list and the survivors in a message, which from then on are this client's only ones in the round."""
        known, name = self._known(), str(letter.head.get("list"))
        entry = known["lists"].get(name) if known["round"] == round else None
        if entry is None:
            raise DataError(f"client {self.client} was asked to open a list of round {round} under which it sent nothing.")
        cohort = Cohort(entry["address"], {int(i): public for i, public in entry["list"].items()})
        survivors = self._survivors(cohort, letter.head.get("survivors"))
        before = {n: e["survivors"] for n, e in known["lists"].items() if e["survivors"]}
        if before and before != {name: survivors}:
            raise DataError(f"client {self.client} has opened round {round} for other survivors; it opens a round once.")
        if not before:
            self._write({**known, "lists": {**known["lists"], name: {**entry, "survivors": survivors}}})
        return cohort, survivors

    def _check_agreed(self, cohort: Cohort, survivors: list[int], said: Any) -> None:
        """Refuse to open a sum if the server may have named other survivors to others: a smaller sum, or one client's values,
        would come out."""
        try:
            signed = {int(i): bytes.fromhex(signature) for i, signature in said}
        except (TypeError, ValueError):
            raise DataError(f"the server sent client {self.client} no signatures of who agreed to open the sum.") from None
        content = survivors_part(cohort, survivors)
        agreed = (i for i in survivors if i in signed and self.identity.is_of(i, signed[i], content))
        if (count := len(list(islice(agreed, cohort.least)))) < cohort.least:
            raise DataError(
                f"client {self.client} was asked to open a sum to which {count} of {len(cohort.ids)} clients agreed; it needs "
                f"at least {cohort.least}."
            )

    def _survivors(self, cohort: Cohort, survivors: Any) -> list[int]:
        """The clients whose sum is to be opened, if there are enough."""
        whole = isinstance(survivors, list) and all(type(i) is int for i in survivors)
        if not whole or survivors != sorted(set(survivors) & set(cohort.ids)) or self.client not in survivors:
            raise DataError(f"client {self.client} was sent {survivors!r} as survivors, which is invalid.")
        if len(survivors) < cohort.least:
            raise DataError(
                f"client {self.client} was asked to open the sum of {len(survivors)} of {len(cohort.ids)} clients; it needs at "
                f"least {cohort.least}."
            )
        if not cohort.joins(survivors):
            raise DataError(
                f"client {self.client} was asked to open a sum that could fall into two, because too many clients next to each "
                "other are lost."
            )
        return list(survivors)

    def _bundles(self, cohort: Cohort, survivors: list[int], letter: Letter) -> dict[int, bytes]:
        """What each survivor sealed for this client."""
        content = letter.parts.get("bundles", torch.zeros(0, dtype=torch.uint8)).numpy().tobytes()
        found, at = {}, 0
        for u in cohort.neighbours(self.client):
            if u in survivors:
                found[u] = content[at : at + cohort.sealed_size(u)]
                at += cohort.sealed_size(u)
        if at != len(content):
            raise DataError(f"the server sent {len(content)} bytes of sealed shares, expected {at}.")
        return found

    def _member(self, cohort: Cohort) -> Member:
        return Member(cohort, self.client, bytes.fromhex(self._known()["keys"][cohort.keys[self.client]]))

    def _known(self) -> dict[str, Any]:
        path = self.folder / "secret.json"
        return read_json(path, LOST) if path.exists() else {"round": 0, "lists": {}, "keys": {}}

    def _write(self, known: dict[str, Any]) -> None:
        private(self.folder)
        write_json(self.folder / "secret.json", known)
        (self.folder / "secret.json").chmod(0o600)


def signed_part(address: dict[str, str], client: int, public: str) -> bytes:
    """What a client signs to prove that a key is its own in a run."""
    return keys.said("key", client=client, key=public, **address)


def survivors_part(cohort: Cohort, survivors: list[int]) -> bytes:
    """What a client signs to tell the others for which survivors, and under which list, it opens a round."""
    return keys.said("survivors", list=cohort.digest.hex(), survivors=survivors)


def agreement(letter: Letter, round: int, reach: list[float]) -> dict[str, Any]:
    """What all clients of a round must have been sent alike, or their pads do not cancel: the round, the ranges, the model and
    the task's options."""
    return {"round": round, "reach": reach, "values": digest(letter.parts), "task": letter.head.get("task")}


def _flat(content: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())
