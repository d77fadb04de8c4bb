"""adapt: try several models for a new client, and choose one on the client's held-out samples."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedselect.adaptation import EPOCHS
from fedselect.adaptation.adapted import Adapted, Row
from fedselect.adaptation.bench import Bench
from fedselect.adaptation.reading import one_client
from fedselect.adaptation.trials import RATES, Trial, trials
from fedselect.core.checks import check_positive
from fedselect.core.errors import InputError
from fedselect.core.tree import Scalar
from fedselect.methods.method import Method
from fedselect.network.shared import Code, Shared, of_run
from fedselect.results import Result, load_result
from fedselect.results.folder import shared_by
from fedselect.runs import rundir
from fedselect.simulate import Simulation
from fedselect.simulate.samples import outputs

CHANCE = 0.05
"""Significance level: the probability that a model no better than the shared one is chosen anyway."""


def adapt(
    run: Result | Simulation | Shared | str | Path,
    client: Any,
    *,
    seed: int = 0,
    epochs: Sequence[int] = EPOCHS,
    rates: Sequence[float] | None = None,
    device: str = "auto",
    model: Code = None,
    on_trial: Callable[[int, str], None] | None = None,
) -> Adapted:
    """Make a model for a new client from a finished run and the client's own samples.

    Models are compared on held-out samples: leave-one-out with up to ten samples, otherwise five folds. The shared model is
    chosen unless the best other model has a significantly lower loss (one-sided paired t-test, 5%).

    Args:
        run: A result, a run directory, a folder written by `result.save`, or a file written by `fedselect share`.
        client: `fs.ClientData`, a pair (inputs, targets), a `Federation` of one client or, if the run's data is a table, a
            DataFrame or dict of columns. Test data is optional, and only reported.
        seed: Decides the folds and the order of training.
        epochs: Numbers of fine-tuning epochs to try.
        rates: Learning rates to try; by default 0.1, 0.3 and 1 times the learning rate of the run.
        device: auto, cpu, cuda or one GPU such as cuda:1.
        model: Your network, if `run` is a folder or file; networks of `fs.models` are known.
        on_trial: Called before each trial with its number and a description.

    Returns:
        The chosen model and a table of all that were tried.

    Examples:
        >>> import fedselect as fs
        >>> data = fs.load("digits", clients=3, train=30, seed=0)
        >>> result = fs.run(fs.FedAvg(lr=0.1), model="mlp", data=data, rounds=2)
        >>> new = fs.load("digits", clients=3, train=30, seed=1).clients[0]
        >>> adapted = fs.adapt(result, new, epochs=(1,), rates=(0.1,))
        >>> adapted.predict(new.test[0][:2]).shape
        (2,)
    """
    shared = shared_of(run, model).check()
    if not epochs or any(type(e) is not int or e < 1 for e in epochs):
        raise InputError(f"epochs must be whole numbers of at least 1, such as (1, 3, 10), not {epochs!r}.")
    rates = tuple(rates) if rates is not None else tuple(round(r * _rate(shared.method), 10) for r in RATES)
    if not rates:
        raise InputError("rates is empty; pass at least one learning rate, such as (0.01, 0.1).")
    for rate in rates:
        check_positive(rates=rate)
    bench = Bench.of(shared, one_client(shared, client), seed, device)
    best: dict[str, Trial] = {}
    for i, (words, make) in enumerate(trials(bench, epochs, rates)):
        if on_trial is not None:
            on_trial(i, words)
        for trial in (_sound(bench, t) for t in make()):
            known = best.setdefault(trial.kind, trial)
            if _mean(_losses(bench, trial)) < _mean(_losses(bench, known)):
                best[trial.kind] = trial
    rows = [_row(bench, trial, best["shared"]) for trial in best.values()]
    return Adapted(
        shared, bench.simulation, rows, choose(rows, bench.samples), {k: t.values for k, t in best.items()}, seed, bench.samples
    )


def shared_of(run: Result | Simulation | Shared | str | Path, model: Code = None) -> Shared:
    """The shared part of a run, from a result, simulation, directory or file."""
    if isinstance(run, Shared):
        return run
    if isinstance(run, Result):
        return run.shared()
    if isinstance(run, Simulation):
        return shared_by(run)
    place = Path(run).expanduser()
    if place.is_file():
        return Shared.read(place, model)
    return load_result(place, model).shared() if rundir.saved(place) else of_run(place)


def choose(rows: Sequence[Row], samples: int) -> str:
    """The kind with the lowest held-out loss if it is significantly lower than the shared model's, else "shared"."""
    from scipy.special import stdtrit

    best = min(rows, key=lambda r: r.loss)
    least = float(stdtrit(samples - 1, 1 - CHANCE))
    return best.kind if best.gain is not None and best.error is not None and best.gain > least * best.error else "shared"


def _row(bench: Bench, trial: Trial, shared: Trial) -> Row:
    losses, s = _losses(bench, trial), bench.simulation
    gains = _losses(bench, shared) - losses
    known = bool(torch.isfinite(gains).all())
    error = float(gains.std() / len(gains) ** 0.5) if known else None
    test = s.data.clients[-1].test
    tested = trial.values and test is not None
    return Row(
        trial.kind,
        trial.words,
        trial.epochs,
        trial.lr,
        trial.rounds,
        loss=_mean(losses),
        headline=s.metrics[0].value(trial.outputs, bench.targets) if trial.values else float("nan"),
        gain=float(gains.mean()) if known and trial is not shared else None,
        error=error if trial is not shared else None,
        test=_tested(s, trial) if tested else None,
    )


def _tested(s: Simulation, trial: Trial) -> float:
    test = s.data.clients[-1].test
    assert test is not None
    models = {n: v.unsqueeze(0).to(s.device) for n, v in trial.values.items()}
    (said,) = outputs(s, models, torch.tensor([s.clients - 1]), "test")
    return s.metrics[0].value(said, test[1].cpu())


def _losses(bench: Bench, trial: Trial) -> Tensor:
    """The loss of each sample while it was held out; infinite if the model could not be trained."""
    if not trial.values:
        return torch.full((bench.samples,), torch.inf, dtype=torch.float64)
    losses = bench.simulation.task.loss(trial.outputs, bench.targets).double()
    return losses.nan_to_num(torch.inf, posinf=torch.inf)


def _sound(bench: Bench, trial: Trial) -> Trial:
    """The trial, without its model if the one trained on all samples diverged, which those of the folds may not have done."""
    s = bench.simulation
    if not trial.values:
        return trial
    models = {n: v.unsqueeze(0).to(s.device) for n, v in trial.values.items()}
    (said,) = outputs(s, models, torch.tensor([s.clients - 1]), "train")
    finite = all(bool(torch.isfinite(v).all()) for v in (said, *trial.values.values()) if v.is_floating_point())
    return trial if finite else replace(trial, words=f"{trial.words}: diverged", values={})


def _mean(losses: Tensor) -> float:
    return float(losses.mean())


def _rate(method: Method) -> float:
    """The learning rate of the run, or of its first client if they differ."""
    lr: Scalar = getattr(method, "lr", 0.1)
    return float(lr if isinstance(lr, float | int) else lr.flatten()[0])
