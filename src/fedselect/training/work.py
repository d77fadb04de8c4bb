"""Work: the only access to clients' data. In a simulation it covers a cohort, on a network node one client."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from fedselect.core import random
from fedselect.core.errors import InputError
from fedselect.core.tree import Mask, Scalar, State, Tree, count, matrix, put, take, take_mask
from fedselect.tasks.classes import Classification
from fedselect.tasks.losses import Goal, Objective
from fedselect.tasks.metrics import Metric
from fedselect.training.batches import Split
from fedselect.training.buffers import ordered
from fedselect.training.optim import SGD
from fedselect.training.per_sample import LOOKS, Guard
from fedselect.training.products import bmm
from fedselect.training.recorded import Programs, Walk
from fedselect.training.step import Aim, Rate, one_by_one, take_rate, trained

EVAL_BATCH, LEAST_EVAL = 256, 16
AT_ONCE = 1 << 22
"""Local epochs are shuffled together up to this many numbers."""


@dataclass(frozen=True)
class Pass:
    """One local epoch for `Work.train`: which entries train, how fast, and in which order of the data.

    only: mask of the entries that train: {name: bool tensor (C, ...)}, or True or False for a whole tensor
    lr: learning rate: a number, one per client (C,), or a dict of either by parameter name
    epoch: number of the local epoch, which decides how the data is shuffled
    """

    only: Mask
    lr: Rate
    epoch: int


def predictions(programs: Programs, tree: Tree, split: Split) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Every client's model on its own data in eval mode: (outputs, features, targets, which rows are real)."""
    tree = programs.place("values", tree) if split.longest else tree
    size = max(LEAST_EVAL, EVAL_BATCH // max(1, split.y[:1].numel()))  # fewer if there are outputs for many positions
    for at in range(0, split.longest, size):
        yield programs.predict(tree, split, at, min(size, split.longest - at))


def score(programs: Programs, tree: Tree, split: Split, metrics: Sequence[Metric]) -> dict[str, Tensor]:
    """Every client's model on its own data: (C,) float64 by metric; NaN without data."""
    means = [m for m in metrics if m.by_sample]
    zeros = torch.zeros(split.n.shape, dtype=torch.float64, device=split.n.device)
    sums = {m.name: zeros for m in means}
    counts: dict[str, Tensor] = {}  # for metrics that do not count every sample once
    kept: list[tuple[Tensor, Tensor]] = []
    for outputs, _, y, inside in predictions(programs, tree, split):
        for m in means:
            value, count = m.each(outputs.flatten(0, 1), y.flatten(0, 1))
            sums[m.name] = sums[m.name] + torch.where(inside, value.view_as(inside), 0.0).sum(1)
            if count is not None:
                counts[m.name] = counts.get(m.name, zeros) + torch.where(inside, count.view_as(inside), 0.0).sum(1)
        if len(means) < len(metrics):
            kept.append((outputs.cpu().clone(), y.cpu()))
    found = {name: total / counts.get(name, split.n) for name, total in sums.items()}
    return {m.name: found[m.name] if m.by_sample else _one_by_one(m, kept, split) for m in metrics}


def _one_by_one(metric: Metric, kept: Sequence[tuple[Tensor, Tensor]], split: Split) -> Tensor:
    """A metric that needs all outputs and targets of a client, client by client."""
    found = torch.full(split.n.shape, torch.nan, dtype=torch.float64)
    outputs, targets = (torch.cat(parts, 1) for parts in zip(*kept, strict=True)) if kept else (found, found)
    for i, n in enumerate(split.sizes or ()):
        if n:
            found[i] = metric.value(outputs[i, :n], targets[i, :n])
    return found.to(split.n.device)


class Work:
    """What a method may do in one round with the data of the clients `ids`.

    A method's `client` gets one of these. Every tree has a leading axis over exactly these clients. Randomness is keyed by
    (seed, client, round, key), so a client's result does not depend on which others are there. `model`, `task`, `round` and
    the numbers of training samples `n` are attributes; `loss` is each client's loss after `train`.

    Examples:
        Two local epochs on all parameters, in a method's `client`:

            everything = dict.fromkeys(work.model.params, True)
            passes = [fs.Pass(everything, lr=0.1, epoch=e) for e in range(2)]
            trained = work.train(down["params"], passes)
    """

    def __init__(
        self,
        programs: Programs,
        train: Split,
        val: Split,
        *,
        ids: Tensor,
        round: int,
        seed: int | Tensor,
        initial: Callable[[], Tree],
        rounds: int | None = None,
        guard: Guard | None = None,
    ) -> None:
        self.model, self.task = programs.model, programs.task
        self.ids = ids
        self.round = round
        self.n = train.n
        self._initial = initial
        self.loss = torch.full(ids.shape, torch.nan, dtype=torch.float64, device=ids.device)
        """Each client's mean objective over the last local epoch it trained."""
        self._data = train
        self._val = val
        self._guard = guard
        self.walked = 0
        """Local epochs that a guard has let through."""
        self._seed = seed
        self._rounds = rounds
        self._programs = programs
        assert train.sizes is not None
        self._batch = [min(n, programs.training.batch_size) for n in train.sizes]
        self._steps = [-(-n // b) for n, b in zip(train.sizes, self._batch, strict=True)]

    @property
    def initial(self) -> Tree:
        """The initial values of the clients, one row for each."""
        return self._initial()

    def keys(self, purpose: str) -> Tensor:
        return random.client_keys(self._seed, self.ids, self.round, purpose)

    def _need_open(self) -> None:
        """Refuse direct access to data if samples are private."""
        if self._guard is not None and not self._guard.opens:
            raise InputError(LOOKS)

    def need_val(self) -> None:
        self._need_open()
        if int(self._val.n.min()) == 0:
            raise InputError("this method needs validation data; hold some out of training with val=... (--val).")

    def metric(self, name: str, tree: Tree) -> Tensor:
        """A metric of the task on the clients' validation data; methods cannot see test data.

        Args:
            name: The metric.
            tree: The models to score.

        Returns:
            One number per client: (C,).
        """
        self.need_val()
        found = self.task.metric(name)
        if found is None:
            known = ", ".join(m.name for m in self.task.measured())
            raise InputError(f"this method needs the metric {name}, which the task does not have; it has {known}.")
        return score(self._programs, tree, self._val, [found])[name]

    def held_out(self, tree: Tree, metrics: Sequence[Metric]) -> dict[str, Tensor]:
        """Metrics on the clients' validation data, by name: (C,), NaN for a client that has none."""
        self._need_open()
        return score(self._programs, tree, self._val, metrics)

    def need_classes(self) -> None:
        if not isinstance(self.task, Classification):
            raise InputError("this method needs classes; use it with the task classification.")

    def dead(self) -> Tree:
        """Entries that can never move: kernel taps that only ever meet padding, each kernel's in a row."""
        return self._programs.fitted.dead()

    def classes(self, count: int) -> Tensor:
        """Which of `count` classes occur in each client's training data: (C, count)."""
        self.need_classes()
        self._need_open()
        last = (self.n - 1).unsqueeze(1)
        at = torch.arange(self._data.longest, device=self.n.device).expand(len(self.n), -1)
        labels = self._data.y[self._data.places(torch.minimum(at, last))]
        return torch.zeros(len(self.n), count, dtype=torch.bool, device=self.n.device).scatter_(1, labels, True)

    def seen(self, tree: Tree) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Outputs on the training data in eval mode, part by part: (outputs, features, targets, which rows are real)."""
        self._need_open()
        return predictions(self._programs, tree, self._data)

    def class_moments(self, tree: Tree) -> Tree:
        """Moments of the features of each class in the training data: "count" (C, K), "mean" (C, K, D), mean squared norm
        "square" (C, K).

        A class that a client does not have has count, mean and square 0.
        """
        self.need_classes()
        total: Tree = {}
        for logits, features, y, inside in self.seen(tree):
            if self.model.head is None or features.ndim != 3:
                shape = tuple(features.shape[2:])
                raise InputError(
                    f"this method needs feature vectors, but the head of {self.model.name} gets inputs of shape {shape}."
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

    def travel(self, epochs: int, lr: Scalar) -> Tensor:
        """How far SGD moves an entry in `epochs` local epochs if its gradient is always 1, with the schedule: (C,) float64.

        An entry's change divided by this is a mean of its gradients over the steps.
        """
        sgd = self._programs.training.the_optimizer
        if type(sgd) is not SGD:
            raise InputError("this method infers gradients from the steps of SGD; use the optimizer sgd (--optimizer sgd).")
        beta = sgd.momentum
        steps = torch.tensor([epochs * s for s in self._steps], dtype=torch.float64, device=self.ids.device)
        speeds = (steps - beta * (1 - beta**steps) / (1 - beta)) / (1 - beta)  # 1 + (1 + beta) + (1 + beta + beta^2) + ...
        way = steps + beta * speeds if sgd.nesterov else speeds
        return way * lr * self._programs.training.factor(self.round, self._rounds)

    def train(
        self,
        tree: Tree,
        passes: Sequence[Pass],
        *,
        objective: Objective | None = None,
        penalty: Objective | None = None,
        ctx: State | None = None,
        key: str = "train",
        scheduled: bool = True,
    ) -> Tree:
        """Train locally with a fresh optimizer, which keeps its memory from one local epoch to the next.

        A client whose mask marks nothing skips a local epoch entirely.

        Args:
            tree: The values to start from; not changed.
            passes: The local epochs.
            objective: Minimized in place of the task's loss.
            penalty: Added to the objective.
            ctx: Values for `objective` and `penalty`, one row per client.
            key: Purpose of the randomness, such as the shuffle; another purpose draws other numbers.
            scheduled: Whether learning rates follow the schedule.

        Returns:
            The trained values.
        """
        factor = self._programs.training.factor(self.round, self._rounds) if scheduled else 1.0
        if factor != 1.0:
            rates = {id(p.lr): _times(p.lr, factor) for p in passes}
            passes = [Pass(p.only, rates[id(p.lr)], p.epoch) for p in passes]
        goal = Goal(self.task, objective, penalty)
        if self._guard is not None:
            return self._guard.train(self, self._data, tree, passes, goal=goal, ctx=ctx or {}, key=key)
        return self._minimise(tree, passes, goal, ctx or {}, key)

    def _minimise(self, tree: Tree, passes: Sequence[Pass], goal: Goal, ctx: State, key: str) -> Tree:
        if not one_by_one(self._programs.fitted, self.ids.device):
            order = self._longest_first()
            if order is not None:
                return self._train_as(order, tree, passes, goal, ctx, key)
            out = self._programs.place("values", tree)
            if out is tree:
                out = ordered(tree)
            memory = self._programs.rest({n: out[n] for n in self.model.params})
            self._train(out, memory, passes, goal, ctx, key)
            return self._programs.fetch("values", out) if self.ids.is_cuda else out
        # the whole round of one client before the next, so that its values stay in the cache
        moving = {n for p in passes for n in trained(self.model, p.only)}
        changing = {n: v for n, v in tree.items() if n in moving or n in self.model.stats}
        out = {**tree, **(ordered(changing) if changing else {})}  # frozen parts are only read
        memory = self._programs.rest({n: out[n][:1] for n in self.model.params if n in moving})
        for row in (slice(i, i + 1) for i in range(len(self.ids))):
            for v in (v for past in memory.values() for v in past.values()):
                v.zero_()
            alone = self.rows(row)
            alone.loss = self.loss[row].clone()
            mine = [Pass(take_mask(p.only, row), take_rate(p.lr, row), p.epoch) for p in passes]
            alone._train(take(out, row), memory, mine, goal, {n: take(t, row) for n, t in ctx.items()}, key)
            self.loss[row] = alone.loss
        self._programs.let_go()
        return out

    def _longest_first(self) -> Tensor | None:
        """Order clients by training time, if they are not: those still training are then adjacent, and used in place."""
        order = sorted(range(len(self._steps)), key=lambda i: (-self._batch[i], -self._steps[i]))
        return None if order == list(range(len(order))) else torch.tensor(order)

    def _train_as(self, order: Tensor, tree: Tree, passes: Sequence[Pass], goal: Goal, ctx: State, key: str) -> Tree:
        """`train` with the clients in another order; the result is in theirs."""
        there = self.rows(order)
        at = order.to(self.ids.device, non_blocking=True)
        there.loss = self.loss[at]  # clients that skip all local epochs keep theirs
        masks = {i: take_mask(only, at) for i, only in {id(p.only): p.only for p in passes}.items()}
        mine = [Pass(masks[id(p.only)], take_rate(p.lr, at), p.epoch) for p in passes]
        out = there._minimise(take(tree, at), mine, goal, {k: take(t, at) for k, t in ctx.items()}, key)
        back = order.argsort().to(at.device, non_blocking=True)
        self.loss = there.loss[back]
        return take(out, back)

    def _train(self, tree: Tree, memory: State, passes: Sequence[Pass], goal: Goal, ctx: State, key: str) -> None:
        """Train `tree` in place."""
        base = self.keys(key)
        batches = self.n.clamp_max(self._programs.training.batch_size)
        steps = -(-self.n // batches)
        ahead = len(passes) * ((self._rounds or 0) - self.round)
        given = {id(p.only): p.only for p in passes}
        masks = {at: self._programs.place(f"mask {i}", only) for i, (at, only) in enumerate(given.items())}
        ctx = {k: self._programs.place(f"ctx {k}", t) for k, t in ctx.items()}
        moving = {at: self._active(only) for at, only in given.items()}
        lists = {at: [active] * len(self.ids) if isinstance(active, bool) else active.tolist() for at, active in moving.items()}
        cuts = {at: list(self._stretches(active)) for at, active in lists.items()}
        for p, epochs in self._shuffled(base, passes, {at for at, cut in cuts.items() if len(cut) == 1}):
            total = torch.zeros_like(self.loss)
            for here, first, last, size in cuts[id(p.only)]:
                rows = here.to(self.ids.device, non_blocking=True) if isinstance(here, Tensor) else here
                mine, past = take(tree, rows), {k: take(t, rows) for k, t in memory.items()}
                aim = Aim(
                    take_mask(masks[id(p.only)], rows), take_rate(p.lr, rows), goal, {n: take(t, rows) for n, t in ctx.items()}
                )
                walks = [Walk(order[rows], shuffle[rows], size) for shuffle, order in epochs]
                own, left = self._data.rows(here), ahead * (last - first)
                total[rows] += self._programs.train(mine, past, aim, own, walks, first=first, last=last, left=left)
                if isinstance(rows, Tensor):
                    put(tree, rows, mine)
                    for k, t in memory.items():
                        put(t, rows, past[k])
            active = moving[id(p.only)]
            if active is not False:
                self.loss = total / steps if active is True else torch.where(active, total / steps, self.loss)

    def _shuffled(
        self, base: Tensor, passes: Sequence[Pass], whole: set[int]
    ) -> Iterator[tuple[Pass, list[tuple[Tensor, Tensor]]]]:
        """Each local epoch with the keys that shuffle it, (C,), and the order of its samples, (C, longest).

        Epochs that follow each other and differ in nothing else come together if all their clients take the same steps, that
        is, if the id of their mask is in `whole`.
        """
        several = max(1, AT_ONCE // max(1, len(self.ids) * self._data.longest))
        for some in (passes[i : i + several] for i in range(0, len(passes), several)):
            numbers = torch.tensor([p.epoch for p in some], dtype=torch.int64).unsqueeze(1)
            shuffles = random.fold(base, numbers.to(self.ids.device, non_blocking=True))  # (passes, C)
            orders = random.permutations(shuffles, self.n, self._data.longest)
            if self._data.picks is not None:
                orders = self._data.picks.expand(len(some), -1, -1).gather(2, orders)
            own = list(zip(shuffles, orders, strict=True))
            alike = [(id(p.only), id(p.lr), 0 if id(p.only) in whole else at) for at, p in enumerate(some)]
            for _, epochs in groupby(range(len(some)), alike.__getitem__):
                at = list(epochs)
                yield some[at[0]], [own[i] for i in at]

    def rows(self, rows: slice | Tensor) -> "Work":
        """Access to fewer clients, or to all in another order; an index is on the host."""
        at = rows.to(self.ids.device, non_blocking=True) if isinstance(rows, Tensor) else rows
        return Work(
            self._programs,
            self._data.rows(rows),
            self._val.rows(rows),
            ids=self.ids[at],
            round=self.round,
            seed=self._seed[at] if isinstance(self._seed, Tensor) else self._seed,
            initial=lambda: take(self.initial, at),
            rounds=self._rounds,
            guard=self._guard,
        )

    def half(self, which: int, whose: Tensor | None = None) -> "Work":
        """Access to one half (0 or 1) of every client's training samples, each used twice.

        So the training is as long as with all samples. Halves are drawn at random, once for all rounds; if the number is odd,
        the first has one more. A client with one sample has it in both, and one not marked in `whose`, (C,), has all samples.
        """
        self._need_open()
        each = torch.arange(self._data.longest, device=self.n.device).expand(len(self.ids), -1)
        mixed = random.permutations(random.client_keys(self._seed, self.ids, 0, "halves"), self.n, self._data.longest)
        last = ((self.n - 1 - which) // 2 * 2 + which).clamp_min(0)
        picks = mixed.gather(1, torch.minimum(each // 2 * 2 + which, last.unsqueeze(1)))
        if whose is not None:
            picks = torch.where(whose.unsqueeze(1), picks, each)
        if self._data.picks is not None:
            picks = self._data.picks.gather(1, picks)
        return Work(
            self._programs,
            replace(self._data, picks=picks),
            self._val,
            ids=self.ids,
            round=self.round,
            seed=self._seed,
            initial=self._initial,
            rounds=self._rounds,
        )

    def stretches(self, only: Mask) -> Iterator[tuple[slice | Tensor, int, int, int]]:
        """A local epoch with this mask, cut as in `_stretches`."""
        active = self._active(only)
        return self._stretches([active] * len(self.ids) if isinstance(active, bool) else active.tolist())

    def _active(self, only: Mask) -> bool | Tensor:
        """Which clients have anything to train with this mask: (C,), or all or none if known beforehand."""
        marks = {n: only.get(n, False) for n in self.model.params}
        partly = {n: m for n, m in marks.items() if isinstance(m, Tensor)}
        whole = any(m is True for m in marks.values())
        if whole or not partly:
            return whole
        return count(matrix(partly)) > 0

    def _stretches(self, active: list[bool]) -> Iterator[tuple[slice | Tensor, int, int, int]]:
        """Cut a local epoch into (rows, first step, last step, batch size) in which the same clients run; on the host.

        A client with fewer batches drops out when it is done, and one with fewer samples than a batch runs separately, so
        nothing ever runs on padding.
        """
        rows = [i for i, on in enumerate(active) if on]
        for size in sorted({self._batch[i] for i in rows}, reverse=True):
            group = [i for i in rows if self._batch[i] == size]
            done = 0
            for last in sorted({self._steps[i] for i in group}):
                running = [i for i in group if self._steps[i] >= last]
                together: slice | Tensor = slice(running[0], running[-1] + 1)
                if len(running) == len(active):
                    together = slice(None)
                elif running[-1] - running[0] + 1 != len(running):
                    together = torch.tensor(running)
                yield together, done, last, size
                done = last


def _times(lr: Rate, factor: float) -> Rate:
    return {n: v * factor for n, v in lr.items()} if isinstance(lr, Mapping) else lr * factor
