"""Optimizers and schedules: how gradients change parameters, and how learning rates change from round to round.

Both are frozen dataclasses whose fields are their options. An optimizer works on one parameter of all clients at once.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedselect.core.errors import InputError
from fedselect.core.shown import Shown
from fedselect.core.tree import Scalar


class Optimizer(Shown, ABC):
    """How gradients change parameters. A subclass is a frozen dataclass; every round starts with an empty memory.

    Examples:
        >>> from dataclasses import dataclass
        >>> import fedselect as fs
        >>> @dataclass(frozen=True)
        ... class SignSGD(fs.Optimizer):
        ...     def update(self, value, gradient, memory, rate):
        ...         return value - rate * gradient.sign(), {}
        >>> training = fs.Training(optimizer=SignSGD())
    """

    memory: ClassVar[tuple[str, ...]] = ()
    """The names of the numbers remembered per entry from step to step; all are 0 at first."""

    @property
    def still(self) -> bool:
        """Whether an entry whose gradient was always zero never moves; training may then leave such entries out."""
        return False

    @abstractmethod
    def update(
        self, value: Tensor, gradient: Tensor, memory: Mapping[str, Tensor], rate: Scalar
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One step of one parameter. All tensors are (C, ...); nothing may change in place.

        Args:
            value: The parameter of all clients.
            gradient: Its gradient.
            memory: What `memory` names, from the step before.
            rate: The learning rate; broadcasts against `value`.

        Returns:
            The new value and the new memory. Entries that do not train keep theirs, whatever is returned for them.
        """


