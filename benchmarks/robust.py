"""What bad clients do to a federation under each defence, and what a defence costs clients that are honest but differ.

Simulated attacks on digits; every number is the mean accuracy of the honest clients after the last round. Writes
results/robust.json, from which scripts/robust.py makes docs/robust.md.

    python benchmarks/robust.py [--out results/robust.json] [--seeds 0,1,2,3,4] [--methods fedalike] [--explore]

`--methods` measures these methods alone: in a file that is there already, their rows take the place of the old ones, and
"again" says when and by which commit they were measured. `--explore` takes other seeds and tries several values of the
defences' options; it writes nothing.
"""

import argparse
import datetime
import itertools
import json
import platform
import statistics
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fedselect as fs
from fedselect.aggregate.lengths import lengths, usual
from fedselect.core.tree import State, Tree
from fedselect.network.plan import digest
from fedselect.runs.config import Config
from fedselect.simulate.stack import Stack, stacks

CLIENTS, ROUNDS = 10, 15
METHODS = ("fedavg", "fedavg+ft", "fedselect", "fedalike")
DEFENCES: dict[str, fs.Aggregator] = {
    "mean": fs.Mean(),
    "clip": fs.ClippedMean(),
    "clip, factor 2": fs.ClippedMean(clip_factor=2.0),
    "median": fs.Median(),
    "median, 5 senders": fs.Median(least_senders=5),
    "trimmed, 5 senders": fs.TrimmedMean(least_senders=5),
}
EXPLORED: dict[str, fs.Aggregator] = {
    "mean": fs.Mean(),
    **{f"clip {f}": fs.ClippedMean(clip_factor=f) for f in (1.0, 1.5, 2.0, 3.0, 5.0)},
    "median": fs.Median(),
    "median, 3 senders": fs.Median(least_senders=3),
    **{f"trimmed {t}": fs.TrimmedMean(trim=t) for t in (0.1, 0.2, 0.3)},
    "trimmed 0.2, 3 senders": fs.TrimmedMean(trim=0.2, least_senders=3),
}
ATTACKS = {
    "sign flip": ("scale", -1.0),
    "x -10": ("scale", -10.0),
    "x 50": ("scale", 50.0),
    "label flips": ("labels", 1.0),
    "backdoor": ("backdoor", 1.0),
    "backdoor x 10": ("backdoor", 10.0),
    "small steps": ("little", 1.5),
}
"""By name: the kind of attack, and its strength."""
PROFILES = ("true", "times 1000", "opposite halves", "huge half")
"""What a bad client sends FedAlike as its profile; the last two are noise, and for the second half its opposite, or zeros."""
SHIFTS: dict[str, dict[str, Any]] = {
    "none": {"shift": "none"},
    "labels": {"classes_per_client": 2},
    "five classes": {},
    "dirichlet": {"split": "dirichlet"},
    "quantity": {"split": "quantity", "concentration": 1.0},
    "sizes": {"split": "quantity", "train": 150, "test": 40},
    "meaning": {"shift": "meaning"},
    "camera": {"shift": "camera"},
    "groups": {"shift": "groups"},
    "motley": {"shift": "motley"},
}
"""Kinds of difference between clients, as options of the data; `quantity`, `sizes`: uneven numbers of samples."""
TARGET = 0
"""The class that a backdoor leads to."""
LOT = 60
"""Runs that are stacked."""


@dataclass(frozen=True)
class Case:
    """One run: who defends, who attacks."""

    method: str
    defence: str
    seed: int
    shift: str = "five classes"
    attack: str | None = None
    bad: int = 0

    @property
    def who(self) -> tuple[int, ...]:
        """The bad clients, others with every seed."""
        order = torch.randperm(CLIENTS, generator=torch.Generator().manual_seed(self.seed)).tolist()
        return tuple(sorted(order[: self.bad]))


@dataclass(frozen=True)
class Hostile(fs.Aggregator):
    """An aggregator some of whose clients send something else than they trained, and every entry of it."""

    inner: fs.Aggregator
    bad: tuple[int, ...]
    kind: str
    strength: float

    def start(self, params: Tree) -> State:
        return self.inner.start(params)

    def fold(self, state: State, params: Tree) -> fs.Fold:
        return HostileFold(self, self.inner.fold(state, params), params)


