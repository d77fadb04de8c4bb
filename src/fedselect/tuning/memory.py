"""fs.tune: a search in memory, on any federation and network."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from fedselect.core.errors import InputError, TrainingError
from fedselect.core.options import build, find, named
from fedselect.data import ClientData, Federation
from fedselect.methods import METHODS
from fedselect.methods.method import Method
from fedselect.results import showing
from fedselect.results.progress import Show, bar
from fedselect.results.result import Result
from fedselect.results.running import as_seeds, check_rounds
from fedselect.results.running import run as run_once
from fedselect.simulate import Simulation
from fedselect.simulate.inputs import Network, RunOptions, as_federation, as_method, as_model, as_task
from fedselect.simulate.keeping import in_tail, is_end, stalled
from fedselect.simulate.named import knows_its_options
from fedselect.simulate.stack import Stack, stacks
from fedselect.training.settings import Training
from fedselect.tuning import space
from fedselect.tuning.budget import Budget
from fedselect.tuning.outcome import History, Judge, Row, check_whole, rank
from fedselect.tuning.search import Plan, Progress, search

Simulate = Callable[[str, int], Simulation]
"""Makes the simulation of a setting with a seed."""


@dataclass(frozen=True)
class Tuned:
    """The outcome of `fs.tune`.

    Attributes:
        name: Name of the chosen setting.
        method: The chosen method, ready for `fs.run`.
        ranking: One row per setting, best first.
        judge: How settings were compared.
        progress: The schedule and the completed rungs.
        results: One `Result` on test data per test seed.

    """

    name: str
    method: Method
    ranking: list[Row]
    judge: Judge
    progress: Progress
    results: list[Result]

    @property
    def headline(self) -> float:
        """The headline metric on test data, averaged over the test seeds."""
        if not self.results:
            raise InputError("test data was not used; give the clients test data, and pass test_seeds.")
        return statistics.fmean(r.headline for r in self.results)

    def __repr__(self) -> str:
        return showing.text(self._table())

    def _repr_html_(self) -> str:
        return showing.html(self._table())

    def _caption(self) -> str:
        said = f"chosen: {self.name}, by the {self.judge.said} on validation data"
        first = self.judge.measure
        return said + (f"; on test data with fresh seeds: {first.said(self.headline)}" if self.results else "")

    def _table(self) -> showing.Table:
        first = self.judge.measure

        def shown(value: float | None) -> str:
            return "" if value is None else first.show(value)

        rows = [
            [r.name, str(r.rounds), shown(r.score) or "diverged", shown(r.error), shown(r.behind), "n.s." if r.chance else ""]
            for r in self.ranking[:12]
        ]
        return showing.Table(self._caption(), ["setting", "rounds", first.title, "±", "behind", ""], rows, [])


@knows_its_options("fs.tune")
def tune(
    methods: Mapping[str, Method | str] | Iterable[str] | None = None,
    *,
    model: Network,
    data: Federation | Iterable[ClientData],
    rounds: int = 30,
    seeds: Sequence[int] = (0, 1, 2),
    test_seeds: Sequence[int] | None = None,
    budget: str | int | None = None,
    worst: bool = False,
    training: Training | None = None,
    patience: int | None = None,
    progress: bool = False,
    **how: Unpack[RunOptions],
) -> Tuned:
    """Choose a method and its settings on validation data by successive halving, in memory.

    Every client needs validation data. Ctrl-C ends the search early: it ranks the results so far and skips the test.

    Args:
        methods: Method names, each tried with a few settings, or your own settings by name, such as
            `{"a": fs.FedAvg(lr=0.1)}`. By default eight methods.
        model: As in `fs.run`.
        data: As in `fs.run`.
        rounds: Rounds of a full run.
        seeds: Seeds of the trials.
        test_seeds: Seeds with which the chosen setting is tested; `()` skips the test. By default the three after the
            last of `seeds`.
        budget: A time (`"10m"`) or a total number of rounds over all runs. By default no limit.
        worst: Compare settings by the worst tenth of clients instead of the mean.
        training: As in `fs.run`.
        patience: As in `fs.run`.
        progress: Show a progress bar.
        how: As in `fs.run`.

    Returns:
        The ranking, the chosen method and its results on test data.

    Examples:
        >>> import fedselect as fs
        >>> data = fs.load("digits", clients=3, train=30, val=10, seed=0)
        >>> tuned = fs.tune(["local", "fedavg"], model="mlp", data=data, rounds=4, seeds=[0], test_seeds=[1])
        >>> len(tuned.ranking), len(tuned.results)
        (6, 1)
        >>> result = fs.run(tuned.method, model="mlp", data=data, rounds=4)
    """
    check_rounds(rounds, how, patience)
    check_whole(how.get("eval_fraction", 1.0))
    data, seeds = as_federation(data), as_seeds(seeds)
    fresh = as_seeds(test_seeds) if test_seeds is not None else [max(seeds) + i for i in (1, 2, 3)] if data.has("test") else []
    if {*seeds} & {*fresh}:
        raise InputError("test_seeds must differ from seeds; choose other seeds for the test.")
    settings = named_settings(methods)
    names = space.order({name: method for name, (method, _) in settings.items()}, seeds[0])
    held = data.on_validation()
    made = as_model(model, held, as_task(how.get("task"), held))
    one = Simulation(settings[names[0]][1], made, held, seed=seeds[0], training=training, rounds=rounds, **how)
    judge = Judge(one.metrics[0], worst)
    plan = Plan({n: settings[n][0] for n in names}, rounds, len(seeds), rounds * len(fresh), Budget.parse(budget))

    tried: RunOptions = {**how, "eval_every": rounds} if how.get("keep") == "last" else how

    def simulate(name: str, seed: int) -> Simulation:
        return Simulation(settings[name][1], made, held, seed=seed, training=training, rounds=rounds, like=one.ready, **tried)

    state = Progress()
    with bar(progress, 0, judge.measure) as show:
        bench = Bench(seeds, rounds, patience, simulate, show)
        try:
            search(plan, bench, judge, state)
        except KeyboardInterrupt:
            fresh = []
    rows = rank(bench.histories(names), judge, rounds)
    if not rows or rows[0].score is None:
        raise TrainingError("the search stopped before any setting was evaluated; let it run longer.")
    chosen = settings[rows[0].name][1]
    results = [
        run_once(chosen, model=made, data=data, rounds=rounds, seed=s, training=training, patience=patience, **how)
        for s in fresh
    ]
    return Tuned(rows[0].name, chosen, rows, judge, state, results)


def named_settings(methods: Mapping[str, Method | str] | Iterable[str] | None) -> dict[str, tuple[str, Method]]:
    """Settings by name, each with its method's name and the method."""
    if isinstance(methods, str):
        methods = [methods]
    if isinstance(methods, Mapping):
        return {name: (name, as_method(method)) for name, method in methods.items()}
    found = {}
    for method in (named(str(m), METHODS) for m in (space.TRIED if methods is None else methods)):
        find("method", method, METHODS)
        for one in space.grid(space.values(method)):
            said = "-".join([method, *(f"{k}={v}" for k, v in one.items())])
            found[said] = (method, build("method", method, METHODS, one))
    if not found:
        raise InputError("there is nothing to choose from; pass at least one method.")
    return found


