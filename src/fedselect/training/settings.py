"""Training: how every client trains, whatever the method."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedselect.core.errors import InputError
from fedselect.core.options import Option, find, named, options
from fedselect.core.shown import Shown
from fedselect.training.optim import OPTIMIZERS, SCHEDULES, Optimizer, Schedule

SEAMS: dict[str, tuple[dict[str, Any], type, tuple[str, ...]]] = {
    "optimizer": (OPTIMIZERS, Optimizer, ("momentum", "nesterov", "weight_decay", "beta1", "beta2", "eps")),
    "schedule": (SCHEDULES, Schedule, ("decay", "decay_every")),
}
"""Settings with a table: its entries, their base class, and which settings of `Training` are their options."""


@dataclass(frozen=True)
class Training(Shown):
    """How every client trains, whatever the method: batches, optimizer and learning-rate schedule.

    The optimizer and the schedule are either names, which take their options from here, or objects with their own options.

    Examples:
        >>> import fedselect as fs
        >>> training = fs.Training(batch_size=32, optimizer="adam", weight_decay=1e-4)
        >>> training = fs.Training(optimizer=fs.SGD(momentum=0.9), schedule="cosine")

    batch_size: samples per step; a client with fewer uses all it has
    momentum: momentum of sgd; in each round the optimizer starts afresh
    weight_decay: weight decay of the entries in training: added to the gradient, or with adamw separate from it
    clip: largest gradient norm over the entries in training, for each client
    optimizer: what turns a gradient into a step: sgd, adam or adamw
    nesterov: use Nesterov's momentum; for sgd
    beta1: decay of the mean gradient; for adam and adamw
    beta2: decay of the mean squared gradient; for adam and adamw
    eps: added to the root of the mean squared gradient; for adam and adamw
    schedule: how learning rates change from round to round: constant, step or cosine
    warmup: first rounds, in which learning rates rise; round r of them, from 0, uses (r + 1) / (warmup + 1) of the rates
    decay: factor on learning rates after every decay_every rounds; for schedule step
    decay_every: rounds from one decay to the next; for schedule step
    """

    batch_size: int = 32
    momentum: float = 0.5
    weight_decay: float = 0.0
    clip: float | None = None
    _: KW_ONLY
    optimizer: str | Optimizer = "sgd"
    nesterov: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    schedule: str | Schedule = "constant"
    warmup: int = 0
    decay: float = 1.0
    decay_every: int = 1

    def __post_init__(self) -> None:
        for kind, (table, _, _) in SEAMS.items():
            if isinstance(name := getattr(self, kind), str):
                object.__setattr__(self, kind, named(name, table))
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
        return self._made("optimizer")  # type: ignore[no-any-return]

    @cached_property
    def the_schedule(self) -> Schedule:
        """The schedule with its options."""
        return self._made("schedule")  # type: ignore[no-any-return]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Training":
        """Training from a table that also has the options that only its optimizer or schedule has."""
        known = options(cls)
        settings = {n: v for n, v in given.items() if n in known}
        for kind, (_, _, names) in SEAMS.items():
            name = given.get(kind, getattr(cls, kind))
            if own := {n: given[n] for n in own_options(kind, name) if n in given}:
                settings[kind] = _named(kind, name, {n: settings.pop(n, getattr(cls, n)) for n in names}, own)
        return cls(**settings)

    def check_rounds(self, rounds: int | None) -> None:
        """Refuse a number of rounds, or a missing one, that the schedule cannot use."""
        if rounds is None and self.the_schedule.needs_rounds:
            raise InputError(
                f"{_said('schedule', self.schedule)} depends on the number of rounds; pass it: fs.Simulation(..., rounds=30)."
            )
        if rounds is not None and self.warmup >= rounds:
            raise InputError(f"warmup must be less than the number of rounds, {rounds}, not {self.warmup}.")

    def factor(self, round: int, rounds: int | None) -> float:
        """The factor on all learning rates of a round, counted from 0."""
        if round < self.warmup:
            return (round + 1) / (self.warmup + 1)
        schedule = self.the_schedule
        if not schedule.needs_rounds:
            return schedule.factor(round - self.warmup, None)
        self.check_rounds(rounds)
        assert rounds is not None
        if round >= rounds:
            raise InputError(f"{_said('schedule', self.schedule)} ends with round {rounds}; start again with more rounds.")
        return schedule.factor(round - self.warmup, rounds - self.warmup)

    def _made(self, kind: str) -> Any:
        """The object that a name stands for, with its options from here, or the object that was given."""
        table, base, names = SEAMS[kind]
        value, settings = getattr(self, kind), {n: getattr(self, n) for n in names}
        if isinstance(value, str):
            return _named(kind, value, settings, {})
        if not isinstance(value, base):
            raise InputError(f"{kind} must be one of {', '.join(table)}, or a fs.{base.__name__}, not {value!r}.")
        _check_class(type(value))
        for n in _changed(settings):
            raise InputError(f"{_said(kind, value)} has its own options; leave {n} out of Training.")
        return value


def training_options(given: Mapping[str, Any]) -> dict[str, Option]:
    """The options of every training, then those that only its optimizer or schedule has."""
    found = options(Training)
    own = [own_options(kind, str(given.get(kind) or found[kind].default)) for kind in SEAMS]
    for name in own[0].keys() & own[1].keys():
        raise InputError(f"the optimizer and the schedule both have an option {name}; rename one of them.")
    return {**found, **own[0], **own[1]}


def own_options(kind: str, name: str) -> dict[str, Option]:
    """The options of an optimizer or schedule that are not settings of `Training`."""
    common = options(Training)
    return {n: o for n, o in options(find(kind, name, SEAMS[kind][0])).items() if n not in common}


def _named(kind: str, name: str, settings: Mapping[str, Any], own: Mapping[str, Any]) -> Any:
    """The optimizer or schedule of this name, with options from the settings of `Training` and those that only it has."""
    table = SEAMS[kind][0]
    made = find(kind, name, table)
    _check_class(made)
    known = options(made)
    for n, value in _changed(settings).items():
        if n not in known:
            owner = next(other for other, row in table.items() if n in options(row))
            flags = f"--{kind} {owner} --{n.replace('_', '-')} {value}"
            raise InputError(f"{_said(kind, name)} does not use {n}; leave it out, or use {kind} {owner} ({flags}).")
    given = {**{n: v for n, v in settings.items() if n in known}, **own}
    return made(**{n: o.value(given) for n, o in known.items()})


def _changed(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in settings.items() if v != getattr(Training, n)}


def _said(kind: str, value: object) -> str:
    return f"{kind} {value if isinstance(value, str) else type(value).__name__}"


def _check_class(made: Any) -> None:
    how = getattr(made, "__dataclass_params__", None)
    if how is None or not how.frozen or "__dataclass_params__" not in vars(made):
        raise InputError(
            f"{made.__name__} must be a frozen dataclass, its options the fields: put @dataclass(frozen=True) before the class."
        )


def _try(optimizer: Optimizer) -> None:
    """Check one step on two numbers: what it returns must fit, and its inputs must not change."""
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
        raise InputError(f"{name}.update must not change its arguments in place.")
