"""Assignment: what a federation trains together; the same on the server and on every client."""

import hashlib
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedselect.core.errors import DataError, InputError
from fedselect.core.tree import Mask, Tree, expand
from fedselect.data import ClientData, Federation
from fedselect.methods.method import Method, Up, for_clients
from fedselect.models import Layout, Model
from fedselect.private.clients import Covered
from fedselect.private.samples import passes_of
from fedselect.private.settings import Private
from fedselect.secret.ring import Ring
from fedselect.tasks.losses import Goal
from fedselect.tasks.metrics import Metric
from fedselect.tasks.task import Targets, Task
from fedselect.training.batches import Split
from fedselect.training.fitted import Fitted
from fedselect.training.per_sample import Counting, Guard
from fedselect.training.prefix import SHARE, Prefix, find, memory
from fedselect.training.recorded import Programs
from fedselect.training.settings import Training
from fedselect.training.step import Batch, one_by_one, try_step
from fedselect.training.work import Work


@dataclass(frozen=True)
class Assignment:
    """A method, a model and a seed for some clients; `federation`, `run` and `plan` identify the run and its settings."""

    method: Method
    model: Model
    training: Training
    task: Task
    data: Targets  # shape and classes of every client's data
    _: KW_ONLY
    seed: int
    clients: int
    headline: str | None = None
    asked: tuple[str, ...] = ()  # metrics in addition to the task's own
    method_name: str = "method"
    federation: str = "federation"
    run: str = "run"
    plan: str = ""  # digest of everything the run depends on
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    card: dict[str, Any] = field(default_factory=dict)  # stored with the finished model: its options, class names
    rounds: int | None = None  # in total, for schedules and privacy budgets that depend on it
    secret: Ring | None = None  # the numbers that are added up when the server may learn sums only
    private: Private | None = None
    keep: str = "last"  # which round's model is kept: last, best or own
    view: str | None = None  # best: each client chooses which of its models it reports
    ahead: bool = True  # whether layers that never change run once per sample; not if samples are augmented
    initial: Tree = field(init=False, repr=False)
    programs: Programs = field(init=False, repr=False)
    metrics: tuple[Metric, ...] = field(init=False, repr=False)
    bare: bool = field(init=False, repr=False)  # whether the network returns a single tensor
    prefix: Prefix | None = field(init=False, repr=False, compare=False)  # the layers that run once per sample
    _told: dict[str, "Assignment"] = field(init=False, repr=False, compare=False, default_factory=dict)  # cache of `told`
    # cache of `split`, by part
    _splits: dict[str, tuple[Federation, Split]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", self.task.measured(self.headline, self.asked))
        self.training.check_rounds(self.rounds)
        if self.private is not None and self.private.unit == "client" and not isinstance(self.method, Covered):
            object.__setattr__(self, "method", Covered(self.method))
        fitted = Fitted(self.model, self.device, layout=self.layout)
        object.__setattr__(self, "initial", {n: v.to(self.device) for n, v in self.model.init(self.seed).items()})
        x, y = self.raw(self._samples(), "train").batch(torch.tensor([[0, 1]], device=self.device))
        self.task.check(fitted.check(x[0], self.task, self.data), y[0], self.metrics)
        object.__setattr__(self, "bare", fitted.bare)
        prefix = find(fitted, x[0], self.task, self.data) if self.ahead else None
        object.__setattr__(self, "prefix", prefix)
        if prefix is not None:
            fitted, x = prefix.rest, prefix.outputs(x[0]).unsqueeze(0)
        object.__setattr__(self, "programs", Programs(fitted, self.training, self.task))
        if not one_by_one(fitted, self.device):
            self._try(fitted, x, y)

    def _try(self, fitted: Fitted, x: Tensor, y: Tensor) -> None:
        batch = Batch(x, y, torch.zeros(1, dtype=torch.int64, device=self.device))
        try:
            try_step(fitted, self.initial, batch, Goal(self.task), self.training)
        except RuntimeError as e:
            raise InputError(f"{self.model.name} cannot be trained on inputs of shape {tuple(x.shape[2:])}: {e}") from e

    @property
    def layout(self) -> Layout | None:
        """How several inputs are packed into one tensor."""
        return getattr(self.data, "layout", None)

    @property
    def validates(self) -> bool:
        """Whether clients also measure on validation data, to choose a model by it."""
        return self.keep != "last" or self.view is not None

    @property
    def address(self) -> dict[str, str]:
        """The fields that every message of a run carries."""
        return {"federation": self.federation, "run": self.run, "plan": self.plan}

    @property
    def identity(self) -> dict[str, str]:
        """What a vault is bound to."""
        shapes = [(n, tuple(v.shape), str(v.dtype)) for n, v in self.initial.items()]
        base = self.model.base if self.model.adapters else ""
        digest = hashlib.sha256((repr(shapes) + base).encode()).hexdigest()[:8]
        model = f"{self.model.name} {digest}"
        return {"federation": self.federation, "method": self.method_name, "model": model}

    def told(self, options: Mapping[str, Any]) -> "Assignment":
        """This assignment with the task options that the server derived from all clients' statistics."""
        known: set[str] = {f.name for f in fields(self.task)} if is_dataclass(self.task) else set()
        if not options.keys() <= known or not all(isinstance(v, str) for v in options.values()):
            raise DataError(f"the server sent {dict(options)!r} for the task, which has no such options; update both sides.")
        if (key := repr(sorted(options.items()))) not in self._told:
            self._told.clear()
            self._told[key] = replace(self, task=replace(self.task, **options))  # type: ignore[type-var]
        return self._told[key]

    def of(self, client: int) -> Method:
        """The method as this client sees it."""
        return for_clients(self.method, self.ids(client))

    def ids(self, client: int) -> Tensor:
        return torch.tensor([client], device=self.device)

    def for_data(self, data: Federation) -> "Assignment":
        """This assignment for one client's data: its samples may be augmented, or too many to keep the outputs of layers."""
        if self.prefix is None:
            return self
        samples = sum(len(p[1]) for c in data.clients for p in (c.train, c.test, c.val) if p is not None)
        fits = samples * self.prefix.size <= SHARE * memory(self.device)
        return self if fits and data.augment == "none" else replace(self, ahead=False)

    def raw(self, data: Federation, part: str) -> Split:
        """A client's samples as the network takes them."""
        return data.split(part, self.initial[self.model.params[0]].dtype).to(self.device)

    def split(self, data: Federation, part: str) -> Split:
        """A client's samples, or the outputs of the layers that run once per sample."""
        if self.prefix is None:
            return self.raw(data, part)
        if part not in self._splits or self._splits[part][0] is not data:  # they are wanted again with every message
            self._splits[part] = data, self.prefix.split(data, part, self.raw(data, part))
        return self._splits[part][1]

    def work(self, data: Federation, client: int, round: int, guard: Guard | None = None) -> Work:
        """Access to one client's data in a round; rounds count from 1."""
        return Work(
            self.programs,
            self.split(data, "train"),
            self.split(data, "val"),
            ids=self.ids(client),
            round=round - 1,
            seed=self.seed,
            initial=lambda: expand(self.initial, 1),
            rounds=self.rounds,
            guard=guard,
        )

    def rehearse(self) -> Up:
        """Run one round on two made-up samples: shows what an honest reply looks like, and fails early on what cannot work."""
        guard = Counting() if self.private is not None and self.private.unit == "sample" else None  # trains nothing
        work, method = self.work(self._samples(), 0, 1, guard), self.of(0)
        down = self.method.down(self.method.init(self.initial, self.clients, self.model), self.ids(0))
        shared = {k: expand(v, 1) for k, v in down.shared.items()}
        return method.client(work, method.join(work, expand(self.initial, 1)), {**shared, **down.rows})[1]

    def passes(self) -> int:
        """Local epochs that the method trains per round, for the accounting of sample-level privacy."""
        return passes_of(self.of(0), lambda guard: self.work(self._samples(), 0, 1, guard))

    def _samples(self) -> Federation:
        """Two made-up samples of one client."""
        x = torch.linspace(-1.0, 1.0, 2 * max(1, torch.Size(self.data.shape).numel())).view(2, *self.data.shape)
        if getattr(self.data, "whole", False):
            x = torch.zeros(2, *self.data.shape, dtype=torch.int64)
        x = x if self.layout is None else self.layout.example(2)
        pair = (x, self.task.example(self.data))
        return Federation([ClientData(pair, pair, pair, layout=self.layout)], self.data.classes)


def first(tree: Tree) -> Tree:
    """The values of the only client, without the client axis."""
    return {n: v[0] for n, v in tree.items()}


def first_mask(mask: Mask) -> Mask:
    return {n: m[0] if isinstance(m, Tensor) else m for n, m in mask.items()}
