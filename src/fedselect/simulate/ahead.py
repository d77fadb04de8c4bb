"""Starts a round early, while the record of the round before is still read, so that a GPU never waits."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fedselect.simulate import ranks
from fedselect.simulate.jobs import Asked, Turn
from fedselect.simulate.records import Record
from fedselect.simulate.store import Store

if TYPE_CHECKING:
    from fedselect.simulate.engine import Simulation


def may(run: "Simulation") -> bool:
    """Whether a round of this run may start early: on a GPU with all clients at hand, if its first jobs change nothing and the
    record of the round before holds only numbers."""
    at_hand = isinstance(run.store, Store) and run.chunk >= run.clients and ranks.world() == 1
    return run.device.type == "cuda" and at_hand and run.private is None and run.keep == "last"


@dataclass
class Begun:
    """A round of each run that has started: its first jobs, and the answers if they are under way."""

    runs: list["Simulation"]
    turns: list[Turn]
    rounds: list[Generator[Asked, Any, Record]]
    asked: list[Asked]
    stood: list[tuple[Any, ...]]
    answers: list[Any] | None = None

    @property
    def current(self) -> bool:
        """Whether all runs are still at the same point."""
        now = map(_standing, self.runs)
        return all(a is b for then, there in zip(self.stood, now, strict=True) for a, b in zip(then, there, strict=True))


def begin(runs: list["Simulation"]) -> Begun:
    turns = [Turn() for _ in runs]
    rounds = [run.asks(turn) for run, turn in zip(runs, turns, strict=True)]
    return Begun(runs, turns, rounds, [next(r) for r in rounds], list(map(_standing, runs)))


def _standing(run: "Simulation") -> tuple[Any, ...]:
    """Objects that each round and each restore replaces."""
    return run.server, run.memory, run.store.rows if isinstance(run.store, Store) else None


class Beside:
    """A stream on which finished work can be read while later work continues."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.mark()

    def mark(self) -> None:
        """Everything queued by now can be read from now on."""
        self._done = None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self._stream is None or self._done is None:
            yield
            return
        self._stream.wait_event(self._done)
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
