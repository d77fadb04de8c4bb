"""Selectors: which entries of a client's model are personal, at the start and as training goes on."""

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
"""Whether the parameter of this name is personal in this model."""
Train = Callable[[Work], Tree]
"""This round's local training on the data of a `Work`; returns the trained model."""
Start = Literal["nothing", "head", "norms", "head+norms"]


def nothing(model: Model, name: str) -> bool:
    return False


def everything(model: Model, name: str) -> bool:
    return True


def head(model: Model, name: str) -> bool:
    model.need_head("a method with a personal head or body")
    return model.is_head(name)


def body(model: Model, name: str) -> bool:
    return not head(model, name)


def norms(model: Model, name: str) -> bool:
    return name in model.norms


def not_convolutions(model: Model, name: str) -> bool:
    """All parameters except convolution kernels and their biases."""
    return name not in model.convolutions


class Selector(Protocol):
    """Decides which entries of a client are personal.

    A mask that grows is stored in the client's state, entry by entry. A fixed mask follows from the model and is not stored.
    """

    def start(self, work: Work, params: Tree) -> State:
        """The memory of a client that joins."""

    def mask(self, model: Model, memory: State) -> Mask:
        """The mask over the model's parameters."""

    def begin(self, work: Work, memory: State, received: Tree) -> State:
        """The memory for this round's training, given the received shared values."""

    def grow(self, work: Work, memory: State, before: Tree, train: Train) -> tuple[Tree, State]:
        """Train from `before` with `train(work)`; return the trained model and the memory for the next round."""


@dataclass(frozen=True)
class Fixed(Shown):
    """The same whole tensors are personal for every client, from the start or `after` this many rounds without any."""

    personal: Which
    after: int = 0

    def __post_init__(self) -> None:
        if self.after < 0:
            raise InputError(f"the rounds before parameters become personal must not be negative, not {self.after}.")

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
    """Choices that the FedSelect paper leaves open.

    scope: one threshold over all of a client's entries, or one for each tensor
    share: rate is a share of the entries still shared, or of all
    strict: never exceed the limit; no: check it over the whole model before the mask grows, so it may be exceeded
    since: measure movement over this round, or since the mask last grew
    every: rounds from one growth of the mask to the next
    first: first round in which the mask grows, counted from 0
    weights_only: yes: vectors (biases, norm layers) are never selected
    counts: rate and limit are shares of all entries, or only of those that can move
    start_with: parameters that are personal from the first round on
    unit: unit that is added: an entry, or a rank of an adapter (a column of B and a row of A) or any other whole layer;
        rate and limit are then shares of units
    relative: movement Δ unchanged, or divided by the root mean square, within its tensor, of Δ over the shared entries, or of
        all weights
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
    """FedSelect's rule: of the entries still shared, those that moved most in local training become personal.

    rate: share of entries added to the mask at a time
    limit: largest share of personal entries
    by: which entries are added: those that moved most, least, or random ones (ablations)
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
            raise InputError("unit=rank requires relative=no, scope=global, counts=all and weights_only=no, the defaults.")
        if self.by == "random" and (self.relative != "no" or self.since != "round"):
            raise InputError("by=random ignores movement; use it with relative=no and since=round.")
        if self.every < 1 or self.first < 0:
            raise InputError(f"every must be at least 1 and first at least 0, not {self.every} and {self.first}.")

    def start(self, work: Work, params: Tree) -> State:
        if self.unit == "rank":
            units_of(work.model, "FedSelect")  # raises if there are none
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
            fresh = memory["restart"][""]  # the mask grew last time: measure movement from this round's start
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
    """The ablation: masks grow as in FedSelect, by random entries of each client."""
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
    """Add to each client's mask the shared entries with the highest score; ties go to the earlier entry.

    A client adds ceil(rate * entries) of them, or fewer if a strict limit leaves less room. A strict limit is a share of all
    parameters (of each tensor with scope=tensor). A limit that is not strict is only checked before growing, over all
    parameters. With `since`, the score of an entry is its distance from there. Entries marked in `dead`, (k,) for a tensor of
    k, are never added and not counted.
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
    """A mask of the `count[i]` largest entries of each row that are not `taken`; ties go to the earlier entry.

    With `base`, the entries farthest from it.
    """
    if kernels.serve(value) and value.dtype == torch.float32:
        from fedselect.kernels import select

        return select.top(value, count, taken, base)
    if base is not None:
        return top((value - base).abs(), count, taken)
    if taken is not None:
        return taken | top(value.masked_fill(taken, -torch.inf), count)
    last = value.shape[1] - 1
    if value.device.type == "cpu":  # there, selecting row by row is much cheaper than a sort
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
    """share * of as an integer, without float rounding errors."""
    exact = torch.as_tensor(share, dtype=torch.float64)
    if isinstance(share, Tensor) and share.dtype == torch.float32:
        exact = exact.round(decimals=7)  # 0.1 is meant, not the nearest float32
    exact = exact * torch.as_tensor(of, dtype=torch.float64)
    return ((exact - 1e-9).ceil() if up else (exact + 1e-9).floor()).to(torch.int64)


def empty(work: Work, params: Tree) -> Tree:
    """An empty mask for each client."""
    return together({n: torch.zeros_like(params[n], dtype=torch.bool) for n in work.model.params})


def _size(v: Tensor, of: Tensor | None = None) -> Tensor:
    """The root mean square of each client's entries, or of those in `of`, shaped to broadcast; 1 if they are all 0."""
    squares = rows(v).square()
    marks = torch.ones_like(squares) if of is None else rows(of).to(v.dtype)
    size = ((squares * marks).sum(1) / marks.sum(1).clamp_min(1)).sqrt()
    return torch.where(size > 0, size, 1.0).view(-1, *[1] * (v.ndim - 1))


def _vectors(tree: Tree) -> frozenset[str]:
    return frozenset(n for n, v in tree.items() if v.ndim <= 2)  # (C, k): one number per unit


@dataclass(frozen=True)
class ByName:
    """Personal layers by name; equal if the names are, so that runs with the same layers can be batched."""

    patterns: tuple[str, ...]

    def __call__(self, model: Model, name: str) -> bool:
        return name in _named(model.name, tuple(model.params), self.patterns)

    def __repr__(self) -> str:
        return f"layers({', '.join(map(repr, self.patterns))})"


def layers(*patterns: str) -> Which:
    """Personal layers by name or pattern, where * matches anything: layers('conv1.weight', 'layer4.*')."""
    return ByName(patterns)


@cache
def _named(model: str, params: tuple[str, ...], patterns: tuple[str, ...]) -> frozenset[str]:
    """The parameters that match any of these patterns; each pattern must match at least one."""
    out: set[str] = set()
    for pattern in patterns:
        found = matching(pattern, params)
        if not found:
            near = nearest(pattern, params) or params
            raise InputError(
                f"no parameter of {model} matches {pattern!r}; name layers of the model (layers='...', --layers), such as "
                f"{', '.join(near[:5])}."
            )
        out.update(found)
    return frozenset(out)
