"""run and compare: whole runs in memory, in one call."""

import itertools
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Unpack

from fedselect.core.errors import InputError, TrainingError
from fedselect.core.shown import made
from fedselect.data import ClientData, Federation
from fedselect.methods.method import Method
from fedselect.results.progress import bar
from fedselect.results.result import Result
from fedselect.simulate import Simulation
from fedselect.simulate.inputs import Network, RunOptions, as_federation, as_model, as_task, check_late, check_ranges
from fedselect.simulate.keeping import is_end, keeps, stalled
from fedselect.simulate.named import knows_its_options
from fedselect.simulate.records import Record
from fedselect.simulate.stack import Stack, stacks
from fedselect.training.settings import Training


@knows_its_options("fs.run")
def run(
    method: Method | str,
    *,
    model: Network,
    data: Federation | Iterable[ClientData],
    rounds: int = 30,
    seed: int = 0,
    training: Training | None = None,
    patience: int | None = None,
    progress: bool = False,
    on_round: Callable[[Record], None] | None = None,
    **how: Unpack[RunOptions],
) -> Result:
    """Train a federation in memory.

    Args:
        method: A method such as `fs.FedAlike(lr=0.1)`, or its name for the default options.
        model: A name, a network of `fs.models`, your module, or a function that creates it.
        data: The clients: a `Federation`, or a list of `ClientData`.
        rounds: Communication rounds.
        seed: Decides the initial parameters and the order of training.
        training: Optimizer, schedule and batch size; by default `fs.Training()`.
        patience: Stop after this many evaluations without improvement on validation data. The best round then counts, or
            with `keep="own"` each client's own best.
        progress: Show a progress bar.
        on_round: Called with the record of each round.
        how: task, headline, metrics, aggregator, secret, mean, private, val, keep, view, fraction, late, chunk, rows, device,
            precision, recompute, deterministic, eval_every and eval_fraction, as in `Simulation`.

    Returns:
        The history, and every client's model, scores and predictions.

    Examples:
        >>> import fedselect as fs
        >>> data = fs.load("digits", clients=3, seed=0)
        >>> result = fs.run(fs.FedAvgFT(lr=0.1), model="mlp", data=data, rounds=2)
        >>> len(result.history)
        2
    """
    check_rounds(rounds, how, patience)
    simulation = Simulation(method, model, data, seed=seed, training=training, rounds=rounds, **how)
    if progress and simulation.promise:
        print(simulation.promise, file=sys.stderr)
    if progress and simulation.frozen:
        print(simulation.frozen, file=sys.stderr)
    history: list[Record] = []
    stack = Stack([simulation])
    with bar(progress, rounds, simulation.metrics[0]) as show:
        for r in range(rounds):
            last = r == rounds - 1
            (outcome,) = stack.step(evaluate=True if last else None, more=not last)
            if isinstance(outcome, TrainingError):
                raise outcome
            history.append(outcome)
            if stalled(history, patience):
                history[-1]["stopped"] = True
            show(made(simulation.method).name, history[-1])
            if on_round is not None:
                on_round(history[-1])
            if is_end(history[-1], rounds):
                break
    return Result(simulation, history)


@knows_its_options("fs.compare")
def compare(
    methods: Mapping[str, Method | str],
    *,
    model: Network,
    data: Federation | Iterable[ClientData],
    rounds: int = 30,
    seeds: Iterable[int] = (0,),
    training: Training | None = None,
    patience: int | None = None,
    progress: bool = False,
    **how: Unpack[RunOptions],
) -> dict[tuple[str, int], Result | TrainingError]:
    """Train several methods with several seeds in memory. Runs with the same shapes are batched into one training run.

    Each result equals that of `run`: bit for bit on a CPU, up to rounding on a GPU.

    Args:
        methods: Methods by a name of your choice; one method may occur several times with different options.
        model: As in `run`.
        data: As in `run`.
        rounds: Communication rounds.
        seeds: Every method is trained with each of these seeds.
        training: As in `run`.
        patience: As in `run`, for each run separately.
        progress: Show a progress bar.
        how: As in `run`.

    Returns:
        A dict by (name, seed). If a run diverges, its value is a `TrainingError`, and the other runs go on.

    Examples:
        >>> import fedselect as fs
        >>> data = fs.load("digits", clients=3, seed=0)
        >>> methods = {"slow": fs.FedAvg(lr=0.01), "fast": fs.FedAvg(lr=0.1)}
        >>> found = fs.compare(methods, model="mlp", data=data, rounds=2, seeds=[0, 1])
        >>> sorted(found)
        [('fast', 0), ('fast', 1), ('slow', 0), ('slow', 1)]
    """
    if not isinstance(methods, Mapping):
        raise InputError(
            f'methods must be a dict of methods by name, such as {{"fedavg": fs.FedAvg()}}, not a {type(methods).__name__}.'
        )
    check_rounds(rounds, how, patience)
    data, seeds = as_federation(data), as_seeds(seeds)
    model = as_model(model, data, as_task(how.get("task"), data))
    runs: dict[tuple[str, int], Simulation] = {}
    ready = None
    for name, seed in itertools.product(methods, seeds):
        one = Simulation(methods[name], model, data, seed=seed, training=training, rounds=rounds, like=ready, **how)
        runs[name, seed], ready = one, ready or one.ready
    alike: dict[Any, list[tuple[str, int]]] = {}
    for key, simulation in runs.items():
        alike.setdefault(stacks(simulation) or key, []).append(key)
    found: dict[tuple[str, int], Result | TrainingError] = {key: Result(s, []) for key, s in runs.items()}
    headline = next((s.metrics[0] for s in runs.values()), None)
    with bar(progress and headline is not None, rounds * len(runs), headline) as show:
        for keys in alike.values():
            left, stack = keys, Stack([runs[key] for key in keys])
            for r in range(rounds):
                last = r == rounds - 1
                outcomes = dict(zip(left, stack.step(evaluate=True if last else None, more=not last), strict=True))
                for key, outcome in outcomes.items():
                    result = found[key]
                    if isinstance(outcome, TrainingError):
                        found[key] = outcome
                    elif isinstance(result, Result):
                        result.history.append(outcome)
                        if stalled(result.history, patience):
                            outcome["stopped"] = True
                        show(f"{key[0]} seed {key[1]}", outcome)
                left = [key for key in left if not _ended(found[key], rounds)]
                if not left:
                    break
                stack.keep([runs[key] for key in left])
    return found


def _ended(found: Result | TrainingError, rounds: int) -> bool:
    return isinstance(found, TrainingError) or is_end(found.history[-1], rounds)


def as_seeds(seeds: Iterable[int]) -> list[int]:
    """The seeds as a list."""
    if isinstance(seeds, str) or not isinstance(seeds, Iterable):
        raise InputError(f"seeds must be a list of whole numbers, such as [0, 1, 2], not {seeds!r}.")
    return list(seeds)


def check_rounds(rounds: int, how: RunOptions, patience: int | None) -> None:
    """Check the options of a run, and fill in the default of `keep`, which depends on `patience`."""
    check_ranges(rounds=rounds, patience=patience)
    check_late(how.get("late"), rounds)
    how["keep"] = keeps(how.get("keep"), patience)