@dataclass(frozen=True)
class SGD(Optimizer):
    """torch.optim.SGD: momentum, optionally Nesterov's, and weight decay as part of the gradient.

    Examples:
        >>> import fedselect as fs
        >>> training = fs.Training(optimizer=fs.SGD(momentum=0.9, nesterov=True))

    momentum: share of the step before that is added to each step
    nesterov: use Nesterov's momentum
    weight_decay: multiple of the value that is added to its gradient
    """

    momentum: float = 0.5
    nesterov: bool = False
    weight_decay: float = 0.0

    memory: ClassVar[tuple[str, ...]] = ("momentum",)

    def __post_init__(self) -> None:
        _check_share(momentum=self.momentum)
        _check_weight_decay(self.weight_decay)
        if self.nesterov and not self.momentum:
            raise InputError("nesterov needs momentum; set momentum above 0, or leave nesterov out.")

    @property
    def still(self) -> bool:
        return not self.weight_decay

    def update(
        self, value: Tensor, gradient: Tensor, memory: Mapping[str, Tensor], rate: Scalar
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if self.weight_decay:
            gradient = gradient + self.weight_decay * value
        speed = gradient + self.momentum * memory["momentum"]
        step = gradient + self.momentum * speed if self.nesterov else speed
        return value - rate * step, {"momentum": speed}


@dataclass(frozen=True)
class Adam(Optimizer):
    """torch.optim.Adam, with weight decay as part of the gradient.

    Examples:
        >>> import fedselect as fs
        >>> training = fs.Training(optimizer=fs.Adam(beta1=0.8))

    beta1: decay of the mean gradient
    beta2: decay of the mean squared gradient
    eps: added to the root of the mean squared gradient
    weight_decay: multiple of the value that is added to its gradient
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    memory: ClassVar[tuple[str, ...]] = ("mean", "square", "steps")

    def __post_init__(self) -> None:
        _check_share(beta1=self.beta1, beta2=self.beta2)
        _check_weight_decay(self.weight_decay)
        if not self.eps > 0.0:  # at 0 an entry without a gradient would become NaN
            raise InputError(f"eps must be positive, not {self.eps}.")

    @property
    def still(self) -> bool:
        return not self.weight_decay

    def update(
        self, value: Tensor, gradient: Tensor, memory: Mapping[str, Tensor], rate: Scalar
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if self.weight_decay:
            gradient = gradient + self.weight_decay * value
        return self._step(value, gradient, memory, rate)

    def _step(
        self, value: Tensor, gradient: Tensor, memory: Mapping[str, Tensor], rate: Scalar
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Each entry counts its own steps, because masks may train it in only some of them."""
        steps = memory["steps"] + 1
        mean = torch.lerp(memory["mean"], gradient, 1 - self.beta1)
        square = self.beta2 * memory["square"] + (1 - self.beta2) * gradient * gradient
        root = (square / _correction(self.beta2, steps)).sqrt() + self.eps
        new = value - rate * (mean / _correction(self.beta1, steps)) / root
        return new, {"mean": mean, "square": square, "steps": steps}


@dataclass(frozen=True)
class AdamW(Adam):
    """torch.optim.AdamW: weight decay shrinks the value itself, separately from the gradient.

    Examples:
        >>> import fedselect as fs
        >>> training = fs.Training(optimizer=fs.AdamW(weight_decay=0.1))

    beta1: decay of the mean gradient
    beta2: decay of the mean squared gradient
    eps: added to the root of the mean squared gradient
    weight_decay: share of the value, times the learning rate, that each step takes away
    """

    weight_decay: float = 0.01

    def update(
        self, value: Tensor, gradient: Tensor, memory: Mapping[str, Tensor], rate: Scalar
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if self.weight_decay:
            value = value * (1 - rate * self.weight_decay)
        return self._step(value, gradient, memory, rate)


OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}


class Schedule(Shown, ABC):
    """The factor on all learning rates of a round. A subclass is a frozen dataclass.

    Examples:
        >>> from dataclasses import dataclass
        >>> import fedselect as fs
        >>> @dataclass(frozen=True)
        ... class Inverse(fs.Schedule):
        ...     def factor(self, round, rounds):
        ...         return 1 / (1 + round)
        >>> training = fs.Training(schedule=Inverse())
    """

    needs_rounds: ClassVar[bool] = True
    """Whether the factor depends on the total number of rounds."""

    @abstractmethod
    def factor(self, round: int, rounds: int | None) -> float:
        """The factor of one round.

        Args:
            round: The round, counted from 0 after the warm-up.
            rounds: The number of rounds after the warm-up; None unless `needs_rounds`.

        Returns:
            The factor that all learning rates of the round are multiplied by.
        """


@dataclass(frozen=True)
class Constant(Schedule):
    """The same rates in every round."""

    needs_rounds: ClassVar[bool] = False

    def factor(self, round: int, rounds: int | None) -> float:
        return 1.0


@dataclass(frozen=True)
class Step(Schedule):
    """Learning rates times `decay` after every `decay_every` rounds."""

    decay: float = 0.1
    decay_every: int = 1

    needs_rounds: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0.0 < self.decay < 1.0:
            raise InputError(
                "schedule step multiplies learning rates by decay after every decay_every rounds: set --decay between 0 and "
                f"1, such as 0.98, not {self.decay}."
            )
        if self.decay_every < 1:
            raise InputError(f"decay_every must be at least 1, not {self.decay_every}.")

    def factor(self, round: int, rounds: int | None) -> float:
        return float(self.decay ** (round // self.decay_every))


@dataclass(frozen=True)
class Cosine(Schedule):
    """Learning rates fall along half a cosine, from the full rate in the first round toward zero after the last."""

    def factor(self, round: int, rounds: int | None) -> float:
        assert rounds is not None
        return 0.5 * (1 + math.cos(math.pi * round / rounds))


SCHEDULES: dict[str, type[Schedule]] = {"constant": Constant, "step": Step, "cosine": Cosine}


def _correction(beta: float, steps: Tensor) -> Tensor:
    """1 - beta ** steps, accurate to the last digit in float32 too."""
    return -torch.expm1(steps * (math.log(beta) if beta else -math.inf))


def _check_share(**given: float) -> None:
    for name, value in given.items():
        if not 0.0 <= value < 1.0:
            raise InputError(f"{name} must be in [0, 1), not {value}.")


def _check_weight_decay(value: float) -> None:
    if not value >= 0.0:
        raise InputError(f"weight_decay must not be negative, not {value}.")
