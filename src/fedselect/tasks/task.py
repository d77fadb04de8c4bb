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
"""Columns that every record has, whatever the task."""


class Targets(Protocol):
    """What a task needs to know of the data: the shape of an input and of a target, and the number of classes.

    With 0 classes, targets are not class labels.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def classes(self) -> int: ...
    @property
    def target_shape(self) -> tuple[int, ...]: ...


@runtime_checkable
class Known(Targets, Protocol):
    """Data whose targets are available."""

    def targets(self) -> Iterable[Tensor]: ...


class Task(Shown, ABC):
    """What outputs and targets mean: a loss, metrics, and checks of data and model.

    Outputs and targets have one row per sample of one client. The first metric is the headline of a run unless it names
    another. Every task also reports its loss, as `test_loss`. Implement `loss` and `metrics`; the rest has defaults.
    """

    metrics: ClassVar[tuple[Metric, ...]] = ()
    more: ClassVar[tuple[Metric, ...]] = ()
    """Metrics that are computed only if a run asks for them, by name or as its headline."""
    lowest_loss: ClassVar[float] = 0.0
    """Lower bound of the loss; float("-inf") if it may be negative."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each sample, which training minimizes: (N, ...), (N, ...) -> (N,)."""

    def outputs(self, data: Targets) -> int:
        """How many numbers the model returns per input; by default as many as a target has."""
        return torch.Size(data.target_shape).numel()

    def unfit_data(self, data: Targets) -> str:
        """Why this task cannot use these targets, in a sentence; empty if it can."""
        return ""

    def unfit_outputs(self, outputs: Tensor, data: Targets) -> str:
        """Why the model's outputs do not fit the targets, in a sentence; empty if they do."""
        return ""

    def example(self, data: Targets) -> Tensor:
        """Two made-up targets, to try a round before there is any data."""
        return torch.zeros(2, *data.target_shape)

    def statistics(self, targets: Tensor, data: Targets) -> Tensor | None:
        """What the task must know of a client's training targets before training: one row of numbers, or None for all.

        In a deployment the client sends this row to the server, with its number of samples.
        """
        return None

    def fitted(self, rows: Tensor, samples: Tensor) -> "Task":
        """The task fitted to the clients' statistics: rows (clients, numbers) and samples (clients,), in float64."""
        return self

    @property
    def units(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """(scale, shift) if outputs * scale + shift are in the units of the targets; None if the outputs are."""
        return None

    def predicted(self, outputs: Tensor) -> Tensor:
        """The outputs in the units of the targets, from which metrics are computed."""
        if self.units is None:
            return outputs
        scale, shift = (constant(numbers, outputs.dtype, outputs.device) for numbers in self.units)
        return outputs * scale + shift

    def decided(self, outputs: Tensor) -> Tensor:
        """The predictions: classes for classification, else the outputs in the units of the targets."""
        return self.predicted(outputs)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Class probabilities, (N, ..., K)."""
        raise InputError(f"the task {type(self).__name__} has no probabilities; use predict.")

    def measured(self, headline: str | None = None, asked: Sequence[str] = ()) -> tuple[Metric, ...]:
        """The metrics of a run, headline first: those of the task, and those of `more` that were asked for."""
        known = self._known()
        for name in (*asked, *([headline] if headline else [])):
            if name not in known:
                raise InputError(f"this task has no metric {name!r}; choose from {', '.join(known)}.")
        first = headline or (self.metrics[0].name if self.metrics else LOSS)
        more = {m.name for m in self.more} - set(asked) - {first}
        found = {name: metric for name, metric in known.items() if name not in more}
        return (found.pop(first), *found.values())

    def metric(self, name: str) -> Metric | None:
        """The task's metric of this name; None if it has none."""
        return self._known().get(name)

    def _known(self) -> dict[str, Metric]:
        for kind in ("metrics", "more"):
            found = getattr(self, kind)
            if not isinstance(found, tuple | list) or not all(isinstance(m, Metric) for m in found):
                raise InputError(
                    f"{type(self).__name__}.{kind} must be a tuple of metrics, with a comma even after a single one: "
                    f"{kind} = (fs.Metric(...),)"
                )
        of_loss = Metric(LOSS, False, self.lowest_loss, of=self.loss, by_sample=True)
        own = [*self.metrics, *self.more]
        known = {m.name: m if self.units is None else replace(m, of=self._after(m.of)) for m in own} | {LOSS: of_loss}
        taken = [name for name in known if name in COLUMNS or name.endswith(("_local", "_merged"))]
        if taken or len(known) != len(own) + 1:
            twice = [m.name for i, m in enumerate(own) if m.name in (LOSS, *(o.name for o in own[:i]))]
            raise InputError(f"{type(self).__name__}: two columns would be named {(taken or twice)[0]}; rename the metric.")
        return known

    def _after(self, of: Callable[[Tensor, Tensor], Each]) -> Callable[[Tensor, Tensor], Each]:
        return lambda outputs, targets: of(self.predicted(outputs), targets)

    def check(self, outputs: Tensor, targets: Tensor, metrics: Sequence[Metric]) -> None:
        """Try the loss and these metrics on some samples; refuse a result of the wrong type or shape."""
        for metric in metrics:
            self._try(metric, outputs, targets)

    def _try(self, metric: Metric, outputs: Tensor, targets: Tensor) -> None:
        count, what = len(outputs), f"the metric {metric.name}"
        if metric.name == LOSS:
            what = f"{type(self).__name__}.loss"
        elif not metric.by_sample:  # computed on the CPU, client by client
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
            mend = "not their mean." if metric.name == LOSS else "or remove by_sample from its fs.Metric."
            raise InputError(f"{what} returns {found} for {count} samples; return ({count},), one number per sample, {mend}")
        if not metric.by_sample and found != ():
            raise InputError(
                f"{what} returns {found} for {count} samples; return one number for all of them, or, if it returns one per "
                "sample, set by_sample=True in its fs.Metric."
            )


def at_hand(data: Targets) -> Iterable[Tensor]:
    """All clients' targets, if the data itself is available and not only its shapes."""
    return data.targets() if isinstance(data, Known) else ()


def learned(plain: Task, fitted: Task) -> dict[str, Any]:
    """The options of a task that were computed from the clients' statistics."""
    names: list[str] = [f.name for f in fields(plain)] if is_dataclass(plain) else []
    return {n: getattr(fitted, n) for n in names if getattr(fitted, n) != getattr(plain, n)}


@lru_cache(maxsize=256)
def constant(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """These numbers as a tensor, created once: nothing may be copied to the GPU while a step is recorded."""
    return torch.tensor(numbers, dtype=dtype, device=device)


def read_numbers(name: str, text: str) -> tuple[float, ...]:
    """Numbers from an option, separated by spaces."""
    try:
        return tuple(float(word) for word in text.split())
    except ValueError:
        raise InputError(f"{name} must be numbers separated by spaces, such as '0.5 2', not {text!r}.") from None


def write_numbers(numbers: Sequence[float]) -> str:
    return " ".join(map(repr, numbers))
