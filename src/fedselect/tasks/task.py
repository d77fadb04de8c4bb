"""Task: what a model's outputs and a sample's target mean."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from fedselect.core.errors import InputError
from fedselect.tasks.metrics import ACCURACY, LOSS, Metric

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


class Task(ABC):
    """A loss, metrics, and what data and model must look like. The first metric is a run's headline, unless it names another.

    Outputs and targets have a row for each sample of one client. Every task is also measured by its loss: `test_loss`.
    """

    metrics: ClassVar[tuple[Metric, ...]] = ()
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

    def measured(self, headline: str | None = None) -> tuple[Metric, ...]:
        """The metrics of a run, its headline first."""
        if not isinstance(self.metrics, tuple | list) or not all(isinstance(m, Metric) for m in self.metrics):
            raise InputError(
                f"{type(self).__name__}.metrics must be a tuple of metrics, with a comma also after one alone: "
                "metrics = (fs.Metric(...),)"
            )
        found = {m.name: m for m in (*self.metrics, Metric(LOSS, False, self.lowest_loss, of=self.loss, by_sample=True))}
        taken = [name for name in found if name in COLUMNS or name.endswith(("_local", "_merged"))]
        if taken or len(found) != len(self.metrics) + 1:
            raise InputError(f"{type(self).__name__}: two columns would be called {(taken or [LOSS])[0]}; rename that metric.")
        first = headline or next(iter(found))
        if first not in found:
            raise InputError(f"this task has no metric {first!r}; it has {', '.join(found)}.")
        return (found.pop(first), *found.values())

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Try the loss and every metric on these samples, and complain in words where one does not return what it must."""
        for metric in self.measured():
            self._try(metric, outputs, targets)

    def _try(self, metric: Metric, outputs: Tensor, targets: Tensor) -> None:
        count, what = len(outputs), f"the metric {metric.name}"
        if metric.name == LOSS:
            what = f"{type(self).__name__}.loss"
        elif not metric.by_sample:  # it is computed on the host, client by client
            outputs, targets = outputs.cpu(), targets.cpu()
        try:
            found = tuple(torch.as_tensor(metric.of(outputs, targets)).shape)
        except Exception as e:
            raise InputError(
                f"{what} fails on outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)} "
                f"({type(e).__name__}: {e}); correct it."
            ) from e
        if metric.by_sample and found != (count,):
            mend = "not their mean." if metric.name == LOSS else "or leave by_sample out of its fs.Metric."
            raise InputError(f"{what} returns {found} for {count} samples; return ({count},), one number for each, {mend}")
        if not metric.by_sample and found != ():
            raise InputError(
                f"{what} returns {found} for {count} samples; return one number for all, or, where these are one for each "
                "sample, give its fs.Metric by_sample=True."
            )


@dataclass(frozen=True)
class Classification(Task):
    """One of several classes: a score for each, and cross-entropy. Reported: accuracy."""

    metrics = (ACCURACY,)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """-log p(target)."""
        return torch.logsumexp(outputs, -1) - outputs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)

    def outputs(self, data: Targets) -> int:
        return data.classes

    def unfit_data(self, data: Targets) -> str:
        if data.classes:
            return ""
        return (
            "classification needs a whole number for each sample, its class, and these targets are something else; name the "
            "task that they are for (task=..., --task)."
        )

    def unfit_outputs(self, outputs: Tensor, data: Targets) -> str:
        if outputs.shape[1:] == (data.classes,):
            return ""
        return (
            f"labels from 0 to {data.classes - 1} need ({len(outputs)}, {data.classes}), or say how many classes there are: "
            "Federation(clients, classes=...)."
        )

    def example(self, data: Targets) -> Tensor:
        return torch.tensor([0, data.classes - 1])


TASKS: dict[str, Callable[..., Task]] = {"classification": Classification}
