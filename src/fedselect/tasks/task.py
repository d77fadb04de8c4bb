"""Task: what a model's outputs and a sample's target mean."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedselect.core.errors import InputError
from fedselect.core.shown import Shown
from fedselect.tasks.metrics import LOSS, Each, Metric

COLUMNS = ("train_loss", "share", "bytes_up", "bytes_down", "round", "seconds", "clients")
"""What every record of a round has, whatever the task."""


class Targets(Protocol):
    """What a task asks of a federation's data: the shape of an input and of a target, and how many classes there are.

    With 0 classes targets are something else.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def classes(self) -> int: ...
    @property
    def target_shape(self) -> tuple[int, ...]: ...


@runtime_checkable
class Known(Targets, Protocol):
    """Data whose targets are at hand."""

    def targets(self) -> Iterable[Tensor]: ...


class Task(Shown, ABC):
    """A loss, metrics, and what data and model must look like. The first metric is a run's headline, unless it names another.

    Outputs and targets have a row for each sample of one client. Every task is also measured by its loss: `test_loss`.
    """

    metrics: ClassVar[tuple[Metric, ...]] = ()
    more: ClassVar[tuple[Metric, ...]] = ()
    """Metrics that are computed where a run asks for them, by name or as its headline."""
    lowest_loss: ClassVar[float] = 0.0
    """No loss may be below it; of one that may be negative, float("-inf")."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What training minimises, for each sample: (N, ...), (N, ...) -> (N,)."""

    def outputs(self, data: Targets) -> int:
        """How many numbers a model returns for one input: by default as many as a target has."""
        return torch.Size(data.target_shape).numel()

    def unfit_data(self, data: Targets) -> str:
        """Why this task has no use for such targets, in words; nothing where they fit."""
        return ""

    def unfit_outputs(self, outputs: Tensor, data: Targets) -> str:
        """Why a model's outputs do not fit the targets, in words; nothing where they do."""
        return ""

    def example(self, data: Targets) -> Tensor:
        """Two targets to rehearse a round with, before there is any data."""
        return torch.zeros(2, *data.target_shape)

    def statistics(self, targets: Tensor, data: Targets) -> Tensor | None:
        """What the task must know of a client's training targets before anything trains: one row of numbers, or None.

        Over a network this row travels to the server, beside the client's number of samples.
        """
        return None

    def fitted(self, rows: Tensor, samples: Tensor) -> "Task":
        """The task that knows what clients' statistics say: rows (clients, numbers) and samples (clients,), in float64."""
        return self

    @property
    def units(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """(scale, shift) where outputs * scale + shift, not the outputs, are in the units of targets."""
        return None

    def predicted(self, outputs: Tensor) -> Tensor:
        """The outputs in the units of targets: what metrics are computed from."""
        if self.units is None:
            return outputs
        scale, shift = (constant(numbers, outputs.dtype, outputs.device) for numbers in self.units)
        return outputs * scale + shift

    def decided(self, outputs: Tensor) -> Tensor:
        """What a model says: classes for a task of classes, else its outputs in the units of targets."""
        return self.predicted(outputs)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """How likely each class is, (N, ..., K)."""
        raise InputError(f"the task {type(self).__name__} has no probabilities; use predict.")

    def measured(self, headline: str | None = None, asked: Sequence[str] = ()) -> tuple[Metric, ...]:
        """The metrics of a run, its headline first: those of the task, and of its others those that are asked for."""
        known = self._known()
        for name in (*asked, *([headline] if headline else [])):
            if name not in known:
                raise InputError(f"this task has no metric {name!r}; it has {', '.join(known)}.")
        first = headline or (self.metrics[0].name if self.metrics else LOSS)
        more = {m.name for m in self.more} - set(asked) - {first}
        found = {name: metric for name, metric in known.items() if name not in more}
        return (found.pop(first), *found.values())

    def metric(self, name: str) -> Metric | None:
        """One of all the task's metrics, if it has it."""
        return self._known().get(name)

    def _known(self) -> dict[str, Metric]:
        for kind in ("metrics", "more"):
            found = getattr(self, kind)
            if not isinstance(found, tuple | list) or not all(isinstance(m, Metric) for m in found):
                raise InputError(
                    f"{type(self).__name__}.{kind} must be a tuple of metrics, with a comma also after one alone: "
                    f"{kind} = (fs.Metric(...),)"
                )
        of_loss = Metric(LOSS, False, self.lowest_loss, of=self.loss, by_sample=True)
        own = [*self.metrics, *self.more]
        known = {m.name: m if self.units is None else replace(m, of=self._after(m.of)) for m in own} | {LOSS: of_loss}
        taken = [name for name in known if name in COLUMNS or name.endswith(("_local", "_merged"))]
        if taken or len(known) != len(own) + 1:
            twice = [m.name for i, m in enumerate(own) if m.name in (LOSS, *(o.name for o in own[:i]))]
            raise InputError(f"{type(self).__name__}: two columns would be called {(taken or twice)[0]}; rename that metric.")
        return known

    def _after(self, of: Callable[[Tensor, Tensor], Each]) -> Callable[[Tensor, Tensor], Each]:
        return lambda outputs, targets: of(self.predicted(outputs), targets)

    def check(self, outputs: Tensor, targets: Tensor, metrics: Sequence[Metric]) -> None:
        """Try the loss and these metrics on some samples, and complain in words where one does not return what it must."""
        for metric in metrics:
            self._try(metric, outputs, targets)

    def _try(self, metric: Metric, outputs: Tensor, targets: Tensor) -> None:
        count, what = len(outputs), f"the metric {metric.name}"
        if metric.name == LOSS:
            what = f"{type(self).__name__}.loss"
        elif not metric.by_sample:  # it is computed on the host, client by client
            outputs, targets = outputs.cpu(), targets.cpu()
        try:
            of = metric.of(outputs, targets)
            pair = isinstance(of, tuple) and metric.by_sample and metric.name != LOSS
            parts = [tuple(torch.as_tensor(v).shape) for v in (of if pair else (of,))]
        except Exception as e:
            raise InputError(
                f"{what} fails on outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)} "
                f"({type(e).__name__}: {e}); correct it."
            ) from e
        found = next((part for part in parts if part != (count,)), parts[0])
        if metric.by_sample and found != (count,):
            mend = "not their mean." if metric.name == LOSS else "or leave by_sample out of its fs.Metric."
            raise InputError(f"{what} returns {found} for {count} samples; return ({count},), one number for each, {mend}")
        if not metric.by_sample and found != ():
            raise InputError(
                f"{what} returns {found} for {count} samples; return one number for all, or, where these are one for each "
                "sample, give its fs.Metric by_sample=True."
            )


def at_hand(data: Targets) -> Iterable[Tensor]:
    """All clients' targets, where the data itself is here and not only what it looks like."""
    return data.targets() if isinstance(data, Known) else ()


def learned(plain: Task, fitted: Task) -> dict[str, Any]:
    """The options of a task that were found from clients' statistics."""
    names: list[str] = [f.name for f in fields(plain)] if is_dataclass(plain) else []
    return {n: getattr(fitted, n) for n in names if getattr(fitted, n) != getattr(plain, n)}


@lru_cache(maxsize=256)
def constant(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """These numbers as a tensor, made once: while a GPU's step is recorded, nothing may be copied there."""
    return torch.tensor(numbers, dtype=dtype, device=device)


def read_numbers(name: str, text: str) -> tuple[float, ...]:
    """Numbers with spaces between, from an option."""
    try:
        return tuple(float(word) for word in text.split())
    except ValueError:
        raise InputError(f"{name} is numbers with spaces between, such as '0.5 2', not {text!r}.") from None


def write_numbers(numbers: Sequence[float]) -> str:
    return " ".join(map(repr, numbers))
