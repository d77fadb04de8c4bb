"""What the tests of secure aggregation share: clients with keys, and letters that pass in one process."""

from dataclasses import replace
from functools import cache

from cryptography.hazmat.primitives.asymmetric import ec
from local import Room, alone

from fedselect.network.client import Node
from fedselect.secret.keys import Identity
from fedselect.secret.mean import hidden


@cache
def node_key(i):
    return ec.derive_private_key(10**30 + i, ec.SECP384R1())


def identity(i, clients, federation="federation"):
    return Identity(i, federation, node_key(i), {j: node_key(j).public_key() for j in range(clients)})


def secret(assigned, aggregator, mean="senders"):
    """The same assignment with secure aggregation of all clients."""
    return replace(assigned, secret=hidden(aggregator, assigned.clients, mean).ring)


class SecretRoom(Room):
    """All nodes in this process, each with its keys; `deaf` says who does not get which letter."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.deaf = lambda i, letter: False

    def ask(self, letters, timeout):
        for number, letter in letters:
            if self.deaf(number - 100, letter):
                self.asked.append((number - 100, letter))
                yield number, "is gone"
            else:
                yield from super().ask([(number, letter)], timeout)

    def node(self, i):
        vault = self.folder / f"vault-{i}"
        return Node(self.assigned, i, alone(self.data, i), vault, identity(i, self.assigned.clients))
