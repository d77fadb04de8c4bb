"""FedAlike: a shared body, and a head for each group of clients that pull it the same way."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from fedselect.core.checks import check_choice, check_not_negative, check_positive
from fedselect.core.errors import InputError
from fedselect.core.tree import Mask, Scalar, State, Tree, clone, merge, rows
from fedselect.methods.common import Stats, tuned, weights, whole_passes
from fedselect.methods.grouping import alike, output_of, outputs
from fedselect.methods.method import Carried, Down, Method, Received, Up, View
from fedselect.models import Model
from fedselect.tasks import Classification
from fedselect.training.work import Work

HALVES = ("first", "second")
FIND = "find"


@dataclass(frozen=True)
class FedAlike(Method):
    """Clients that pull the head the same way share one; the body is shared by all; each client fine-tunes at the end.

    In its first `window` rounds a client shares everything and trains on either half of its samples, as two clients would.
    The server then groups clients by how their halves pulled the head, in the rows of classes that they have (`grouping`). One
    group is FedAvg, a group for each client FedPer; in between, clients share a head with those they agree with. Whoever knows
    the groups can say so (`heads`).

    window: rounds of a client before it is grouped; 0: all share one head
    epochs: passes over the client's training data a round
    lr: learning rate
    finetune: passes of fine-tuning; 0: no fine-tuning
    finetune_lr: learning rate of fine-tuning; none: as lr
    norm_stats: BatchNorm statistics stay with the client, or are averaged
    heads: find out who shares a head, or a number for each client: "0 0 1 1"
    """

    window: int = 10
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
        check_not_negative(window=self.window, finetune=self.finetune)
        if self.epochs < 1:
            raise InputError(f"epochs must be at least 1, not {self.epochs}.")
        if self.heads != FIND and not all(word.isdecimal() for word in self.heads.split()):
            raise InputError(f"heads is find, or a number for each client as in '0 0 1 1', not {self.heads!r}.")

    def init(self, params: Tree, clients: int, model: Model) -> State:
        model.need_head("FedAlike")
        if self.heads != FIND and len(self.heads.split()) != clients:
            raise InputError(f"heads has {len(self.heads.split())} numbers for {clients} clients; give one for each.")
        heads = {n: v.expand(clients, *v.shape).clone() for n, v in _head(model, params).items()}
        who = torch.zeros(clients, dtype=torch.int64, device=params[model.params[0]].device)
        # a group is named by its first member; those who are not tested yet are the group `clients`
        group = torch.full_like(who, clients)
        has = torch.zeros(clients, outputs(model), dtype=torch.bool, device=who.device)
        if self.heads != FIND and not self.window:
            group = self._alike(torch.arange(clients), {}, has).to(group)
        state: State = {"params": clone(params), "heads": heads, "who": {"pulls": who, "group": group, "has": has}}
        sums = {half: {n: torch.zeros_like(v, dtype=torch.float64) for n, v in heads.items()} for half in HALVES}
        return state | (sums if self.window else {})

    def join(self, work: Work, params: Tree) -> State:
        return {"params": clone(params), "head": {"apart": torch.zeros_like(work.ids, dtype=torch.bool)}}

    def down(self, server: State, ids: Tensor) -> Down:
        pulls, group = server["who"]["pulls"], server["who"]["group"]
        size = torch.zeros(len(group) + 1, dtype=group.dtype, device=group.device).index_add(0, group, torch.ones_like(group))
        halves = (pulls[ids] < self.window) & (self.heads == FIND)
        told = {"halves": halves, "apart": size[group[ids]] < len(group)}
        return Down({"params": server["params"]}, {"heads": {n: v[ids] for n, v in server["heads"].items()}, "told": told})

    def client(self, work: Work, state: State, down: State) -> tuple[State, Up]:
        model, tree = work.model, self._merged(work.model, state, down)
        passes, halved = whole_passes(work, self.epochs, self.lr), down["told"]["halves"]
        if bool(halved.any()):
            halves = work.half(0, halved), work.half(1, halved)
            first, second = (half.train(tree, passes) for half in halves)
            work.loss = (halves[0].loss + halves[1].loss) / 2
            after = {n: torch.lerp(v, second[n], 0.5) for n, v in first.items()}
        else:
            first = second = after = work.train(tree, passes)
        extra = {"first": _head(model, first), "second": _head(model, second)}
        has = _classes(work, outputs(model)) | ~halved.unsqueeze(1)  # after the window nobody needs to know
        extra["classes"] = {"has": has}
        up = Up(after, self.wants(model, state), weights(work, "uniform"), extra)
        return {"params": after, "head": {"apart": down["told"]["apart"]}}, up

    def server(self, server: State, got: Received) -> State:
        at = got.ids.argsort()
        ids = got.ids[at].to(server["who"]["group"].device)
        sent = {half: {n: v[at].double() for n, v in got.extra[half].items()} for half in HALVES}
        state = {**server, "params": merge(got.heard, got.mean, server["params"])}
        state = self._watched(state, ids, sent, got.extra["classes"]["has"][at])
        group = state["who"]["group"]
        whose = group[ids]
        count = torch.zeros(len(group) + 1, dtype=torch.float64, device=ids.device).index_add(
            0, whose, torch.ones_like(whose, dtype=torch.float64)
        )
        heard = count[group] > 0
        heads: Tree = {}
        for n, v in server["heads"].items():
            own = (sent["first"][n] + sent["second"][n]) / 2
            total = torch.zeros(len(count), *own.shape[1:], dtype=own.dtype, device=own.device).index_add(0, whose, own)
            mean = total / _along(count.clamp_min(1), total)
            heads[n] = torch.where(_along(heard, v), mean[group].to(v.dtype), v)
        return {**state, "heads": heads}

    def _watched(self, state: State, ids: Tensor, sent: State, has: Tensor) -> State:
        """Take in the pulls of clients that are in their window, and group those who have come to its end."""
        pulls, group = state["who"]["pulls"], state["who"]["group"]
        some = pulls[ids] < self.window
        if int(some.sum()) < 2:  # a pull is against others
            return state
        ids, sent = ids[some], {half: {n: v[some] for n, v in sent[half].items()} for half in HALVES}
        has = state["who"]["has"].index_copy(0, ids, has[some].to(ids.device))
        # one sample has no halves: its pull, less the mean of either, would look like one without noise
        cut = torch.stack([rows(v != sent["second"][n]).any(1) for n, v in sent["first"].items()]).any(0)
        sums: State = {}
        for half in HALVES:
            own = {n: torch.where(_along(cut, v), v - v.mean(0), 0.0) for n, v in sent[half].items()}
            sums[half] = {n: v.index_add(0, ids, own[n]) for n, v in state[half].items()}
        pulls = pulls.index_add(0, ids, torch.ones_like(ids))
        done = (pulls >= self.window).nonzero().flatten()
        if bool((group[done] == len(group)).any()):
            group = group.index_copy(0, done, done[self._alike(done, sums, has).to(done.device)])
        out = {k: t for k, t in state.items() if k not in HALVES} | {"who": {"pulls": pulls, "group": group, "has": has}}
        return out if len(done) == len(group) else out | sums

    def _alike(self, ids: Tensor, sums: State, has: Tensor) -> Tensor:
        """Of these clients, the place of the first one that each shares its head with."""
        if self.heads == FIND:
            first, second = (torch.cat([rows(v[ids]) for v in sums[half].values()], 1) / self.window for half in HALVES)
            return alike(first, second, has[ids], output_of(sums["first"], has.shape[1]))
        told = self.heads.split()
        mine = [int(told[i]) for i in ids.tolist()]
        return torch.tensor([mine.index(number) for number in mine])

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
        """The head of a client whose group is not everybody."""
        apart, params = state["head"]["apart"], state["params"]
        return {n: _along(apart, params[n]).expand_as(params[n]) if model.is_head(n) else False for n in model.params}

    def carries(self, model: Model, state: State) -> Mapping[str, Carried]:
        """Of the model only statistics of the client's own: body and head come from the server."""
        return {"params": dict.fromkeys(model.stats, self.norm_stats == "local")}

    def groups(self, server: State) -> Tensor:
        return torch.where(server["who"]["group"] < len(server["who"]["group"]), server["who"]["group"], -1)

    def _merged(self, model: Model, state: State, down: State) -> Tree:
        return {**merge(self.wants(model, state), down["params"], state["params"]), **down["heads"]}


def _head(model: Model, tree: Tree) -> Tree:
    """What clients share with their group alone."""
    return {n: tree[n] for n in model.params if model.is_head(n)}


def _classes(work: Work, outputs: int) -> Tensor:
    """Which classes each client has: (C, outputs); in other tasks every output is everybody's."""
    if isinstance(work.task, Classification):
        return work.classes(outputs)
    return torch.ones(len(work.ids), outputs, dtype=torch.bool, device=work.ids.device)


def _along(each: Tensor, like: Tensor) -> Tensor:
    """One value for each row, shaped to meet it."""
    return each.view(-1, *[1] * (like.ndim - 1))
