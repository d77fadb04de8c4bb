"""The server's checks before it accepts anything: it knows what an honest reply looks like and rejects all others."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from fedselect.aggregate import codec
from fedselect.core.errors import CALM, DataError
from fedselect.core.tree import Mask, State, Tree, flat, nested
from fedselect.methods.choice import CHOICES
from fedselect.network.assignment import Assignment, first, first_mask
from fedselect.network.letters import Letter, check_finite, take_packet
from fedselect.network.protected import most_spent
from fedselect.network.unmasking import key_of
from fedselect.secret.mean import check_hidden
from fedselect.simulate.records import CHOSEN, figures, validated
from fedselect.tasks.metrics import Measure, is_number

LARGEST = 1e9
"""Largest magnitude of the statistics that a client sends with its values; the values are compared with the model."""
ABSURD = 100.0
"""Default limits on the length of an update: a multiple of the model's length, and of the usual update length."""


@dataclass(frozen=True)
class Hello:
    """What a client says about itself: its number, the round it can continue from, its mask, and how many samples it has."""

    client: int
    base: int
    newest: int  # the last round in its vault, accepted or not
    bits: Tensor
    samples: int
    tested: int | None  # test samples, if it says so
    statistics: tuple[float, ...] | None  # of its training targets, if the task needs them
    key: list[str]  # for secure aggregation, with its signature


@dataclass(frozen=True)
class Update:
    """A reply that passed the checks: values, which of them were sent, weight, side statistics and mask of one client."""

    values: Tree
    sent: Mask
    weight: float
    _: KW_ONLY
    extra: State
    bits: Tensor
    train_loss: float | None
    measured: dict[str, float | None]
    length: float  # root mean square over all that was sent
    epsilon: float | None = None  # what the client has spent of its privacy budget, if it keeps one


