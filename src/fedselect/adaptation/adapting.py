"""adapt: try what may help a newcomer on its own held-out samples, and keep what beats the shared model beyond chance."""

from collections.abc import Callable, Sequence
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
"""How likely it may be, if a model were no better than the shared one, that it looks as much better as it does."""


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
    """A model for a client that was not there, from a finished run and the client's own samples.

    run: a result, a run directory, a folder that `result.save` wrote, or a file of `fedselect share`
    client: fs.ClientData, a pair (inputs, targets), a Federation of one client or, where the run's data is a table, a
        DataFrame or dict of columns; test data is optional, and only reported
    epochs, rates: what fine-tuning tries; without rates, 0.1, 0.3 and 1 times the run's own learning rate
    model: the network, where it is not one of ours and the run is a folder or file
    on_trial: is told what comes next, its number and in words

    What is best is decided on samples that are held out: one by one where there are up to ten, else in five parts. The shared
    model stays as it is unless the best of the others has a lower loss beyond chance (Student's t of the differences, 5%).
    """
    shared = shared_of(run, model).check()
    if not epochs or any(type(e) is not int or e < 1 for e in epochs):
        raise InputError(f"epochs are whole numbers from 1, such as (1, 3, 10), not {epochs!r}.")
    rates = tuple(rates) if rates is not None else tuple(round(r * _rate(shared.method), 10) for r in RATES)
    if not rates:
        raise InputError("rates are learning rates such as (0.01, 0.1); give one at least.")
    for rate in rates:
        check_positive(rates=rate)
    bench = Bench.of(shared, one_client(shared, client), seed, device)
    best: dict[str, Trial] = {}
    for i, (words, make) in enumerate(trials(bench, epochs, rates)):
        if on_trial is not None:
            on_trial(i, words)
        for trial in make():
            known = best.setdefault(trial.kind, trial)
            if _mean(_losses(bench, trial)) < _mean(_losses(bench, known)):
                best[trial.kind] = trial
    rows = [_row(bench, trial, best["shared"]) for trial in best.values()]
    return Adapted(
        shared, bench.simulation, rows, choose(rows, bench.samples), {k: t.values for k, t in best.items()}, seed, bench.samples
    )


def shared_of(run: Result | Simulation | Shared | str | Path, model: Code = None) -> Shared:
    """What a run shares, however it is given."""
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
    """The kind with the lowest held-out loss, if that is lower than the shared model's beyond chance; else the shared model."""
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
    """The loss of each sample while it was held out; infinite where a model came to nothing."""
    if not trial.values:
        return torch.full((bench.samples,), torch.inf, dtype=torch.float64)
    losses = bench.simulation.task.loss(trial.outputs, bench.targets).double()
    return losses.nan_to_num(torch.inf, posinf=torch.inf)


def _mean(losses: Tensor) -> float:
    return float(losses.mean())


def _rate(method: Method) -> float:
    """The run's own learning rate; of one for each client, the first."""
    lr: Scalar = getattr(method, "lr", 0.1)
    return float(lr if isinstance(lr, float | int) else lr.flatten()[0])
