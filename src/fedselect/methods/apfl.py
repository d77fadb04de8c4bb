"""APFL: every client mixes a personal model with the global one, and learns how much of each."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedselect.core.checks import check_choice, check_not_negative, check_number, check_positive, check_shares
from fedselect.core.errors import InputError
from fedselect.core.tree import Mask, Scalar, State, Tree, along, clone, merge, rows
from fedselect.methods.common import Weight, per_row, weights, whole_passes
from fedselect.methods.method import Carried, Down, Method, Received, Up, View
from fedselect.models import Model
from fedselect.training.work import Work

LEAST = 0.05
"""With alpha = 0 the personal model would get no gradient, and alpha could never rise again."""


@dataclass(frozen=True)
class APFL(Method):
    """Each client mixes its personal model v with the global w: alpha v + (1 - alpha) w, and learns alpha.

    The copy of w trains and is averaged. Then v trains to reduce the loss of the mixture, and alpha takes a step down the same
    loss. Clients that resemble the others end near FedAvg; clients that do not end near training alone.

    epochs: local epochs of each of the two models per round
    lr: learning rate of both
    alpha: initial weight of the personal model, from 0.05 to 1
    alpha_lr: learning rate of alpha, one step per round; 0: alpha stays fixed
    weight: weight of a client in the mean: 1, or its number of training samples
    view: reported model: after local training, or merged with the aggregate
    """

    epochs: int = 3
    lr: Scalar = 0.01
    alpha: Scalar = 0.5
    alpha_lr: Scalar = 0.1
    weight: Weight = "uniform"
    view: View = "local"

    def __post_init__(self) -> None:
        check_choice(("uniform", "samples"), weight=self.weight)
        check_choice(("local", "merged"), view=self.view)
        check_positive(lr=self.lr)
        check_shares(alpha=self.alpha)
        check_not_negative(alpha_lr=self.alpha_lr)
        if bool((check_number("alpha", self.alpha) < LEAST).any()):
            raise InputError(f"alpha must be at least {LEAST}, not {self.alpha}, or the personal model would never train.")
        if self.epochs < 1:
            raise InputError(f"epochs must be at least 1, not {self.epochs}.")

    def init(self, params: Tree, clients: int, model: Model) -> State:
        return {"params": clone(params)}

    def join(self, work: Work, params: Tree) -> State:
        work.travel(self.epochs, self.lr)  # checks now what it needs later
        alpha = per_row(self.alpha, params[work.model.params[0]])
        return {"params": clone(params), "own": clone(params), "share": {"alpha": alpha}}

    def down(self, server: State, ids: Tensor) -> Down:
        return Down({"params": server["params"]})

    def client(self, work: Work, state: State, down: State) -> tuple[State, Up]:
        names, alpha = work.model.params, state["share"]["alpha"]
        shared = work.train(down["params"], whole_passes(work, self.epochs, self.lr))
        before = self._mixed(work.model, state, shared)
        # v's gradient is alpha times the mixture's, so a step of v moves the mixture by alpha^2 lr times its gradient
        rate = self.lr * alpha.double().square()
        after = work.train(before, whole_passes(work, self.epochs, rate))
        moved = {n: after[n] - before[n] for n in names}
        own = {**after, **{n: state["own"][n] + moved[n] / along(alpha, moved[n]) for n in names}}
        way = work.travel(self.epochs, rate)
        slope = sum(rows(moved[n].double() * (shared[n] - state["own"][n])).sum(1) for n in names) / way.clamp_min(1e-300)
        alpha = (alpha - self.alpha_lr * slope).clamp(LEAST, 1.0).to(alpha.dtype)
        up = Up(shared, self.wants(work.model, state), weights(work, self.weight))
        return {"params": after, "own": own, "share": {"alpha": alpha}}, up

    def server(self, server: State, got: Received) -> State:
        return {"params": merge(got.heard, got.mean, server["params"])}

    def local(self, state: State) -> Tree:
        return state["params"]

    def personal(self, work: Work, state: State, down: State) -> Tree:
        return self._mixed(work.model, state, down["params"])

    def wants(self, model: Model, state: State) -> Mask:
        return dict.fromkeys(model.names, True)

    def mask(self, model: Model, state: State) -> Mask:
        """All entries of the mixture are personal; the copy that is uploaded is another model."""
        return dict.fromkeys(model.params, True)

    def carries(self, model: Model, state: State) -> Mapping[str, Carried]:
        """The personal model and alpha; the mixture is computed again in each round."""
        return {"params": {}}

    def _mixed(self, model: Model, state: State, shared: Tree) -> Tree:
        """alpha v + (1 - alpha) w, with the mixture's own BatchNorm statistics."""
        alpha, own = state["share"]["alpha"], state["own"]
        return {**own, **{n: torch.lerp(shared[n], own[n], torch.as_tensor(along(alpha, own[n]))) for n in model.params}}
