"""Selectors: which entries of a client's model are personal, at first and as training goes on."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from fedselect import kernels
from fedselect.core import random
from fedselect.core.checks import check_choice, check_shares
from fedselect.core.errors import InputError, nearest
from fedselect.core.names import matching
from fedselect.core.shown import Shown
from fedselect.core.tree import Mask, Scalar, State, Tree, count, lay, matrix, rows, together
from fedselect.methods.units import units_of
from fedselect.models import Model
from fedselect.training.work import Work

Which = Callable[[Model, str], bool]
"""Whether an entry named so is personal, in this model."""
Train = Callable[[Work], Tree]
"""This round's local training, of the data that this door leads to: the model that comes out."""
Start = Literal["nothing", "head", "norms", "head+norms"]


def nothing(model: Model, name: str) -> bool:
    return False


def everything(model: Model, name: str) -> bool:
    return True


def head(model: Model, name: str) -> bool:
    model.need_head("a method that keeps the head or the body personal")
    return model.is_head(name)


def body(model: Model, name: str) -> bool:
    return not head(model, name)


def norms(model: Model, name: str) -> bool:
    return name in model.norms


def not_convolutions(model: Model, name: str) -> bool:
    """Everything but convolution kernels and their biases."""
    return name not in model.convolutions


class Selector(Protocol):
    """Growing masks live in the client's state, entry by entry; fixed ones are known to everybody and stored nowhere."""

    def start(self, work: Work, params: Tree) -> State:
        """What a client that joins must remember."""

    def mask(self, model: Model, memory: State) -> Mask:
        """The mask over the model's parameters."""

    def begin(self, work: Work, memory: State, received: Tree) -> State:
        """The memory to train this round with, now that the shared values are known."""

    def grow(self, work: Work, memory: State, before: Tree, train: Train) -> tuple[Tree, State]:
        """This round's local training, from `before` to `train(work)`, and the memory for the next round."""


@dataclass(frozen=True)
class Fixed(Shown):
    """The same whole tensors for every client, from the start or after some rounds in which nothing is personal."""

    personal: Which
    after: int = 0

    def __post_init__(self) -> None:
        if self.after < 0:
            raise InputError(f"the rounds before anything is personal must not be negative, not {self.after}.")

    def start(self, work: Work, params: Tree) -> State:
        return {"mask": empty(work, params)} if self.after else {}

    def mask(self, model: Model, memory: State) -> Mask:
        return dict(memory["mask"]) if self.after else {n: self.personal(model, n) for n in model.params}

    def begin(self, work: Work, memory: State, received: Tree) -> State:
        if not self.after or work.round < self.after:
            return memory
        return {"mask": {n: torch.full_like(m, self.personal(work.model, n)) for n, m in memory["mask"].items()}}

    def grow(self, work: Work, memory: State, before: Tree, train: Train) -> tuple[Tree, State]:
        return train(work), memory


@dataclass(frozen=True, kw_only=True)
class Reading(Shown):
    """How FedSelect's rule is read where the paper leaves it open.

    scope: one threshold over all of a client's entries, or one for each tensor
    share: rate is a share of the entries still shared, or of all
    strict: never pass the limit; no: checked over the whole model before growing, may be passed
    since: movement in this round, or from the round after the last growth on
    every: grow every so many rounds
    first: the first round that grows the mask, counted from 0
    weights_only: yes: vectors (biases, norm layers) are never selected
    counts: rate and limit are shares of all entries, or of those that can ever move
    start_with: what is personal from the first round on
    unit: what joins at a time: an entry, or a rank of an adapter (a column of B and a row of A) and any other layer as a whole;
        rate and limit are then shares of these
    relative: movement Δ as it is, or divided by the root mean square, in its tensor, of Δ over the shared entries, or of all
        weights
    """

    scope: Literal["global", "tensor"] = "global"
    share: Literal["shared", "all"] = "shared"
    strict: bool = True
    since: Literal["round", "update"] = "round"
    every: int = 1
    first: int = 0
    weights_only: bool = False
    counts: Literal["all", "live"] = "all"
    start_with: Start = "nothing"
    relative: Literal["no", "tensor", "weights"] = "no"
    unit: Literal["entry", "rank"] = "entry"


