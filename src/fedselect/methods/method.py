"""Method: frozen hyper-parameters and pure functions, written once for stacked clients and for one node of a network."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from fedselect.core.errors import InputError
from fedselect.core.shown import Shown
from fedselect.core.tree import Mask, State, Tree
from fedselect.models import Model
from fedselect.training.work import Work

View = Literal["local", "merged"]
Carried = Mapping[str, bool | str]
"""Of each tensor of a tree: whether all its entries are carried, or the tree of masks that marks those that are."""
M = TypeVar("M")


@dataclass(frozen=True)
class Up:
    """What clients hand over. Entries of `values` marked in `sent` leave the client, and nothing else does."""

    values: Tree
    sent: Mask
    weight: Tensor  # (C,)
    extra: State = field(default_factory=dict)  # side statistics, one row for each client


@dataclass(frozen=True)
class Down:
    """What the server hands out: the same for everybody, and rows of a client's own."""

    shared: State
    rows: State = field(default_factory=dict)


@dataclass(frozen=True)
class Received:
    """A round's uploads as the server sees them, folded entry by entry; rows of `extra` follow `ids`."""

    ids: Tensor
    mean: Tree  # of the clients that sent the entry, or what else the aggregator makes of them; where nobody did, of no use
    heard: Mask  # entries that anybody sent
    extra: State


def for_clients(method: M, ids: Tensor) -> M:
    """The method as these clients see it: of a hyper-parameter given one for each client, theirs."""
    own: dict[str, Any] = {}
    for f in fields(method):  # type: ignore[arg-type]
        value = getattr(method, f.name)
        if isinstance(value, Tensor) and value.ndim == 1:
            own[f.name] = value.to(ids.device, non_blocking=True)[ids]
        elif is_dataclass(value) and (changed := for_clients(value, ids)) is not value:
            own[f.name] = changed
    return altered(method, own) if own else method


def exact(method: M) -> M:
    """The method with float32 numbers for each client as the decimals they were meant to be: 0.1, not the nearest float32."""
    own: dict[str, Any] = {}
    for f in fields(method):  # type: ignore[arg-type]
        value = getattr(method, f.name)
        if isinstance(value, Tensor) and value.dtype == torch.float32:
            own[f.name] = torch.tensor([float(f"{v:.7g}") for v in value.flatten().tolist()], dtype=torch.float64).view(
                value.shape
            )
        elif is_dataclass(value) and (changed := exact(value)) is not value:
            own[f.name] = changed
    return altered(method, own) if own else method


def altered(method: M, own: Mapping[str, Any]) -> M:
    """The method with other values for some fields. They were checked when they came in; asking again would wait for a GPU."""
    out = copy.copy(method)
    for name, value in own.items():
        object.__setattr__(out, name, value)
    return out


def check_method(method: object) -> None:
    """What a method must be, said before it is run."""
    if not isinstance(method, Method):
        raise InputError(f"method must be a method such as fs.FedSelect(), not {method!r}.")
    name = type(method).__name__
    if not is_dataclass(method):
        raise InputError(f"{name} must be a dataclass, its options the fields: put @dataclass(frozen=True) before the class.")
    if getattr(method, "view", None) not in ("local", "merged"):
        raise InputError(f"{name} must say which model it reports: give it view = 'local' or view = 'merged'.")


def check_clients(method: object, clients: int) -> None:
    """A hyper-parameter given for each client must have one for every client."""
    for f in fields(method):  # type: ignore[arg-type]
        value = getattr(method, f.name)
        if isinstance(value, Tensor) and value.ndim == 1 and len(value) != clients:
            raise InputError(
                f"{f.name} has {len(value)} values for {clients} clients; give one number, or one for each client."
            )
        if is_dataclass(value):
            check_clients(value, clients)


