"""What adapters on a frozen base are worth: accuracy, bytes a round and seconds, beside full fine-tuning and the head alone.

Rates are chosen on held-out samples (seeds 100 and above), one for each way over all kinds of shift; if the best is at an edge
of those tried, the next is tried too. Then every way runs once on test data with fresh seeds. Runs of one way stack by seeds,
rates and kinds of shift. Every row is appended to the file once it is known; a second start goes on behind those rows.

    python benchmarks/adapters.py --weights resnet18.safetensors [--out results/adapters.jsonl] [--data FOLDER] [--seconds 330]
    python benchmarks/adapters.py --places audiomnist --base vit.safetensors [--data FOLDER]

The base of audiomnist is trained first, unless its file is there (speakers.py). On cifar10 nothing below the last stage trains
(pictures.py).

scripts/adapters.py makes docs/adapters.md of the rows.
"""

import argparse
import datetime
import itertools
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pictures import below, last_stage
from speakers import make_base, network, speakers

import fedselect as fs
from fedselect.data.partition import Sizes
from fedselect.runs.config import Config
from fedselect.simulate.stack import Stack, stacks

LORA = {"name": "lora"}
RATES = (0.003, 0.01, 0.03, 0.1)
LADDER = (0.0003, 0.001, *RATES, 0.3, 1.0)  # what rates go on to, where the best is at an edge
SHIFTS = ("none", "labels", "meaning", "camera", "groups", "motley")


@dataclass(frozen=True)
class Way:
    """What trains, and who shares what."""

    adapt: dict[str, Any]
    method: dict[str, Any]
    aggregate: str = "mean"
    rate_of: str | None = None  # the way whose rate it takes


FT: dict[str, Any] = {"finetune": 3, "finetune_lr": None}
WAYS = {
    "full, shared + FT": Way({"name": "all"}, {"name": "fedavg+ft", **FT}),
    "full, personal": Way({"name": "all"}, {"name": "local"}),
    "full, personal head": Way({"name": "all"}, {"name": "fedper"}),
    "full, FedPersist": Way({"name": "all"}, {"name": "fedpersist", "window": 6, **FT}),
    "full, FedAlike": Way({"name": "all"}, {"name": "fedalike", **FT}),
    "head, shared + FT": Way({"name": "head"}, {"name": "fedavg+ft", **FT}),
    "head, personal": Way({"name": "head"}, {"name": "local"}),
    "LoRA, shared": Way(LORA, {"name": "fedavg"}),
    "LoRA, shared, exact": Way(LORA, {"name": "fedavg"}, "product", rate_of="LoRA, shared"),
    "LoRA, shared + FT": Way(LORA, {"name": "fedavg+ft", **FT}),
    "LoRA, shared + FT, exact": Way(LORA, {"name": "fedavg+ft", **FT}, "product", rate_of="LoRA, shared + FT"),
    "LoRA, personal": Way(LORA, {"name": "local"}),
    "LoRA, personal head": Way(LORA, {"name": "fedper"}),
    "LoRA, Ditto": Way(LORA, {"name": "ditto"}),
    "LoRA, A shared, B personal": Way(LORA, {"name": "layers", "layers": "*.lora_b,HEAD"}),
    "LoRA, FedPersist by rank": Way(LORA, {"name": "fedpersist", "unit": "rank", "window": 6, **FT}),
    "LoRA, FedPersist by layer": Way(LORA, {"name": "fedpersist", "window": 6, **FT}),
    "LoRA, FedSelect by rank": Way(LORA, {"name": "fedselect", "unit": "rank"}),
    "LoRA, FedAlike": Way(LORA, {"name": "fedalike", **FT}),
}


@dataclass(frozen=True)
class Place:
    """Data, and how long is trained on it. `held`: sizes where test samples stay unseen."""

    data: dict[str, Any]
    held: dict[str, int]
    rounds: int
    epochs: int = 1
    shifts: tuple[str, ...] = ("",)
    seeds: tuple[int, ...] = (100, 101)  # of the choice of rates
    rates: tuple[float, ...] = RATES
    batch: int = 32
    rank: int = 8
    fresh: tuple[int, ...] = (0, 1, 2, 3, 4)  # seeds of the test