@dataclass(frozen=True)
class DeltaSelect(Reading):
    """FedSelect's choice: of the entries still shared, those that moved most in local training become personal.

    rate   p: the share of entries that joins at a time        limit  alpha: the largest personal share
    by     most | least moved | random (the ablation)          and how the rule is read: see Reading
    """

    rate: Scalar = 0.05
    limit: Scalar = 0.30
    by: Literal["most", "least", "random"] = "most"

    def __post_init__(self) -> None:
        check_shares(rate=self.rate, limit=self.limit)
        check_choice(("most", "least", "random"), by=self.by)
        check_choice(("global", "tensor"), scope=self.scope)
        check_choice(("shared", "all"), share=self.share)
        check_choice(("round", "update"), since=self.since)
        check_choice(("all", "live"), counts=self.counts)
        check_choice(get_args(Start), start_with=self.start_with)
        check_choice(("no", "tensor", "weights"), relative=self.relative)
        check_choice(("entry", "rank"), unit=self.unit)
        if self.unit == "rank" and (self.relative, self.scope, self.counts, self.weights_only) != (
            "no",
            "global",
            "all",
            False,
        ):
            raise InputError("unit=rank goes with relative=no, scope=global, counts=all and weights_only=no; leave those out.")
        if self.by == "random" and (self.relative != "no" or self.since != "round"):
            raise InputError("by=random looks at no movement; use relative=no and since=round with it.")
        if self.every < 1 or self.first < 0:
            raise InputError(f"every must be at least 1 and first at least 0, not {self.every} and {self.first}.")

    def start(self, work: Work, params: Tree) -> State:
        if self.unit == "rank":
            units_of(work.model, "FedSelect")  # or say that there are none
        memory = {"mask": empty(work, params)}
        for n, m in memory["mask"].items():
            m.fill_(self._at_first(work.model, n))
        if self.since == "update":
            memory["anchor"] = {n: params[n].clone() for n in work.model.params}
            memory["restart"] = {"": torch.ones(len(work.ids), dtype=torch.bool, device=work.ids.device)}
        return memory

    def mask(self, model: Model, memory: State) -> Mask:
        return dict(memory["mask"])

    def begin(self, work: Work, memory: State, received: Tree) -> State:
        return memory

    def grow(self, work: Work, memory: State, before: Tree, train: Train) -> tuple[Tree, State]:
        after = train(work)
        return after, self._grown(work, dict(memory), before, after)

    def _grown(self, work: Work, memory: State, before: Tree, after: Tree) -> State:
        if self.since == "update":
            fresh = memory["restart"][""]  # the mask grew last time: movement counts from this round's start
            before = {n: torch.where(fresh.view(-1, *[1] * (a.ndim - 1)), before[n], a) for n, a in memory["anchor"].items()}
            memory["anchor"] = before
            memory["restart"] = {"": torch.full_like(fresh, self._due(work.round))}
        if self._due(work.round) and self.unit == "rank":
            memory["mask"] = self._grown_by_rank(work, memory["mask"], before, after)
        elif self._due(work.round):
            now, then = ({n: tree[n] for n in memory["mask"]} for tree in (after, before))
            plain = self.by == "most" and self.relative == "no"
            score = now if plain else self._scores(work, memory["mask"], now, then)
            memory["mask"] = grow_mask(
                memory["mask"], score, self.rate, self.limit, scope=self.scope, share=self.share, strict=self.strict,
                skip=_vectors(score) if self.weights_only else frozenset(),
                dead=work.dead() if self.counts == "live" else {}, since=then if plain else None,
            )  # fmt: skip
        return memory

    def _grown_by_rank(self, work: Work, mask: Tree, before: Tree, after: Tree) -> Tree:
        units = units_of(work.model, "FedSelect")
        far = units.moved({n: before[n] for n in mask}, {n: after[n] for n in mask})
        if self.by == "random":
            keys = work.keys("select")
            far = {u: random.uniform(random.fold(keys, u), v.shape[1]).double() for u, v in far.items()}
        score = {u: -v for u, v in far.items()} if self.by == "least" else far
        held = grow_mask(units.marks(mask), score, self.rate, self.limit, share=self.share, strict=self.strict)
        return together(units.spread(held, mask))

    def _at_first(self, model: Model, name: str) -> bool:
        return ("head" in self.start_with and head(model, name)) or ("norms" in self.start_with and norms(model, name))

    def _scores(self, work: Work, mask: Tree, after: Tree, before: Tree) -> Tree:
        if self.by == "random":
            keys = work.keys("select")
            return {n: random.uniform(random.fold(keys, n), v[0].numel()).view_as(v) for n, v in after.items()}
        apart = torch._foreach_abs(torch._foreach_sub(list(after.values()), list(before.values())))
        far = dict(zip(after, apart if self.by == "most" else torch._foreach_neg(apart), strict=True))
        if self.relative == "no":
            return far
        if self.relative == "weights":
            return {n: v / _size(before[n]) for n, v in far.items()}
        return {n: v / _size(v, ~mask[n]) for n, v in far.items()}

    def _due(self, round: int) -> bool:
        return round >= self.first and (round - self.first) % self.every == 0