def check_upload(up: Up, wanted: Mask, samples: Tensor) -> None:
    """Refuse an upload that a deployment could not take; `wanted`: what the clients take from the server after it.

    A server knows how many samples a client has, so it can check a weight of 1 or of that number and no other. And it knows
    from an upload which entries to send back, so a client takes those that it sent.
    """
    weight = up.weight.double()
    if not (bool((weight == 1).all()) or bool((weight == samples).all())):
        raise InputError(
            "a client's weight is 1 or the number of its samples (work.n.double()), which a server over a network can check; "
            f"not {[round(w, 4) for w in weight.tolist()[:3]]}. Weigh values in `client`, or send what decides in `extra`."
        )
    for name in {**wanted, **up.sent}:
        ours, theirs = (torch.as_tensor(m.get(name, False), device=weight.device) for m in (wanted, up.sent))
        if not bool((ours == theirs).all()):
            raise InputError(
                f"the method takes other entries of {name} from the server than it sends, which a server over a network cannot "
                "know: let `wants`, given the state after a round, say what that round sent."
            )


class Method(Shown, ABC):
    """State goes in and comes out; nothing is kept on self.

    Client functions see trees with a leading axis over `work.ids`. In `down`, as a client gets it, everything carries
    that axis too: shared values are views, one for each client.
    """

    view: View
    """Which model the tables show: as local training left it, or merged with the aggregate (and fine-tuned)."""
    not_negative: tuple[str, ...] = ()
    """Side statistics ("statistics/v") that are never below 0: a server turns away a client that says otherwise."""

    @abstractmethod
    def init(self, params: Tree, clients: int, model: Model) -> State:
        """Server, once: its state from the common initial values."""

    @abstractmethod
    def join(self, work: Work, params: Tree) -> State:
        """Client, once: its state from the common initial values."""

    @abstractmethod
    def down(self, server: State, ids: Tensor) -> Down:
        """Server: what the clients `ids` get."""

    @abstractmethod
    def client(self, work: Work, state: State, down: State) -> tuple[State, Up]:
        """Client: one round."""

    @abstractmethod
    def server(self, server: State, got: Received) -> State:
        """Server: one round's uploads folded into its state."""

    @abstractmethod
    def local(self, state: State) -> Tree:
        """The clients' models as local training left them."""

    @abstractmethod
    def personal(self, work: Work, state: State, down: State) -> Tree:
        """The clients' models merged with what the server holds now."""

    @abstractmethod
    def wants(self, model: Model, state: State) -> Mask:
        """Which entries of the shared "params" a client takes from the server; the others need not travel down."""

    @abstractmethod
    def mask(self, model: Model, state: State) -> Mask:
        """Which parameters are personal from the next round on: for reports and `result.masks`."""

    def persistence(self, state: State) -> Tree:
        """How much of its disagreement with the others persists in a client, by tensor: (C,), NaN until it is known.

        For runs, reports and `result.persistence`; it stays with the client. By default a method does not measure it.
        """
        return {}

    def groups(self, server: State) -> Tensor | None:
        """Who shares with whom what not everybody shares: (N,), each client's group, named by its first member.

        -1 until it is known. For runs, reports and `result.groups`. By default a method makes no groups.
        """
        return None

    def offers(self, server: State, clients: int) -> Down:
        """Server: what a client may begin with that was not there while the run lasted; rows are choices, not clients.

        By default one choice: of what clients have rows of their own, the mean.
        """
        device = next(v.device for tree in server.values() for v in tree.values())
        down = self.down(server, torch.arange(clients, device=device))
        rows = {k: {n: v.double().mean(0, keepdim=True).to(v.dtype) for n, v in t.items()} for k, t in down.rows.items()}
        return Down(down.shared, rows)

    def carries(self, model: Model, state: State) -> Mapping[str, Carried]:
        """What of its state a client needs again in a later round; a tree that is not named it needs whole.

        {"params": {"conv.weight": "kept", "norm.mean": True}}: of the first the entries marked under that name in the
        state's "kept", of the second all, of others nothing. The rest may be forgotten between rounds and come back as
        zero, so that many clients fit in memory.
        """
        return {}
