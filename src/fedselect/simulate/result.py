"""Result: what a run leaves in memory; `run` makes one in a call, `compare` several."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fedselect.core.errors import InputError, TrainingError
from fedselect.core.tree import Tree
from fedselect.data import ClientData, Federation
from fedselect.methods.groups import members
from fedselect.methods.method import Method
from fedselect.models import Model
from fedselect.simulate.engine import Simulation
from fedselect.simulate.inputs import RunOptions, as_federation, as_model, as_task, check_late, check_ranges
from fedselect.simulate.records import Record
from fedselect.simulate.stack import Stack, stacks
from fedselect.tasks import Spread
from fedselect.training.settings import Training


@dataclass(frozen=True)
class Result:
    """What a run leaves in memory."""

    simulation: Simulation
    history: list[Record]

    @property
    def headline(self) -> float:
        """Mean over clients of the headline metric, each client's model on its own test data, as last evaluated."""
        return float(self._last()[self.simulation.metrics[0].name])

    @property
    def accuracy(self) -> float:
        """The same of the accuracy, where the task has one."""
        if "accuracy" not in (last := self._last()):
            known = ", ".join(m.name for m in self.simulation.metrics)
            raise InputError(f"this task has no accuracy; it has {known}, and result.headline is the first.")
        return float(last["accuracy"])

    @property
    def clients(self) -> list[Record]:
        """One entry for each client: what was last measured."""
        lists = self._last()["clients"]
        return [{k: v[i] for k, v in lists.items()} for i in range(self.simulation.clients)]

    def over_clients(self, metric: str | None = None) -> Spread:
        """A metric over clients, by default the headline: mean, worst tenth, weighted by test samples, and who has it."""
        measured = {m.name: m for m in self.simulation.metrics}
        name = metric or next(iter(measured))
        if name not in measured:
            raise InputError(f"this run did not measure {name!r}; it measured {', '.join(measured)}: metrics=[{name!r}].")
        tested = [c.tested for c in self.simulation.data.clients]
        return Spread.of(measured[name], self._last()["clients"][name], tested)

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
        if not bool(s.store.joined.any()):
            raise InputError("no client has joined yet, so there are no masks; run a round first.")
        state = s.store.take(torch.arange(s.clients), s.device)
        out: Tree = {}
        for n, m in s.method.mask(s.model, state).items():
            shape = (s.clients, *s.initial[n].shape)
            out[n] = m.clone() if isinstance(m, Tensor) else torch.full(shape, m)
        return out

    @property
    def persistence(self) -> Tree:
        """How much of its disagreement with the others persists in each client: {name: (clients,)}, NaN where not tested."""
        s = self.simulation
        if not (found := s.persistence()):
            raise InputError(f"{type(s.method).__name__} measured no persistence; use fs.FedPersist(), or fs.diagnose(data).")
        return found

    @property
    def groups(self) -> list[list[int]]:
        """The clients of each group, such as share a head, in the order of their first; who is not tested is in none."""
        s = self.simulation
        if (found := s.groups()) is None:
            raise InputError(f"{type(s.method).__name__} makes no groups; use fs.FedAlike(), or fs.diagnose(data).")
        return members(found)

    def cross(self) -> Tensor:
        """The headline metric of client i's model on client j's test data: (i, j)."""
        return self.simulation.cross()

    def to_dataframe(self) -> Any:
        """The history as a pandas DataFrame: a row for each round and client."""
        try:
            import pandas
        except ImportError:
            raise InputError("to_dataframe needs pandas; install it with: pip install pandas") from None
        names = [c.name or str(i) for i, c in enumerate(self.simulation.data.clients)]
        return pandas.DataFrame([
            {"round": r["round"], "client": i, "name": name, **{k: v[i] for k, v in r["clients"].items()}}
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
            if record[self.simulation.metrics[0].name] is not None:
                return record
        if not self.simulation.data.has("test"):
            raise InputError(
                "no client has test data, so nothing was scored; give fs.ClientData(test=...), or look at train_loss in "
                "result.history."
            )
        raise InputError(f"nothing was evaluated; {'use a smaller eval_every' if self.history else 'the history is empty'}.")


def compare(
    methods: Mapping[str, Method],
    *,
    model: Model | nn.Module,
    data: Federation | Iterable[ClientData],
    rounds: int = 30,
    seeds: Iterable[int] = (0,),
    training: Training | None = None,
    **how: Unpack[RunOptions],
) -> dict[tuple[str, int], Result | TrainingError]:
    """Every method with every seed, by (name, seed), in memory; runs of the same shapes are batched into one training run.

    Each comes out as `run` would have it: to the bit on a CPU, up to rounding on a GPU. A run whose numbers stop being finite
    has its error in place of a result, and the others go on.
    """
    if not isinstance(methods, Mapping):
        raise InputError(
            f'methods must be a dict of methods by name, such as {{"fedavg": fs.FedAvg()}}, not a {type(methods).__name__}.'
        )
    _check_rounds(rounds, how)
    data, seeds = as_federation(data), list(seeds)
    model = as_model(model, data, as_task(how.get("task"), data))
    runs = {
        (name, seed): Simulation(method, model, data, seed=seed, training=training, rounds=rounds, **how)
        for name, method in methods.items()
        for seed in seeds
    }
    alike: dict[Any, list[tuple[str, int]]] = {}
    for key, simulation in runs.items():
        alike.setdefault(stacks(simulation) or key, []).append(key)
    found: dict[tuple[str, int], Result | TrainingError] = {key: Result(s, []) for key, s in runs.items()}
    for keys in alike.values():
        left, stack = keys, Stack([runs[key] for key in keys])
        for r in range(rounds):
            outcomes = dict(zip(left, stack.step(evaluate=True if r == rounds - 1 else None), strict=True))
            for key, outcome in outcomes.items():
                result = found[key]
                if isinstance(outcome, TrainingError):
                    found[key] = outcome
                elif isinstance(result, Result):
                    result.history.append(outcome)
            left = [key for key in left if isinstance(found[key], Result)]
            if not left:
                break
    return found


def _check_rounds(rounds: int, how: RunOptions) -> None:
    check_ranges(rounds=rounds)
    check_late(how.get("late"), rounds)


def run(
    method: Method,
    *,
    model: Model | nn.Module,
    data: Federation | Iterable[ClientData],
    rounds: int = 30,
    seed: int = 0,
    training: Training | None = None,
    on_round: Callable[[Record], None] | None = None,
    **how: Unpack[RunOptions],
) -> Result:
    """Train a federation in memory. `on_round` is given each round's record.

    `how`: task, headline, metrics, aggregator, fraction, late, chunk, rows, device, precision, deterministic and eval_every;
    Simulation explains them.
    """
    _check_rounds(rounds, how)
    simulation = Simulation(method, model, data, seed=seed, training=training, rounds=rounds, **how)
    history: list[Record] = []
    for r in range(rounds):
        history.append(simulation.step(evaluate=True if r == rounds - 1 else None))
        if on_round is not None:
            on_round(history[-1])
    return Result(simulation, history)
