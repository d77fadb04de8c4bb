"""A client's side of secure aggregation: its keys and what it has sent and opened, which it never forgets halfway.

`secret.json` beside the snapshots of a run holds the newest round it sent values in, that round's lists with who survived them,
and secret keys. It is written before anything is sent that follows from it, so after kill -9 a client refuses what it
refused before.
"""

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

LOST = "without it this client cannot tell what it has sent: put it back from a copy, or begin another run."


class Masking:
    """What one client does to hide its values in a run; `folder` is where its states of the run are."""

    def __init__(self, ring: Ring, address: dict[str, str], identity: Identity, folder: Path) -> None:
        if identity.federation != address["federation"]:
            raise DataError(
                f"client {identity.client} has the roster of {identity.federation!r}, and this run is of "
                f"{address['federation']!r}; start runs from the site that it is a part of."
            )
        self.ring, self.address, self.identity, self.folder = ring, address, identity, folder

    @property
    def client(self) -> int:
        return self.identity.client

    def key(self, besides: str = "") -> list[str]:
        """A public key that was not used yet, signed; kept here before anybody sees it."""
        known = self._known()
        used = {entry["key"] for entry in known["lists"].values()} | {besides}
        fresh = next((public for public in known["keys"] if public not in used), None)
        if fresh is None:
            secret = keys.new_key()
            fresh = keys.public(secret).hex()
            self._write({**known, "keys": {**known["keys"], fresh: secret.hex()}})
        return [fresh, self.identity.sign(signed_part(self.address, self.client, fresh)).hex()]

    def cohort(self, letter: Letter, round: int) -> Cohort:
        """The list of a round, if every key in it is signed by a client of the roster and this client's own is its own."""
        said = letter.head.get("secret")
        try:
            listed = {int(i): (str(public), bytes.fromhex(signature)) for i, public, signature in said["list"]}  # type: ignore[index]
            reach = [float(r) for r in said["reach"]]  # type: ignore[index]
            whole = len(listed) == len(said["list"]) and all(len(bytes.fromhex(p)) == 32 for p, _ in listed.values())  # type: ignore[index]
        except (TypeError, ValueError, KeyError):
            raise DataError("the server sent no list of clients for secure aggregation.") from None
        if not whole or not all(0.0 < r < float("inf") for r in reach):
            raise DataError("the server sent a list of clients for secure aggregation that cannot be used.")
        if len(listed) > self.ring.clients:
            raise DataError(f"the server's list has {len(listed)} clients; in this run at most {self.ring.clients} add up.")
        if len(listed) < FEWEST:
            raise DataError(
                f"client {self.client} was to add up with {len(listed) - 1} others; it does so with {FEWEST - 1} or more."
            )
        for i, (public, signature) in listed.items():
            if not self.identity.is_of(i, signature, signed_part(self.address, i, public)):
                raise DataError(f"the key of client {i} is not signed by a client of this federation; somebody invented it.")
        if self.client not in listed or listed[self.client][0] not in self._known()["keys"]:
            raise DataError(f"the server's list has another key of client {self.client} than it has; greet it again.")
        agreed = {"round": round, "reach": reach, "values": digest(letter.parts)}  # a client sent another model stands alone
        return Cohort({**self.address, **agreed}, {i: public for i, (public, _) in listed.items()})

    def check_new(self, cohort: Cohort) -> None:
        """Refuse a list under which it has sent other values, and a round that it has opened or passed."""
        known, round = self._known(), cohort.address["round"]
        opened = any(entry["survivors"] for entry in known["lists"].values())
        if round < known["round"] or (round == known["round"] and opened):
            raise DataError(
                f"client {self.client} has opened or passed round {known['round']} and takes part in no other sum of round "
                f"{round}; go on from the last checkpoint, or begin another run."
            )
        if round == known["round"] and cohort.digest.hex() in known["lists"]:
            raise DataError(f"client {self.client} has sent other values under this list; make another.")

    def hide(self, cohort: Cohort, codes: Tree, sent: Mask) -> tuple[dict[str, Any], Tree]:
        """What goes into the reply: the line of ring elements under its pads, sealed shares, and a key for the next round."""
        public = cohort.keys[self.client]
        member = self._member(cohort)
        line = self.ring.pack(codes, sent)
        member.mask(line)
        sealed = b"".join(bundle for _, bundle in sorted(member.bundles().items()))
        return {"key": self.key(public)}, {"line": _flat(line.tobytes()), "bundles": _flat(sealed)}

    def note(self, cohort: Cohort) -> None:
        """Keep that values go out under this list; older ones, and their keys, are done with."""
        known, round, name = self._known(), cohort.address["round"], cohort.digest.hex()
        lists = known["lists"] if known["round"] == round else {}
        if name in lists:
            return
        mine = cohort.keys[self.client]
        lists |= {name: {"key": mine, "address": cohort.address, "list": cohort.keys, "survivors": None}}
        used = {entry["key"] for entry in lists.values()}
        old = {entry["key"] for entry in known["lists"].values()} - used
        self._write({"round": round, "lists": lists, "keys": {p: s for p, s in known["keys"].items() if p not in old}})

    def open(self, letter: Letter, round: int) -> tuple[dict[str, Any], Tree]:
        """The shares that unmask the sum over survivors: for one list of a round, and one set of survivors of it."""
        known, name = self._known(), str(letter.head.get("list"))
        entry = known["lists"].get(name) if known["round"] == round else None
        if entry is None:
            raise DataError(f"client {self.client} has sent nothing under the list of round {round} that it was to open.")
        cohort = Cohort(entry["address"], {int(i): public for i, public in entry["list"].items()})
        survivors = self._survivors(cohort, letter.head.get("survivors"))
        before = {n: e["survivors"] for n, e in known["lists"].items() if e["survivors"]}
        if before and before != {name: survivors}:
            raise DataError(f"client {self.client} has opened round {round} for other survivors; it does so once.")
        if not before:
            self._write({**known, "lists": {**known["lists"], name: {**entry, "survivors": survivors}}})
        opened = self._member(cohort).open(survivors, self._bundles(cohort, survivors, letter))
        return {"of": list(opened)}, {"shares": _flat(b"".join(s for shares in opened.values() for s in shares))}

    def _survivors(self, cohort: Cohort, survivors: Any) -> list[int]:
        """Whose sum is to be opened, if they are enough."""
        whole = isinstance(survivors, list) and all(type(i) is int for i in survivors)
        if not whole or survivors != sorted(set(survivors) & set(cohort.ids)) or self.client not in survivors:
            raise DataError(f"client {self.client} was sent {survivors!r} as survivors, which cannot be.")
        if len(survivors) < cohort.least:
            raise DataError(
                f"client {self.client} was to open the sum of {len(survivors)} of {len(cohort.ids)} clients; it opens that of "
                f"{cohort.least} or more."
            )
        return list(survivors)

    def _bundles(self, cohort: Cohort, survivors: list[int], letter: Letter) -> dict[int, bytes]:
        """What the survivors sealed for this client, by who did."""
        content = letter.parts.get("bundles", torch.zeros(0, dtype=torch.uint8)).numpy().tobytes()
        found, at = {}, 0
        for u in cohort.neighbours(self.client):
            if u in survivors:
                found[u] = content[at : at + cohort.sealed_size(u)]
                at += cohort.sealed_size(u)
        if at != len(content):
            raise DataError(f"the server sent {len(content)} bytes of sealed shares where {at} belong.")
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
    """What a client signs to say that a key is its own in a run."""
    return keys.said("key", client=client, key=public, **address)


def _flat(content: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())
