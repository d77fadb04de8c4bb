"""What local training minimises. Each is written for one client and lifted over the cohort by the step."""

from collections.abc import Callable

import torch
from torch import Tensor

from fedselect.models import Output
from fedselect.tree import State, Tree

Objective = Callable[[Output, Tensor, Tree, State], Tensor]
"""(what the model returned, labels, the client's parameters, the method's context for this client) -> a scalar."""


def cross_entropy(out: Output, y: Tensor, params: Tree, ctx: State) -> Tensor:
    """-log p(y), averaged over the batch."""
    picked = out.logits.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    return (torch.logsumexp(out.logits, -1) - picked).mean()
