"""SecretMean: an aggregator that sees only sums of whole numbers, as secure aggregation gives them to a server.

A simulation adds up the plain numbers. Over a network they are sent under pads that cancel in the sum, which changes no bit of
it, so both give the same model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from fedselect.aggregate.aggregator import Aggregator, Fold
from fedselect.aggregate.masked import MaskedSum
from fedselect.core.errors import InputError
from fedselect.core.tree import Mask, State, Tree
from fedselect.methods.method import Up
from fedselect.secret.ring import CLIENTS, IS_NEAR, OVER, Ring, untold

Over = Literal["senders", "cohort"]
"""What a sum is divided by: the clients that sent the entry, or the whole cohort, which hides how many sent it."""
FEWEST = 3
"""Fewest clients in a round: of two, each could work out the other's update from the mean."""
FIRST, FIRST_STATISTIC = 1.0, 64.0
"""How far an entry may move in the first round: a parameter, and a BatchNorm statistic, which can have any scale."""
ROUNDING = "rounding"  # purpose of a client's random key
GROW, SHRINK, LEAST, MOST = 4.0, 0.5, 2.0**-10, 2.0**40


class Noisy(Protocol):
    """Turns private updates into whole numbers."""

    @property
    def step(self) -> float:
        """The value of the number 1."""

    def code(self, values: Tree, params: Tree, keys: Tensor, clients: int) -> Tree:
        """Updates from `params`, clipped, rounded and noised, for a round of this many clients."""


@dataclass(frozen=True)
class SecretMean(Aggregator):
    """Applies `inner` to the sums. The range of values follows from what was cut off in the round before.

    `noisy`: makes the whole numbers if clients are private; ranges then follow from the privacy settings alone.
    """

    inner: Aggregator
    ring: Ring
    noisy: Noisy | None = None

    @property
    def mean(self) -> Over:
        return "senders" if self.ring.counted else "cohort"

    def start(self, params: Tree) -> State:
        first = FIRST if self.noisy is None else self.noisy.step * self.ring.top
        return {**self.inner.start(params), "reach": {n: _reach(first, v) for n, v in params.items()}}

    def fold(self, state: State, params: Tree) -> "SecretFold":
        return SecretFold(self, state, params)


class SecretFold(Fold):
    """Sums of whole numbers and of senders; `finish` turns them into sums of values for the inner fold."""

    sums: MaskedSum

    def __init__(self, how: SecretMean, state: State, params: Tree) -> None:
        self.sums, self._how, self._params, self._state = MaskedSum(), how, params, state
        self.reach = {n: state["reach"].get(n, _reach(FIRST_STATISTIC, v)) for n, v in params.items()}
        self._clients = how.ring.clients

    def expect(self, clients: int) -> None:
        self._clients = clients

    def take(self, up: Up, keys: Callable[[], Tensor]) -> None:
        check_hidden(up)
        names = [n for n in up.values if up.sent.get(n, False) is not False]
        codes = coded(
            self._how.ring, self._how.noisy, up, self._params, {n: self.reach[n] for n in names}, keys(), clients=self._clients
        )
        self.add(codes, {**dict.fromkeys(codes, True), **{n: up.sent[n] for n in names}}, up.weight)

    def add(self, values: Tree, sent: Mask, weight: Tensor) -> None:
        self.sums.add(values, sent, weight)

    def put(self, total: Tree, senders: Tree) -> None:
        """Take the sums over all clients, as a server has them once they are unmasked."""
        device = next(iter(self._params.values())).device
        values, counts = ({n: v.to(device) for n, v in tree.items()} for tree in (total, senders))
        self.sums = MaskedSum(values, counts, dict.fromkeys(total, torch.float32))

    def finish(self) -> tuple[Tree, Mask, State]:
        how, inner = self._how, self._how.inner.fold(self._state, self._params)
        assert inner.sums is not None  # checked by `hidden`
        total, senders = self.sums.total, self.sums.weight
        names = [n for n in total if not n.startswith("~")]
        for n in names:
            count = senders[n] if how.ring.counted else total[CLIENTS].expand_as(senders[n]).clone()
            step = self.reach[n].double() / how.ring.top if how.noisy is None else how.noisy.step
            inner.sums.total[n] = self._params[n].double() * count + step * total[n]
            inner.sums.weight[n], inner.sums.dtypes[n] = count, self._params[n].dtype
        mean, heard, memory = inner.finish()
        reach = {**self._state["reach"], **{n: self._next(i, n) for i, n in enumerate(names)}}
        return mean, heard, {**memory, "reach": reach, "cut": {"share": self._cut(names)}}

    def _next(self, at: int, name: str) -> Tensor:
        """Grow a range that cut something off, shrink one that no value came near; private updates move no range."""
        if self._how.noisy is not None:
            return self.reach[name]
        over, near = (self.sums.total[n][at] for n in (OVER, IS_NEAR))
        change = torch.where(over > 0, GROW, torch.where(near > 0, 1.0, SHRINK))
        return (self.reach[name] * change).clamp(LEAST, MOST).to(self.reach[name].dtype)

    def _cut(self, names: list[str]) -> Tensor:
        """The share of entries sent that were outside their range."""
        if not names:
            return torch.zeros(())
        sent = sum(self.sums.weight[n].sum() for n in names)
        return (self.sums.total[OVER].sum() / torch.as_tensor(sent).clamp_min(1.0)).float()


def coded(ring: Ring, noisy: Noisy | None, up: Up, params: Tree, reach: Tree, keys: Tensor, *, clients: int) -> Tree:
    """Stacked uploads of a round of this many clients as whole numbers; `reach` names the tensors that are sent."""
    if noisy is None:
        return ring.code(up.values, up.sent, params, reach, keys)
    codes = noisy.code({n: up.values[n] for n in reach}, params, keys, clients)
    return {**codes, **untold(len(reach), keys)}


def _reach(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, device=like.device)


def check_secret(secret: bool, mean: Over, aggregator: Aggregator) -> None:
    """Refuse options that do not go together, before anything is built."""
    if mean == "cohort" and not secret:
        raise InputError("mean=cohort needs secure aggregation; add --secret (in Python: secret=True), or leave mean out.")
    if secret and not vars(type(aggregator)).get("only_sums", False):
        raise InputError(
            f"{type(aggregator).__name__} looks at the values of single clients, which secure aggregation hides; use the "
            "aggregator mean or adam."
        )


def hidden(aggregator: Aggregator, clients: int, mean: Over) -> SecretMean:
    """The aggregator behind secure aggregation of at most this many clients per round."""
    check_secret(True, mean, aggregator)
    if clients < FEWEST:
        raise InputError(
            f"secure aggregation needs at least {FEWEST} clients in a round, and this run has {clients}: of two clients, "
            "each could work out the other's values from the mean."
        )
    return SecretMean(aggregator, Ring(clients, counted=mean == "senders"))


def check_hidden(up: Up) -> None:
    """Refuse what secure aggregation does not hide: rows of single clients, and unequal weights."""
    if up.extra:
        raise InputError(
            f"this method sends rows of single clients ({', '.join(up.extra)}) with its values, which secure aggregation "
            "would not hide; choose another method, or leave secret (--secret) out."
        )
    if not bool((up.weight == 1).all()):
        raise InputError("secure aggregation weights all clients equally; use weight=uniform, or leave secret (--secret) out.")
