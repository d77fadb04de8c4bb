"""Tasks: what outputs and targets mean, with losses and metrics."""

from collections.abc import Callable

from fedselect.tasks.classes import Binary, Classification, Multilabel, Sequences
from fedselect.tasks.metrics import Measure, Metric
from fedselect.tasks.regression import Regression
from fedselect.tasks.spread import Spread
from fedselect.tasks.suited import suited
from fedselect.tasks.task import Task

TASKS: dict[str, Callable[..., Task]] = {
    "classification": Classification,
    "binary": Binary,
    "multilabel": Multilabel,
    "regression": Regression,
    "sequences": Sequences,
}

__all__ = [
    "TASKS", "Binary", "Classification", "Measure", "Metric", "Multilabel", "Regression", "Sequences", "Spread", "Task",
    "suited",
]  # fmt: skip
