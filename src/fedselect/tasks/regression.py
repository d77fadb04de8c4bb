"""Regression: numeric targets, learned in standardized units and reported in their own."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedselect.core.errors import InputError
from fedselect.tasks.metrics import Metric
from fedselect.tasks.task import Targets, Task, constant, read_numbers, write_numbers


def _flat(values: Tensor) -> Tensor:
    """One row of targets per sample: (N,) and (N, ...) -> (N, numbers)."""
    return values.reshape(len(values), -1)


def _errors(outputs: Tensor, targets: Tensor) -> Tensor:
    return _flat(outputs).double() - _flat(targets).double()


def _rmse(outputs: Tensor, targets: Tensor) -> Tensor:
    """The root mean squared error, averaged over targets."""
    return _errors(outputs, targets).square().mean(0).sqrt().mean()


def _r2(outputs: Tensor, targets: Tensor) -> Tensor:
    """The explained share of a target's variance, averaged over the targets that vary."""
    y = _flat(targets).double()
    left, total = _errors(outputs, targets).square().sum(0), (y - y.mean(0)).square().sum(0)
    varies = y.amax(0) > y.amin(0)
    return torch.where(varies, 1 - left / total, torch.nan).nanmean()


@dataclass(frozen=True)
class Regression(Task):
    """One or several numbers per sample; the loss is the squared error. Headline: mean absolute error.

    The model learns (target - mean) / scale, with the mean and standard deviation over all clients' training targets, found
    before the first round or given. Metrics, exported models and `predicted` are in the units of the targets.
    """

    target_mean: str | None = None  # mean of each target, such as "12 0.5"; none: computed from all clients' training targets
    target_scale: str | None = None  # standard deviation of each target, likewise

    metrics = (
        Metric("mae", more_is_better=False, low=0.0, of=lambda o, t: _errors(o, t).abs().mean(1), by_sample=True),
        Metric("rmse", more_is_better=False, low=0.0, of=_rmse),
        Metric("r2", high=1.0, of=_r2),
    )

    def __post_init__(self) -> None:
        if (self.target_mean is None) != (self.target_scale is None):
            raise InputError("target_mean and target_scale belong together; give both or neither.")
        if self.units is not None and (len(self.units[0]) != len(self.units[1]) or not all(s > 0 for s in self.units[0])):
            raise InputError("target_mean and target_scale must have one number per target, and scales must be positive.")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The squared error in standardized units, averaged over targets."""
        wanted = _flat(targets).to(outputs.dtype)
        if self.units is not None:
            scale, mean = (constant(numbers, outputs.dtype, outputs.device) for numbers in self.units)
            wanted = (wanted - mean) / scale
        return (_flat(outputs) - wanted).square().mean(-1)

    @property
    def units(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        if self.target_mean is None or self.target_scale is None:
            return None
        return read_numbers("target_scale", self.target_scale), read_numbers("target_mean", self.target_mean)

    def predicted(self, outputs: Tensor) -> Tensor:
        return super().predicted(_flat(outputs)).view_as(outputs)

    def unfit_data(self, data: Targets) -> str:
        wanted = self.outputs(data)
        if self.units is None or len(self.units[0]) == wanted:
            return ""
        return f"each sample has {wanted} targets; give target_mean and target_scale {wanted} numbers each."

    def unfit_outputs(self, outputs: Tensor, data: Targets) -> str:
        wanted = self.outputs(data)
        return "" if outputs[0].numel() == wanted else f"the task regression needs one number per target, that is {wanted}."

    def statistics(self, targets: Tensor, data: Targets) -> Tensor | None:
        """Means, then variances."""
        if self.units is not None:
            return None
        y = _flat(targets).double()
        return torch.cat([y.mean(0), y.var(0, correction=0)])

    def fitted(self, rows: Tensor, samples: Tensor) -> Task:
        if self.units is not None:
            return self
        means, variances = rows.chunk(2, 1)
        weight = (samples / samples.sum()).unsqueeze(1)
        mean = (weight * means).sum(0)
        scale = (weight * (variances + (means - mean).square())).sum(0).clamp_min(0).sqrt()
        scale = torch.where(scale > 0, scale, 1.0)
        return replace(self, target_mean=write_numbers(mean.tolist()), target_scale=write_numbers(scale.tolist()))
