"""A federation in one process: how a simulation is made, driven and read."""

import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fedselect.aggregate.aggregator import Aggregator
from fedselect.core import random
from fedselect.core.errors import InputError, TrainingError
from fedselect.core.names import client_number
from fedselect.core.tree import Mask, State, Tree, clone, put, take, together
from fedselect.data import ClientData, Federation
from fedselect.methods.groups import Groups, groups_of
from fedselect.methods.method import Down, Method, Received, check_clients, exact, for_clients
from fedselect.private.budget import Budget
from fedselect.private.clients import Covered, drawn
from fedselect.private.settings import Private, as_private
from fedselect.private.words import statement
from fedselect.secret.mean import Over, check_secret, hidden
from fedselect.simulate import checkpoint, measures, ranks, trial
from fedselect.simulate.disk import Disk
from fedselect.simulate.frozen import run_ahead
from fedselect.simulate.inputs import (
    Network,
    as_aggregator,
    as_federation,
    as_method,
    as_model,
    as_task,
    check_present,
    check_ranges,
    check_validation,
    fit,
    most,
    pick_device,
    pick_precision,
)
from fedselect.simulate.jobs import Asked, Job, Turn
from fedselect.simulate.keeping import Kept
from fedselect.simulate.named import knows_its_options
from fedselect.simulate.protect import check_private, check_together, protect
from fedselect.simulate.ready import Ready
from fedselect.simulate.records import CHOSEN, Record, columns, validated
from fedselect.simulate.rounds import Round
from fedselect.simulate.stack import Stack
from fedselect.simulate.store import Compact, Store
from fedselect.tasks.task import Task
from fedselect.training.batches import Split
from fedselect.training.fitted import Fitted
from fedselect.training.per_sample import PerSample
from fedselect.training.recorded import Programs, keep_memory
from fedselect.training.settings import Training
from fedselect.training.work import Work