class HostileFold(fs.Fold):
    """Changes rows. A run here has all its clients in one chunk, ordered by number, for all have as many samples."""

    def __init__(self, hostile: Hostile, inner: fs.Fold, params: Tree) -> None:
        self._hostile, self._inner, self._params = hostile, inner, params

    def add(self, values: Tree, sent: fs.Mask, weight: Tensor) -> None:
        assert len(weight) == CLIENTS
        bad = list(self._hostile.bad)
        honest = [i for i in range(CLIENTS) if i not in bad]
        all_sent = {n: m if isinstance(m, bool) else m.index_fill(0, torch.tensor(bad), True) for n, m in sent.items()}
        changed = {n: self._changed(v, sent.get(n, False), self._params[n], bad, honest) for n, v in values.items()}
        self._inner.add(changed, all_sent, weight)

    def _changed(self, v: Tensor, sent: bool | Tensor, params: Tensor, bad: list[int], honest: list[int]) -> Tensor:
        out, strength = v.clone(), self._hostile.strength
        if self._hostile.kind == "little":
            marks = torch.as_tensor(sent).expand_as(v)[honest]
            out[bad] = params + little(v[honest] - params, marks, strength)
        else:
            out[bad] = params + strength * (v[bad] - params)
        return out

    def finish(self) -> tuple[Tree, fs.Mask, State]:
        return self._inner.finish()


def little(steps: Tensor, marks: Tensor, strength: float) -> Tensor:
    """The mean of honest steps less so many standard deviations, entry by entry (Baruch et al. 2019)."""
    count = marks.sum(0).clamp_min(1)
    mean = torch.where(marks, steps, 0.0).sum(0) / count
    spread = (torch.where(marks, (steps - mean).square(), 0.0).sum(0) / count).sqrt()
    return mean - strength * spread


def spoil_heads(run: fs.Simulation, who: tuple[int, ...], kind: str, strength: float) -> None:
    """FedAlike's heads travel beside the aggregator: bad clients change them too. Their profiles are those of their data."""
    received = run._received

    def spoiled(*args: Any) -> fs.Received:
        got = received(*args)
        bad = torch.isin(got.ids, torch.tensor(who))
        extra = dict(got.extra)
        extra["head"] = {}
        for n, v in got.extra["head"].items():
            before = run.server["heads"][n][got.ids]
            step = strength * (v - before)[bad]
            if kind == "little":
                step = little((v - before)[~bad], torch.ones_like(v[~bad], dtype=torch.bool), strength).expand_as(step)
            extra["head"][n] = v.clone()
            extra["head"][n][bad] = before[bad] + step
        return replace(got, extra=extra)

    run._received = spoiled  # type: ignore[method-assign]


def spoil_profiles(run: fs.Simulation, case: Case) -> None:
    """Bad clients train as all do, but the profiles by which FedAlike groups are false.

    Noise has every class. Beside honest profiles (root mean square) it is 2 times as large in "opposite halves", 1000 times in
    "huge half".
    """
    received = run._received

    def spoiled(*args: Any) -> fs.Received:
        got = received(*args)
        sent = {n: v.clone() for n, v in got.extra["profile"].items()}
        bad = torch.isin(got.ids, torch.tensor(case.who))
        if case.attack == "times 1000":
            for half in ("first", "second"):
                sent[half][bad] *= 1000
        else:
            size = sent["first"][~bad][sent["has"][~bad]].square().mean().sqrt()
            noise = size * torch.randn(sent["first"][bad].shape, generator=torch.Generator().manual_seed(case.seed))
            first, second = (2, -2) if case.attack == "opposite halves" else (1000, 0)
            sent["first"][bad], sent["second"][bad], sent["has"][bad] = first * noise, second * noise, True
        return replace(got, extra={**got.extra, "profile": sent})

    run._received = spoiled  # type: ignore[method-assign]


def triggered(x: Tensor) -> Tensor:
    """With a bright corner, which no digit has."""
    x = x.clone()
    x[..., :2, :2] = 1.0
    return x


def poisoned(client: fs.ClientData, kind: str) -> fs.ClientData:
    """A bad client's own data: labels reversed, or half its samples with the trigger and the target for a label."""
    x, y = client.train
    if kind == "labels":
        return replace(client, train=(x, 9 - y))
    if kind == "backdoor":
        half = torch.arange(len(y)) % 2 == 0
        return replace(client, train=(torch.where(half.view(-1, 1, 1, 1), triggered(x), x), torch.where(half, TARGET, y)))
    return client


def simulation(case: Case, defences: dict[str, fs.Aggregator]) -> fs.Simulation:
    config = Config(
        method={"name": case.method}, data={"name": "digits", "clients": CLIENTS, **SHIFTS[case.shift]}, model={"name": "mlp"},
        rounds=ROUNDS, seed=case.seed, device="cpu",
    ).complete()  # fmt: skip
    data, aggregator = config.make_data(), defences[case.defence]
    if case.attack in ATTACKS:
        kind, strength = ATTACKS[case.attack]
        clients = [poisoned(c, kind) if i in case.who else c for i, c in enumerate(data.clients)]
        data = replace(data, clients=clients)
        aggregator = Hostile(aggregator, case.who, kind, strength)
    run = fs.Simulation(
        config.make_method(), config.make_model(data), data, seed=case.seed, training=config.make_training(),
        aggregator=aggregator, rounds=ROUNDS, eval_every=ROUNDS, device="cpu",
    )  # fmt: skip
    if case.attack in PROFILES:
        if case.attack != "true":
            spoil_profiles(run, case)
    elif case.attack is not None and case.method == "fedalike":
        spoil_heads(run, case.who, *ATTACKS[case.attack])
    return run


