"""Clients that were held out of a federation get a model from it: with 5, 20 and 100 samples, beside training alone.

Natural data sets: speakers of AudioMNIST, people of SP-SW HAR, hospitals of UCI heart disease. Data as for `fedselect run`
(FEDSELECT_DATA). What is done is kept in the file and not done again:

    python benchmarks/adapt.py adapt.jsonl --seeds 1,2
    python benchmarks/adapt.py adapt.jsonl --table
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fedselect as fs
from fedselect.adaptation.adapted import Row
from fedselect.adaptation.adapting import choose
from fedselect.adaptation.reading import few
from fedselect.methods import METHODS

ROUNDS, SAMPLES = 20, (5, 20, 100)
WAYS = {
    "fedavg+ft": {"lr": 0.1, "finetune_lr": 0.01},
    "fedalike": {"lr": 0.1},
    "fedbabu": {"lr": 0.1, "finetune_lr": 0.01},
    "fedper": {"lr": 0.1},
}
SETS = {"audiomnist": "4 of 24 speakers", "har": "4 of 23 people", "heart": "each of 4 hospitals in turn"}


def held_out(name: str, seed: int) -> Iterator[tuple[fs.Federation, list[fs.Federation]]]:
    """Federations, and clients that are no part of them."""
    if name == "heart":
        data = fs.load(name, seed=seed)
        for i in range(len(data.clients)):
            yield part(data, [j for j in range(len(data.clients)) if j != i]), [part(data, [i])]
        return
    how: dict[str, Any] = {"train": 100, "clients": 24} if name == "audiomnist" else {"per": "person"}
    data = fs.load(name, seed=seed, **how)
    count = len(data.clients)
    yield part(data, list(range(count - 4))), [part(data, [i]) for i in range(count - 4, count)]


def part(data: fs.Federation, clients: list[int]) -> fs.Federation:
    return replace(data, clients=[data.clients[i] for i in clients], pools={})


def measure(name: str, seed: int, done: set[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    for fold, (data, others) in enumerate(held_out(name, seed)):
        keys = [(name, seed, fold, w, i, n) for w in WAYS for i in range(len(others)) for n in SAMPLES]
        if set(keys) <= done:
            continue
        methods = {way: METHODS[way](**options) for way, options in WAYS.items()}
        found = fs.compare(methods, model="mlp", data=data, rounds=ROUNDS, seeds=[seed], eval_every=ROUNDS)
        for way, i, n in [k[3:] for k in keys if k not in done]:
            result = found[way, seed]
            assert isinstance(result, fs.Result)
            samples = min(n, len(others[i].clients[0].train[1]))
            began = time.perf_counter()
            made = fs.adapt(result, few(others[i], samples, seed), seed=seed)
            yield {
                "key": [name, seed, fold, way, i, n], "samples": samples, "inside": result.headline, "chosen": made.chosen,
                "table": made.table, "seconds": round(time.perf_counter() - began, 2),
            }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Mean test accuracy over held-out clients and seeds, and how often something was trained at all."""
    heads = ["", "samples", "alone", *(f"{way}: shared → adapted" for way in WAYS)]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "--:|" * (len(heads) - 1)]
    for name in SETS:
        for n in SAMPLES:
            mine = [r for r in rows if r["key"][0] == name and r["key"][5] == n]
            if not mine:
                continue
            cells = [f"{of(mine, lambda r: tested(r, 'alone')):.1f}"]
            for way in WAYS:
                own = [r for r in mine if r["key"][3] == way]
                gains = torch.tensor([tested(r, r["chosen"]) - tested(r, "shared") for r in own], dtype=torch.float64)
                error = 100 * float(gains.std() / len(gains) ** 0.5)
                moved = sum(r["chosen"] != "shared" for r in own)
                before, after = (of(own, lambda r, k=k: tested(r, k or r["chosen"])) for k in ("shared", ""))
                cells.append(f"{before:.1f} → {after:.1f} ± {error:.1f} ({moved}/{len(own)})")
            lines.append(f"| {name} | {n} | {' | '.join(cells)} |")
    return "\n".join(lines)


def tested(row: dict[str, Any], kind: str) -> float:
    return float(next(r["test"] for r in row["table"] if r["kind"] == kind))


def of(rows: list[dict[str, Any]], value: Any) -> float:
    return 100 * sum(map(value, rows)) / len(rows)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("file", type=Path)
    asked.add_argument("--sets", default=",".join(SETS))
    asked.add_argument("--seeds", default="1,2", help="Not 0, on which the rule of choice was settled.")
    asked.add_argument("--table", action="store_true", help="Print the table of what is there; run nothing.")
    given = asked.parse_args()
    rows = [json.loads(line) for line in given.file.read_text().splitlines()] if given.file.exists() else []
    if not given.table:
        torch.set_num_threads(1)
        with given.file.open("a") as out:
            for seed in map(int, given.seeds.split(",")):
                for name in given.sets.split(","):
                    for row in measure(name, seed, {tuple(r["key"]) for r in rows}):
                        rows.append(row)
                        print(json.dumps(row), file=out, flush=True)
    for row in rows:  # by the rule as it is now
        row["chosen"] = choose([Row(**{k: v for k, v in r.items() if k != "chosen"}) for r in row["table"]], row["samples"])
    print(table(rows))


if __name__ == "__main__":
    main()