PLACES = {
    "pacs": Place(
        {"name": "domains", "path": "pacs_96.parquet", "size": 64, "train": 150, "test": 200},
        {"train": 250, "val": 100}, 20, fresh=(0, 1, 2),
    ),
    "audiomnist": Place(
        {"train": 40, "test": 60}, {"train": 55, "val": 15}, 12, 1, SHIFTS, (100,), (0.003, 0.01, 0.03), 10, 4,
    ),
    "cifar10": Place(  # the last stage of the ResNet18 alone
        {"name": "cifar10", "clients": 10, "train": 40, "test": 100}, {"train": 60, "val": 20},
        10, 1, SHIFTS, (100,), (0.003, 0.01, 0.03), 10,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    place: str
    shift: str
    way: str
    seed: int
    rate: float
    score: str


@dataclass(frozen=True)
class Files:
    """Where data lies, and the weights of the bases."""

    data: Path
    resnet: Path
    vit: Path


def simulation(case: Case, files: Files) -> fs.Simulation:
    place, way = PLACES[case.place], WAYS[case.way]
    found = federation(case.place, case.shift, case.seed, case.score, files)
    given = {"rank": place.rank} if way.adapt["name"] == "lora" else {}
    model = fs.ADAPTERS[way.adapt["name"]](base(case.place, found, files), **given)
    rates = {"lr": case.rate} | ({"personal_lr": case.rate} if way.method["name"] in ("fedselect", "layers") else {})
    method = {n: v.replace("HEAD", str(model.head)) if n == "layers" else v for n, v in way.method.items()}
    raw = {
        "method": {**method, **rates, "epochs": place.epochs}, "data": {"name": "digits"}, "model": {"name": "mlp"},
        "aggregate": {"name": way.aggregate}, "training": {"batch_size": place.batch, "momentum": 0.9}, "seed": case.seed,
    }  # fmt: skip
    config = Config.from_dict(raw, str(case))
    return fs.Simulation(
        config.make_method(), model, found, seed=case.seed, training=config.make_training(), eval_every=place.rounds,
        aggregator=config.make_aggregator(),
    )  # fmt: skip


def base(place: str, found: fs.Federation, files: Files) -> fs.Model:
    if place == "audiomnist":
        return network(files.vit)
    return last_stage(files.resnet) if place == "cifar10" else fs.models.resnet18(found, weights=str(files.resnet))


@cache
def federation(name: str, shift: str, seed: int, score: str, files: Files) -> fs.Federation:
    """The clients of a case; where it scores held-out samples, these are in the place of test samples."""
    place = PLACES[name]
    data = {**place.data, **(place.held if score == "val" else {})}
    if name == "audiomnist":
        found = speakers(files.data, shift, Sizes(data["train"], data["test"], data.get("val", 0)), seed)
        return found.on_validation() if score == "val" else found
    data |= {"path": str(files.data / data["path"])} if "path" in data else {"data_dir": str(files.data)}
    data |= {"shift": shift} if shift else {}
    raw = {"data": data, "method": {"name": "fedavg"}, "model": {"name": "mlp"}, "score": score, "seed": seed}
    made = Config.from_dict(raw, f"{name} {shift}").make_data()
    return below(made, files.resnet) if name == "cifar10" else made


def outcomes(cases: list[Case], files: Files) -> Iterator[dict[str, Any]]:
    """These cases of one way, stacked where that is possible."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time  # a CPU may be shared
    runs = [simulation(case, files) for case in cases]
    alike: dict[Any, list[int]] = {}
    for i, run in enumerate(runs):
        alike.setdefault(stacks(run) or i, []).append(i)
    for places in alike.values():
        began = clock()
        stack, left = Stack([runs[i] for i in places]), list(places)
        last: dict[int, Any] = {}
        sent: dict[int, list[int]] = {i: [0, 0] for i in places}
        for _ in range(PLACES[cases[0].place].rounds):
            found = dict(zip(left, stack.step(), strict=True))
            last |= found
            left = [i for i in left if not isinstance(found[i], fs.TrainingError)]
            for i in left:
                sent[i] = [sent[i][0] + found[i]["bytes_up"], sent[i][1] + found[i]["bytes_down"]]
            if not left:
                break
        seconds = (clock() - began) / len(places)
        for i in places:
            run, case = runs[i], cases[i]
            lost = isinstance(last[i], fs.TrainingError)
            turns = run.clients * run.round or 1
            yield {
                **vars(case), "accuracy": None if lost else round(100 * last[i]["accuracy"], 3),
                "up": round(sent[i][0] / turns), "down": round(sent[i][1] / turns), "seconds": round(seconds, 3),
                "trained": run.model.size, "frozen": run.model.frozen, "clients": run.clients, "rounds": run.round,
            }  # fmt: skip


def chosen(rows: list[dict[str, Any]], place: str, way: str) -> float | None:
    """The rate with the best mean on held-out samples, over seeds and kinds of shift; one that diverged counts as 0."""
    own = [r for r in rows if (r["place"], r["way"], r["score"]) == (place, WAYS[way].rate_of or way, "val")]
    rates = sorted({r["rate"] for r in own})
    return max(rates, key=lambda v: statistics.fmean(r["accuracy"] or 0.0 for r in own if r["rate"] == v)) if rates else None


def planned(rows: list[dict[str, Any]], places: list[str], ways: list[str]) -> Iterator[list[Case]]:
    """Lots of cases, way by way: the choice of a rate, then the test."""
    for name in places:
        place = PLACES[name]
        for way in ways:
            if WAYS[way].rate_of is None:
                yield from choices(rows, name, way)
            if (rate := chosen(rows, name, way)) is not None:
                yield [Case(name, shift, way, seed, rate, "test") for shift in place.shifts for seed in place.fresh]


def choices(rows: list[dict[str, Any]], name: str, way: str) -> Iterator[list[Case]]:
    """Cases on held-out samples: the rates to begin with, then the next of the ladder while the best is at an edge."""
    place, more = PLACES[name], list(PLACES[name].rates)
    tried: list[float] = []
    while more:
        tried = sorted({*tried, *more})
        every = itertools.product(place.shifts, more, place.seeds)
        yield [Case(name, shift, way, seed, rate, "val") for shift, rate, seed in every]
        best = chosen(rows, name, way)
        below, above = [v for v in LADDER if v < tried[0]], [v for v in LADDER if v > tried[-1]]
        more = below[-1:] if best == tried[0] else above[:1] if best == tried[-1] else []


def machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{os.cpu_count()} {platform.machine()} cores, torch on {torch.get_num_threads()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=Path("resnet18.safetensors"), help="A pretrained ResNet18.")
    parser.add_argument("--base", type=Path, default=Path("audiomnist-vit.safetensors"), help="The base of audiomnist.")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("results/adapters.jsonl"))
    parser.add_argument("--places", default=",".join(PLACES))
    parser.add_argument("--ways", default=";".join(WAYS))
    parser.add_argument("--commit", help="What is measured, where git does not know.")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="Begin nothing new after so long.")
    parser.add_argument("--quick", action="store_true", help="One round each, to see that all runs.")
    args = parser.parse_args()
    if args.quick:
        few = {"train": 8, "test": 8}
        held = {"train": 16, "val": 8}
        PLACES.update({n: replace(p, data=p.data | few, held=held, rounds=1, seeds=(100,)) for n, p in PLACES.items()})
    began = time.perf_counter()
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    said = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False).stdout
    made = {"commit": args.commit or said.strip(), "machine": machine(), "torch": torch.__version__,
            "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat()}  # fmt: skip
    files = Files(args.data, args.weights, args.base)

    def keep(row: dict[str, Any]) -> None:
        rows.append({**row, **made})
        with args.out.open("a") as f:
            f.write(json.dumps(rows[-1]) + "\n")

    if "audiomnist" in args.places.split(",") and not args.base.exists():
        right = round(make_base(args.data, args.base), 3)
        case = Case("audiomnist", "", "base", 0, 0.0, "base")
        if vars(case) not in [{k: r[k] for k in vars(case)} for r in rows]:
            keep({**vars(case), "accuracy": right})
    for cases in planned(rows, args.places.split(","), args.ways.split(";")):
        there = [{k: r[k] for k in vars(cases[0])} for r in rows]
        left = [case for case in cases if vars(case) not in there]
        if not left or time.perf_counter() - began > args.seconds:
            continue
        for row in outcomes(left, files):
            keep(row)
        mean = statistics.fmean(r["accuracy"] or 0.0 for r in rows[-len(left) :])
        said = f"{cases[0].place}, {cases[0].way}, {cases[0].score}: {mean:.1f}%"
        print(f"{time.perf_counter() - began:6.1f} s  {said}", flush=True)


if __name__ == "__main__":
    main()
