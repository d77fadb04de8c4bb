"""FedPAC: a shared body, features aligned to class prototypes, and for each client a mixture of all clients' heads."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from fedselect.core.checks import check_choice, check_not_negative, check_positive
from fedselect.core.errors import InputError
from fedselect.core.tree import Mask, Scalar, State, Tree, clone, merge
from fedselect.methods.common import (
    Stats,
    Weight,
    check_finetune_lr,
    check_finetune_view,
    per_row,
    tuned,
    weights,
    whole_passes,
)
from fedselect.methods.method import Carried, Down, Method, Received, Up, View
from fedselect.models import Model
from fedselect.tasks.losses import align
from fedselect.training.work import Pass, Work


@dataclass(frozen=True)
class FedPAC(Method):
    """Average the body, align features to class prototypes, and give each client the best mixture of all heads.

    Client: measure statistics of the received model; train the head for `head_epochs` with the body frozen; train the body for
    `epochs` with the head frozen and lam * MSE(feature, prototype of the label) added to the loss (not in the first round);
    compute prototypes with the trained model.
    Server: average prototypes by class counts; head_i = sum_j a_j head_j with a = argmin a'(diag(v) + D_i) a on the simplex.

    epochs: local epochs of the body per round
    head_epochs: local epochs of the head per round
    lr: learning rate of the body
    head_lr: learning rate of the head; none: as lr
    lam: strength of the alignment
    finetune: epochs of fine-tuning the merged model before evaluation; needs view=merged
    finetune_lr: learning rate of fine-tuning; none: as lr
    weight: weight of a client in the mean of bodies: 1, or its number of training samples
    norm_stats: BatchNorm statistics stay with the client, or are averaged
    view: reported model: after local training, or merged with the aggregate
    """

    epochs: int = 3
    head_epochs: int = 1
    lr: Scalar = 0.01
    head_lr: Scalar | None = None
    lam: Scalar = 1.0
    _: KW_ONLY
    finetune: int = 0
    finetune_lr: Scalar | None = None
    weight: Weight = "samples"
    norm_stats: Stats = "local"
    view: View = "local"
    not_negative = ("prototypes/count", "statistics/v")  # with a negative variance there is no best mixture

    def __post_init__(self) -> None:
        check_choice(("uniform", "samples"), weight=self.weight)
        check_choice(("local", "shared"), norm_stats=self.norm_stats)
        check_choice(("local", "merged"), view=self.view)
        check_positive(lr=self.lr, head_lr=self.head_lr, finetune_lr=self.finetune_lr)
        check_not_negative(lam=self.lam, head_epochs=self.head_epochs, finetune=self.finetune)
        check_finetune_lr("FedPAC", self.finetune, self.finetune_lr)
        check_finetune_view(self.finetune, self.view)
        if self.epochs < 1:
            raise InputError(f"epochs must be at least 1, not {self.epochs}.")

    def init(self, params: Tree, clients: int, model: Model) -> State:
        model.need_head("FedPAC")
        heads = {n: v.expand(clients, *v.shape).clone() for n, v in self._head(model, params).items()}
        return {"params": clone(params), "heads": heads}

    def join(self, work: Work, params: Tree) -> State:
        work.need_classes()
        return {"params": clone(params)}

    def down(self, server: State, ids: Tensor) -> Down:
        shared = {k: v for k, v in server.items() if k != "heads"}
        return Down(shared, {"head": {n: v[ids] for n, v in server["heads"].items()}})

    def client(self, work: Work, state: State, down: State) -> tuple[State, Up]:
        model = work.model
        tree = self._merged(model, state, down)
        seen = work.class_moments(tree)
        share = seen["count"] / work.n.unsqueeze(-1)
        h = share.unsqueeze(-1) * seen["mean"]
        v = ((share * seen["square"]).sum(-1) - (h**2).sum((-2, -1))).clamp_min(0.0) / work.n
        heads: Mask = {n: model.is_head(n) for n in model.names}
        bodies: Mask = {n: not model.is_head(n) for n in model.names}
        head_lr = self.lr if self.head_lr is None else self.head_lr
        tree = work.train(tree, [Pass(heads, head_lr, e) for e in range(self.head_epochs)], key="head")
        passes = [Pass(bodies, self.lr, e) for e in range(self.epochs)]
        if "prototypes" in down:
            known = down["prototypes"]["count"].unsqueeze(-1) > 0
            points = torch.where(known, down["prototypes"]["mean"], seen["mean"])
            ctx = {"align": {"prototypes": points, "lam": per_row(self.lam, points)}}
            tree = work.train(tree, passes, penalty=align, ctx=ctx)
        else:
            tree = work.train(tree, passes)
        after = work.class_moments(tree)
        extra = {
            "head": self._head(model, tree),
            "prototypes": {"mean": after["mean"], "count": after["count"]},
            "statistics": {"h": h, "v": v},
        }
        return {"params": tree}, Up(tree, self.wants(model, state), weights(work, self.weight), extra)

    def server(self, server: State, got: Received) -> State:
        a = mixtures(got.extra["statistics"]["h"], got.extra["statistics"]["v"])
        heads = clone(server["heads"])
        for n, sent in got.extra["head"].items():
            heads[n][got.ids] = torch.einsum("ij,j...->i...", a, sent.double()).to(sent.dtype)
        means, counts = got.extra["prototypes"]["mean"].double(), got.extra["prototypes"]["count"].double()
        total = counts.sum(0)  # a class that no client has keeps count 0: absent
        points = (counts.unsqueeze(-1) * means).sum(0) / total.clamp_min(1.0).unsqueeze(-1)
        dtype = got.extra["prototypes"]["mean"].dtype
        prototypes = {"mean": points.to(dtype), "count": total.to(dtype)}
        return {"params": merge(got.heard, got.mean, server["params"]), "heads": heads, "prototypes": prototypes}

    def local(self, state: State) -> Tree:
        return state["params"]

    def personal(self, work: Work, state: State, down: State) -> Tree:
        merged = self._merged(work.model, state, down)
        if not self.finetune:
            return merged
        lr = self.lr if self.finetune_lr is None else self.finetune_lr
        return tuned(work, merged, whole_passes(work, self.finetune, lr))

    def wants(self, model: Model, state: State) -> Mask:
        return {n: not model.is_head(n) and not self._stays(model, n) for n in model.names}

    def mask(self, model: Model, state: State) -> Mask:
        return {n: model.is_head(n) for n in model.params}

    def carries(self, model: Model, state: State) -> Mapping[str, Carried]:
        """Only the client's own BatchNorm statistics: body and head come from the server."""
        return {"params": dict.fromkeys(model.stats, self.norm_stats == "local")}

    def _merged(self, model: Model, state: State, down: State) -> Tree:
        return {**merge(self.wants(model, state), down["params"], state["params"]), **down["head"]}

    def _head(self, model: Model, tree: Tree) -> Tree:
        """The parameters that the server mixes: the head."""
        return {n: v for n, v in tree.items() if model.is_head(n) and not self._stays(model, n)}

    def _stays(self, model: Model, name: str) -> bool:
        """Whether this is a statistic that never leaves the client."""
        return self.norm_stats == "local" and name in model.stats


