"""The engine: rounds over stacked clients."""

import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedselect import random
from fedselect.data import ClientData, Federation
from fedselect.deploy import wire
from fedselect.errors import InputError, TrainingError
from fedselect.method import Method, Received, check_clients, for_clients
from fedselect.models import Model
from fedselect.objectives import cross_entropy
from fedselect.simulate.store import Store
from fedselect.step import Training, one_by_one, step
from fedselect.tree import MaskedSum, State, Tree, clone, expand, rows
from fedselect.work import Work, score

Record = dict[str, Any]
"""One round as it is written to metrics.jsonl: means, and under "clients" one list entry for each client."""
LISTS = ("accuracy", "accuracy_local", "accuracy_merged", "test_loss", "train_loss", "share", "bytes_up", "bytes_down")


def pick_device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"device is auto, cpu or cuda, not {name!r}.")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no CUDA device here; use --device cpu.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


class Simulation:
    """A federation in one process. `step` runs one round; `server`, `store` and `round` are all there is to save."""

    def __init__(
        self,
        method: Method,
        model: Model,
        data: Federation,
        *,
        seed: int = 0,
        training: Training | None = None,
        fraction: float = 1.0,
        late: tuple[int, int] | None = None,
        chunk: int | Literal["auto"] = "auto",
        device: str = "auto",
        eval_every: int = 1,
    ) -> None:
        self.clients = len(data.clients)
        if not 0.0 < fraction <= 1.0:
            raise InputError(f"fraction is the share of clients in a round and must lie in (0, 1], not {fraction}.")
        if not 0 <= seed < 2**63:
            raise InputError(f"seed must lie in 0 to 2**63 - 1, not {seed}.")
        if late is not None and not 0 < late[0] < self.clients:
            raise InputError(
                f"late: {late[0]} of {self.clients} clients cannot join late; at least one must be there at first."
            )
        if chunk != "auto" and not (isinstance(chunk, int) and chunk >= 1):
            raise InputError(f"chunk must be at least 1 or auto, not {chunk}.")
        if eval_every < 1:
            raise InputError(f"eval_every must be at least 1, not {eval_every}.")
        check_clients(method, self.clients)
        self.method, self.model, self.data, self.seed, self.fraction = method, model, data, seed, fraction
        self.training = training or Training()
        self.eval_every = eval_every
        self.device = pick_device(device)
        self.initial = model.init(seed)
        dtype = self.initial[model.params[0]].dtype
        splits = {part: data.split(part, dtype) for part in ("train", "val", "test")}
        one = splits["train"].rows(slice(0, 1))
        x, _ = one.batch(torch.tensor([[0, min(1, int(one.n[0]) - 1)]]))
        model.check(x[0], data.classes)
        model.to(self.device)
        self.initial = {n: v.to(self.device) for n, v in self.initial.items()}
        self._split = {part: split.to(self.device) for part, split in splits.items()}
        self._from = torch.zeros(self.clients, dtype=torch.int64)
        if late is not None:
            self._from[-late[0] :] = late[1] - 1
        self.round = 0
        self._folded = False  # whether the round in hand has been counted
        self.server = method.init(self.initial, self.clients, model)
        fits = self._fit()
        self.chunk = fits if chunk == "auto" else chunk
        self._try_join()
        self.store = Store(self.clients, self.device if self.chunk >= self.clients else torch.device("cpu"))

    def step(self, evaluate: bool | None = None) -> Record:
        """One round: clients train, the server folds, everybody present is evaluated."""
        began = time.perf_counter()
        self._folded = False
        present = (self._from <= self.round).nonzero().flatten()
        for ids in self._chunks(present[~self.store.joined[present]]):
            self.store.put(ids, self._for(ids).join(self._work(ids), expand(self.initial, len(ids))))
        count = max(1, round(self.fraction * len(present)))
        cohort = random.choose(self.seed, present, count, self.round, "cohort")
        lists: dict[str, list[Any]] = {k: [None] * self.clients for k in LISTS}
        folded, extras, order = MaskedSum(), [], []
        for ids in self._chunks(cohort):
            work, state, down = self._open(ids)
            wanted = self.method.wants(self.model, state)
            _write(lists["bytes_down"], ids, wire.down_size(self.method.down(self.server, ids), wanted, len(ids)))
            state, up = self._for(ids).client(work, state, down)
            self._check_finite(ids, self.method.local(state), up.values)
            self.store.put(ids, state)
            folded.add(up.values, up.sent, up.weight)
            extras.append(up.extra)
            order.append(ids)
            _write(lists["bytes_up"], ids, wire.up_size(up))
            _write(lists["train_loss"], ids, work.loss)
        mean, heard = folded.mean()
        got = Received(torch.cat(order), mean, heard, _concat(extras))
        self.server = self.method.server(self.server, got)
        self.round += 1
        self._folded = True
        if evaluate is None:
            evaluate = self.round % self.eval_every == 0
        if evaluate:
            self._evaluate(present, lists)
        return {
            "round": self.round,
            "seconds": round(time.perf_counter() - began, 4),
            **{
                k: _mean(lists[k])
                for k in ("accuracy", "accuracy_local", "accuracy_merged", "test_loss", "train_loss", "share")
            },
            "bytes_up": sum(v or 0 for v in lists["bytes_up"]),
            "bytes_down": sum(v or 0 for v in lists["bytes_down"]),
            "clients": lists,
        }

    def models(self, ids: Sequence[int] | Tensor, view: str | None = None) -> Tree:
        """The personal models of these clients, stacked: the view the method reports, or the one asked for."""
        ids = torch.as_tensor(ids)
        if not bool(self.store.joined[ids].all()):
            late = int(ids[~self.store.joined[ids]][0])
            raise InputError(f"client {late} has not joined yet and has no model.")
        work, state, down = self._open(ids, self.round - 1)
        if (view or self.method.view) == "local":
            return clone(self.method.local(state))
        return self._for(ids).personal(work, state, down)

    def cross(self) -> Tensor:
        """Accuracy of client i's model on client j's test data: (i, j), NaN for a client that has not joined."""
        out = torch.full((self.clients, self.clients), torch.nan, dtype=torch.float64)
        for ids in self._chunks(self.store.joined.nonzero().flatten()):
            models, test = self.models(ids), self._split["test"]
            for j in range(self.clients):
                theirs = test.rows(torch.full_like(ids, j, device=self.device))
                out[ids, j] = score(self.model, models, theirs)[0].cpu()
        return out

    def _evaluate(self, present: Tensor, lists: dict[str, list[Any]]) -> None:
        for ids in self._chunks(present):
            work, state, down = self._open(ids, self.round - 1)
            test = self._split["test"].rows(ids.to(self.device))
            merged = self._for(ids).personal(work, state, down)
            self._check_finite(ids, merged)
            results = {"local": score(self.model, self.method.local(state), test), "merged": score(self.model, merged, test)}
            for view, (accuracy, _) in results.items():
                _write(lists[f"accuracy_{view}"], ids, accuracy)
            accuracy, loss = results[self.method.view]
            _write(lists["accuracy"], ids, accuracy)
            _write(lists["test_loss"], ids, loss)
            _write(lists["share"], ids, self._share(state, len(ids)))

    def _share(self, state: State, clients: int) -> Tensor:
        """The personal share of each client's parameters."""
        total = torch.zeros(clients, dtype=torch.float64)
        for n, m in self.method.mask(self.model, state).items():
            total += rows(m).sum(1).cpu() if isinstance(m, Tensor) else self.initial[n].numel() * bool(m)
        return total / self.model.size

    def _for(self, ids: Tensor) -> Method:
        return for_clients(self.method, ids.to(self.device))

    def _open(self, ids: Tensor, round: int | None = None) -> tuple[Work, State, State]:
        state = self.store.take(ids, self.device)
        down = self.method.down(self.server, ids.to(self.device))
        shared = {k: expand(v, len(ids)) for k, v in down.shared.items()}
        return self._work(ids, round), state, {**shared, **down.rows}

    def _work(self, ids: Tensor, round: int | None = None) -> Work:
        at = ids.to(self.device)
        return Work(
            self.model,
            self._split["train"].rows(at),
            self._split["val"].rows(at),
            ids=at,
            round=self.round if round is None else round,
            seed=self.seed,
            initial=self.initial,
            training=self.training,
        )

    def _chunks(self, ids: Tensor) -> Iterator[Tensor]:
        """Cut a cohort so that it fits; clients of like size lie side by side, so that they run without copies."""
        n = self._split["train"].n.cpu()[ids]
        order = sorted(range(len(ids)), key=lambda i: (-int(n[i]), int(ids[i])))
        for at in range(0, len(order), self.chunk):
            yield ids[torch.tensor(order[at : at + self.chunk])]

    def _check_finite(self, ids: Tensor, *trees: Tree) -> None:
        for tree in trees:
            fine = {n: torch.isfinite(rows(v)).all(1) for n, v in tree.items()}
            if bool(torch.stack(list(fine.values())).all()):
                continue
            name, ok = next((n, ok) for n, ok in fine.items() if not bool(ok.all()))
            client = self.data.clients[int(ids[int((~ok).nonzero()[0])])].name or int(ids[int((~ok).nonzero()[0])])
            raise TrainingError(
                f"client {client}, round {self.round + (not self._folded)}: {name} is no longer finite; "
                "lower the learning rate, or limit gradients with clip (--clip 1)."
            )

    def _try_join(self) -> None:
        """One client joins and is thrown away: what a method asks of model and data shows now, not after an hour."""
        one = torch.zeros(1, dtype=torch.int64)
        state = self._for(one).join(self._work(one, 0), expand(self.initial, 1))
        self.method.mask(self.model, state)
        self.method.wants(self.model, state)

    def _fit(self) -> int:
        """How many clients fit side by side in half of the memory there is, by what one client's step keeps."""
        kept = 0

        def count(t: Tensor) -> Tensor:
            nonlocal kept
            kept += t.nbytes
            return t

        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            self._try_step()
        weights = sum(v.nbytes for v in self.initial.values())
        running = 0 if one_by_one(self.model, self.device) else 2 * kept
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
        else:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return max(1, min(self.clients, int(0.5 * free / (10 * weights + running))))

    def _try_step(self) -> None:
        """One step of one client, thrown away: does this model run stacked?"""
        train = self._split["train"].rows(slice(0, 1))
        size = min(self.training.batch_size, int(train.n[0]))
        x, y = train.batch(torch.arange(size, device=self.device).unsqueeze(0))
        for _ in range(2):
            tree = {n: v.clone() for n, v in expand(self.initial, 1).items()}
            speed = {n: torch.zeros_like(v) for n, v in tree.items()}
            everything = dict.fromkeys(self.model.params, True)
            try:
                step(
                    self.model, tree, speed, x, y, torch.zeros_like(y[:, 0]), everything, 0.01, cross_entropy, {}, self.training
                )
                return
            except RuntimeError as e:
                if not self.model.stackable:
                    raise InputError(f"{self.model.name} cannot be trained on inputs of shape {self.data.shape}: {e}") from e
                self.model.stackable = False
                warnings.warn(
                    f"{self.model.name} cannot run for all clients at once, so they run one by one ({str(e).splitlines()[0]}).",
                    stacklevel=2,
                )


