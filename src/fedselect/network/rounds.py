"""A round of a deployment: its limits, its outcome, and the transport of messages that it needs."""

from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

from fedselect.core.errors import CALM, DataError, InputError
from fedselect.network.letters import Letter
from fedselect.private.settings import Private
from fedselect.simulate.inputs import check_ranges, most

Reply = Letter | DataError | str
"""What came back: a message, an error if it was not one, or the reason why nothing came."""


class Nodes(Protocol):
    """The transport of messages: the one seam between rounds and a network engine."""

    def present(self) -> list[int]:
        """The connected nodes, by the engine's own numbers."""

    def ask(self, letters: Iterable[tuple[int, Letter]], timeout: float) -> Iterator[tuple[int, Reply]]:
        """Send each node its message and yield replies as they arrive; every node gets an entry, within the time-out."""


@dataclass(frozen=True)
class Limits:
    """When to wait, when to continue, and what to reject."""

    min_clients: int = 1
    timeout: float = 600.0  # seconds for a client to answer
    wait: float = 60.0  # seconds for clients to connect: for all of them at first, for enough of them later
    _: KW_ONLY
    fraction: float = 1.0
    eval_every: int = 1
    max_norm: float | None = None  # longest update as a multiple of the model's length; None: by the usual update length
    poll: float = 1.0

    def __post_init__(self) -> None:
        if self.min_clients < 1:
            raise InputError(f"min_clients must be at least 1, not {self.min_clients}.")
        check_ranges(fraction=self.fraction, eval_every=self.eval_every)
        for name in ("timeout", "wait", "max_norm"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise InputError(f"{name} must be positive, not {getattr(self, name)}.")


def check_enough(limits: Limits, clients: int, private: Private | None) -> None:
    """Refuse to wait for more clients than a round asks."""
    if limits.min_clients > clients:
        raise InputError(f"min_clients is {limits.min_clients}, but this federation has {clients} clients.")
    asked = most(limits.fraction, clients)
    if limits.min_clients > asked and (private is None or private.unit != "client"):  # whose cohorts are of any size
        raise InputError(
            f"min_clients is {limits.min_clients}, but with fraction={limits.fraction:g} a round asks {asked} of {clients} "
            "clients; lower --min-clients, or raise --fraction."
        )


@dataclass
class Outcome:
    """One round as it went: who sent what, who measured (the round before), who missed it and why."""

    round: int
    uploads: dict[int, dict[str, Any]] = field(default_factory=dict)
    measured: dict[int, dict[str, float | None]] = field(default_factory=dict)
    missed: dict[int, str] = field(default_factory=dict)  # no usable reply in this round
    _: KW_ONLY
    rejected: dict[str, str] = field(default_factory=dict)  # by client or node: what was rejected
    set_back: dict[str, str] = field(default_factory=dict)  # by client: what its vault lost, and how it continues
    sealed: str = ""  # why secure aggregation gave no sum
    seconds: float = 0.0
    epsilon: float | None = None  # what the run has spent of its privacy budget by then

    def why(self) -> str:
        said = {**{f"client {i}": why for i, why in self.missed.items()}, **self.rejected}
        said |= {"secret": self.sealed} if self.sealed else {}
        return "; ".join(f"{who}: {why.removesuffix('.')}" for who, why in said.items()) or "no other client is connected"

    def advice(self, otherwise: str) -> str:
        """What to do if too few clients answered; diverged training would only diverge again."""
        if CALM in self.why():
            return "start a new run with that changed; if resumed, training would diverge again."
        return otherwise
