"""Optimizers and schedules: how entries follow their gradients, and how learning rates change from round to round.

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
    """How entries follow their gradients. Every round starts with an empty memory."""

    memory: ClassVar[tuple[str, ...]] = ()
    """What is remembered of each entry from step to step, by name: a number each, 0 at first."""

    @property
    def still(self) -> bool:
        """Whether an entry whose gradient was always zero never moves; training may then leave such entries out."""
        return False

    @abstractmethod
    def update(
        self, value: Tensor, gradient: Tensor, memory: Mapping[str, Tensor], rate: Scalar
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One step of one parameter: its new value and memory. All are (C, ...), `rate` broadcasts; nothing changes in place.

        Entries that do not train keep their value and memory, whatever is returned for them.
        """


@dataclass(frozen=True)
class SGD(Optimizer):
    """torch.optim.SGD: momentum, Nesterov's or not, and weight decay as part of the gradient."""

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
    """torch.optim.Adam: weight decay is part of the gradient."""

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
        """Each entry counts its own steps: masks may train it in some and not in others."""
        steps = memory["steps"] + 1
        mean = torch.lerp(memory["mean"], gradient, 1 - self.beta1)
        square = self.beta2 * memory["square"] + (1 - self.beta2) * gradient * gradient
        root = (square / _correction(self.beta2, steps)).sqrt() + self.eps
        new = value - rate * (mean / _correction(self.beta1, steps)) / root
        return new, {"mean": mean, "square": square, "steps": steps}


@dataclass(frozen=True)
class AdamW(Adam):
    """torch.optim.AdamW: weight decay shrinks the value itself, apart from the gradient."""

    weight_decay: float = 0.01

    def update(
        self, value: Tensor, gradient: Tensor, memory: Mapping[str, Tensor], rate: Scalar
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if self.weight_decay:
            value = value * (1 - rate * self.weight_decay)
        return self._step(value, gradient, memory, rate)


OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}


class Schedule(Shown, ABC):
    """What all learning rates of a round are multiplied by."""

    needs_rounds: ClassVar[bool] = True
    """Whether the factor depends on how many rounds there are in all."""

    @abstractmethod
    def factor(self, round: int, rounds: int | None) -> float:
        """In `round`, counted from 0, of `rounds`, both after the warm-up; `rounds` is None unless `needs_rounds`."""


@dataclass(frozen=True)
class Constant(Schedule):
    """The same rates in every round."""

    needs_rounds: ClassVar[bool] = False

    def factor(self, round: int, rounds: int | None) -> float:
        return 1.0


@dataclass(frozen=True)
class Step(Schedule):
    """Rates times `decay` after every `decay_every` rounds."""

    decay: float = 0.1
    decay_every: int = 1

    needs_rounds: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0.0 < self.decay < 1.0:
            raise InputError(
                "schedule step multiplies learning rates by decay after every decay_every rounds: give --decay between 0 and "
                f"1, such as 0.98, not {self.decay}."
            )
        if self.decay_every < 1:
            raise InputError(f"decay_every must be at least 1, not {self.decay_every}.")

    def factor(self, round: int, rounds: int | None) -> float:
        return float(self.decay ** (round // self.decay_every))


@dataclass(frozen=True)
class Cosine(Schedule):
    """Rates fall along half a cosine, from all in the first round towards nothing after the last."""

    def factor(self, round: int, rounds: int | None) -> float:
        assert rounds is not None
        return 0.5 * (1 + math.cos(math.pi * round / rounds))


SCHEDULES: dict[str, type[Schedule]] = {"constant": Constant, "step": Step, "cosine": Cosine}


def _correction(beta: float, steps: Tensor) -> Tensor:
    """1 - beta ** steps, to the last place in float32 too."""
    return -torch.expm1(steps * (math.log(beta) if beta else -math.inf))


def _check_share(**given: float) -> None:
    for name, value in given.items():
        if not 0.0 <= value < 1.0:
            raise InputError(f"{name} must be in [0, 1), not {value}.")


def _check_weight_decay(value: float) -> None:
    if not value >= 0.0:
        raise InputError(f"weight_decay must not be negative, not {value}.")