@dataclass(frozen=True)
class Result:
    """What a run leaves in memory."""

    simulation: Simulation
    history: list[Record]

    @property
    def accuracy(self) -> float:
        """Mean over clients of each client's accuracy on its own test data, as last evaluated."""
        return float(self._last()["accuracy"])

    @property
    def clients(self) -> list[Record]:
        """One entry for each client: what was last measured."""
        lists = self._last()["clients"]
        return [{k: lists[k][i] for k in LISTS} for i in range(self.simulation.clients)]

    @property
    def bytes_up(self) -> int:
        return sum(r["bytes_up"] for r in self.history)

    @property
    def bytes_down(self) -> int:
        return sum(r["bytes_down"] for r in self.history)

    @property
    def masks(self) -> Tree:
        """Which parameters are personal: {name: bool (clients, ...)}."""
        s = self.simulation
        state = s.store.take(torch.arange(s.clients), s.device)
        out: Tree = {}
        for n, m in s.method.mask(s.model, state).items():
            shape = (s.clients, *s.initial[n].shape)
            out[n] = m.clone() if isinstance(m, Tensor) else torch.full(shape, m)
        return out

    def cross(self) -> Tensor:
        """Accuracy of client i's model on client j's test data: (i, j)."""
        return self.simulation.cross()

    def to_dataframe(self) -> Any:
        """The history as a pandas DataFrame: a row for each round and client."""
        try:
            import pandas
        except ImportError:
            raise InputError("to_dataframe needs pandas; install it with: pip install pandas") from None
        names = [c.name or str(i) for i, c in enumerate(self.simulation.data.clients)]
        return pandas.DataFrame([
            {"round": r["round"], "client": i, "name": name, **{k: r["clients"][k][i] for k in LISTS}}
            for r in self.history
            for i, name in enumerate(names)
        ])  # fmt: skip

    def personal(self, client: int) -> Tree:
        """One client's model as a state_dict for the plain module."""
        if not 0 <= client < self.simulation.clients:
            raise InputError(f"there is no client {client}; there are 0 to {self.simulation.clients - 1}.")
        tree = self.simulation.models([client])
        return self.simulation.model.state_dict({n: v[0].cpu() for n, v in tree.items()})

    def _last(self) -> Record:
        for record in reversed(self.history):
            if record["accuracy"] is not None:
                return record
        raise InputError("nothing was evaluated; use a smaller eval_every.")


