"""What local training minimises. Each is written for one client and lifted over the cohort by the step."""

from collections.abc import Callable

import torch
from torch import Tensor

from fedselect.core.tree import State, Tree
from fedselect.models import Output

Objective = Callable[[Output, Tensor, Tree, State], Tensor]
"""(what the model returned, labels, the client's parameters, the method's context for this client) -> a scalar.

A context with the groups "anchor" (by name of parameter) and "pull" ("mu") adds 0.5 mu ||w - anchor||^2 to what is
minimised, whatever the objective. The step knows its gradient, so it is no part of the loss.
"""


def cross_entropy(out: Output, y: Tensor, params: Tree, ctx: State) -> Tensor:
    """-log p(y), averaged over the batch."""
    picked = out.logits.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    return (torch.logsumexp(out.logits, -1) - picked).mean()


def align(out: Output, y: Tensor, params: Tree, ctx: State) -> Tensor:
    """Cross-entropy + lam * mean (f - prototype of the label)^2 over batch and features; ctx: align/lam, align/prototypes."""
    assert out.features is not None
    off = out.features - ctx["align"]["prototypes"][y]
    return cross_entropy(out, y, params, ctx) + ctx["align"]["lam"] * (off**2).mean()
