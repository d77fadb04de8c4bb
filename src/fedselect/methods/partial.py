"""Partial: all methods that keep some entries personal and average the others.

A boolean mask marks the personal entries. None personal is FedAvg, all of them Local, the head FedPer, FedRep and FedBABU, the
body LG-FedAvg, the norm layers FedBN; FedSelect learns the mask, entry by entry.
"""

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from torch import Tensor

from fedselect.core.checks import check_choice, check_not_negative, check_positive, check_shares
from fedselect.core.errors import InputError
from fedselect.core.tree import Mask, Scalar, State, Tree, clone, merge, negate
from fedselect.methods.common import (
    Answers,
    Stats,
    Weight,
    check_finetune_view,
    head_bias,
    only_own,
    towards,
    tuned,
    weights,
)
from fedselect.methods.method import Carried, Down, Method, Received, Up, View
from fedselect.methods.select import Selector, Which, nothing
from fedselect.models import Model
from fedselect.training.step import Rate
from fedselect.training.work import Pass, Work

Phases = tuple[tuple[Literal["personal", "shared", "all"], int], ...]
"""Which part trains for how many epochs, in order. Each part counts its own epochs: the i-th epoch of the personal part and
the i-th of the shared part use the same batches, as in the paper's LocalAlt."""


@dataclass(frozen=True)
class Partial(Method):
    """Train in phases, average each shared entry over the clients that share it, and let the selector grow the mask.

    If the mask grows in a round, it takes effect in the next one: an added entry starts there from the aggregate, because
    merging uses the mask of the last training.
    """

    select: Selector
    phases: Phases
    lr: Scalar = 0.01
    personal_lr: Scalar | None = None  # None: as lr
    weight: Weight = "uniform"
    norm_stats: Stats = "local"
    _: KW_ONLY
    finetune: Phases = ()  # fine-tuning of the merged model before evaluation; not stored
    finetune_lr: Scalar | None = None
    mu: Scalar = 0.0  # pull towards the merged model: 0.5 mu ||w - w_t||^2
    server_average: Scalar = 0.0  # decay of a moving average of the aggregate, used instead of it in the merged model
    freeze: Which = nothing  # parameters that keep their initial value until fine-tuning
    answers: Answers = "all"  # own: the merged model predicts only classes that the client trains on
    view: View = "local"

    def __post_init__(self) -> None:
        check_choice(("uniform", "samples"), weight=self.weight)
        check_choice(("local", "shared"), norm_stats=self.norm_stats)
        check_choice(("local", "merged"), view=self.view)
        check_choice(("all", "own"), answers=self.answers)
        check_positive(lr=self.lr, personal_lr=self.personal_lr, finetune_lr=self.finetune_lr)
        check_not_negative(mu=self.mu)
        check_shares(server_average=self.server_average)
        if sum(epochs for _, epochs in self.phases) < 1:
            raise InputError("epochs must be at least 1, or nothing would be trained.")
        for part, epochs in (*self.phases, *self.finetune):
            if epochs < 0:
                raise InputError(f"the epochs of the {part} phase must not be negative, not {epochs}.")
        check_finetune_view(sum(epochs for _, epochs in self.finetune), self.view)
        if self.view == "local" and self.answers == "own":
            raise InputError("answers=own changes the merged model, which view=local does not report; use view=merged.")
        if _given(self.server_average):
            if bool(torch.as_tensor(self.server_average >= 1).any()):
                raise InputError(f"server_average must be less than 1, not {self.server_average}, or it would never change.")
            if self.view == "local":
                raise InputError("server_average changes the merged model, which view=local does not report; use view=merged.")

    def init(self, params: Tree, clients: int, model: Model) -> State:
        if isinstance(self.server_average, Tensor) and self.server_average.ndim:
            raise InputError("server_average is an option of the server; give one number, not one per client.")
        if self.answers == "own":
            head_bias(model)  # raises if there is none
        state: State = {"params": clone(params)}
        if _given(self.server_average):
            state |= {"average": clone(params), "past": {"rounds": torch.zeros_like(params[model.params[0]].sum())}}
        return state

    def join(self, work: Work, params: Tree) -> State:
        if self.answers == "own":
            work.need_classes()
        memory = self.select.start(work, params)
        return {"params": clone(params), **memory, **({"kept": clone(memory["mask"])} if "mask" in memory else {})}

    def down(self, server: State, ids: Tensor) -> Down:
        return Down({k: server[k] for k in ("params", "average") if k in server})

    def client(self, work: Work, state: State, down: State) -> tuple[State, Up]:
        before = merge(self._kept(work.model, state), state["params"], down["params"])
        memory = {k: v for k, v in state.items() if k not in ("params", "kept")}
        memory = self.select.begin(work, memory, down["params"])
        mask = self._full(work.model, memory)
        shared = negate(mask)
        passes = list(self._passes(self.phases, mask, work, self.lr, self.personal_lr, self.freeze))

        def train(door: Work) -> Tree:
            return door.train(before, passes, **towards(before, self.mu, work))

        after, memory = self.select.grow(work, memory, before, train)
        kept = {"kept": {n: m for n, m in mask.items() if isinstance(m, Tensor)}} if "mask" in memory else {}
        return {"params": after, **memory, **kept}, Up(after, shared, weights(work, self.weight))

    def server(self, server: State, got: Received) -> State:
        state: State = {"params": merge(got.heard, got.mean, server["params"])}
        if "average" in server:
            past = server["past"]["rounds"] + 1
            step = (1 - self.server_average) / (1 - self.server_average**past)  # unbiased: the first aggregate replaces it
            state["average"] = {n: v + step.to(v.dtype) * (state["params"][n] - v) for n, v in server["average"].items()}
            state["past"] = {"rounds": past}
        return state

    def local(self, state: State) -> Tree:
        return state["params"]

    def personal(self, work: Work, state: State, down: State) -> Tree:
        kept = self._kept(work.model, state)
        merged = merge(kept, state["params"], down.get("average", down["params"]))
        if self.answers == "own":
            merged = only_own(work, merged)
        if not self.finetune:
            return merged
        lr = self.lr if self.finetune_lr is None else self.finetune_lr
        return tuned(work, merged, list(self._passes(self.finetune, kept, work, lr, None)))

    def wants(self, model: Model, state: State) -> Mask:
        return negate(self._kept(model, state))

    def mask(self, model: Model, state: State) -> Mask:
        return self.select.mask(model, state)

    def persistence(self, state: State) -> Tree:
        return state.get("persistence", {})

    def carries(self, model: Model, state: State) -> Mapping[str, Carried]:
        """The entries that merging takes from the client; the mask of the last training lies within the current one."""
        if "kept" not in state:
            return {"params": {n: m is not False for n, m in self._kept(model, state).items()}}
        params = {n: m if isinstance(m, bool) else "kept" for n, m in self._kept(model, state).items()}
        return {"params": params, "kept": dict.fromkeys(state["kept"], "mask")}

    def _kept(self, model: Model, state: State) -> Mask:
        """The mask of the client's last training."""
        return self._full(model, {**state, "mask": state["kept"]} if "kept" in state else state)

    def _full(self, model: Model, memory: State) -> Mask:
        return {**self.select.mask(model, memory), **dict.fromkeys(model.stats, self.norm_stats == "local")}

    def _passes(
        self,
        phases: Phases,
        mask: Mask,
        work: Work,
        lr: Scalar,
        personal_lr: Scalar | None,
        freeze: Which = nothing,
    ) -> Iterator[Pass]:
        own = lr if personal_lr is None else personal_lr
        mixed = own is not lr and any(part == "all" for part, _ in phases)
        rates: dict[str, Rate] = {"personal": own, "shared": lr, "all": _joint(mask, own, lr) if mixed else lr}
        only: dict[str, Mask] = {"personal": mask, "shared": negate(mask), "all": dict.fromkeys(work.model.params, True)}
        if frozen := [n for n in work.model.params if freeze(work.model, n)]:
            only = {part: {**marks, **dict.fromkeys(frozen, False)} for part, marks in only.items()}
        walked = dict.fromkeys(only, 0)
        for part, epochs in phases:
            for _ in range(epochs):
                yield Pass(only[part], rates[part], walked[part])
                walked[part] += 1


def _given(value: Scalar) -> bool:
    return isinstance(value, Tensor) or value > 0


def _joint(mask: Mask, own: Scalar, lr: Scalar) -> Rate:
    """Learning rates per entry for epochs that train both parts together."""

    def pick(m: bool | Tensor) -> Scalar:
        if isinstance(m, bool):
            return own if m else lr
        own_, lr_ = (torch.as_tensor(v, dtype=torch.float64, device=m.device).view(-1, *[1] * (m.ndim - 1)) for v in (own, lr))
        return torch.where(m, own_, lr_)

    return {n: pick(m) for n, m in mask.items()}