def run(
    method: Method,
    *,
    model: Model | nn.Module,
    data: Federation | Iterable[ClientData],
    rounds: int = 30,
    seed: int = 0,
    training: Training | None = None,
    on_round: Callable[[Record], None] | None = None,
    **how: Any,
) -> Result:
    """Train a federation in memory; `how` takes fraction, late, chunk, device and eval_every, as Simulation does."""
    if rounds < 1:
        raise InputError(f"rounds must be at least 1, not {rounds}.")
    if not isinstance(method, Method):
        raise InputError(f"method must be a method such as fs.FedSelect(), not {method!r}.")
    if isinstance(model, nn.Module):
        model = Model.wrap(model)
    if not isinstance(data, Federation):
        clients = [data] if isinstance(data, ClientData) else list(data)
        if not all(isinstance(c, ClientData) for c in clients):
            raise InputError("data must be a Federation or a list of fs.ClientData.")
        data = Federation(clients)
    simulation = Simulation(method, model, data, seed=seed, training=training, **how)
    history: list[Record] = []
    for r in range(rounds):
        history.append(simulation.step(evaluate=True if r == rounds - 1 else None))
        if on_round is not None:
            on_round(history[-1])
    return Result(simulation, history)


def _write(into: list[Any], ids: Tensor, values: Tensor) -> None:
    for i, v in zip(ids.tolist(), values.tolist(), strict=True):
        into[i] = None if v != v else round(v, 6) if isinstance(v, float) else v


def _mean(values: list[Any]) -> float | None:
    there = [v for v in values if v is not None]
    return round(sum(there) / len(there), 6) if there else None


def _concat(extras: list[State]) -> State:
    return {k: {n: torch.cat([e[k][n] for e in extras]) for n in tree} for k, tree in extras[0].items()}