def fooled(run: fs.Simulation, honest: list[int]) -> float:
    """The share of honest clients' samples of other classes that the trigger turns into the target, %."""
    models, hits, count = run.models(honest), 0, 0
    for row, i in enumerate(honest):
        x, y = run.data.clients[i].test
        with torch.no_grad():
            found = torch.func.functional_call(run.model.module.eval(), {n: v[row] for n, v in models.items()}, triggered(x))
        others = y != TARGET
        hits, count = hits + int((found.argmax(1) == TARGET)[others].sum()), count + int(others.sum())
    return 100 * hits / count


def outcomes(cases: Iterable[Case], defences: dict[str, fs.Aggregator]) -> Iterator[dict[str, Any]]:
    """Every case run, in stacks of those that can be."""
    for _, same in itertools.groupby(sorted(cases, key=lambda c: (c.method, c.shift)), key=lambda c: (c.method, c.shift)):
        left = list(same)
        while left:
            lot, left = left[:LOT], left[LOT:]
            runs = [simulation(case, defences) for case in lot]
            alike: dict[Any, list[int]] = {}
            for i, run in enumerate(runs):
                alike.setdefault(stacks(run) or i, []).append(i)
            for places in alike.values():
                yield from trained([lot[i] for i in places], [runs[i] for i in places])


def trained(cases: list[Case], runs: list[fs.Simulation]) -> Iterator[dict[str, Any]]:
    """Under attack, of FedAlike also how many groups honest clients are in, and how many bad ones are in none of these."""
    stack, here = Stack(runs), list(range(len(runs)))
    last: dict[int, Any] = {}
    for r in range(ROUNDS):
        found = dict(zip(here, stack.step(evaluate=r == ROUNDS - 1), strict=True))
        last |= found
        here = [i for i in here if not isinstance(found[i], fs.TrainingError)]
        if not here:
            break
    for i, (case, run) in enumerate(zip(cases, runs, strict=True)):
        out: dict[str, Any] = {k: v for k, v in vars(case).items() if v is not None}
        if isinstance(last[i], fs.TrainingError):
            yield {**out, "accuracy": None}
            continue
        honest = [c for c in range(CLIENTS) if c not in case.who]
        figures = last[i]["clients"]["accuracy"]
        out["accuracy"] = round(100 * statistics.fmean(figures[c] for c in honest), 4)
        if case.attack is None:
            out["shared"] = digest(run.server["params"])[:16]
        groups = run.method.groups(run.server)
        if groups is not None and case.bad:
            mine = set(groups[honest].tolist())
            out["groups"] = len(mine)
            out["apart"] = sum(int(groups[c]) not in mine for c in case.who)
        if case.attack in ATTACKS and ATTACKS[case.attack][0] == "backdoor":
            out["fooled"] = round(fooled(run, honest), 4)
        yield out


def attacked(seeds: list[int], defences: Iterable[str], methods: Iterable[str]) -> list[Case]:
    return [
        Case(method, defence, seed, attack=attack, bad=bad)
        for method in methods
        for defence in defences
        for seed in seeds
        for attack, bad in [(None, 0), *itertools.product(ATTACKS, (1, 2))]
    ]


def honest(seeds: list[int], defences: Iterable[str], methods: Iterable[str]) -> list[Case]:
    return [
        Case(method, defence, seed, shift=shift)
        for method in methods
        for shift in SHIFTS
        for defence in defences
        for seed in seeds
    ]


def profiled(seeds: list[int], methods: Iterable[str]) -> list[Case]:
    """One bad client, if FedAlike is among the methods."""
    return [
        Case("fedalike", "mean", seed, shift, attack, 1)
        for shift in ("five classes", "groups", "meaning")
        for attack in PROFILES
        for seed in seeds
        if "fedalike" in methods
    ]


@dataclass(frozen=True)
class Watched(fs.ClippedMean):
    """The plain mean, which notes how many times as long as the limit's median updates are."""

    def fold(self, state: State, params: Tree) -> fs.Fold:
        fold = super().fold(state, params)
        past, add = state.get("parameters_lengths", {}), fold.add

        def watched(values: Tree, sent: fs.Mask, weight: Tensor) -> None:
            part = {n: v for n, v in values.items() if n in state["parameters"] and sent.get(n, False) is not False}
            if part and past:
                RATIOS.extend((lengths(part, sent, params) / usual(past)).tolist())
            add(values, sent, weight)

        fold.add = watched  # type: ignore[method-assign]
        return fold


