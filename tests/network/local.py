"""What the tests of the deployment share: a small federation whose letters pass in one process, and its simulation."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fedselect as fs
from fedselect.core import random
from fedselect.core.errors import FedselectError
from fedselect.network.assignment import Assignment
from fedselect.network.client import Node
from fedselect.network.letters import Letter, unseal
from fedselect.network.rounds import Limits, Outcome, Reply
from fedselect.network.server import Server
from fedselect.simulate import Simulation
from fedselect.training.settings import Training

QUICK = Limits(wait=0.2, poll=0.01, timeout=5.0)


def alone(data: fs.Federation, i: int) -> fs.Federation:
    """One client's data as its node has it."""
    return fs.Federation([data.clients[i]], data.classes, mean=data.mean, std=data.std, augment=data.augment)


class Room:
    """All nodes in this process; every letter is sealed and unsealed on its way, as a network would.

    `spoil` may change a reply: (client, letter) -> letter, or what came in place of one.
    """

    def __init__(self, assigned: Assignment, data: fs.Federation, folder: Path, here: list[int] | None = None) -> None:
        self.assigned, self.data, self.folder = assigned, data, folder
        self.here = list(range(assigned.clients)) if here is None else here
        self.spoil: Callable[[int, Letter], Reply] = lambda node, letter: letter
        self.asked: list[tuple[int, Letter]] = []

    def node(self, i: int) -> Node:
        return Node(self.assigned, i, alone(self.data, i), self.folder / f"vault-{i}")

    def present(self) -> list[int]:
        return [100 + i for i in self.here]  # an engine's numbers are its own

    def ask(self, letters, timeout):
        for number, letter in letters:
            self.asked.append((number - 100, letter))
            try:
                reply = self.node(number - 100).answer(unseal(*letter.seal()))
            except FedselectError as e:
                yield number, str(e)
                continue
            reply = self.spoil(number - 100, reply)
            yield number, unseal(*reply.seal()) if isinstance(reply, Letter) else reply


def assignment(
    method: fs.Method,
    model: Callable[[fs.Federation], fs.Model],
    data: fs.Federation,
    *,
    seed: int,
    training: Training,
    rounds: int | None = None,
) -> Assignment:
    task = fs.Classification()
    return Assignment(
        method, model(data), training, task, data, seed=seed, clients=len(data.clients), method_name="m", rounds=rounds
    )


def rounds(server: Server, room: Room, count: int) -> list[Outcome]:
    return [server.step(room) for _ in range(count)]


def server_state(server: Server | Simulation) -> dict[str, torch.Tensor]:
    return {f"{k}/{n}": v for k, t in getattr(server, "state", getattr(server, "server", None)).items() for n, v in t.items()}


def at(module: object, name: str, count: int, after: bool = False) -> None:
    """Have this process killed as it calls a function for the n-th time, before the call or after it."""
    real, calls = getattr(module, name), []

    def dying(*args, **given):
        calls.append(1)
        if len(calls) == count and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        done = real(*args, **given)
        if len(calls) == count and after:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    setattr(module, name, dying)


def choose(cohorts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly these clients train in the rounds of a simulation; all are evaluated."""
    picked, real = iter(cohorts), random.choose
    monkeypatch.setattr(random, "choose", lambda *a: torch.tensor(next(picked)) if a[-1] == "cohort" else real(*a))
