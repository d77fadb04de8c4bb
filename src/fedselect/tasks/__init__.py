"""What a model's outputs and a sample's target mean: tasks, losses and metrics."""

from fedselect.tasks.metrics import Measure, Metric
from fedselect.tasks.task import TASKS, Classification, Task

__all__ = ["TASKS", "Classification", "Measure", "Metric", "Task"]
