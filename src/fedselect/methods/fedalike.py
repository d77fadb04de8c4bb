"""FedAlike: a shared body, and a head for each group of clients whose targets look alike."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from fedselect.core.checks import check_choice, check_not_negative, check_positive
from fedselect.core.errors import InputError
from fedselect.core.tree import Mask, Scalar, State, Tree, clone, merge
from fedselect.methods.common import Stats, tuned, weights, whole_passes
from fedselect.methods.grouping import alike, profiles
from fedselect.methods.method import Carried, Down, Method, Received, Up, View
from fedselect.models import Model
from fedselect.training.work import Work

FIND = "find"


@dataclass(frozen=True)
class FedAlike(Method):
    """Clients whose classes look alike share a head; the body is shared by all; each client fine-tunes before evaluation.

    In its first round a client tells the server what its classes look like to the untrained network, and the server groups
    clients accordingly (`grouping`). With one group this is FedAvg, with one group per client FedPer; in between, clients
    share a head with those they agree with. If you know the groups, pass them (`heads`).

    epochs: local epochs per round
    lr: learning rate
    finetune: epochs of fine-tuning; 0: no fine-tuning
    finetune_lr: learning rate of fine-tuning; none: as lr
    norm_stats: BatchNorm statistics stay with the client, or are averaged
    heads: find: the server finds the groups; or one group number per client: "0 0 1 1"
    """

    epochs: int = 3
    lr: Scalar = 0.1
    _: KW_ONLY
    finetune: int = 3
    finetune_lr: Scalar | None = 0.01
    norm_stats: Stats = "local"
    heads: str = FIND
    view: View = field(default="merged", init=False)

    def __post_init__(self) -> None:
        check_choice(("local", "shared"), norm_stats=self.norm_stats)
        check_positive(lr=self.lr, finetune_lr=self.finetune_lr)
        check_not_negative(finetune=self.finetune)
        if self.epochs < 1:
            raise InputError(f"epochs must be at least 1, not {self.epochs}.")
        if self.heads != FIND and not all(word.isdecimal() for word in self.heads.split()):
            raise InputError(f"heads must be 'find' or one group number per client, such as '0 0 1 1', not {self.heads!r}.")

    def init(self, params: Tree, clients: int, model: Model) -> State:
        model.need_head("FedAlike")
        heads = {n: v.expand(clients, *v.shape).clone() for n, v in _head(model, params).items()}
        # a group is named by its first member; clients that have not taken part yet are the group `clients`
        group = torch.full((clients,), clients, device=params[model.params[0]].device)
        if self.heads != FIND:
            told = self.heads.split()
            if len(told) != clients:
                raise InputError(f"heads has {len(told)} numbers for {clients} clients; give one number per client.")
            group = torch.tensor([[int(n) for n in told].index(int(n)) for n in told]).to(group)
        return {"params": clone(params), "heads": heads, "who": {"group": group, "shape": group.new_zeros(2)}}

    def join(self, work: Work, params: Tree) -> State:
        return {"params": clone(params), "head": {"apart": torch.zeros_like(work.ids, dtype=torch.bool)}}

    def down(self, server: State, ids: Tensor) -> Down:
        group = server["who"]["group"]
        size = torch.zeros(len(group) + 1, dtype=group.dtype, device=group.device).index_add(0, group, torch.ones_like(group))
        told = {
            "asked": group[ids] == len(group),
            "apart": size[group[ids]] < len(group),
            "shape": server["who"]["shape"].expand(len(ids), 2),
        }
        return Down({"params": server["params"]}, {"heads": {n: v[ids] for n, v in server["heads"].items()}, "told": told})

    def offers(self, server: State, clients: int) -> Down:
        """The mean of all heads, then the head of each group of two or more clients; a single client's head stays its own."""
        group = server["who"]["group"]
        names, size = torch.unique(group, return_counts=True)
        several = names[(size > 1) & (size < clients) & (names < clients)]  # `clients` marks those that have not taken part
        share = torch.cat([torch.ones_like(group[None], dtype=torch.bool), group == several[:, None]]).double()
        share = share / share.sum(1, keepdim=True)
        heads = {n: torch.tensordot(share, v.double(), 1).to(v.dtype) for n, v in server["heads"].items()}
        asked = torch.zeros(len(share), dtype=torch.bool, device=group.device)
        told = {"asked": asked, "apart": ~asked, "shape": server["who"]["shape"].expand(len(share), 2)}
        return Down({"params": server["params"]}, {"heads": heads, "told": told})

    def client(self, work: Work, state: State, down: State) -> tuple[State, Up]:
        model = work.model
        extra = {} if self.heads != FIND else {"profile": _profile(work, down["told"])}
        after = work.train(self._merged(model, state, down), whole_passes(work, self.epochs, self.lr))
        up = Up(after, self.wants(model, state), weights(work, "uniform"), {"head": _head(model, after), **extra})
        return {"params": after, "head": {"apart": down["told"]["apart"]}}, up

    def server(self, server: State, got: Received) -> State:
        at = got.ids.argsort()
        state = {**server, "params": merge(got.heard, got.mean, server["params"])}
        ids = got.ids[at].to(server["who"]["group"].device)
        if self.heads == FIND:
            state = _grouped(state, ids, {n: v[at] for n, v in got.extra["profile"].items()})
        group = state["who"]["group"]
        # clients that have not taken part yet start from the mean of all heads
        whose = torch.cat([group[ids], torch.full_like(ids, len(group))])
        count = torch.zeros(len(group) + 1, dtype=torch.float64, device=ids.device)
        count = count.index_add(0, whose, torch.ones_like(whose, dtype=torch.float64))
        heads: Tree = {}
        for n, v in server["heads"].items():
            sent = got.extra["head"][n][at].double()
            total = torch.zeros(len(count), *sent.shape[1:], dtype=sent.dtype, device=sent.device)
            mean = total.index_add(0, whose, torch.cat([sent, sent])) / _along(count.clamp_min(1), total)
            heads[n] = torch.where(_along(count[group] > 0, v), mean[group].to(v.dtype), v)
        return {**state, "heads": heads}

    def local(self, state: State) -> Tree:
        return state["params"]

    def personal(self, work: Work, state: State, down: State) -> Tree:
        tree = self._merged(work.model, state, down)
        if not self.finetune:
            return tree
        lr = self.lr if self.finetune_lr is None else self.finetune_lr
        return tuned(work, tree, whole_passes(work, self.finetune, lr))

    def wants(self, model: Model, state: State) -> Mask:
        return {n: not model.is_head(n) if n in model.params else self.norm_stats == "shared" for n in model.names}

    def mask(self, model: Model, state: State) -> Mask:
        """The head, for clients whose group is not the whole federation."""
        apart, params = state["head"]["apart"], state["params"]
        return {n: _along(apart, params[n]).expand_as(params[n]) if model.is_head(n) else False for n in model.params}

    def carries(self, model: Model, state: State) -> Mapping[str, Carried]:
        """Only the client's own BatchNorm statistics: body and head come from the server."""
        return {"params": dict.fromkeys(model.stats, self.norm_stats == "local")}

    def groups(self, server: State) -> Tensor:
        group = server["who"]["group"]
        return torch.where(group < len(group), group, -1)

    def _merged(self, model: Model, state: State, down: State) -> Tree:
        return {**merge(self.wants(model, state), down["params"], state["params"]), **down["heads"]}


