"""A server that names other survivors to each client: none of them may open anything for it."""

import pytest
import torch
from secretly import identity

import fedselect as fs
from fedselect.network.letters import Letter
from fedselect.network.masking import Masking
from fedselect.secret import pads, protocol, shamir
from fedselect.secret.protocol import pad_key
from fedselect.secret.ring import Ring


class Split:
    """A server that names other survivors to each client and keeps what they open. Of each client it knows line and shares."""

    def __init__(self, folder, clients):
        address = {"federation": "federation", "run": "run", "plan": ""}
        self.members = [Masking(Ring(clients), address, identity(i, clients), folder / str(i)) for i in range(clients)]
        listed = [[i, *member.key()] for i, member in enumerate(self.members)]
        letter = Letter({"secret": {"list": listed, "reach": [1.0]}}, {"values": torch.zeros(3, dtype=torch.uint8)})
        self.lines, self.sealed, self.plain = {}, {}, {}
        for i, member in enumerate(self.members):
            self.cohort = member.cohort(letter, 1)
            codes, sent = {"w": torch.full((6,), i + 1.0), "~clients": torch.ones(1)}, {"w": True}
            parts = member.hide(self.cohort, codes, sent)[1]
            member.note(self.cohort)
            self.lines[i], self.sealed[i] = parts["line"].numpy().view("<u4"), parts["bundles"].numpy().tobytes()
            self.plain[i] = member.ring.pack(codes, sent)
        self.found = {}  # of each client, by which of its secrets: shares by place

    def head(self, away):
        return {"list": self.cohort.digest.hex(), "survivors": [i for i in self.cohort.ids if i not in away]}

    def agree(self, holder, away):
        """One client's signature that it opens for all but these."""
        return self.members[holder].agree(Letter(self.head(away)), 1)["signature"]

    def without(self, holder, away, signed):
        """Ask one client to open for all but these, with the signatures that the server has."""
        head = {**self.head(away), "agreed": signed}
        survivors = head["survivors"]
        sealed = b"".join(self._bundle(u, holder) for u in self.cohort.neighbours(holder) if u in survivors)
        letter = Letter(head, {"bundles": torch.frombuffer(bytearray(sealed), dtype=torch.uint8)})
        said, parts = self.members[holder].open(letter, 1)
        shares, at = parts["shares"].numpy().tobytes(), 0
        for u in said["of"]:
            lost = [k for k, v in enumerate(self.cohort.neighbours(u), 1) if v in away]
            for k in (0, *lost):
                self.found.setdefault(u, {}).setdefault(k, {})[holder + 1] = int.from_bytes(shares[at : at + 32], "little")
                at += 32

    def _bundle(self, sender, receiver):
        size, at = self.cohort.sealed_size(sender), self.cohort.neighbours(sender).index(receiver)
        return self.sealed[sender][at * size : (at + 1) * size]

    def sum_of(self, clients):
        """The sum of their lines without all pads for which it has enough shares."""
        total = sum(self.lines[u] for u in clients)
        for u in clients:
            for k, shares in self.found.get(u, {}).items():
                v = self.cohort.neighbours(u)[k - 1] if k else None
                if len(shares) < self.cohort.threshold or v in clients:
                    continue
                secret = shamir.secret(dict(list(shares.items())[: self.cohort.threshold]))
                pads.add(total, pad_key(secret.to_bytes(31, "little")), 1 if k and u > v else -1)
        return total

    def split(self, target):
        """For each client whom to name as lost, so that everybody outside `target` is lost for as many as possible."""
        counts, found = dict.fromkeys((i for i in self.cohort.ids if i not in target), 0), {}
        for holder in self.cohort.ids:
            away = list(counts) if self.cohort.complete else self.cohort.neighbours(target[0])
            away = [v for v in sorted(away, key=counts.get) if v != holder]
            found[holder] = away[: len(self.cohort.ids) - self.cohort.least]
            counts |= {v: counts[v] + 1 for v in found[holder]}
        return found


SPLITS = {"all are neighbours": (10, 64, [0, 1, 2, 3, 4, 5]), "few are neighbours": (12, 4, [7])}


@pytest.mark.parametrize("size", SPLITS)
def test_a_server_that_names_different_survivors_to_clients_gets_nothing(tmp_path, monkeypatch, size):
    """Each of them is asked for enough survivors. But what they open together would be the sum of six of ten clients, for
    whom the noise of --private is too little; in a large cohort, where a client has neighbors, the values of that one alone."""
    clients, neighbours, target = SPLITS[size]
    monkeypatch.setattr(protocol, "NEIGHBOURS", neighbours)
    monkeypatch.setattr(protocol, "CUT", 0)
    server = Split(tmp_path, clients)
    assert len(target) < server.cohort.least
    plain = sum(server.plain[u] for u in target)
    split = server.split(target)
    signed = [[i, server.agree(i, away)] for i, away in split.items()]
    for i, away in split.items():
        with pytest.raises(fs.DataError, match="clients agreed; it needs at least"):
            server.without(i, away, signed)
    assert not server.found
    monkeypatch.setattr(Masking, "_check_agreed", lambda *a: None)  # without this check the attack works
    for i, away in split.items():
        server.without(i, away, signed)
    assert (server.sum_of(target) == plain).all()


def test_a_client_agrees_to_no_sum_that_could_fall_into_two(tmp_path, monkeypatch):
    monkeypatch.setattr(protocol, "NEIGHBOURS", 4)
    monkeypatch.setattr(protocol, "CUT", 1)
    server = Split(tmp_path, 12)
    *away, holder = server.cohort.circle[:3]
    with pytest.raises(
        fs.DataError, match="a sum that could fall into two, because too many clients next to each other are lost"
    ):
        server.agree(holder, away)
    assert server.agree(holder, away[:1])
