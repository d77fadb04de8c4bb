"""Diagnosis: what a window of sharing everything says about how clients differ."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any, Unpack

import torch

from fedselect.core.errors import InputError
from fedselect.core.shown import html_table
from fedselect.core.tree import Tree, counts
from fedselect.data import ClientData, Federation
from fedselect.diagnosis import heat, words
from fedselect.methods.aliases import FedPersist
from fedselect.methods.grouping import alike, profiles
from fedselect.simulate import Simulation, ranks
from fedselect.simulate.inputs import Network, RunOptions
from fedselect.simulate.records import Record
from fedselect.simulate.stack import Stack
from fedselect.training.settings import Training

MOST = 10  # columns of a table before the body's are put together
FEW = 100  # training samples a client, below which differences drown in chance
SAME = 0.9  # of the first round's loss: so little was learned that pulls are mostly noise
CANNOT = (
    "What this cannot tell: {rounds} rounds are few, and small tensors noisy. Clients that differ pull the shared model, and "
    "the others then disagree with it, too. Persistence does not tell one group from another, for they meet in the middle: "
    "groups are found by what classes look like to the untrained network, and clients of one group may still differ in other "
    "ways. None of it says that a head of their own, or another part kept personal, will pay. Statistics of BatchNorm stay "
    "with the client and absorb differences such as a camera's."
)


@dataclass(frozen=True)
class Diagnosis:
    """Persistence by client and tensor, and what it means. Print it, or use `table`, `sentences` and `figure()`."""

    clients: list[str]
    samples: list[int]  # to train on, by client
    persistence: dict[str, list[float | None]]  # by tensor, in the model's order; None: not tested
    roles: dict[str, str]  # of the tensors: "body weights", "head vector"
    share: list[float]  # of its parameters that FedPersist would keep, by client
    losses: list[float]  # of training, round by round
    groups: list[int]  # who would share a head: by client, the first member of its group

    @property
    def rounds(self) -> int:
        """Rounds of sharing everything."""
        return len(self.losses)

    @cached_property
    def kinds(self) -> list[words.Kind]:
        """How each client differs."""
        return kinds(self.persistence, self.roles)

    @property
    def sentences(self) -> list[str]:
        """For each kind of difference the clients that have it."""
        return words.sentences(self.kinds, words.short(self.clients))

    @property
    def table(self) -> dict[str, list[float | None]]:
        """Columns of numbers by client: the tensors; of a deep model's body, the most persistent of each part."""
        if len(self.persistence) <= MOST:
            return self.persistence
        parts: dict[str, list[str]] = {}
        for name, role in self.roles.items():
            parts.setdefault(name if role.startswith("head") else name.partition(".")[0], []).append(name)
        return {
            part: [_most(self.persistence[n][i] for n in names) for i in range(len(self.clients))]
            for part, names in parts.items()
        }

    @property
    def heads(self) -> str:
        """Who would share a head in FedAlike."""
        count = len(set(self.groups))
        if count == 1:
            return "FedAlike would share one head among all clients."
        if count == len(self.groups):
            return "FedAlike would give every client a head of its own."
        said = " ".join(words.together(self.groups, words.short(self.clients)))
        return f"FedAlike would give {count} groups a head each. {said}"

    @property
    def keeps(self) -> str:
        """What FedPersist would keep personal."""
        own = [s for s in self.share if s]
        if not own:
            return "FedPersist would keep nothing personal."
        who = "every client" if len(own) == len(self.share) else f"{len(own)} of {len(self.share)} clients"
        return f"FedPersist would keep {_percent(statistics.fmean(own))} of the parameters personal in {who}."

    @property
    def methods(self) -> list[str]:
        """What to begin with: one shared model, fine-tuned; and where there are groups, FedAlike beside it."""
        return ["fedalike", "fedavg+ft"] if self._apart else ["fedavg+ft"]

    @property
    def advice(self) -> str:
        """Why to begin with these methods."""
        if self._apart:
            why = "that groups differ does not say that a head each pays"
            return f"Begin with fedalike, and compare it with fedavg+ft: {why}."
        return "Begin with fedavg+ft: one shared model, fine-tuned by each client."

    @property
    def limits(self) -> str:
        """What the numbers cannot tell."""
        first, last = self.losses[0], self.losses[-1]
        doubts = [
            f"The loss hardly fell ({first:.2f} to {last:.2f}), so these numbers say little; try more --rounds."
            if last > SAME * first else "",
            f"With {statistics.median(self.samples):.0f} samples a client, differences may go unnoticed." if self._few else "",
        ]  # fmt: skip
        return " ".join([*filter(None, doubts), CANNOT.format(rounds=self.rounds)])

    @property
    def _apart(self) -> bool:
        return len(set(self.groups)) > 1

    @property
    def _few(self) -> bool:
        return statistics.median(self.samples) < FEW

    def __repr__(self) -> str:
        return "\n".join([*self.sentences, self.heads, self.keeps, self.advice])

    def _repr_html_(self) -> str:
        table = self.table
        rows = [[who, *(_cell(column[i]) for column in table.values())] for i, who in enumerate(self.clients)]
        return html_table("Persistence by client and tensor", ["client", *table], rows) + f"<p>{escape(repr(self))}</p>"

    def figure(self) -> Any:
        """A heat map of clients and tensors, as a matplotlib figure."""
        return heat.figure(self.persistence, self.clients)

    def save(self, path: str | Path) -> Path:
        """The heat map as a file: .png, .pdf or .svg."""
        return heat.save(self.figure, Path(path))

    def to_json(self) -> dict[str, Any]:
        own = zip(self.clients, self.samples, self.kinds, self.share, strict=True)
        return {
            "losses": self.losses,
            "clients": [{"name": n, "train": t, "kind": k, "share": s} for n, t, k, s in own],
            "groups": self.groups,
            "persistence": self.persistence,
            "roles": self.roles,
            "sentences": self.sentences,
            "methods": self.methods,
        }