def _profile(work: Work, told: Tree) -> Tree:
    """The profiles of the clients that the server asks for one; zeros for the others."""
    if not bool(told["asked"].any()):
        rows, size = told["shape"][0].tolist()
        zeros = torch.zeros(len(work.ids), rows, size, device=work.ids.device)
        return {"first": zeros, "second": zeros, "has": torch.zeros_like(zeros[..., 0], dtype=torch.bool)}
    return {n: torch.where(_along(told["asked"], v), v, torch.zeros_like(v)) for n, v in profiles(work).items()}


def _grouped(state: State, ids: Tensor, sent: Tree) -> State:
    """Store the profiles of clients that take part for the first time, and group all clients with a known profile."""
    group = state["who"]["group"]
    new = group[ids] == len(group)
    if not bool(new.any()):
        return state
    known = state.get("profiles") or {n: v.new_zeros(len(group), *v.shape[1:]) for n, v in sent.items()}
    known = {n: v.index_copy(0, ids[new], sent[n][new]) for n, v in known.items()}
    here = (group < len(group)).index_fill(0, ids[new], True).nonzero().flatten()
    group = group.index_copy(0, here, here[alike(*(known[n][here] for n in ("first", "second", "has")))])
    shape = group.new_tensor(sent["first"].shape[1:])
    out = {k: t for k, t in state.items() if k != "profiles"} | {"who": {"group": group, "shape": shape}}
    return out if len(here) == len(group) else out | {"profiles": known}


def _head(model: Model, tree: Tree) -> Tree:
    """The parameters that clients share only with their group."""
    return {n: tree[n] for n in model.params if model.is_head(n)}


def _along(each: Tensor, like: Tensor) -> Tensor:
    """One value per row, shaped to broadcast with it."""
    return each.view(-1, *[1] * (like.ndim - 1))