class Bench:
    """Trains simulations in memory, and frees those that were dropped."""

    def __init__(
        self, seeds: Sequence[int], rounds: int, patience: int | None, simulate: Simulate, show: Show | None = None
    ) -> None:
        self._seeds, self._rounds, self._patience, self._simulate = seeds, rounds, patience, simulate
        self._show = show or (lambda name, record: None)
        self._runs: dict[tuple[str, int], Simulation] = {}
        self._found: dict[tuple[str, int], list[Any] | None] = {}

    def histories(self, names: Sequence[str]) -> dict[str, list[History | None]]:
        return {n: [self._found.get((n, s), []) for s in self._seeds] for n in names}

    def drop(self, names: Sequence[str]) -> None:
        for key in [key for key in self._runs if key[0] in names]:
            del self._runs[key]

    def advance(self, names: Sequence[str], until: int, seeds: int | None = None) -> dict[str, list[History | None]]:
        keys = [(n, s) for n in names for s in self._seeds[:seeds]]
        alike: dict[Any, list[tuple[str, int]]] = {}
        for key in keys:
            if key not in self._found:
                self._runs[key], self._found[key] = self._simulate(*key), []
            if not self._ended(key, until):
                alike.setdefault(stacks(self._runs[key]) or key, []).append(key)
        for group in alike.values():
            self._train(group, until)
        return {n: [self._found[n, s] for s in self._seeds[:seeds]] for n in names}

    def _train(self, left: list[tuple[str, int]], until: int) -> None:
        stack = Stack([self._runs[key] for key in left])
        while left:
            judged = stack.round + 1 == until or in_tail(stack.round + 1, self._rounds)
            outcomes = stack.step(evaluate=True if judged else None, more=stack.round + 1 < until)
            for key, outcome in zip(left, outcomes, strict=True):
                history = self._found[key]
                if isinstance(outcome, TrainingError) or history is None:
                    self._found[key] = None
                    continue
                history.append(outcome)
                if stalled(history, self._patience):
                    outcome["stopped"] = True
                self._show(f"{key[0]} seed {key[1]}", outcome)
            left = [key for key in left if not self._ended(key, until)]
            stack.keep([self._runs[key] for key in left])

    def _ended(self, key: tuple[str, int], until: int) -> bool:
        history = self._found[key]
        return history is None or (bool(history) and (is_end(history[-1], self._rounds) or len(history) >= until))
