"""What local training minimises beside the task's loss. Written for one client and lifted over the cohort by the step."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fedselect.core.tree import State, Tree
from fedselect.models import Output
from fedselect.tasks.task import Task

Objective = Callable[[Output, Tensor, Tree, State], Tensor]
"""(what the model returned, targets, the client's parameters, the method's context for this client) -> a scalar.

A context with the groups "anchor" (by name of parameter) and "pull" ("mu") adds 0.5 mu ||w - anchor||^2 to what is
minimised, whatever the objective. The step knows its gradient, so it is no part of the loss. Nor is the group "correction"
(by name of parameter), which is added to the gradient.
"""


def align(out: Output, y: Tensor, params: Tree, ctx: State) -> Tensor:
    """lam * mean (f - prototype of the label)^2 over batch and features; ctx: align/lam, align/prototypes."""
    assert out.features is not None
    off = out.features - ctx["align"]["prototypes"][y]
    return ctx["align"]["lam"] * (off**2).mean()


@dataclass(frozen=True)
class Goal:
    """What a step minimises: the mean of the task's loss, or a method's objective in its place, and a penalty on top."""

    task: Task
    objective: Objective | None = None
    penalty: Objective | None = None

    def __call__(self, out: Output, y: Tensor, params: Tree, ctx: State) -> Tensor:
        loss = self.objective(out, y, params, ctx) if self.objective else self.task.loss(out.logits, y).mean()
        return loss if self.penalty is None else loss + self.penalty(out, y, params, ctx)