class Simulation:
    """A federation in one process, round by round.

    `step` runs one round and returns its record. `save` and `resume` let another process continue the run, bit by bit on the
    same hardware. `fs.Result(simulation, history)` gives models, masks and scores. Use `fs.run` unless you need control
    between rounds.

    Args:
        method: A method such as `fs.FedAlike(lr=0.1)`, or its name for the default options.
        model: A name, a network of `fs.models`, your module, or a function that creates it.
        data: The clients: a `Federation`, or a list of `ClientData`.
        seed: Decides the initial parameters and the order of training.
        training: Optimizer, schedule and batch size; by default `fs.Training()`.
        task: What outputs and targets mean: a task or its name; by default the task that the data is for.
        headline: The metric of the task that tables show first.
        metrics: Names of further metrics of the task to measure.
        fraction: The share of clients that train in a round.
        late: How many clients join late, and in which round (counted from 1), such as `(2, 10)`.
        chunk: How many clients run at once; `auto` fits them to the memory.
        rows: What is stored per client between rounds: `all`, or `personal` parameters only, in memory or on `disk`.
        device: `auto`, `cpu`, `cuda` or one GPU such as `cuda:1`.
        precision: `auto`, `float32`, `bf16` (on a CPU only with AVX512_BF16 or AMX), or on a GPU `tf32`.
        recompute: Keep only the inputs of each transformer block and recompute its activations in the backward pass.
        deterministic: Refuse GPU operations whose result may differ from one time to the next.
        eval_every: Rounds between evaluations.
        eval_fraction: The share of clients that an evaluation covers, drawn anew each time.
        val: Also score validation data (`val_accuracy`, `val_loss`).
        keep: Which models are the result: those of the `last` round, of the `best` round on validation data, or of each
            client's `own` best round.
        view: `best` lets each client choose on its validation data which of its models it reports (local, merged,
            fine-tuned, mixed); by default the method decides.
        aggregator: How uploads are aggregated: an aggregator or its name; by default their mean, `fs.Mean()`.
        rounds: The total number of rounds, for a schedule or a privacy budget that depends on it.
        secret: Compute sums as secure aggregation does: values rounded, clients weighted equally. The pads that hide
            values on a network do not change a sum and are left out.
        mean: With `secret`, what sums are divided by: the `senders` of an entry, or the `cohort`.
        private: Differential privacy, such as `fs.Private(epsilon=8)`.
        like: What another run has prepared, `other.ready`. With the same model, data and training it is used again, which
            makes many small runs on a CPU faster; results are the same.

    Examples:
        >>> import fedselect as fs
        >>> data = fs.load("digits", clients=3, seed=0)
        >>> simulation = fs.Simulation(fs.FedAvgFT(lr=0.1), "mlp", data)
        >>> simulation.step()["round"]
        1
    """

    @knows_its_options("fs.Simulation")
    def __init__(
        self,
        method: Method | str,
        model: Network,
        data: Federation | Iterable[ClientData],
        *,
        seed: int = 0,
        training: Training | None = None,
        task: Task | str | None = None,
        headline: str | None = None,
        metrics: Sequence[str] = (),
        fraction: float = 1.0,
        late: tuple[int, int] | None = None,
        chunk: int | Literal["auto"] = "auto",
        rows: str = "auto",
        device: str = "auto",
        precision: str = "auto",
        recompute: bool = False,
        deterministic: bool = False,
        eval_every: int = 1,
        eval_fraction: float = 1.0,
        val: bool = False,
        keep: str = "last",
        view: str | None = None,
        aggregator: Aggregator | str | None = None,
        rounds: int | None = None,
        secret: bool = False,
        mean: Over = "senders",
        private: Private | str | None = None,
        like: Ready | None = None,
    ) -> None:
        method = as_method(method)
        self.aggregator = as_aggregator(aggregator)
        if training is not None and not isinstance(training, Training):
            raise InputError(f"training must be fs.Training(...), not {training!r}.")
        data = as_federation(data)
        task = as_task(task, data)
        model = as_model(model, data, task)
        self.clients = len(data.clients)
        check_ranges(seed=seed, fraction=fraction, chunk=chunk, rows=rows, eval_every=eval_every, eval_fraction=eval_fraction)
        check_ranges(
            deterministic=deterministic, headline=headline, metrics=metrics, secret=secret, mean=mean, keep=keep, view=view
        )
        check_secret(secret, mean, self.aggregator)
        if not isinstance(val, bool):
            raise InputError(f"val is True or False, not {val!r}; validation data belongs in fs.ClientData(val=...).")
        check_validation(data, val, keep, view, eval_fraction)
        val = val or keep != "last" or view is not None
        check_ranges(**({} if rounds is None else {"rounds": rounds}))
        check_present(late, self.clients)
        check_clients(method, self.clients)
        method = exact(method)
        self.private = as_private(private)
        if self.private is not None:
            check_private(rounds)
            check_together(self.private, secret, keep, view)
        self._bare = method, self.aggregator  # as given
        self.view = view or method.view  # of the models that clients report
        self.method: Method = Covered(method) if self.private and self.private.unit == "client" else method
        self.budget: Budget | None = None  # of privacy
        self.guard: PerSample | None = None
        self.model, self.data, self.seed, self.fraction = model, data, seed, fraction
        self.training, self.total = training or Training(), rounds
        self.training.check_rounds(rounds)
        self._from = torch.zeros(self.clients, dtype=torch.int64)
        if late is not None:
            self._from[-late[0] :] = late[1] - 1
        self.asked = task  # as given; the fitted task may learn from the data
        self.task = fit(task, data, self._from == 0)
        self.metrics = self.task.measured(headline, metrics)
        same = self.task.measured(asked=[m.name for m in self.metrics])
        self._kept = [m.name for m in same]  # the same for any headline, so that checkpoints fit
        keep_memory()
        self.eval_every, self.eval_fraction, self.deterministic, self.val = eval_every, eval_fraction, deterministic, val
        self.device = pick_device(device)
        self.precision = pick_precision(precision, self.device)
        self.initial = model.init(seed)
        names = [m.name for m in self.metrics]
        of = (model, data, late, self.training, task, names, self.device, self.precision, recompute)
        new = like is None or self.private is not None or not like.serves(of)
        self.ready = self._prepared(of, recompute) if like is None or new else like
        self.task, self._split = self.ready.task, self.ready.split
        self.fitted, self._programs = self.ready.fitted, self.ready.programs
        self.frozen, self.bare, self.raw = self.ready.frozen, self.ready.bare, self.ready.raw
        sizes = self._split["train"].sizes or ()
        self.initial = together({n: v.to(self.device) for n, v in self.initial.items()}, clients=False)
        self.round = 0
        self.server = method.init(self.initial, self.clients, model)
        self.secret = hidden(self.aggregator, most(fraction, self.clients), mean) if secret else None
        self._folds = self.secret or self.aggregator
        self.memory = self._folds.start({n: self.initial[n] for n in model.params})  # the aggregator's state between rounds
        self._check_processes()
        if new:
            self.ready.fits = trial.fits(self)
        self.fits = self.ready.fits
        if new and 1 in sizes:  # one sample may be too little for BatchNorm
            trial.step(self, sizes.index(1))
        if new and self.fitted.slow:
            what = ", ".join(sorted(self.fitted.slow))
            warnings.warn(f"{model.name} is slow to train: {what} has no fast rule for stacked clients.", stacklevel=3)
        self.chunk = min(self.fits, self.clients) if chunk == "auto" else chunk
        joined = trial.join(self)
        self.store = self._new_store(rows, joined)
        if self.private is not None:
            protect(self, self.private, joined)
        if val:
            self.need(self.view)
        self.keep = keep
        self.kept = None if keep == "last" else Kept(keep, self.clients, self.metrics[0], self._resting())

    def _prepared(self, of: tuple[Any, ...], recompute: bool) -> Ready:
        """The data and the model, in place."""
        dtype = self.initial[self.model.params[0]].dtype
        split = {part: self.data.split(part, dtype).to(self.device) for part in ("train", "val", "test")}
        sizes = split["train"].sizes or ()
        fitted = Fitted(self.model, self.device, self.precision, layout=self.data.layout, recompute=recompute)
        x, y = split["train"].rows(slice(0, 1)).batch(torch.tensor([[0, min(1, sizes[0] - 1)]], device=self.device))
        self.task.check(fitted.check(x[0], self.task, self.data), y[0], self.metrics)
        raw, bare = split["train"], fitted.bare
        frozen = None
        if ahead := run_ahead(self, fitted, split, x[0]):
            frozen, fitted, split = ahead
            raw = replace(raw, x=raw.x[:1].clone())  # one shows what they are like; the others need not stay on the device
        programs = Programs(fitted, self.training, self.task)
        return Ready(of, split, self.task, fitted, programs, raw, bare=bare, frozen=frozen)

    def __getstate__(self) -> dict[str, Any]:
        """How it was made and its current state; everything else, such as recorded steps, each process makes for itself."""
        late = (int((self._from > 0).sum()), int(self._from.max()) + 1)
        first, *others = [m.name for m in self.metrics]
        how = {
            "seed": self.seed, "training": self.training, "task": self.asked, "headline": first, "metrics": others,
            "fraction": self.fraction, "late": late if late[0] else None, "chunk": self.chunk,
            "rows": checkpoint.ROWS[self.store.kind], "device": self.device.type,
            "precision": self.precision, "recompute": self.fitted.recompute, "deterministic": self.deterministic,
            "eval_every": self.eval_every, "eval_fraction": self.eval_fraction, "val": self.val,
            "keep": self.keep, "view": "best" if self.view == "best" else None,
            "aggregator": self._bare[1], "rounds": self.total, "secret": self.secret is not None,
            "mean": self.secret.mean if self.secret else "senders", "private": self.private,
        }  # fmt: skip
        return {"given": (self._bare[0], self.model, self.data), "how": how, "stands": checkpoint.standing(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they were shown when it was first made
            self.__init__(*state["given"], **state["how"])  # type: ignore[misc]
        checkpoint.put_back(self, state["stands"])

    def __repr__(self) -> str:
        return f"Simulation({self.method}, {self.model}, {self.clients} clients, after round {self.round})"

    @property
    def _columns(self) -> tuple[str, ...]:
        """What is recorded for each client."""
        chosen = (CHOSEN,) if self.view == "best" else ()
        return (*columns(self.metrics), *(validated(m.name) for m in self.metrics if self.val), *chosen)

    def step(self, evaluate: bool | None = None) -> Record:
        """Run one round: the cohort trains, the server aggregates, and all present clients are evaluated.

        Args:
            evaluate: Whether to evaluate; by default every `eval_every` rounds.

        Returns:
            The record of the round: means, and under `clients` one list entry for each client.
        """
        (outcome,) = Stack([self]).step(evaluate)
        if isinstance(outcome, TrainingError):
            raise outcome
        return outcome

    def save(self, folder: str | Path) -> None:
        """Write the state to a folder, completely or not at all; the state before it is kept too."""
        checkpoint.save(Path(folder), self, checkpoint.owner(self))

    def resume(self, folder: str | Path) -> bool:
        """Restore the last state saved in a folder, if there is one; it must be of the same method, model and data.

        Returns:
            Whether there was one.
        """
        run = checkpoint.owner(self)
        found = checkpoint.find(Path(folder), run)
        if found is not None:
            checkpoint.load(found.place, self, run)
        return found is not None

    def asks(self, turn: Turn) -> Generator[Asked, Any, Record]:
        """The next round, as jobs for its clients."""
        return Round(self, turn).asks()

    def _cohort(self, present: Tensor) -> Tensor:
        """The clients that train in this round."""
        if self.private is not None and self.private.unit == "client" and self.secret is None:
            return drawn(present, self.fraction, self.private.entropy, self.seed, self.round)
        return random.choose(self.seed, present, most(self.fraction, len(present)), self.round, "cohort")

    def _drawn(self, present: Tensor) -> Tensor:
        """The clients that are evaluated after this round."""
        return random.choose(self.seed, present, most(self.eval_fraction, len(present)), self.round, "evaluation")

    def _received(self, order: list[Tensor], extras: list[State], mean: Tree, heard: Mask) -> Received:
        """This round's uploads from all processes, with one row of side statistics for each client."""
        ids, extra = ranks.gathered(order, extras)
        return Received(ids, mean, heard, {k: {n: v.to(self.device) for n, v in t.items()} for k, t in extra.items()})

    def models(self, ids: Sequence[int] | Tensor, view: str | None = None) -> Tree:
        """The personalized models of these clients, stacked, in the view that the method reports or the one asked for.

        With keep=best or own, the models of the kept rounds, which exist in the reported view only.
        """
        ids, view = torch.as_tensor(ids), view or self.view
        self.need(view)
        if len(ranks.own(ids)) < len(ids):
            raise InputError("a process holds only the models of its own clients; ask for those, or run in one process.")
        joined = self._joined(ids)
        if not bool(joined.all()):
            raise InputError(f"client {int(ids[~joined][0])} has not joined yet and has no model.")
        if self.kept and bool(self.kept.store.joined[ids].all()):
            if view != self.view:
                raise InputError(f"models of kept rounds exist in one view only; use view='{self.view}', or keep='last'.")
            return self.kept.models(ids, self.device)
        state, down = self._open(ids)
        if view == "local":
            return clone(self.method.local(state))
        if view == "best":
            return Stack([self]).do(Job("choose", ids, self.round - 1, state, down)).best  # type: ignore[no-any-return]
        return Stack([self]).do(Job("personal", ids, self.round - 1, state, down))  # type: ignore[no-any-return]

    @property
    def promise(self) -> str:
        """The privacy that this run promises, in words; empty without `private`."""
        return statement(self.budget.guarantee) if self.budget else ""

    @property
    def inputs(self) -> Split:
        """All clients' training inputs, in the form that models get."""
        return self._split["train"]

    def masks(self) -> Tree:
        """Which parameters are personal: {name: bool (clients, ...)}."""
        everybody = torch.arange(self.clients)
        if not bool(self._joined(everybody).any()):
            raise InputError("no client has joined yet, so there are no masks; run a round first.")
        state = self._open(everybody)[0] if isinstance(self.store, Disk) else self.store.take(everybody, self.device)
        found = self.method.mask(self.model, state)
        shapes = {n: (self.clients, *self.initial[n].shape) for n in found}
        return {n: m.clone() if isinstance(m, Tensor) else torch.full(shapes[n], m) for n, m in found.items()}

    def personal(self, client: int | str) -> Tree:
        """One client's personalized model, by its number or name, as a state_dict for the plain module."""
        number = client_number(client, self.data.names)
        return self.model.state_dict({n: v[0].cpu() for n, v in self.models([number]).items()})

    def need(self, view: str) -> None:
        """Refuse a view that needs models that are not kept."""
        if view != "merged" and self.store.forgets:
            instead = "another view" if view == "best" else "view='merged'"
            raise InputError(
                f"with rows={checkpoint.ROWS[self.store.kind]} clients keep their personal parameters, not their local models; "
                f"use {instead} or rows=all."
            )

    def cross(self) -> Tensor:
        """The headline metric of client i's model on client j's test data: (i, j), NaN for a client that has not joined."""
        return measures.cross(self)

    def live_share(self) -> float | None:
        """The mean personal share of the live parameters: in a kernel, the taps that ever meet the input.

        None if clients are spread over processes, or none has joined.
        """
        return measures.live_share(self)

    def persistence(self) -> Tree:
        """The persistence that the method measured, by tensor: one number per client, NaN if not measured or not joined.

        Empty if clients are spread over processes.
        """
        return measures.persistence(self)

    def groups(self) -> Groups | None:
        """Each client's group, named by its first member, if the method makes groups; None for clients not assigned yet."""
        return groups_of(self.method, self.server)

    def _shared(self) -> Tree:
        """The current values of the shared parameters."""
        return self.method.down(self.server, torch.zeros(1, dtype=torch.int64, device=self.device)).shared["params"]

    def _check_processes(self) -> None:
        if ranks.world() > 1 and self._folds.fold(self.memory, self._shared()).sums is None:
            raise InputError(
                f"the aggregator {type(self.aggregator).__name__} needs every upload in one process, and this run has "
                f"{ranks.world()}; start it without torchrun, or choose another."
            )

    def _for(self, ids: Tensor) -> Method:
        return for_clients(self.method, ids.to(self.device, non_blocking=True))

    def _open(self, ids: Tensor, ahead: Sequence[Tensor] = ()) -> tuple[State, Down]:
        """These clients' stored state and the server's values for them; the next clients' rows are fetched meanwhile."""
        state = self.store.take(ranks.place(ids), self.device)
        if ahead:
            self.store.prefetch(ranks.place(ahead[0]))
        if isinstance(self.store, Disk) and len(new := (~self.store.joined[ids]).nonzero().flatten()):
            for key, tree in self.store.carried(self._join(ids[new])).items():
                put(state[key], new.to(self.device), tree)
        return state, self.method.down(self.server, ids.to(self.device, non_blocking=True))

    def _join(self, ids: Tensor) -> State:
        """The states with which clients join. A store on disk holds only clients that trained; others join when needed."""
        since = self._from[ids]
        if len(rounds := sorted(set(since.tolist()))) == 1:
            return Stack([self]).do(Job("join", ids, rounds[0]))  # type: ignore[no-any-return]
        parts = [(since == r).nonzero().flatten() for r in rounds]
        back = torch.cat(parts).argsort().to(self.device)
        states = [self._join(ids[part]) for part in parts]
        return {k: take({n: torch.cat([s[k][n] for s in states]) for n in t}, back) for k, t in states[0].items()}

    def _joined(self, ids: Tensor) -> Tensor:
        """Which of these clients have joined."""
        return self._from[ids] < self.round if isinstance(self.store, Disk) else self.store.joined[ranks.place(ids)]

    def _remembered(self, ids: Tensor) -> dict[str, Tensor]:
        """What the local models of these clients scored when they were dropped."""
        assert not isinstance(self.store, Store)
        found = dict(zip(self._kept, self.store.scored(ids).T, strict=True))
        if isinstance(self.store, Disk) and len(new := (~self.store.joined[ids]).nonzero().flatten()):
            model = self.method.local(self._join(ids[new]))
            fresh = Stack([self]).do(Job("score", ids[new], self.round - 1, {"model": model}))
            for name, values in found.items():
                values[new] = fresh[name].cpu()
        return found

    def _work(self, ids: Tensor, round: int) -> Work:
        return Stack([self]).work(ids, round)

    def _chunks(self, ids: Tensor) -> Iterator[Tensor]:
        """Cut a cohort evenly into chunks that fit; clients of similar size are adjacent, so that they run without copies."""
        sizes = self._split["train"].sizes or ()
        order = sorted(ids.tolist(), key=lambda i: (-sizes[i], i))
        count = max(1, -(-len(order) // self.chunk))
        each = max(1, -(-len(order) // count))
        for at in range(0, len(order), each):
            yield torch.tensor(order[at : at + each])

    def _new_store(self, rows: str, state: State) -> Store | Compact | Disk:
        """Where client states are stored: on the device if all run at once, else on the host; packed if they are too many."""
        here = ranks.share(self.clients)
        if rows == "auto":
            full = here * sum(v.nbytes for t in state.values() for v in t.values())
            rows = "all" if self.chunk >= here or full < 0.5 * trial.host_memory() else "personal"
        if rows == "all":
            return Store(here, self.device if self.chunk >= here else torch.device("cpu"))
        if ranks.world() > 1:
            raise InputError("several processes store whole rows; use more processes, or rows=all.")
        packed = Disk if rows == "disk" else Compact
        return packed(here, self.device, lambda s: self.method.carries(self.model, s), state, len(self.metrics))

    def _resting(self) -> torch.device:
        """Where the models of kept rounds are stored: with the clients' rows, which must all be at hand."""
        if not isinstance(self.store, Store) or ranks.world() > 1:
            raise InputError("keep=best and own need whole rows of all clients in one process; use rows=all, without torchrun.")
        return self.store.device