def RandomSelect(rate: Scalar = 0.05, limit: Scalar = 0.30) -> DeltaSelect:
    """The ablation: masks grow as FedSelect's do, by entries drawn at random for each client."""
    return DeltaSelect(rate, limit, by="random")


def grow_mask(
    mask: Tree,
    score: Tree,
    rate: Scalar,
    limit: Scalar,
    *,
    scope: str = "global",
    share: str = "shared",
    strict: bool = True,
    skip: frozenset[str] = frozenset(),
    dead: Tree | None = None,
    since: Tree | None = None,
) -> Tree:
    """Add, for each client, the shared entries with the highest score. Of equal scores the earlier entry wins.

    A client adds ceil(rate * entries) of them, fewer where a strict limit leaves less room. A strict limit is a share of all
    parameters (of each tensor, with scope = tensor); one that is not is only asked before growing, of all parameters.
    With `since`, the score of an entry is how far it has moved from there. Entries marked in `dead`, (k,) for a tensor of k,
    are never added, and no share counts them.
    """
    dead = dead or {}
    names = [n for n in mask if n not in skip]
    marks = matrix(mask)
    gone = {n: d.sum() for n, d in dead.items()}
    whole, held = marks.shape[1] - sum(gone.values()), count(marks)
    groups = [[n] for n in names] if scope == "tensor" else [names]
    below = held < whole_number(limit, whole, up=True)  # held / whole < limit
    out = dict(mask)
    for group in groups:
        everything = len(group) == len(mask)
        taken = marks if everything else matrix({n: mask[n] for n in group})
        size = taken.shape[1] - sum(gone[n] for n in group if n in gone)
        personal = held if everything else count(taken)
        wanted = whole_number(rate, size - personal if share == "shared" else size, up=True)
        room = whole_number(limit, size) - personal if scope == "tensor" else whole_number(limit, whole) - held
        wanted = torch.minimum(wanted, room.clamp_min(0)) if strict else torch.where(below, wanted, 0)
        wanted = torch.minimum(wanted, size - personal)
        value, base = matrix({n: score[n] for n in group}), None if since is None else matrix({n: since[n] for n in group})
        if any(n in dead for n in group):
            value, base = value if base is None else (value - base).abs(), None
            sizes = {n: mask[n][0].numel() for n in group}
            value = value.masked_fill(torch.cat([dead.get(n, taken.new_zeros(k)) for n, k in sizes.items()]), -torch.inf)
        out.update(lay(top(value, wanted, taken, base), {n: mask[n] for n in group}))
    return out


