"""Ditto: FedAvg's global model, and a personal model per client that is pulled towards it."""

from dataclasses import KW_ONLY, dataclass, field

from torch import Tensor

from fedselect.core.checks import check_choice, check_not_negative, check_positive
from fedselect.core.errors import InputError
from fedselect.core.tree import Mask, Scalar, State, Tree, clone, merge
from fedselect.methods.common import Weight, check_finetune_lr, towards, tuned, weights, whole_passes
from fedselect.methods.method import Down, Method, Received, Up, View
from fedselect.models import Model
from fedselect.training.work import Pass, Work


@dataclass(frozen=True)
class Ditto(Method):
    """Each client trains a personal model, pulled towards a global model that FedAvg trains alongside.

    The global copy is trained and averaged, BatchNorm statistics included. The personal v trains on the same batches:
    v -= lr (grad f(v) + lam (v - w_t)), where w_t is the global model received this round.

    epochs: local epochs of the global copy per round
    lr: learning rate of the global copy
    lam: strength of the pull towards the global model
    personal_lr: learning rate of the personal model; none: as lr
    personal_epochs: local epochs of the personal model per round; none: as epochs
    weight: weight of a client in the mean: 1, or its number of training samples
    finetune: epochs of fine-tuning the personal model, without the pull, before evaluation
    finetune_lr: learning rate of fine-tuning; none: as personal_lr, or else lr
    """

    epochs: int = 3
    lr: Scalar = 0.01
    lam: Scalar = 0.75
    personal_lr: Scalar | None = None
    personal_epochs: int | None = None
    weight: Weight = "uniform"
    _: KW_ONLY
    finetune: int = 0
    finetune_lr: Scalar | None = None
    view: View = field(default="local", init=False)  # aggregation does not change the personal model; only fine-tuning does

    def __post_init__(self) -> None:
        check_choice(("uniform", "samples"), weight=self.weight)
        check_positive(lr=self.lr, personal_lr=self.personal_lr, finetune_lr=self.finetune_lr)
        check_not_negative(lam=self.lam, finetune=self.finetune)
        check_finetune_lr("Ditto", self.finetune, self.finetune_lr)
        if self.epochs < 1 or (self.personal_epochs is not None and self.personal_epochs < 1):
            raise InputError("epochs and personal_epochs must be at least 1.")
        object.__setattr__(self, "view", "merged" if self.finetune else "local")

    def init(self, params: Tree, clients: int, model: Model) -> State:
        return {"params": clone(params)}

    def join(self, work: Work, params: Tree) -> State:
        return {"params": clone(params)}

    def down(self, server: State, ids: Tensor) -> Down:
        return Down({"params": server["params"]})

    def client(self, work: Work, state: State, down: State) -> tuple[State, Up]:
        everything: Mask = dict.fromkeys(work.model.names, True)
        shared = work.train(down["params"], [Pass(everything, self.lr, e) for e in range(self.epochs)])
        passes = [Pass(everything, self._personal_lr, e) for e in range(self.personal_epochs or self.epochs)]
        own = work.train(state["params"], passes, **towards(down["params"], self.lam, work))
        return {"params": own}, Up(shared, everything, weights(work, self.weight))

    def server(self, server: State, got: Received) -> State:
        return {"params": merge(got.heard, got.mean, server["params"])}

    def local(self, state: State) -> Tree:
        return state["params"]

    def personal(self, work: Work, state: State, down: State) -> Tree:
        if not self.finetune:
            return state["params"]
        lr = self._personal_lr if self.finetune_lr is None else self.finetune_lr
        return tuned(work, state["params"], whole_passes(work, self.finetune, lr))

    def wants(self, model: Model, state: State) -> Mask:
        return dict.fromkeys(model.names, True)

    def mask(self, model: Model, state: State) -> Mask:
        """All entries of the personal model are personal; the global copy that is uploaded is another model."""
        return dict.fromkeys(model.params, True)

    @property
    def _personal_lr(self) -> Scalar:
        return self.lr if self.personal_lr is None else self.personal_lr