def diagnose(
    data: Federation | Iterable[ClientData],
    *,
    model: Network,
    rounds: int = 10,
    epochs: int = 3,
    lr: float = 0.1,
    seed: int = 0,
    training: Training | None = None,
    on_round: Callable[[Record], None] | None = None,
    **how: Unpack[RunOptions],
) -> Diagnosis:
    """Share everything for a few rounds, on training samples only, and report how clients differ.

    Args:
        data: The clients.
        model: As in `fs.run`.
        rounds: Rounds of sharing; one more round is needed to look back.
        epochs: Local epochs per round.
        lr: Learning rate.
        seed: Decides the initial parameters and the order of training.
        training: Optimizer, schedule and batch size.
        on_round: Called with the record of each round.
        how: As in `fs.run`.

    Returns:
        Persistence by client and layer, groups of clients that are alike, and sentences; `print` it.

    Examples:
        >>> import fedselect as fs
        >>> data = fs.load("digits", clients=3, train=30, val=0, seed=0)
        >>> found = fs.diagnose(data, model="mlp", rounds=2)
        >>> len(found.groups)
        3
    """
    check_rounds(rounds)
    method = FedPersist(window=rounds, epochs=epochs, lr=lr)
    return observe(Simulation(method, model, data, seed=seed, training=training, rounds=rounds + 1, **how), rounds, on_round)


def check_rounds(rounds: int) -> None:
    if rounds < 2:
        raise InputError(
            f"a diagnosis needs at least 2 rounds, one for each half of the samples, not {rounds}; try --rounds 10."
        )


def observe(simulation: Simulation, rounds: int, on_round: Callable[[Record], None] | None = None) -> Diagnosis:
    """Take a simulation of FedPersist through its window, and the round after it, in which clients look back."""
    simulation.model.need_head("a diagnosis")
    if ranks.world() > 1:
        raise InputError("a diagnosis runs in one process; start it without torchrun.")

    def step() -> float:
        record = simulation.step(evaluate=False)
        if on_round is not None:
            on_round(record)
        return float(record["train_loss"])

    losses = [step() for _ in range(rounds)]
    step()
    clients = simulation.data.clients
    kept = counts(simulation.masks()).sum(1).cpu() / simulation.model.size
    return Diagnosis(
        clients=[c.name or str(i) for i, c in enumerate(clients)],
        samples=[len(c.train[1]) for c in clients],
        persistence=plain(simulation.persistence()),
        roles=roles(simulation),
        share=[round(s, 6) for s in kept.tolist()],
        losses=losses,
        groups=sharing(simulation),
    )


def sharing(simulation: Simulation) -> list[int]:
    """Whose classes look alike: by client, the first member of its group."""
    found = profiles(Stack([simulation]).work(torch.arange(simulation.clients), 0))
    return [int(group) for group in alike(found["first"], found["second"], found["has"])]


def roles(simulation: Simulation) -> dict[str, str]:
    """Where each tensor is, and what."""
    model, initial = simulation.model, simulation.initial
    return words.roles({n: initial[n].ndim for n in model.params}, [n for n in model.params if model.is_head(n)])


def plain(persistence: Tree) -> dict[str, list[float | None]]:
    """As files hold it."""
    return {n: [None if math.isnan(x) else round(x, 4) for x in v.tolist()] for n, v in persistence.items()}


def kinds(persistence: Mapping[str, list[float | None]], roles: Mapping[str, str]) -> list[words.Kind]:
    """How each client differs, of numbers by tensor and client."""
    clients = [dict(zip(persistence, row, strict=True)) for row in zip(*persistence.values(), strict=True)]
    return words.kinds([None if None in row.values() else words.profile(row, roles) for row in clients])


def _most(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return max(known) if known else None


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%"
