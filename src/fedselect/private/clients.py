"""Client-level privacy: every client sends every entry, and the server adds up clipped updates and noise."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedselect.aggregate.aggregator import Aggregator, FedAdam, Fold, Mean
from fedselect.core import random
from fedselect.core.entropy import Entropy
from fedselect.core.errors import InputError
from fedselect.core.shown import Made, made
from fedselect.core.tree import Mask, State, Tree, along, merge, rows
from fedselect.methods.method import Carried, Down, Method, Received, Up, View
from fedselect.models import Model
from fedselect.private.guarantee import Guarantee, split
from fedselect.training.work import Work

PACE = 0.2
"""How fast an adaptive clip moves, from Andrew et al."""


@dataclass(frozen=True)
class Covered(Method):
    """A method whose clients send every entry that any client may share; for a personal entry, an update of zero.

    So what a client sends shows neither which entries are personal nor how many. Masks that are the same for all clients (whole
    tensors, by the method's own rule) stay as they are.
    """

    method: Method

    @property
    def _made_by(self) -> Made:
        return made(self.method)

    @property
    def view(self) -> View:  # type: ignore[override]
        return self.method.view

    def init(self, params: Tree, clients: int, model: Model) -> State:
        return self.method.init(params, clients, model)

    def join(self, work: Work, params: Tree) -> State:
        return self.method.join(work, params)

    def down(self, server: State, ids: Tensor) -> Down:
        return self.method.down(server, ids)

    def client(self, work: Work, state: State, down: State) -> tuple[State, Up]:
        state, up = self.method.client(work, state, down)
        if up.extra:
            raise InputError(
                f"{type(self.method).__name__} also sends {', '.join(up.extra)}, which noise on updates does not protect; use "
                "a method that sends only parameters, such as fedavg, or protect samples instead of clients (unit=sample)."
            )
        if not bool((up.weight == 1).all()):
            raise InputError("differential privacy weights all clients equally; use weight=uniform.")
        sent = _covered(up.sent)
        _check_sent(work.model, sent)
        shared = {n: down["params"][n] for n in up.values}
        return state, Up(merge(up.sent, up.values, shared), sent, up.weight)

    def server(self, server: State, got: Received) -> State:
        return self.method.server(server, got)

    def local(self, state: State) -> Tree:
        return self.method.local(state)

    def personal(self, work: Work, state: State, down: State) -> Tree:
        return self.method.personal(work, state, down)

    def wants(self, model: Model, state: State) -> Mask:
        return _covered(self.method.wants(model, state))

    def mask(self, model: Model, state: State) -> Mask:
        return self.method.mask(model, state)

    def persistence(self, state: State) -> Tree:
        return self.method.persistence(state)

    def groups(self, server: State) -> Tensor | None:
        return self.method.groups(server)

    def carries(self, model: Model, state: State) -> dict[str, Carried]:
        return dict(self.method.carries(model, state))


def _covered(marks: Mask) -> Mask:
    return {n: m if isinstance(m, bool) else True for n, m in marks.items()}


def shared_names(model: Model, wanted: Mask) -> tuple[str, ...]:
    """The tensors that clients of a covered method send."""
    _check_sent(model, wanted)
    names = tuple(n for n in model.params if wanted.get(n, False) is not False)
    if not names:
        raise InputError("this method shares nothing, so there is nothing to protect; leave private (--private) out.")
    return names


def _check_sent(model: Model, sent: Mask) -> None:
    if any(sent.get(n, False) is not False for n in model.stats):
        raise InputError(
            "BatchNorm statistics are not updates and cannot be clipped; keep them on the client (norm_stats=local), or "
            "use a network without BatchNorm."
        )


@dataclass(frozen=True)
class PrivateMean(Aggregator):
    """Clips updates to one length, sums them, adds noise to the sum, and divides by the expected number of clients.

    What `then` makes of that mean (server momentum, Adam) needs no further noise. `noise`: of the sum, over the clip;
    `count_noise`: of the count of unclipped updates, which adapts the clip.
    """

    then: Aggregator
    names: tuple[str, ...]
    clip: float
    noise: float
    expected: float
    quantile: float | None = None
    count_noise: float = 0.0
    seed: int | None = None  # only in tests: draws the noise instead of the operating system

    def start(self, params: Tree) -> State:
        device = next(iter(params.values())).device
        own = {
            "clip": torch.tensor(self.clip, dtype=torch.float64, device=device),
            "round": torch.zeros((), dtype=torch.int64, device=device),
        }
        return {**self.then.start(params), "private": own}

    def fold(self, state: State, params: Tree) -> Fold:
        return PrivateFold(self, state, params)


class PrivateFold(Fold):
    """One round; needs the memory of one model, however many clients there are."""

    def __init__(self, how: PrivateMean, state: State, params: Tree) -> None:
        own = state["private"]
        self._how, self._params = how, params
        self._then = how.then.fold({k: t for k, t in state.items() if k != "private"}, params)
        self._clip, self._round = float(own["clip"]), int(own["round"])
        self._device = own["clip"].device
        self._total = {n: torch.zeros_like(params[n], dtype=torch.float64) for n in how.names}
        self._short = 0.0  # updates within the clip count 1/2, others -1/2

    def add(self, values: Tree, sent: Mask, weight: Tensor) -> None:
        known = [n for n in self._how.names if sent.get(n, False) is not False]
        steps = {n: values[n].double() - self._params[n].double() for n in known}
        length = lengths(steps)
        scale = torch.where(length > self._clip, self._clip / length, 1.0)
        for n, step in steps.items():
            self._total[n] += (step * along(scale, step)).sum(0)
        self._short += float((length <= self._clip).double().sum()) - len(length) / 2

    def finish(self) -> tuple[Tree, Mask, State]:
        how = self._how
        std = how.noise * self._clip if how.noise else 0.0
        values = {n: self._params[n] + (self._noised(n, v, std) / how.expected).to(self._params[n].dtype)
                  for n, v in self._total.items()}  # fmt: skip
        whole: Mask = dict.fromkeys(values, True)
        self._then.add(
            {n: v.unsqueeze(0) for n, v in values.items()}, whole, torch.ones(1, dtype=torch.float64, device=self._device)
        )
        mean, heard, memory = self._then.finish()
        own = {"clip": self._next_clip(), "round": torch.tensor(self._round + 1)}
        return mean, heard, {**memory, "private": {n: v.to(self._device) for n, v in own.items()}}

    def _next_clip(self) -> Tensor:
        """C exp(-pace (share within the clip - quantile)): falls if too many updates are within."""
        clip = torch.tensor(self._clip, dtype=torch.float64)
        if self._how.quantile is None:
            return clip
        short = self._noised("clip", torch.tensor(self._short, dtype=torch.float64), self._how.count_noise)
        share = short / self._how.expected + 0.5
        return clip * math.exp(-PACE * (float(share) - self._how.quantile))

    def _noised(self, what: str, total: Tensor, std: float) -> Tensor:
        seed = self._how.seed
        key = random.fold(torch.full((1,), seed or 0, dtype=torch.int64), self._round, "noise", what).to(total.device)
        deviation = torch.full((1,), std, dtype=torch.float64, device=total.device)
        return Entropy(seed is not None).noised(total.reshape(1, -1), deviation, key).view_as(total)


def lengths(steps: Tree) -> Tensor:
    """The length of each client's update over all tensors: (C,) float64."""
    first = next(iter(steps.values()))
    square = torch.zeros(len(first), dtype=torch.float64, device=first.device)
    for v in steps.values():
        square = square + rows(v).square().sum(1)
    return square.sqrt()


def private_mean(guarantee: Guarantee, then: Aggregator, names: tuple[str, ...], seed: int) -> PrivateMean:
    """The aggregator that keeps a promise to clients."""
    if type(then) not in (Mean, FedAdam):
        raise InputError(
            "with private clients (unit=client) the server clips every update to the same length and adds noise to the sum; "
            f"use the aggregator mean or adam, not {type(then).__name__}."
        )
    private, lot = guarantee.private, guarantee.lots[0]
    noise, count = (lot.noise, 0.0) if private.quantile is None else split(lot.noise, lot.many)
    return PrivateMean(
        then, names, private.clip, noise, lot.many, private.quantile, count, seed=seed if private.seeded else None
    )


def drawn(ids: Tensor, fraction: float, entropy: Entropy, seed: int, round: int) -> Tensor:
    """The cohort of a round: each client is drawn independently with the same probability, so it may be empty."""
    if fraction >= 1:
        return ids.sort().values
    keys = random.client_keys(seed, ids, round, "private cohort")
    return ids[entropy.uniform(keys, 1)[:, 0] < fraction].sort().values
