"""LotteryFL: each client prunes the global model to its own ticket; entries are averaged over the clients that keep them."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from fedselect.core.checks import check_choice, check_positive, check_shares
from fedselect.core.errors import InputError
from fedselect.core.tree import Mask, Scalar, State, Tree, clone, entries, merge, rows
from fedselect.methods.common import Stats, Weight, weights
from fedselect.methods.method import Carried, Down, Method, Received, Up, View
from fedselect.methods.select import top
from fedselect.models import Model
from fedselect.training.work import Pass, Work


@dataclass(frozen=True)
class LotteryFL(Method):
    """Each client prunes its smallest weights once it is accurate enough, and trains the weights it keeps.

    A ticket is the global model times the client's mask. If its accuracy on validation data is above `above` and the kept
    share above `floor`, the share `rate` of the smallest weights is pruned, tensor by tensor, and the rest restarts from its
    initial values.

    epochs: local epochs per round
    lr: learning rate
    rate: share of the kept weights pruned at a time in each tensor, rounded down
    floor: prune only while the kept share of the weights is above this
    above: prune only if validation accuracy is above this
    weight: weight of a client in the mean: 1, or its number of training samples
    norm_stats: BatchNorm statistics stay with the client, or are averaged
    view: reported model: after local training, or merged with the aggregate
    """

    epochs: int = 3
    lr: Scalar = 0.01
    rate: Scalar = 0.2
    floor: Scalar = 0.5
    above: Scalar = 0.2
    _: KW_ONLY
    weight: Weight = "uniform"
    norm_stats: Stats = "shared"
    view: View = "merged"

    def __post_init__(self) -> None:
        check_choice(("uniform", "samples"), weight=self.weight)
        check_choice(("local", "shared"), norm_stats=self.norm_stats)
        check_choice(("local", "merged"), view=self.view)
        check_positive(lr=self.lr)
        check_shares(rate=self.rate, floor=self.floor, above=self.above)
        if self.epochs < 1:
            raise InputError(f"epochs must be at least 1, not {self.epochs}.")

    def init(self, params: Tree, clients: int, model: Model) -> State:
        return {"params": clone(params)}

    def join(self, work: Work, params: Tree) -> State:
        work.need_val()
        kept = {n: torch.ones_like(params[n], dtype=torch.bool) for n in work.model.params if params[n].ndim > 2}
        return {"params": clone(params), "kept": kept}

    def down(self, server: State, ids: Tensor) -> Down:
        return Down({"params": server["params"]})

    def client(self, work: Work, state: State, down: State) -> tuple[State, Up]:
        kept, model = state["kept"], work.model
        ticket = self.personal(work, state, down)
        count = entries(kept, kept)
        share = count.double() / sum(m[0].numel() for m in kept.values())
        ready = (work.metric("accuracy", ticket) > self.above) & (share > self.floor)
        pruned = {n: prune(m, ticket[n].abs(), self.rate, ready) for n, m in kept.items()}
        fewer = entries(pruned, kept) < count  # clients that pruned restart from the initial values
        initial = work.initial
        start = {n: torch.where(_by(fewer, v), initial[n], v) if n in model.params else v for n, v in ticket.items()}
        start = {n: torch.where(pruned[n], v, 0.0) if n in pruned else v for n, v in start.items()}
        only: Mask = {n: pruned.get(n, True) for n in model.params}
        after = work.train(start, [Pass(only, self.lr, e) for e in range(self.epochs)])
        new = {"params": after, "kept": pruned}
        return new, Up(after, self.wants(model, new), weights(work, self.weight))

    def server(self, server: State, got: Received) -> State:
        return {"params": merge(got.heard, got.mean, server["params"])}

    def local(self, state: State) -> Tree:
        return state["params"]

    def personal(self, work: Work, state: State, down: State) -> Tree:
        merged = merge(self.wants(work.model, state), down["params"], state["params"])
        return {n: torch.where(state["kept"][n], v, 0.0) if n in state["kept"] else v for n, v in merged.items()}

    def wants(self, model: Model, state: State) -> Mask:
        local = set(model.stats) if self.norm_stats == "local" else set()
        return {n: state["kept"].get(n, n not in local) for n in model.names}

    def mask(self, model: Model, state: State) -> Mask:
        """The entries that a client does not share: those it pruned."""
        return {n: ~state["kept"][n] if n in state["kept"] else False for n in model.params}

    def carries(self, model: Model, state: State) -> Mapping[str, Carried]:
        """Only the client's own BatchNorm statistics: the values of the ticket come from the server."""
        return {"params": dict.fromkeys(model.stats, self.norm_stats == "local")}


def prune(kept: Tensor, size: Tensor, rate: Scalar, who: Tensor) -> Tensor:
    """`kept` without its share `rate` of smallest entries, rounded down, for clients in `who`; ties prune the earlier entry."""
    held = rows(kept)
    share = torch.as_tensor(rate, dtype=torch.float64, device=kept.device)
    count = (share * held.sum(1) + 1e-9).floor().to(torch.int64) * who
    gone = top((-rows(size)).masked_fill(~held, -torch.inf), count)
    return (held & ~gone).view_as(kept)


def _by(who: Tensor, like: Tensor) -> Tensor:
    return who.view(-1, *[1] * (like.ndim - 1))
