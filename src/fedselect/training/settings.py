"""Training: how every client trains, whatever the method."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedselect.core.errors import InputError, unknown
from fedselect.training.optim import OPTIMIZERS, SCHEDULES, Optimizer, Schedule

T = TypeVar("T")
OF_OPTIMIZERS = ("momentum", "nesterov", "weight_decay", "beta1", "beta2", "eps")
OF_SCHEDULES = ("decay", "decay_every")


@dataclass(frozen=True)
class Training:
    """How every client trains, whatever the method: an optimizer on shuffled batches, and a schedule of the learning rates.

    An optimizer or schedule is a name, and takes its options from here, or an object that has its own.
    """

    batch_size: int = 32
    momentum: float = 0.5  # of sgd
    weight_decay: float = 0.0  # of sgd and adam: part of the gradient; of adamw: apart from it
    clip: float | None = None  # largest gradient norm over the entries in training, per client
    _: KW_ONLY
    optimizer: str | Optimizer = "sgd"
    nesterov: bool = False  # of sgd
    beta1: float = 0.9  # of adam and adamw, as the next two
    beta2: float = 0.999
    eps: float = 1e-8
    schedule: str | Schedule = "constant"
    warmup: int = 0  # round r of these, counted from 0, has (r + 1) / (warmup + 1) of the rates; then the schedule begins
    decay: float = 1.0  # of schedule step, as the next
    decay_every: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise InputError(f"batch_size must be at least 1, not {self.batch_size}.")
        if self.clip is not None and not self.clip > 0.0:
            raise InputError(f"clip must be positive, not {self.clip}.")
        if self.warmup < 0:
            raise InputError(f"warmup must not be negative, not {self.warmup}.")
        _try(self.the_optimizer)
        assert self.the_schedule is not None

    @cached_property
    def the_optimizer(self) -> Optimizer:
        """The optimizer with its options."""
        return self._made("optimizer", self.optimizer, OPTIMIZERS, Optimizer, OF_OPTIMIZERS)  # type: ignore[type-abstract]

    @cached_property
    def the_schedule(self) -> Schedule:
        """The schedule with its options."""
        return self._made("schedule", self.schedule, SCHEDULES, Schedule, OF_SCHEDULES)  # type: ignore[type-abstract]

    def check_rounds(self, rounds: int | None) -> None:
        """Refuse a number of rounds, or none, that the schedule cannot use."""
        if rounds is None and self.the_schedule.needs_rounds:
            raise InputError(
                f"{_said('schedule', self.schedule)} depends on how many rounds there are; say it: "
                "fs.Simulation(..., rounds=30)."
            )
        if rounds is not None and self.warmup >= rounds:
            raise InputError(f"warmup must be less than the number of rounds, {rounds}, not {self.warmup}.")

    def factor(self, round: int, rounds: int | None) -> float:
        """What all learning rates of a round, counted from 0, are multiplied by."""
        if round < self.warmup:
            return (round + 1) / (self.warmup + 1)
        schedule = self.the_schedule
        if not schedule.needs_rounds:
            return schedule.factor(round - self.warmup, None)
        self.check_rounds(rounds)
        assert rounds is not None
        if round >= rounds:
            raise InputError(f"{_said('schedule', self.schedule)} ends with round {rounds}; begin anew with more rounds.")
        return schedule.factor(round - self.warmup, rounds - self.warmup)

    def _made(self, kind: str, value: T | str, table: Mapping[str, type[T]], base: type[T], names: tuple[str, ...]) -> T:
        """What a name stands for, with its options from here, or the object that was given."""
        changed = {n: getattr(self, n) for n in names if getattr(self, n) != getattr(type(self), n)}
        if not isinstance(value, str):
            if not isinstance(value, base):
                raise InputError(f"{kind} is one of {', '.join(table)}, or a fs.{base.__name__}, not {value!r}.")
            _check_class(type(value))
            for n in changed:
                raise InputError(f"{_said(kind, value)} has options of its own; leave {n} out of Training.")
            return value
        if value not in table:
            raise unknown(kind, value, table)
        _check_class(table[value])
        known = _options(table[value])
        for n in changed:
            if n not in known:
                owner = next(name for name, made in table.items() if n in _options(made))
                flags = f"--{kind} {owner} --{n.replace('_', '-')} {changed[n]}"
                raise InputError(f"{_said(kind, value)} has no use for {n}; leave it out, or use {kind} {owner} ({flags}).")
        return table[value](**{n: getattr(self, n) for n in names if n in known})


def _said(kind: str, value: object) -> str:
    return f"{kind} {value if isinstance(value, str) else type(value).__name__}"


def _options(made: Any) -> set[str]:
    return {f.name for f in fields(made)}


def _check_class(made: type) -> None:
    how = getattr(made, "__dataclass_params__", None)
    if how is None or not how.frozen or "__dataclass_params__" not in vars(made):
        raise InputError(
            f"{made.__name__} must be a frozen dataclass, its options the fields: put @dataclass(frozen=True) before the class."
        )


def _try(optimizer: Optimizer) -> None:
    """One step on two numbers: what comes back must fit, and what was given must be as it was."""
    name = type(optimizer).__name__
    value, gradient = torch.tensor([[1.0, -2.0]]), torch.tensor([[0.5, 0.0]])
    memory = {n: torch.zeros_like(value) for n in optimizer.memory}
    given = [value, gradient, *memory.values()]
    before = [v.clone() for v in given]
    found: Any = optimizer.update(value, gradient, memory, torch.full((1, 1), 0.1))
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict) and set(found[1]) == set(memory)):
        said = ", ".join(optimizer.memory) or "nothing"
        raise InputError(f"{name}.update must return the new value and a dict of what `memory` names: {said}.")
    if any(not isinstance(v, Tensor) or v.shape != value.shape for v in (found[0], *found[1].values())):
        raise InputError(f"{name}.update must return tensors of the shape of the value.")
    if not all(map(torch.equal, given, before)):
        raise InputError(f"{name}.update must not change what it is given in place.")
