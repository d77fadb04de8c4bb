"""Work: the only door to clients' data. In simulation it holds a cohort, on a network node one client."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedselect import random
from fedselect.errors import InputError
from fedselect.models import Model
from fedselect.objectives import Objective, cross_entropy
from fedselect.stacked import bmm
from fedselect.step import Rate, Training, forward, one_by_one, step
from fedselect.transforms import crop_flip
from fedselect.tree import Mask, Rows, State, Tree, put, take, take_mask

EVAL_BATCH = 256


@dataclass(frozen=True)
class Split:
    """One part (training, validation or test) of every client's data, in one pool: client i owns n[i] rows from start[i].

    Pictures stay uint8 in the pool and become numbers batch by batch: pixel * scale + shift, by channel.
    """

    x: Tensor
    y: Tensor
    start: Tensor
    n: Tensor
    scale: Tensor | None = None
    shift: Tensor | None = None
    augment: str = "none"

    def rows(self, rows: Rows) -> "Split":
        return replace(self, start=self.start[rows], n=self.n[rows])

    def batch(self, index: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Samples by their number within each client: (C, b) -> (C, b, ...), (C, b); with keys, augmented."""
        flat = self.start.unsqueeze(1) + index
        x = self.x[flat]
        if keys is not None and self.augment == "crop-flip":
            x = crop_flip(x, keys, index)
        if self.scale is not None and self.shift is not None:
            x = x.to(self.scale.dtype) * self.scale + self.shift
        return x, self.y[flat]

    def to(self, device: torch.device) -> "Split":
        scale = None if self.scale is None else self.scale.to(device)
        shift = None if self.shift is None else self.shift.to(device)
        x, y, start, n = (v.to(device) for v in (self.x, self.y, self.start, self.n))
        return Split(x, y, start, n, scale, shift, self.augment)


@dataclass(frozen=True)
class Pass:
    """One walk over the training data: which entries move, how fast, and which shuffle of the data it follows."""

    only: Mask
    lr: Rate
    epoch: int


def walk(model: Model, tree: Tree, split: Split) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Every client's model over its own data in eval mode: (logits, features, labels, which rows are real)."""
    for at in range(0, int(split.n.max()) if len(split.n) else 0, EVAL_BATCH):
        index = at + torch.arange(EVAL_BATCH, device=split.n.device)
        inside = index < split.n.unsqueeze(1)
        width = int(inside.sum(1).max())
        inside = inside[:, :width]
        x, y = split.batch(torch.where(inside, index[:width], 0))
        yield (*forward(model, tree, x), y, inside)


def score(model: Model, tree: Tree, split: Split) -> tuple[Tensor, Tensor]:
    """Accuracy and mean cross-entropy of every client's model on its own data, each (C,) float64; NaN without data."""
    right = torch.zeros(len(split.n), dtype=torch.float64, device=split.n.device)
    loss = torch.zeros_like(right)
    for logits, _, y, inside in walk(model, tree, split):
        picked = torch.logsumexp(logits, -1) - logits.gather(-1, y.unsqueeze(-1)).squeeze(-1)
        right += (inside & (logits.argmax(-1) == y)).sum(1)
        loss += torch.where(inside, picked.double(), 0.0).sum(1)
    return right / split.n, loss / split.n


