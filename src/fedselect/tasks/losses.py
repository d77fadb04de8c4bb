"""What local training minimizes besides the task's loss. Written for one client; the step lifts it over the cohort."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fedselect.core.tree import State, Tree
from fedselect.models import Output
from fedselect.tasks.task import Task

Objective = Callable[[Output, Tensor, Tree, State], Tensor]
"""(what the model returned, targets, the client's parameters, the method's context for this client) -> a scalar.

A context with the groups "anchor" (by parameter name) and "pull" ("mu") adds 0.5 mu ||w - anchor||^2 to what is minimized,
whatever the objective. The step knows its gradient, so it is not part of the loss. Neither is the group "correction" (by
parameter name), which is added to the gradient.
"""


def align(out: Output, y: Tensor, params: Tree, ctx: State) -> Tensor:
    """lam * mean (f - prototype of the label)^2 over batch and features; ctx: align/lam, align/prototypes."""
    assert out.features is not None
    off = out.features - ctx["align"]["prototypes"][y]
    return ctx["align"]["lam"] * (off**2).mean()


@dataclass(frozen=True)
class Goal:
    """What a step minimizes: the mean of the task's loss, or a method's own objective, plus a penalty."""

    task: Task
    objective: Objective | None = None
    penalty: Objective | None = None

    def __call__(self, out: Output, y: Tensor, params: Tree, ctx: State) -> Tensor:
        loss = self.objective(out, y, params, ctx) if self.objective else self.task.loss(out.logits, y).mean()
        return loss if self.penalty is None else loss + self.penalty(out, y, params, ctx)
