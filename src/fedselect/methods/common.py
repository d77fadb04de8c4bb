"""Shared by several methods: weights of clients, a pull towards an anchor, fine-tuning before evaluation."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fedselect.core.errors import InputError
from fedselect.core.tree import Mask, Scalar, Tree
from fedselect.methods.method import View
from fedselect.models import Model
from fedselect.training.work import Pass, Work

Weight = Literal["uniform", "samples"]
Stats = Literal["local", "shared"]
Answers = Literal["all", "own"]
NEVER = -1e4
"""A bias so low that its class is never predicted and gets no gradient."""


def weights(work: Work, how: Weight) -> Tensor:
    """The weight of each client in the mean: (C,)."""
    return work.n.double() if how == "samples" else torch.ones_like(work.n, dtype=torch.float64)


def head_bias(model: Model) -> str:
    """The name of the head's bias, which `only_own` changes."""
    model.need_head("answers=own")
    if (name := f"{model.head}.bias") not in model.params:
        raise InputError(f"answers=own needs a head with a bias, and {model.name} has no {name}.")
    return name


def only_own(work: Work, tree: Tree) -> Tree:
    """Models that predict only classes their client trains on: the head's bias of all other classes is NEVER."""
    name = head_bias(work.model)
    return {**tree, name: torch.where(work.classes(tree[name].shape[1]), tree[name], NEVER)}


def per_row(value: Scalar, like: Tensor) -> Tensor:
    """One number for each client, of the type of `like`."""
    if isinstance(value, Tensor):
        return value.to(like.device, like.dtype, non_blocking=True).expand(len(like))
    return torch.full((len(like),), value, dtype=like.dtype, device=like.device)


def towards(anchor: Tree, mu: Scalar, work: Work) -> dict[str, Any]:
    """Arguments of `Work.train` that pull every client towards its anchor."""
    if not isinstance(mu, Tensor) and mu == 0.0:
        return {}
    points = {n: anchor[n] for n in work.model.params}
    return {"ctx": {"anchor": points, "pull": {"mu": per_row(mu, points[work.model.params[0]])}}}


def check_finetune_lr(who: str, finetune: int, finetune_lr: Scalar | None) -> None:
    """Refuse a learning rate of fine-tuning without fine-tuning."""
    if finetune == 0 and finetune_lr is not None:
        raise InputError(
            f"{who} without finetune does not use finetune_lr; set finetune too, or name the method it is for "
            "(--fedbabu.finetune-lr)."
        )


def check_finetune_view(finetune: int, view: View) -> None:
    """Refuse fine-tuning if the fine-tuned model is not the reported one."""
    if finetune and view == "local":
        raise InputError("finetune trains the merged model, which view=local does not report; use view=merged.")


def whole_passes(work: Work, epochs: int, lr: Scalar) -> list[Pass]:
    """This many epochs that train all parameters."""
    everything: Mask = dict.fromkeys(work.model.params, True)
    return [Pass(everything, lr, e) for e in range(epochs)]


def tuned(work: Work, tree: Tree, passes: Sequence[Pass]) -> Tree:
    """Models fine-tuned for evaluation: each time from scratch, at rates without a schedule."""
    return work.train(tree, passes, key="finetune", scheduled=False)
