"""Diagnosis: how clients differ, measured over a few rounds in which all parameters are shared."""

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

MOST = 10  # columns of a table, above which layers of the body are combined
FEW = 100  # training samples per client, below which differences may go unnoticed
SAME = 0.9  # ratio of last to first loss above which pulls are mostly noise
CANNOT = (
    "Limits: {rounds} rounds are few, and small tensors are noisy. Clients that differ pull the shared model away, so that "
    "the other clients disagree with it as well. Persistence does not distinguish groups, since the shared model lies between "
    "them; groups are found by how the untrained network sees the classes, and clients of a group may still differ in other "
    "ways. A difference does not mean that a head per group or other personal parameters will help. BatchNorm statistics stay "
    "on the client and absorb some differences, such as those between cameras."
)


@dataclass(frozen=True)
class Diagnosis:
    """Persistence by client and tensor, and what it means. Print it, or use `table`, `sentences` and `figure()`."""

    clients: list[str]
    samples: list[int]  # training samples, by client
    persistence: dict[str, list[float | None]]  # by tensor and client, in the model's order; None: not tested
    roles: dict[str, str]  # by tensor: "body weights", "head vector", ...
    share: list[float]  # share of parameters that FedPersist would make personal, by client
    losses: list[float]  # training loss, by round
    groups: list[int]  # groups of clients that would share a head: by client, the first member of its group

    @property
    def rounds(self) -> int:
        """Rounds in which all parameters were shared."""
        return len(self.losses)

    @cached_property
    def kinds(self) -> list[words.Kind]:
        """How each client differs."""
        return kinds(self.persistence, self.roles)

    @property
    def sentences(self) -> list[str]:
        """One sentence per kind of difference, with the clients that have it."""
        return words.sentences(self.kinds, words.short(self.clients))

    @property
    def table(self) -> dict[str, list[float | None]]:
        """Persistence by tensor and client. In a deep model, body tensors are combined by part (maximum)."""
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
        """The groups that would share a head in FedAlike."""
        count = len(set(self.groups))
        if count == 1:
            return "FedAlike would use one head for all clients."
        if count == len(self.groups):
            return "FedAlike would use a separate head for every client."
        said = " ".join(words.together(self.groups, words.short(self.clients)))
        return f"FedAlike would use {count} heads, one per group. {said}"

    @property
    def keeps(self) -> str:
        """What FedPersist would make personal."""
        own = [s for s in self.share if s]
        if not own:
            return "FedPersist would make no parameters personal."
        who = "every client" if len(own) == len(self.share) else f"{len(own)} of {len(self.share)} clients"
        return f"FedPersist would make {_percent(statistics.fmean(own))} of the parameters personal in {who}."

    @property
    def methods(self) -> list[str]:
        """Methods to try first: a fine-tuned shared model, and FedAlike if there are groups."""
        return ["fedalike", "fedavg+ft"] if self._apart else ["fedavg+ft"]

    @property
    def advice(self) -> str:
        """Why to try these methods first."""
        if self._apart:
            why = "groups that differ do not always benefit from separate heads"
            return f"Try fedalike first, and compare it with fedavg+ft: {why}."
        return "Try fedavg+ft first: one shared model, fine-tuned by each client."

    @property
    def limits(self) -> str:
        """The limits of the diagnosis."""
        first, last = self.losses[0], self.losses[-1]
        doubts = [
            f"The loss hardly fell ({first:.2f} to {last:.2f}), so these numbers mean little; try more rounds."
            if last > SAME * first else "",
            f"With {statistics.median(self.samples):.0f} samples per client, differences may go unnoticed."
            if self._few else "",
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
        """Save the heat map as .png, .pdf or .svg."""
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
            f"a diagnosis needs at least 2 rounds, one for each half of the samples, not {rounds}; try rounds=10 (--rounds 10)."
        )


def observe(simulation: Simulation, rounds: int, on_round: Callable[[Record], None] | None = None) -> Diagnosis:
    """Run a simulation of FedPersist through its window and one more round, in which clients measure persistence."""
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
    """Groups of clients whose classes look alike: by client, the first member of its group."""
    found = profiles(Stack([simulation]).work(torch.arange(simulation.clients), 0))
    return [int(group) for group in alike(found["first"], found["second"], found["has"])]


def roles(simulation: Simulation) -> dict[str, str]:
    """The role of each tensor: body or head, weights or vector."""
    model, initial = simulation.model, simulation.initial
    return words.roles({n: initial[n].ndim for n in model.params}, [n for n in model.params if model.is_head(n)])


def plain(persistence: Tree) -> dict[str, list[float | None]]:
    """Persistence as plain lists, for files."""
    return {n: [None if math.isnan(x) else round(x, 4) for x in v.tolist()] for n, v in persistence.items()}


def kinds(persistence: Mapping[str, list[float | None]], roles: Mapping[str, str]) -> list[words.Kind]:
    """How each client differs, from persistence by tensor and client."""
    clients = [dict(zip(persistence, row, strict=True)) for row in zip(*persistence.values(), strict=True)]
    return words.kinds([None if None in row.values() else words.profile(row, roles) for row in clients])


def _most(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return max(known) if known else None


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%"