def mixtures(h: Tensor, v: Tensor) -> Tensor:
    """Each client's weights for all clients' heads, (m, m): rows are non-negative and sum to 1; weights below 1e-3 become 0.

    h (m, K, D): class shares times class feature means; v (m,): variance of this estimate.
    """
    flat = h.double().flatten(1)
    flat = flat - flat.mean(0)  # only differences matter; centered, fewer digits cancel
    gram = flat @ flat.T
    own = gram.diagonal()
    d = own.view(-1, 1, 1) - gram.unsqueeze(1) - gram.unsqueeze(2) + gram.unsqueeze(0)  # (h_i - h_j) . (h_i - h_l)
    a = simplex_qp(d + torch.diag(v.double()))
    kept = torch.where(a > 1e-3, a, 0.0)
    kept = torch.where(kept.sum(1, keepdim=True) > 0, kept, a)  # with over a thousand equal weights, none exceeds 1e-3
    return kept / kept.sum(1, keepdim=True)


def simplex_qp(p: Tensor, steps: int = 60) -> Tensor:
    """argmin a'Pa, a >= 0, sum a = 1 for a batch of positive semi-definite P (B, m, m): a primal-dual interior-point method."""
    m = p.shape[-1]
    q = 2.0 * p / p.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-300).view(-1, 1, 1)
    a = torch.full(p.shape[:-1], 1.0 / m, dtype=p.dtype, device=p.device)
    s, y = torch.ones_like(a), torch.zeros_like(a[:, :1])
    ones = torch.ones_like(a).unsqueeze(-1)
    for _ in range(steps):
        gap = (a * s).mean(-1, keepdim=True)
        if float(gap.max()) < 1e-13:
            break
        dual = (q @ a.unsqueeze(-1)).squeeze(-1) - y - s
        centre = 0.1 * gap - a * s
        system = q + torch.diag_embed(s / a)
        both = torch.linalg.solve(system, torch.cat([(centre / a - dual).unsqueeze(-1), ones], -1))
        u, w = both[..., 0], both[..., 1]
        dy = (1.0 - a.sum(-1, keepdim=True) - u.sum(-1, keepdim=True)) / w.sum(-1, keepdim=True)
        da = u + w * dy
        ds = (centre - s * da) / a
        reach = torch.cat([_reach(a, da), _reach(s, ds)], -1).amin(-1, keepdim=True)
        length = (0.99 * reach).clamp_max(1.0)
        a, s, y = a + length * da, s + length * ds, y + length * dy
    return a / a.sum(-1, keepdim=True)


def _reach(value: Tensor, change: Tensor) -> Tensor:
    """How far each entry can move before it becomes negative."""
    return torch.where(change < 0, -value / change, torch.inf)