class Work:
    """What a method may do with the data of the clients `ids`, in one round.

    Every tree carries a leading axis over exactly these clients. Randomness is keyed by (seed, client, round, key), so
    a client's result does not depend on who else is here.
    """

    def __init__(
        self,
        model: Model,
        train: Split,
        val: Split,
        *,
        ids: Tensor,
        round: int,
        seed: int,
        initial: Tree,
        training: Training,
    ) -> None:
        self.model = model
        self.ids = ids
        self.round = round
        self.n = train.n
        self.initial = initial
        self.loss = torch.full(ids.shape, torch.nan, dtype=torch.float64, device=ids.device)
        """Each client's mean objective over the last pass it trained."""
        self._data = train
        self._val = val
        self._seed = seed
        self._training = training
        self._batch = train.n.clamp_max(training.batch_size).tolist()
        self._steps = [-(-n // b) for n, b in zip(train.n.tolist(), self._batch, strict=True)]

    def keys(self, purpose: str) -> Tensor:
        return random.client_keys(self._seed, self.ids, self.round, purpose)

    def need_val(self) -> None:
        if int(self._val.n.min()) == 0:
            raise InputError("this method needs validation data; hold some out of training with val=... (--val).")

    def accuracy(self, tree: Tree) -> Tensor:
        """On the clients' validation data: (C,). Test data is for the engine alone."""
        self.need_val()
        return score(self.model, tree, self._val)[0]

    def class_moments(self, tree: Tree) -> Tree:
        """Of the features of each class in the training data: count (C, K), mean (C, K, D), mean squared norm "square" (C, K).

        A class that a client does not have has count, mean and square 0.
        """
        total: Tree = {}
        for logits, features, y, inside in walk(self.model, tree, self._data):
            if self.model.head is None or features.ndim != 3:
                shape = tuple(features.shape[2:])
                raise InputError(
                    f"this method needs features that are a vector, but the head of {self.model.name} is given {shape}."
                )
            kind = (F.one_hot(y, logits.shape[-1]) * inside.unsqueeze(-1)).double()  # (C, b, K)
            f = features.double()
            parts = {
                "count": kind.sum(1),
                "mean": bmm(kind.transpose(1, 2), f),
                "square": bmm(kind.transpose(1, 2), (f**2).sum(-1, keepdim=True)).squeeze(-1),
            }
            total = {n: total[n] + v if total else v for n, v in parts.items()}
        many = total["count"].clamp_min(1.0)
        means = {"count": total["count"], "mean": total["mean"] / many.unsqueeze(-1), "square": total["square"] / many}
        return {n: v.to(features.dtype) for n, v in means.items()}

    def train(
        self,
        tree: Tree,
        passes: Sequence[Pass],
        *,
        objective: Objective = cross_entropy,
        ctx: State | None = None,
        key: str = "train",
    ) -> Tree:
        """Local training with a fresh optimizer, momentum carried from pass to pass; `tree` itself is left alone.

        A client whose mask marks nothing sits a pass out entirely.
        """
        out = {n: v.clone(memory_format=torch.contiguous_format) for n, v in tree.items()}
        ctx = ctx or {}
        if not one_by_one(self.model, self.ids.device):
            self._train(out, {n: torch.zeros_like(out[n]) for n in self.model.params}, passes, objective, ctx, key)
            return out
        # the whole round of one client before the next, so that its values stay in the cache
        speed = {n: torch.empty_like(out[n][:1]) for n in self.model.params}
        for row in (slice(i, i + 1) for i in range(len(self.ids))):
            for v in speed.values():
                v.zero_()
            alone = self.rows(row)
            mine = [Pass(take_mask(p.only, row), _take_rate(p.lr, row), p.epoch) for p in passes]
            alone._train(take(out, row), speed, mine, objective, {n: take(t, row) for n, t in ctx.items()}, key)
            self.loss[row] = alone.loss
        return out

    def _train(self, tree: Tree, velocity: Tree, passes: Sequence[Pass], objective: Objective, ctx: State, key: str) -> None:
        """Train `tree` in place."""
        base = self.keys(key)
        longest = int(self.n.max())
        steps = torch.tensor(self._steps, device=self.ids.device)
        for p in passes:
            shuffle = random.fold(base, p.epoch)
            order = random.permutations(shuffle, self.n, longest)
            total = torch.zeros_like(self.loss)
            active = self._active(p.only)
            for rows, first, last, size in self._stretches(active):
                mine, speed = take(tree, rows), take(velocity, rows)
                only, data, perm = take_mask(p.only, rows), self._data.rows(rows), order[rows]
                lr = _take_rate(p.lr, rows)
                own = {n: take(t, rows) for n, t in ctx.items()}
                for s in range(first, last):
                    # the last short batch is filled by going round the same shuffle: no padding to leak into statistics
                    places = (s * size + torch.arange(size, device=perm.device)) % data.n.unsqueeze(1)
                    x, y = data.batch(perm.gather(1, places), shuffle[rows])
                    keys = random.fold(shuffle[rows], s)
                    total[rows] += step(self.model, mine, speed, x, y, keys, only, lr, objective, own, self._training)
                if isinstance(rows, Tensor):
                    put(tree, rows, mine)
                    put(velocity, rows, speed)
            self.loss = torch.where(torch.tensor(active, device=total.device), total / steps, self.loss)

    def rows(self, rows: Rows) -> "Work":
        """The same door to fewer clients."""
        return Work(
            self.model,
            self._data.rows(rows),
            self._val.rows(rows),
            ids=self.ids[rows],
            round=self.round,
            seed=self._seed,
            initial=self.initial,
            training=self._training,
        )

    def _active(self, only: Mask) -> list[bool]:
        """Which clients have anything to train under this mask."""
        if any(m is True for n, m in only.items() if n in self.model.params):
            return [True] * len(self.ids)
        any_entry = torch.zeros(len(self.ids), dtype=torch.bool, device=self.ids.device)
        for n in self.model.params:
            m = only.get(n, False)
            if isinstance(m, Tensor):
                any_entry |= m.reshape(len(m), -1).any(1)
        return any_entry.tolist()

    def _stretches(self, active: list[bool]) -> Iterator[tuple[Rows, int, int, int]]:
        """Cut a pass into (rows, first step, last step, batch size) in which the same clients run side by side.

        A client with fewer batches drops out when it is done and one with fewer samples than a batch runs apart, so
        nothing ever runs on padding.
        """
        rows = [i for i, on in enumerate(active) if on]
        for size in sorted({self._batch[i] for i in rows}, reverse=True):
            group = [i for i in rows if self._batch[i] == size]
            done = 0
            for last in sorted({self._steps[i] for i in group}):
                running = [i for i in group if self._steps[i] >= last]
                together = running[-1] - running[0] + 1 == len(running)
                yield (
                    slice(running[0], running[-1] + 1) if together else torch.tensor(running, device=self.ids.device),
                    done,
                    last,
                    size,
                )
                done = last


def _take_rate(lr: Rate, rows: Rows) -> Rate:
    if isinstance(lr, Mapping):
        return {n: v[rows] if isinstance(v, Tensor) and v.ndim else v for n, v in lr.items()}
    return lr[rows] if isinstance(lr, Tensor) and lr.ndim else lr
