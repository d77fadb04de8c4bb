"""What tune finds for a fifth of the rounds: beside the full grid, and beside random search and TPE of Optuna at equal work.

Every setting of the default space is trained to the end on every seed (the full grid), evaluated in the last quarter of its
rounds on validation and on test data. tune runs for real. Of both the time of the processor is measured, on one thread, as the
least of a few turns; neither finds anything that the other has prepared.
Optuna chooses among the same settings, each trained to the end on all seeds, for as many rounds in all as tune took. A run
depends on its setting and seed alone, so what a trial of Optuna gives is read from the grid, and each sampler is tried 50
times. Needs optuna; nothing else of the project does.

    python benchmarks/tune.py [--out tune.json] [--only "heart, 4 hospitals"] [--rounds 30] [--turns 1]
"""

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fedselect as fs
from fedselect.runs.presets import suited
from fedselect.simulate.inputs import as_model, as_task
from fedselect.simulate.records import validated
from fedselect.tuning import space
from fedselect.tuning.budget import Budget
from fedselect.tuning.halving import cost, spell
from fedselect.tuning.memory import Bench, named_settings
from fedselect.tuning.outcome import Judge, gap, standard_error
from fedselect.tuning.search import Plan, Progress, search

DATA: dict[str, tuple[str, str, dict[str, Any]]] = {  # what it is called: data, model, options
    "digits, other classes": ("digits", "mlp", {"train": 40, "val": 15}),
    "digits, two groups": ("digits", "mlp", {"train": 40, "val": 15, "shift": "groups"}),
    "AudioMNIST, 6 speakers": ("audiomnist", "mlp", {"clients": 6, "train": 40, "val": 15, "test": 60}),
    "heart, 4 hospitals": ("heart", "mlp", {"train": 80, "val": 25, "test": 60}),
}
SEEDS = (0, 1, 2)
TRIES = 50  # of each sampler


def measure(name: str, rounds: int, turns: int) -> dict[str, Any]:
    source, model, options = DATA[name]
    feds = {seed: fs.load(source, seed=seed, **options) for seed in SEEDS}
    settings = named_settings(None)
    training = fs.Training(**suited("fedavg", source)["training"])
    methods = {n: method for n, (method, _) in settings.items()}
    names = space.order(methods, SEEDS[0])

    made = as_model(model, feds[SEEDS[0]], as_task(None, feds[SEEDS[0]]))
    ready: dict[int, Any] = {}  # what the runs of a seed share, as in fs.tune

    def simulate(setting: str, seed: int) -> fs.Simulation:
        how: dict[str, Any] = {"training": training, "rounds": rounds, "val": True, "eval_every": rounds}
        found = fs.Simulation(settings[setting][1], made, feds[seed], seed=seed, like=ready.get(seed), **how)
        ready.setdefault(seed, found.ready)
        return found

    simulate(names[0], 0).step()  # whatever a process does once
    first = simulate(names[0], 0).metrics[0]
    judge, seen = Judge(first), Judge(replace(first, name=validated(first.name)))
    plan = Plan({n: methods[n] for n in names}, rounds, len(SEEDS), 0, Budget())

    took: dict[str, list[float]] = {"grid": [], "tune": []}
    for _ in range(turns):
        ready.clear()
        began = time.process_time()
        found = Bench(SEEDS, rounds, None, simulate).advance(names, rounds)
        took["grid"].append(time.process_time() - began)
        ready.clear()
        began = time.process_time()
        progress = Progress()
        chosen = search(plan, Bench(SEEDS, rounds, None, simulate), seen, progress)[0]
        took["tune"].append(time.process_time() - began)
    assert progress.schedule is not None
    scores = {n: seen.score(found[n], rounds) for n in names}
    there = {n: s for n, s in scores.items() if s is not None}
    best = max(there, key=lambda n: there[n])
    tests = {n: judge.score(found[n], rounds) or 0.0 for n in there}

    def values(setting: str) -> list[list[float | None]]:
        return [seen.clients(run, rounds) for run in found[setting] if run is not None]

    behind, error = gap(values(best), values(chosen), seen)
    work = cost(progress.schedule, len(SEEDS))
    count = work // (rounds * len(SEEDS))
    by_sampler = {kind: optuna_choices(kind, settings, there, count) for kind in ("random", "tpe")}
    each = [v for run in found[best] if run is not None and (v := seen.over(seen.clients(run, rounds))) is not None]
    return {
        "settings": len(names),
        "schedule": spell(progress.schedule),
        "work": [rounds * len(SEEDS) * len(names), work],
        "seconds": {who: [round(t, 1) for t in times] for who, times in took.items()},
        "share": round(min(took["tune"]) / min(took["grid"]), 3),
        "grid": {"chosen": best, "val": there[best], "error": standard_error(each), "test": tests[best]},
        "tune": {"chosen": chosen, "val": there[chosen], "test": tests[chosen], "behind": behind, "behind_error": error},
        "optuna": {
            kind: {
                "trials": count,
                "val": statistics.fmean(there[n] for n in picks),
                "test": statistics.fmean(tests[n] for n in picks),
                "as_good": statistics.fmean(there[n] >= there[chosen] - 1e-9 for n in picks),
            }
            for kind, picks in by_sampler.items()
        },
    }


def optuna_choices(kind: str, settings: Mapping[str, Any], scores: Mapping[str, float], count: int) -> list[str]:
    """What a sampler chooses after so many trials, in each of many tries."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    by_options = {
        (method, *sorted(dict(part.split("=") for part in name.removeprefix(method).split("-") if part).items())): name
        for name, (method, _) in settings.items()
    }
    picks = []
    for attempt in range(TRIES):
        sampler = {"random": optuna.samplers.RandomSampler, "tpe": optuna.samplers.TPESampler}[kind](seed=attempt)
        study = optuna.create_study(direction="maximize", sampler=sampler)

        def objective(trial: Any) -> float:
            method = trial.suggest_categorical("method", list(space.TRIED))
            tried = space.values(method).items()
            own = {k: str(trial.suggest_categorical(f"{method}.{k}", list(v))) for k, v in tried}
            name = by_options[method, *sorted(own.items())]
            trial.set_user_attr("setting", name)
            return scores.get(name, 0.0)  # of one that diverged

        study.optimize(objective, n_trials=count)
        picks.append(study.best_trial.user_attrs["setting"])
    return [p for p in picks if p in scores]


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--out", type=Path)
    asked.add_argument("--only", choices=list(DATA))
    asked.add_argument("--rounds", type=int, default=30)
    asked.add_argument("--turns", type=int, default=1)
    given = asked.parse_args()
    torch.set_num_threads(1)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit.stdout.strip(),
        "machine": f"{platform.machine()}, one thread, PyTorch {torch.__version__}",
        "rounds": given.rounds,
        "seeds": SEEDS,
        "data": {},
    }
    for name in [given.only] if given.only else DATA:
        made = found["data"][name] = measure(name, given.rounds, given.turns)
        print(json.dumps({name: made}, indent=1), flush=True)
        if given.out:
            given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
