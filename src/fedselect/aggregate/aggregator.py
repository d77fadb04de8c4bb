"""Aggregator: how a round's uploads become one value per entry; the same in a simulation and on a server."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedselect.aggregate.masked import MaskedSum
from fedselect.core.checks import check_positive, check_shares
from fedselect.core.errors import InputError
from fedselect.core.shown import Shown
from fedselect.core.tree import Mask, State, Tree, merge, zeros
from fedselect.methods.method import Up


class Fold(ABC):
    """The aggregation of one round: add uploads as they arrive, then finish."""

    sums: MaskedSum | None = None
    """Sums that several processes add up before `finish`; None: all uploads must be in one process."""

    @abstractmethod
    def add(self, values: Tree, sent: Mask, weight: Tensor) -> None:
        """Add the uploads of some clients, stacked; entries that `sent` does not mark are undefined."""

    def take(self, up: Up, keys: Callable[[], Tensor]) -> None:
        """Add uploads; `keys()`: a random key per client and round, for a fold that needs randomness."""
        self.add(up.values, up.sent, up.weight)

    def exchange(self, everywhere: Callable[[Any], list[Any]]) -> None:  # noqa: B027  # most have nothing to exchange
        """Exchange small values with other processes before `sums` are added up; `everywhere` returns all values by rank.

        Not called if there is only one process.
        """

    def expect(self, clients: int) -> None:  # noqa: B027  # few need it
        """Called before the first upload, with the size of the cohort."""

    @abstractmethod
    def finish(self) -> tuple[Tree, Mask, State]:
        """The aggregate, the mask of the entries that at least one client sent, and the state for the next round."""


class Aggregator(Shown, ABC):
    """How the server combines uploads: a frozen dataclass of options.

    What lasts from round to round is in its state, never on self.
    """

    only_sums: ClassVar[bool] = False
    """Whether its folds use only sums over clients, so that secure aggregation can hide single uploads. Not inherited: a
    subclass that changes the aggregation must set it again."""

    def start(self, params: Tree) -> State:
        """The state before the first round; `params`: initial parameters, without BatchNorm statistics."""
        return {}

    @abstractmethod
    def fold(self, state: State, params: Tree) -> Fold:
        """Start a round; `params`: the server's current shared values, including BatchNorm statistics."""


@dataclass(frozen=True)
class Mean(Aggregator):
    """The weighted mean of uploads; with server_momentum, the server's steps have momentum (FedAvgM)."""

    server_momentum: float = 0.0
    only_sums = True

    def __post_init__(self) -> None:
        if not isinstance(self.server_momentum, Real):
            raise InputError(f"server_momentum is an option of the server; give one number, not {self.server_momentum!r}.")
        check_shares(server_momentum=self.server_momentum)

    def start(self, params: Tree) -> State:
        return {"velocity": zeros(params)} if self.server_momentum else {}

    def fold(self, state: State, params: Tree) -> Fold:
        return MeanFold(self.server_momentum, state, params)


class MeanFold(Fold):
    """Sums over the senders of each entry; memory does not grow with the number of clients."""

    sums: MaskedSum

    def __init__(self, momentum: float, state: State, params: Tree) -> None:
        self.sums = MaskedSum()
        self._momentum, self._state, self._params = momentum, state, params

    def add(self, values: Tree, sent: Mask, weight: Tensor) -> None:
        self.sums.add(values, sent, weight)

    def finish(self) -> tuple[Tree, Mask, State]:
        mean, heard = self.sums.mean()
        if "velocity" not in self._state:
            return mean, heard, {}
        before, after = self._params, merge(heard, mean, self._params)
        velocity = {n: self._momentum * v + after[n] - before[n] for n, v in self._state["velocity"].items()}
        ahead = {n: before[n] + v for n, v in velocity.items() if n in mean}
        return {**mean, **ahead}, heard, {"velocity": velocity}


@dataclass(frozen=True)
class FedAdam(Aggregator):
    """Adam on the server (Reddi et al. 2021), with the mean of the updates as its gradient.

    Without bias correction: the mean of squares starts at server_eps squared.
    """

    server_lr: float = 0.01
    server_beta1: float = 0.9
    server_beta2: float = 0.99
    server_eps: float = 1e-3
    only_sums = True

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, Real):
                raise InputError(f"{name} is an option of the server; give one number, not {value!r}.")
        check_positive(server_lr=self.server_lr, server_eps=self.server_eps)
        for name in ("server_beta1", "server_beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise InputError(f"{name} must be in [0, 1), not {getattr(self, name)}.")

    def start(self, params: Tree) -> State:
        return {"mean": zeros(params), "square": {n: torch.full_like(v, self.server_eps**2) for n, v in params.items()}}

    def fold(self, state: State, params: Tree) -> Fold:
        return AdamFold(self, state, params)


class AdamFold(Fold):
    """The mean of uploads, then a step of Adam; an entry that no client sent keeps its value and its moments."""

    sums: MaskedSum

    def __init__(self, adam: FedAdam, state: State, params: Tree) -> None:
        self.sums = MaskedSum()
        self._adam, self._state, self._params = adam, state, params

    def add(self, values: Tree, sent: Mask, weight: Tensor) -> None:
        self.sums.add(values, sent, weight)

    def finish(self) -> tuple[Tree, Mask, State]:
        adam, params, (result, heard) = self._adam, self._params, self.sums.mean()
        mean, square = dict(self._state["mean"]), dict(self._state["square"])
        result = dict(result)
        for n in filter(result.__contains__, self._state["mean"]):
            update, there = result[n] - params[n], torch.as_tensor(heard[n])
            mean[n] = torch.where(there, torch.lerp(mean[n], update, 1 - adam.server_beta1), mean[n])
            square[n] = torch.where(there, torch.lerp(square[n], update.square(), 1 - adam.server_beta2), square[n])
            result[n] = params[n] + adam.server_lr * mean[n] / (square[n].sqrt() + adam.server_eps)
        return result, heard, {"mean": mean, "square": square}


def check_aggregator(aggregator: object) -> None:
    """Refuse an object that cannot be used as an aggregator."""
    if not isinstance(aggregator, Aggregator):
        raise InputError(f"aggregator must be an aggregator such as fs.Mean(), not {aggregator!r}.")
    if not is_dataclass(aggregator):
        name = type(aggregator).__name__
        raise InputError(f"{name} must be a dataclass of its options; put @dataclass(frozen=True) before the class.")
