"""Method: frozen hyper-parameters and pure functions, written once for stacked clients and for one client in a network."""

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
"""For each tensor of a tree: whether all its entries are carried, or the name of the mask tree that marks them."""
M = TypeVar("M")


@dataclass(frozen=True)
class Up:
    """What clients upload. Only the entries of `values` that `sent` marks leave the client, and `extra`."""

    values: Tree
    sent: Mask
    weight: Tensor  # (C,)
    extra: State = field(default_factory=dict)  # side statistics, one row per client


@dataclass(frozen=True)
class Down:
    """What clients download: values that are the same for all clients, and rows of their own."""

    shared: State
    rows: State = field(default_factory=dict)


@dataclass(frozen=True)
class Received:
    """A round's uploads as the server sees them, aggregated entry by entry; rows of `extra` follow `ids`."""

    ids: Tensor
    mean: Tree  # the aggregate over the clients that sent an entry; undefined for entries that no client sent
    heard: Mask  # entries that at least one client sent
    extra: State


def for_clients(method: M, ids: Tensor) -> M:
    """The method for these clients: hyper-parameters with one value per client are reduced to theirs."""
    own: dict[str, Any] = {}
    for f in fields(method):  # type: ignore[arg-type]
        value = getattr(method, f.name)
        if isinstance(value, Tensor) and value.ndim == 1:
            own[f.name] = value.to(ids.device, non_blocking=True)[ids]
        elif is_dataclass(value) and (changed := for_clients(value, ids)) is not value:
            own[f.name] = changed
    return altered(method, own) if own else method


def exact(method: M) -> M:
    """The method with per-client float32 numbers as the decimals that were meant: 0.1, not the nearest float32."""
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
    """The method with other values for some fields, unchecked: they were checked before, and a check would wait for the GPU."""
    out = copy.copy(method)
    for name, value in own.items():
        object.__setattr__(out, name, value)
    return out


def check_method(method: object) -> None:
    """Refuse an object that cannot be run as a method."""
    if not isinstance(method, Method):
        raise InputError(f"method must be a method such as fs.FedSelect(), not {method!r}.")
    name = type(method).__name__
    if not is_dataclass(method):
        raise InputError(f"{name} must be a dataclass of its options; put @dataclass(frozen=True) before the class.")
    if getattr(method, "view", None) not in ("local", "merged"):
        raise InputError(f"{name} does not say which model it reports; add view = 'local' or view = 'merged' to the class.")


def check_clients(method: object, clients: int) -> None:
    """Refuse a per-client hyper-parameter that does not have one value per client."""
    for f in fields(method):  # type: ignore[arg-type]
        value = getattr(method, f.name)
        if isinstance(value, Tensor) and value.ndim == 1 and len(value) != clients:
            raise InputError(f"{f.name} has {len(value)} values for {clients} clients; give one number, or one per client.")
        if is_dataclass(value):
            check_clients(value, clients)


def check_upload(up: Up, wanted: Mask, samples: Tensor) -> None:
    """Refuse an upload that a deployment could not handle; `wanted`: what the clients take from the server after it.

    A server knows how many samples a client has, so it can check a weight that is 1 or that number, and no other. It also
    knows which entries to send back only from an upload, so a client must take exactly those that it sent.
    """
    weight = up.weight.double()
    if not (bool((weight == 1).all()) or bool((weight == samples).all())):
        raise InputError(
            "a client's weight must be 1 or its number of samples (work.n.double()), so that a server can check it, "
            f"not {[round(w, 4) for w in weight.tolist()[:3]]}; scale values in `client`, or send the weights in `extra`."
        )
    for name in {**wanted, **up.sent}:
        ours, theirs = (torch.as_tensor(m.get(name, False), device=weight.device) for m in (wanted, up.sent))
        if not bool((ours == theirs).all()):
            raise InputError(
                f"the method takes other entries of {name} from the server than it sends, which a server over a network cannot "
                "know; let `wants`, given the state after a round, return what that round sent."
            )


class Method(Shown, ABC):
    """A federated method: its client half and its server half. State goes in and comes out; nothing is stored on self.

    A method is a frozen dataclass whose fields are its options. Implement `init`, `join`, `down`, `client`, `server`, `local`,
    `personal` and `wants`; the other functions have defaults.

    Trees in client functions have a leading client axis over `work.ids`. So does `down` as a client receives it: shared values
    are views, one per client.
    """

    view: View
    """The reported model: "local", after local training, or "merged" with the aggregate (and fine-tuned)."""
    not_negative: tuple[str, ...] = ()
    """Side statistics ("statistics/v") that are never negative: a server rejects an upload in which they are."""

    @abstractmethod
    def init(self, params: Tree, clients: int, model: Model) -> State:
        """Server, once: its initial state, from the common initial values."""

    @abstractmethod
    def join(self, work: Work, params: Tree) -> State:
        """Client, once: its initial state, from the common initial values."""

    @abstractmethod
    def down(self, server: State, ids: Tensor) -> Down:
        """Server: what the clients `ids` download."""

    @abstractmethod
    def client(self, work: Work, state: State, down: State) -> tuple[State, Up]:
        """Client: train for one round; return the new state and the upload."""

    @abstractmethod
    def server(self, server: State, got: Received) -> State:
        """Server: the new state after one round's uploads."""

    @abstractmethod
    def local(self, state: State) -> Tree:
        """The local models: the clients' models after local training."""

    @abstractmethod
    def personal(self, work: Work, state: State, down: State) -> Tree:
        """The merged models: the clients' models merged with the current aggregate."""

    @abstractmethod
    def wants(self, model: Model, state: State) -> Mask:
        """Which entries of the shared "params" a client downloads."""

    @abstractmethod
    def mask(self, model: Model, state: State) -> Mask:
        """Which parameters are personal from the next round on, for reports and `result.masks`."""

    def persistence(self, state: State) -> Tree:
        """The persistence of each client's disagreement, by tensor: (C,), NaN until it is known.

        For runs, reports and `result.persistence`; it stays on the client. By default a method does not measure it.
        """
        return {}

    def groups(self, server: State) -> Tensor | None:
        """Groups of clients that share parameters only with each other: (N,), each client's group by its first member.

        -1 until it is known. For runs, reports and `result.groups`. By default a method has no groups.
        """
        return None

    def offers(self, server: State, clients: int) -> Down:
        """Server: what a new client may start from; rows are alternatives, not clients.

        By default there is one alternative: the mean over clients of the rows they have of their own.
        """
        device = next(v.device for tree in server.values() for v in tree.values())
        down = self.down(server, torch.arange(clients, device=device))
        rows = {k: {n: v.double().mean(0, keepdim=True).to(v.dtype) for n, v in t.items()} for k, t in down.rows.items()}
        return Down(down.shared, rows)

    def carries(self, model: Model, state: State) -> Mapping[str, Carried]:
        """Which parts of its state a client needs in later rounds; a tree that is not named is kept whole.

        {"params": {"conv.weight": "kept", "norm.mean": True}} keeps, of "params", the entries of conv.weight that are marked
        under that name in the state's "kept", all of norm.mean, and nothing else. What is not kept may come back as zero in
        the next round, so that many clients fit in memory.
        """
        return {}