def top(value: Tensor, count: Tensor, taken: Tensor | None = None, base: Tensor | None = None) -> Tensor:
    """The `count[i]` largest entries of each row as a mask, besides those already taken; of equal ones the earlier wins.

    With `base`, those farthest from there.
    """
    if kernels.serve(value) and value.dtype == torch.float32:
        from fedselect.kernels import select

        return select.top(value, count, taken, base)
    if base is not None:
        return top((value - base).abs(), count, taken)
    if taken is not None:
        return taken | top(value.masked_fill(taken, -torch.inf), count)
    last = value.shape[1] - 1
    if value.device.type == "cpu":  # selection row by row costs far less there than a sort
        cut = torch.stack(
            [row.kthvalue(int(last + 1 - max(k - 1, 0))).values for row, k in zip(value, count.tolist(), strict=True)]
        )
    else:
        cut = value.sort(1, descending=True).values.gather(1, (count - 1).clamp(0, last).unsqueeze(1)).squeeze(1)
    above = value > cut.unsqueeze(1)
    level = value == cut.unsqueeze(1)
    short = (count - above.sum(1)).unsqueeze(1)
    chosen = above | (level & (level.cumsum(1) <= short))
    return chosen & (count > 0).unsqueeze(1)


def whole_number(share: Scalar, of: int | Tensor, up: bool = False) -> Tensor:
    """share * of as a whole number, float rounding aside."""
    exact = torch.as_tensor(share, dtype=torch.float64)
    if isinstance(share, Tensor) and share.dtype == torch.float32:
        exact = exact.round(decimals=7)  # 0.1 is meant, not the nearest float32
    exact = exact * torch.as_tensor(of, dtype=torch.float64)
    return ((exact - 1e-9).ceil() if up else (exact + 1e-9).floor()).to(torch.int64)


def empty(work: Work, params: Tree) -> Tree:
    """A mask for each client that marks nothing yet."""
    return together({n: torch.zeros_like(params[n], dtype=torch.bool) for n in work.model.params})


def _size(v: Tensor, of: Tensor | None = None) -> Tensor:
    """The root mean square of each client's entries, or of some of them, shaped to divide by; 1 where all of them are 0."""
    squares = rows(v).square()
    marks = torch.ones_like(squares) if of is None else rows(of).to(v.dtype)
    size = ((squares * marks).sum(1) / marks.sum(1).clamp_min(1)).sqrt()
    return torch.where(size > 0, size, 1.0).view(-1, *[1] * (v.ndim - 1))


def _vectors(tree: Tree) -> frozenset[str]:
    return frozenset(n for n, v in tree.items() if v.ndim <= 2)  # (C, k): one number per unit


@dataclass(frozen=True)
class ByName:
    """Personal layers by name; equal where the names are, so that runs which choose the same stack."""

    patterns: tuple[str, ...]

    def __call__(self, model: Model, name: str) -> bool:
        return name in _named(model.name, tuple(model.params), self.patterns)

    def __repr__(self) -> str:
        return f"layers({', '.join(map(repr, self.patterns))})"


def layers(*patterns: str) -> Which:
    """Personal layers by name, or by pattern with * for anything: layers('conv1.weight', 'layer4.*')."""
    return ByName(patterns)


@cache
def _named(model: str, params: tuple[str, ...], patterns: tuple[str, ...]) -> frozenset[str]:
    """The parameters that match any of these patterns, of which each must match one."""
    out: set[str] = set()
    for pattern in patterns:
        found = matching(pattern, params)
        if not found:
            near = nearest(pattern, params) or params
            raise InputError(
                f"no parameter of {model} matches {pattern!r}; name layers that it has (layers='...', --layers), nearest: "
                f"{', '.join(near[:5])}."
            )
        out.update(found)
    return frozenset(out)