RATIOS: list[float] = []


def ratios(seeds: list[int], methods: Iterable[str]) -> None:
    """How long honest updates are beside the median, by method and kind."""
    for method in methods:
        for shift in SHIFTS:
            RATIOS.clear()
            list(outcomes([Case(method, "watched", s, shift) for s in seeds], {"watched": Watched(clip_factor=1e9)}))
            if not RATIOS:
                continue
            found = torch.tensor(RATIOS)
            shown = {q: round(float(found.quantile(q)), 2) for q in (0.5, 0.9, 0.99, 1.0)}
            above = {f: round(100 * float((found > f).double().mean()), 2) for f in (1.5, 2.0, 3.0, 5.0)}
            print(f"{method:10} {shift:12} quantiles {shown}  % above {above}", flush=True)


def show(rows: list[dict[str, Any]], column: str, by: str) -> None:
    """Means over seeds, a line for each method and defence."""
    names = list(dict.fromkeys(str(r.get(column)) + (f" {r['bad']}" if r["bad"] else "") for r in rows))
    print(f"{'':32}" + "".join(f"{n[:14]:>15}" for n in names))
    for method, defence in dict.fromkeys((r["method"], r["defence"]) for r in rows):
        cells = []
        for name in names:
            found = [
                r[by] for r in rows
                if (r["method"], r["defence"]) == (method, defence) and by in r
                and str(r.get(column)) + (f" {r['bad']}" if r["bad"] else "") == name
            ]  # fmt: skip
            cells.append("-" if not found or None in found else f"{statistics.fmean(found):.1f}")
        print(f"{method:10} {defence:21}" + "".join(f"{c:>15}" for c in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/robust.json"))
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--explore", action="store_true")
    parser.add_argument("--parts", default="ratios,attacked,honest")
    args = parser.parse_args()
    torch.set_num_threads(1)
    methods, seeds = args.methods.split(","), [int(s) for s in args.seeds.split(",")]
    if args.explore:
        seeds = [s + 100 for s in seeds]
        if "ratios" in args.parts:
            ratios(seeds, methods)
        if "attacked" in args.parts:
            rows = list(outcomes(attacked(seeds, EXPLORED, methods), EXPLORED))
            show(rows, "attack", "accuracy")
            show([r for r in rows if "fooled" in r], "attack", "fooled")
        if "honest" in args.parts:
            show(list(outcomes(honest(seeds, EXPLORED, methods), EXPLORED)), "shift", "accuracy")
        return
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    here = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "commit": commit,
        "machine": f"{platform.machine()}, 1 CPU thread, torch {torch.__version__}",
    }
    settings = {
        "seeds": seeds,
        "clients": CLIENTS,
        "rounds": ROUNDS,
        "defences": {n: {"kind": type(a).__name__, **vars(a)} for n, a in DEFENCES.items()},
    }
    before = json.loads(args.out.read_text(encoding="utf-8")) if set(methods) < set(METHODS) and args.out.exists() else {}
    if before and {k: before[k] for k in settings} != settings:
        parser.error(f"{args.out} was measured with other settings; measure all methods, or give another --out.")
    found: dict[str, list[dict[str, Any]]] = {
        "attacked": list(outcomes(attacked(seeds, DEFENCES, methods), DEFENCES)),
        "honest": list(outcomes(honest(seeds, DEFENCES, methods), DEFENCES)),
        "profiles": list(outcomes(profiled(seeds, methods), DEFENCES)),
    }
    show(found["attacked"], "attack", "accuracy")
    show(found["honest"], "shift", "accuracy")
    for what in ("accuracy", "groups"):
        for shift in dict.fromkeys(r["shift"] for r in found["profiles"]):
            print(shift)
            show([r for r in found["profiles"] if r["shift"] == shift], "attack", what)
    made: dict[str, Any] = {**here, **settings, **found}
    if before:
        made = {
            **{k: before[k] for k in here},
            "again": {**before.get("again", {}), **dict.fromkeys(methods, here)},
            **settings,
        }
        for part, rows in found.items():
            kept = [r for r in before.get(part, []) if r["method"] not in methods]
            made[part] = sorted(kept + rows, key=lambda r: r["method"])
    lines = {k: ",\n  ".join(map(json.dumps, v)) for k, v in made.items() if k in found}
    head = ",\n ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in made.items() if k not in lines)
    tables = ",\n ".join(f"{json.dumps(k)}: [\n  {v}\n ]" for k, v in lines.items())
    args.out.write_text(f"{{\n {head},\n {tables}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
