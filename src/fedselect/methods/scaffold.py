"""SCAFFOLD: one global model; clients correct their gradients by how they differ from the mean gradient."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from fedselect.core.checks import check_not_negative, check_positive
from fedselect.core.errors import InputError
from fedselect.core.tree import Mask, Scalar, State, Tree, along, clone, merge, zeros
from fedselect.methods.common import check_finetune_lr, tuned, weights, whole_passes
from fedselect.methods.method import Carried, Down, Method, Received, Up, View
from fedselect.models import Model
from fedselect.training.work import Work


@dataclass(frozen=True)
class Scaffold(Method):
    """FedAvg's global model, with each client's gradient corrected by control variates: g - c_i + c (SCAFFOLD).

    c_i is the mean gradient of the client's last round, c the mean of c_i over all clients, including those not in the cohort.
    So within its round, a client moves in the direction of the whole federation.

    epochs: local epochs per round
    lr: learning rate
    finetune: epochs of fine-tuning the global model on each client before evaluation
    finetune_lr: learning rate of fine-tuning; none: as lr
    """

    epochs: int = 3
    lr: Scalar = 0.01
    _: KW_ONLY
    finetune: int = 0
    finetune_lr: Scalar | None = None
    view: View = field(default="merged", init=False)

    def __post_init__(self) -> None:
        check_positive(lr=self.lr, finetune_lr=self.finetune_lr)
        check_not_negative(finetune=self.finetune)
        check_finetune_lr("SCAFFOLD", self.finetune, self.finetune_lr)
        if self.epochs < 1:
            raise InputError(f"epochs must be at least 1, not {self.epochs}.")

    def init(self, params: Tree, clients: int, model: Model) -> State:
        control = zeros({n: params[n] for n in model.params})
        count = torch.tensor(clients, device=params[model.params[0]].device)
        return {"params": clone(params), "control": control, "everybody": {"clients": count}}

    def join(self, work: Work, params: Tree) -> State:
        work.travel(self.epochs, self.lr)  # checks now what it needs later
        return {"params": clone(params), "control": zeros({n: params[n] for n in work.model.params})}

    def down(self, server: State, ids: Tensor) -> Down:
        return Down({"params": server["params"], "control": server["control"]})

    def client(self, work: Work, state: State, down: State) -> tuple[State, Up]:
        before, own, common = down["params"], state["control"], down["control"]
        correction = {n: common[n] - c for n, c in own.items()}
        after = work.train(before, whole_passes(work, self.epochs, self.lr), ctx={"correction": correction})
        way = work.travel(self.epochs, self.lr)
        change = {n: _gradient(before[n] - after[n], way, c) - c for n, c in common.items()}
        control = {n: c + change[n] for n, c in own.items()}
        up = Up(after, self.wants(work.model, state), weights(work, "uniform"), {"control": change})
        return {"params": after, "control": control}, up

    def server(self, server: State, got: Received) -> State:
        at, count = got.ids.argsort(), server["everybody"]["clients"]
        change = {n: v[at].double().sum(0) / count for n, v in got.extra["control"].items()}
        control = {n: (c + change[n]).to(c.dtype) for n, c in server["control"].items()}
        return {**server, "params": merge(got.heard, got.mean, server["params"]), "control": control}

    def local(self, state: State) -> Tree:
        return state["params"]

    def personal(self, work: Work, state: State, down: State) -> Tree:
        if not self.finetune:
            return down["params"]
        lr = self.lr if self.finetune_lr is None else self.finetune_lr
        return tuned(work, down["params"], whole_passes(work, self.finetune, lr))

    def wants(self, model: Model, state: State) -> Mask:
        return dict.fromkeys(model.names, True)

    def mask(self, model: Model, state: State) -> Mask:
        return dict.fromkeys(model.params, False)

    def carries(self, model: Model, state: State) -> Mapping[str, Carried]:
        """The client's control variate; the model comes from the server."""
        return {"params": {}}


def _gradient(moved: Tensor, way: Tensor, otherwise: Tensor) -> Tensor:
    """The mean gradient of steps that moved entries this far; `otherwise` if a schedule with rate 0 let nothing move."""
    way = torch.as_tensor(along(way, moved))
    return torch.where(way > 0, moved / way, otherwise)