class Examiner:
    """Knows from a rehearsal on made-up data what replies look like: names, dtypes, shapes, weight."""

    def __init__(self, assigned: Assignment, max_norm: float | None) -> None:
        self.assigned, self.max_norm = assigned, max_norm
        honest = assigned.rehearse()
        self.outline = codec.outline(first(honest.values), first_mask(honest.sent))
        self.like = {n: v.cpu() for n, v in assigned.initial.items()}
        self._extra = {n: (v.dtype, v.shape) for n, v in flat("extra", {k: first(t) for k, t in honest.extra.items()}).items()}
        self.figures_of = {**figures(assigned.metrics), "share": Measure("share", low=0.0, high=1.0)}
        if assigned.validates:
            self.figures_of |= {validated(m.name): m for m in assigned.metrics}
        if assigned.view is not None:
            self.figures_of |= {CHOSEN: Measure(CHOSEN, low=0.0, high=len(CHOICES) - 1.0)}
        asked = assigned.task.statistics(assigned.task.example(assigned.data), assigned.data)
        self.statistics = 0 if asked is None else len(asked)  # numbers that the task needs about every client's targets
        self.sent = {n: v for n, v in self.like.items() if n in (*self.outline.whole, *self.outline.partly)}
        if assigned.secret is not None:
            check_hidden(honest)
        self._most_spent = most_spent(assigned)
        self._by_samples = float(honest.weight[0]) == 2.0  # of the two samples of the rehearsal

    def head(self, letter: Letter, kind: str, **said: Any) -> None:
        """Check that a message is the one that was asked for, and from the right client."""
        for name, value in {"kind": kind, **self.assigned.address, **said}.items():
            found = letter.head.get(name)
            if found != value or type(found) is not type(value):
                raise DataError(f"it sent {name} {found!r}, expected {value!r}")

    def hello(self, letter: Letter) -> Hello:
        """Read the hello of a new client."""
        self.head(letter, "hello")
        client, base, samples = (letter.head.get(k) for k in ("client", "base", "samples"))
        if type(client) is not int or not 0 <= client < self.assigned.clients:
            raise DataError(f"it says it is client {client!r}; clients are numbered 0 to {self.assigned.clients - 1}")
        if type(samples) is not int or not 0 < samples < LARGEST:
            raise DataError(f"it says it has {samples!r} samples")
        if type(base) is not int or base < 0:
            raise DataError(f"it says it is at round {base!r}")
        newest = letter.head.get("newest", base)
        if type(newest) is not int or not base <= newest < LARGEST:
            raise DataError(f"it says its newest round is {newest!r}, and that it is at round {base}")
        tested, found = letter.head.get("tested"), letter.head.get("statistics")
        if tested is not None and (type(tested) is not int or not 0 <= tested < LARGEST):
            raise DataError(f"it says it has {tested!r} test samples")
        numbers = found if isinstance(found, list) and all(map(is_number, found)) else []
        if len(numbers) != self.statistics or (found is not None and not self.statistics):
            raise DataError(f"it sent {found!r}, but the task needs {self.statistics} statistics of its targets")
        packet = self._packet(letter)
        key: list[str] = []
        if self.assigned.secret is None:
            codec.unmask(packet, self.like)
        elif packet.bits.numel():
            raise DataError("it sent its mask, which --secret keeps from the server")
        else:
            key = key_of(letter)
        known = tuple(map(float, numbers)) if self.statistics else None
        return Hello(client, base, newest, packet.bits, samples, tested, statistics=known, key=key)

    def update(self, letter: Letter, samples: int, params: Tree, usual: float | None = None) -> Update:
        """One client's update, checked and ready to aggregate; `usual`: how long updates were in the last rounds."""
        values, sent = codec.unpack(packet := self._packet(letter), self.like)
        extra = {n: v for n, v in letter.parts.items() if n not in ("values", "bits")}
        if {n: (v.dtype, v.shape) for n, v in extra.items()} != self._extra:
            raise DataError(f"it sent the statistics {_shapes(extra)}, but the method has {_shapes_of(self._extra)}")
        check_finite({**values, **extra}, "it sent")
        for name in self.assigned.method.not_negative:
            if bool((extra[f"extra/{name}"] < 0).any()):
                raise DataError(f"it sent a negative number in extra/{name}")
        length = self._norms(values, sent, extra, params, usual)
        return Update(
            values,
            sent,
            self._weight(letter, samples),
            extra=nested("extra", extra),
            bits=packet.bits,
            train_loss=self._loss(letter),
            measured=self.figures(letter),
            length=length,
            epsilon=self._epsilon(letter),
        )

    def hidden(self, letter: Letter) -> Update:
        """What secure aggregation shows of one client: its loss and its metrics; its values go into the sum."""
        nothing = torch.zeros(0, dtype=torch.uint8)
        loss, measured = self._loss(letter), self.figures(letter)
        return Update({}, {}, 1.0, extra={}, bits=nothing, train_loss=loss, measured=measured, length=0.0,
                      epsilon=self._epsilon(letter))  # fmt: skip

    def _epsilon(self, letter: Letter) -> float | None:
        epsilon = letter.head.get("epsilon")
        if epsilon is not None and (not is_number(epsilon) or epsilon < 0):
            raise DataError(f"it sent the epsilon {epsilon!r}")
        if epsilon is not None and self._most_spent is not None and epsilon > 1.001 * self._most_spent:
            raise DataError(f"it says it has spent epsilon {epsilon:.3g} of a budget of {self._most_spent:.3g}")
        return epsilon

    def _loss(self, letter: Letter) -> float | None:
        loss = letter.head.get("train_loss")
        if loss is not None and not is_number(loss):
            raise DataError(f"it sent the training loss {loss!r}")
        return loss

    def figures(self, letter: Letter) -> dict[str, float | None]:
        """The metrics a client measured, if it did; None for a metric that is undefined on its data."""
        found = letter.head.get("measured")
        if not isinstance(found, dict) or (found and set(found) != set(self.figures_of)):
            raise DataError(f"it measured {found!r}")
        for name, value in found.items():
            if value is None and name == "share":
                raise DataError("it did not report the share of personal parameters")
            if why := self.figures_of[name].unfit(value):
                raise DataError(f"it measured {why}")
            if name == CHOSEN and (value is None or value != int(value)):
                raise DataError(f"it chose {value!r}, which is not the number of a model")
        return {name: None if value is None else float(value) for name, value in found.items()}

    def _packet(self, letter: Letter) -> codec.Packet:
        packet = take_packet(letter)
        if (packet.whole, packet.partly) != (self.outline.whole, self.outline.partly):
            raise DataError("it sent tensors other than those the method shares")
        return packet

    def _weight(self, letter: Letter, samples: int) -> float:
        weight = letter.head.get("weight")
        wanted = float(samples) if self._by_samples else 1.0
        if weight != wanted:
            raise DataError(f"it sent the weight {weight!r}, expected {wanted}")
        return wanted

    def _norms(self, values: Tree, sent: Mask, extra: Tree, params: Tree, usual: float | None) -> float:
        """Check the length of an update and return its root mean square.

        An update may be `max_norm` times as long as the model it updates, or as a vector of length 1. The default is 100 times,
        and at most 100 times the usual length. An update no longer than the model always passes: a client that joins late has
        much to learn when others have converged.
        """
        moved = size = 0.0
        count = 0
        for n, v in values.items():
            mark, old = sent[n], params[n].double().cpu()
            step = v.double() - old
            if isinstance(mark, Tensor):
                count, step, old = count + int(mark.sum()), torch.where(mark, step, 0.0), torch.where(mark, old, 0.0)
            elif mark:
                count += v.numel()
            else:
                continue
            moved += float(torch.linalg.vector_norm(step)) ** 2
            size += float(torch.linalg.vector_norm(old)) ** 2
        for path, v in extra.items():
            name = path.split("/", 2)[2]
            if name in params:
                count += v.numel()
                moved += float((v.double() - params[name].double().cpu()).square().sum())
                size += float(params[name].double().square().sum())
            elif v.is_floating_point() and float(v.abs().max()) > LARGEST:
                raise DataError(f"it sent {float(v.abs().max()):.3g} in {path}; the largest allowed is {LARGEST:.0g}")
        length, model = math.sqrt(moved), max(1.0, math.sqrt(size))
        most = ABSURD if self.max_norm is None else self.max_norm
        if not length <= most * model:
            raise DataError(f"its update has length {length:.3g}, more than {most:g} times the model's {model:.3g}; {CALM}")
        often = None if usual is None or self.max_norm is not None else usual * math.sqrt(count)
        if often is not None and length > max(model, ABSURD * often):
            raise DataError(
                f"its update has length {length:.3g}, more than {ABSURD:g} times the usual {often:.3g}; check that "
                "client, or set --max-norm"
            )
        return length / math.sqrt(max(1, count))


def _shapes(tensors: Tree) -> str:
    return _shapes_of({n: (v.dtype, v.shape) for n, v in tensors.items()})


def _shapes_of(found: dict[str, tuple[torch.dtype, torch.Size]]) -> str:
    said = [f"{n} {tuple(s)} {str(d).removeprefix('torch.')}" for n, (d, s) in found.items()]
    return ", ".join(said) or "none"
