"""Classification tasks: one class per sample, yes or no, several labels at once, or one class per position."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedselect.core.errors import InputError
from fedselect.tasks import formulas
from fedselect.tasks.metrics import Metric
from fedselect.tasks.task import Targets, Task, at_hand, constant, read_numbers, write_numbers

BALANCED = "balanced"
View = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Converts outputs and targets of a task to those of classification: (N, K) scores and (N,) classes."""


def _correct(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.argmax(-1) == targets


def _minus_log(outputs: Tensor, targets: Tensor) -> Tensor:
    """-log p(target)."""
    return torch.logsumexp(outputs, -1) - outputs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def _one_hot(of: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """A metric from a formula of predicted and true classes, each (N, K) booleans."""

    def metric(outputs: Tensor, targets: Tensor) -> Tensor:
        classes = outputs.shape[1]
        return of(F.one_hot(outputs.argmax(-1), classes).bool(), F.one_hot(targets, classes).bool())

    return metric


def _one_against_rest(of: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """A metric from a formula of scores and positives: for the second of two classes, else the mean over classes that occur."""

    def metric(outputs: Tensor, targets: Tensor) -> Tensor:
        if len(there := torch.unique(targets).tolist()) < 2:
            return torch.tensor(torch.nan)
        odds = formulas.log_odds(outputs.double())
        return torch.stack([of(odds[:, c], targets == c) for c in ([1] if odds.shape[1] == 2 else there)]).mean()

    return metric


def _calibration(outputs: Tensor, targets: Tensor) -> Tensor:
    confidence, said = outputs.double().softmax(-1).max(-1)
    return formulas.calibration_error(confidence, said == targets)


ACCURACY = Metric("accuracy", low=0.0, high=1.0, of=_correct, by_sample=True)
LOG_LOSS = Metric("log_loss", more_is_better=False, low=0.0, of=lambda o, t: _minus_log(o.double(), t), by_sample=True)
WHOLE = (  # computed from all outputs of a client
    Metric("balanced_accuracy", low=0.0, high=1.0, of=_one_hot(formulas.recall)),
    Metric("f1", low=0.0, high=1.0, of=_one_hot(formulas.f1)),
    Metric("auroc", low=0.0, high=1.0, of=_one_against_rest(formulas.auroc)),
    Metric("average_precision", low=0.0, high=1.0, of=_one_against_rest(formulas.average_precision)),
    Metric("ece", more_is_better=False, low=0.0, high=1.0, of=_calibration),
)


def _seen(metric: Metric, view: View) -> Metric:
    """A classification metric for a task, via `view`, which converts its outputs and targets."""
    return replace(metric, of=lambda outputs, targets: metric.of(*view(outputs, targets)))


@dataclass(frozen=True)
class Weighted(Task):
    """A classification task with optional class weights in the loss."""

    class_weights: str | None = None  # balanced, or one number per class, such as "1 3"; none: equal weights

    def __post_init__(self) -> None:
        numbers = self._numbers
        if numbers is not None and (not any(numbers) or not all(0 <= w < float("inf") for w in numbers)):
            raise InputError(
                f"class_weights must be {BALANCED} or one number per class, such as '1 3', not {self.class_weights!r}."
            )

    @property
    def _numbers(self) -> tuple[float, ...] | None:
        """The class weights; balanced ones are known once the task is fitted."""
        return None if self.class_weights in (None, BALANCED) else read_numbers("class_weights", str(self.class_weights))

    def weights(self, like: Tensor) -> Tensor | None:
        """One weight per class, on the device of `like`."""
        return None if self._numbers is None else constant(self._numbers, like.dtype, like.device)

    def unfit_data(self, data: Targets) -> str:
        if self._numbers is None or len(self._numbers) == data.classes:
            return ""
        return (
            f"there are {data.classes} classes; give class_weights one number each, or {BALANCED}, not {self.class_weights!r}."
        )

    def statistics(self, targets: Tensor, data: Targets) -> Tensor | None:
        """The share of each class among a client's samples."""
        if self.class_weights != BALANCED:
            return None
        return torch.bincount(targets.long(), minlength=data.classes).double() / len(targets)

    def fitted(self, rows: Tensor, samples: Tensor) -> Task:
        """With weights that give every class the same total over all clients; 0 for a class that no client has."""
        if self.class_weights != BALANCED:
            return self
        count = (rows * samples.unsqueeze(1)).sum(0)
        weights = torch.where(count > 0, count.sum() / (len(count) * count), 0.0)
        return replace(self, class_weights=write_numbers(weights.tolist()))


@dataclass(frozen=True)
class Classification(Weighted):
    """One class per sample: the model returns a score per class; the loss is cross-entropy. Headline: accuracy."""

    label_smoothing: float = 0.0  # share of the label that is spread over all classes

    metrics = (ACCURACY,)
    more = (*WHOLE, LOG_LOSS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.label_smoothing < 1.0:
            raise InputError(f"label_smoothing must lie in [0, 1), not {self.label_smoothing}.")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """-log p(target), with class weights and label smoothing if set."""
        plain, weights = _minus_log(outputs, targets), self.weights(outputs)
        if weights is None and not self.label_smoothing:
            return plain
        own = plain if weights is None else plain * weights[targets]
        if not self.label_smoothing:
            return own
        every = torch.logsumexp(outputs, -1, keepdim=True) - outputs
        every = every if weights is None else every * weights
        return (1 - self.label_smoothing) * own + self.label_smoothing * every.mean(-1)

    def decided(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(-1)

    def probabilities(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(-1)

    def outputs(self, data: Targets) -> int:
        return data.classes

    def unfit_data(self, data: Targets) -> str:
        if data.classes and data.target_shape == ():
            return super().unfit_data(data)
        return (
            "classification needs one integer class per sample, and these targets are something else; choose the task for them "
            "(task=..., --task)."
        )

    def unfit_outputs(self, outputs: Tensor, data: Targets) -> str:
        if outputs.shape[1:] == (data.classes,):
            return ""
        return (
            f"labels from 0 to {data.classes - 1} need ({len(outputs)}, {data.classes}); change the model, or give the number "
            "of classes: Federation(clients, classes=...)."
        )

    def example(self, data: Targets) -> Tensor:
        return torch.tensor([0, data.classes - 1])


def _logit(outputs: Tensor) -> Tensor:
    """The single output of each sample: (N, 1) or (N,) -> (N,)."""
    return outputs.flatten()


def _two_classes(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logit = _logit(outputs)
    return torch.stack([torch.zeros_like(logit), logit], -1), targets


@dataclass(frozen=True)
class Binary(Weighted):
    """Yes or no, classes 1 and 0: the model returns one number per sample, the logit of yes. Headline: accuracy."""

    metrics = (_seen(ACCURACY, _two_classes),)
    more = tuple(_seen(m, _two_classes) for m in (*WHOLE, LOG_LOSS))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """-log p(target), with class weights if set."""
        logit, weights = _logit(outputs), self.weights(outputs)
        plain = F.binary_cross_entropy_with_logits(logit, targets.to(logit.dtype), reduction="none")
        return plain if weights is None else plain * weights[targets]

    def decided(self, outputs: Tensor) -> Tensor:
        return (_logit(outputs) > 0).long()

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Probabilities of no and of yes: (N, 2)."""
        yes = _logit(outputs).sigmoid()
        return torch.stack([1 - yes, yes], -1)

    def outputs(self, data: Targets) -> int:
        return 1

    def unfit_data(self, data: Targets) -> str:
        if data.classes == 2 and data.target_shape == ():
            return super().unfit_data(data)
        return "the task binary needs one integer target per sample, 0 or 1; choose another task for these targets."

    def unfit_outputs(self, outputs: Tensor, data: Targets) -> str:
        return "" if outputs[0].numel() == 1 else "the task binary needs one number per sample."

    def example(self, data: Targets) -> Tensor:
        return torch.tensor([0, 1])


def _by_label(of: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """A metric from a formula of scores and positives: the mean over labels for which it is defined."""

    def metric(outputs: Tensor, targets: Tensor) -> Tensor:
        odds, truth = outputs.double(), targets.bool()
        return torch.stack([of(odds[:, c], truth[:, c]) for c in range(odds.shape[1])]).nanmean()

    return metric


def _sure(outputs: Tensor, targets: Tensor) -> Tensor:
    odds = outputs.double().flatten()
    return formulas.calibration_error(odds.abs().sigmoid(), (odds > 0) == targets.flatten().bool())


def _of_labels(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none").mean(-1)


@dataclass(frozen=True)
class Multilabel(Task):
    """Any of several labels: the model returns one logit per label; targets (N, labels) are 0 or 1. Headline: accuracy."""

    metrics = (replace(ACCURACY, of=lambda o, t: ((o > 0) == t.bool()).double().mean(-1)),)
    more = (
        Metric("f1", low=0.0, high=1.0, of=lambda o, t: formulas.f1(o > 0, t.bool())),
        Metric("auroc", low=0.0, high=1.0, of=_by_label(formulas.auroc)),
        Metric("average_precision", low=0.0, high=1.0, of=_by_label(formulas.average_precision)),
        Metric("ece", more_is_better=False, low=0.0, high=1.0, of=_sure),
        replace(LOG_LOSS, of=lambda o, t: _of_labels(o.double(), t)),
    )

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over labels of -log p(target)."""
        return _of_labels(outputs, targets)

    def decided(self, outputs: Tensor) -> Tensor:
        return (outputs > 0).long()

    def probabilities(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def unfit_data(self, data: Targets) -> str:
        if len(data.target_shape) == 1 and not data.classes and all(bool(((y == 0) | (y == 1)).all()) for y in at_hand(data)):
            return ""
        return "the task multilabel needs targets of shape (N, labels) that are 0 or 1; choose another task for these targets."

    def unfit_outputs(self, outputs: Tensor, data: Targets) -> str:
        wanted = tuple(data.target_shape)
        return "" if outputs.shape[1:] == wanted else f"the task multilabel needs one number per label, that is {wanted[0]}."


@dataclass(frozen=True)
class Sequences(Task):
    """A class per position, such as the next character: targets (N, T), outputs (N, T, classes). Headline: accuracy."""

    ignore: int = -100  # positions with this target count neither in the loss nor in metrics

    @property
    def metrics(self) -> tuple[Metric, ...]:  # type: ignore[override]
        return (replace(ACCURACY, of=lambda o, t: self._summed(_correct(o, t), t)),)

    @property
    def more(self) -> tuple[Metric, ...]:  # type: ignore[override]
        log_loss = replace(LOG_LOSS, of=lambda o, t: self._summed(self._of_positions(o.double(), t), t))
        return (*(_seen(m, self._positions) for m in WHOLE), log_loss)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over a sample's positions of -log p(target)."""
        total, count = self._summed(self._of_positions(outputs, targets), targets)
        return total / count.clamp_min(1)

    def decided(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(-1)

    def probabilities(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(-1)

    def outputs(self, data: Targets) -> int:
        return data.classes

    def unfit_data(self, data: Targets) -> str:
        if len(data.target_shape) == 1 and data.classes:
            strange = [int(v) for y in at_hand(data) for v in y[(y < 0) & (y != self.ignore)][:1]]
            return f"the target {strange[0]} is not a class; to ignore it, add --ignore {strange[0]}." if strange else ""
        return (
            "the task sequences needs integer targets (N, positions), a class per position, and a number of classes; correct "
            "the targets, or give the number: Federation(clients, classes=...)."
        )

    def unfit_outputs(self, outputs: Tensor, data: Targets) -> str:
        wanted = (*data.target_shape, data.classes)
        if tuple(outputs.shape[1:]) == wanted:
            return ""
        return f"the task sequences needs ({', '.join(map(str, (len(outputs), *wanted)))}): one number per position and class."

    def example(self, data: Targets) -> Tensor:
        return torch.zeros(2, *data.target_shape, dtype=torch.int64)

    def counted(self, targets: Tensor) -> Tensor:
        """Which positions are not ignored."""
        return targets != self.ignore

    def _of_positions(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """-log p(target) of each position; ignored positions have an arbitrary value."""
        return _minus_log(outputs, torch.where(self.counted(targets), targets, 0))

    def _summed(self, values: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of these values over each sample's positions, and the number of positions."""
        counted = self.counted(targets)
        return torch.where(counted, values, 0).sum(-1), counted.sum(-1)

    def _positions(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        counted = self.counted(targets)
        return outputs[counted], targets[counted]
