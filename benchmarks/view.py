"""What --view best gains and costs, where each client chooses its model on few samples: digits, every kind of shift.

A client has 60 samples. Some are held out to choose on, and the rest are trained on. Beside the choice stand the model that
the method reports, trained on as many samples, and that model trained on all 60. What is done is kept in the file and not
done again; the results and the table in docs/tune.md are made from it.

    python benchmarks/view.py view.jsonl --seeds 10,11,12
    python benchmarks/view.py view.jsonl --table
"""

import argparse
import datetime
import json
import platform
import statistics
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import fedselect as fs
from fedselect.methods import METHODS

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "results" / "view.json", ROOT / "docs" / "tune.md"
BEGIN, END = "<!-- from results/view.json -->\n", "<!-- end -->"
ROUNDS, SAMPLES, HELD_OUT = 30, 60, (5, 10, 20, 40)
SHIFTS = ("none", "labels", "meaning", "groups", "camera", "permuted", "motley")
METHOD_OPTIONS: dict[str, dict[str, Any]] = {
    "fedavg": {"lr": 0.1},
    "fedavg+ft": {"lr": 0.1},
    "fedbabu": {"lr": 0.1},
    "fedper": {"lr": 0.1},
    "fedalike": {"lr": 0.1},
}
Row = dict[str, Any]


def measure(commit: str, shift: str, seed: int, done: set[tuple[Any, ...]]) -> Iterator[Row]:
    """Every method with every number of samples held out: the accuracy in % of each client."""
    for held_out in (0, *HELD_OUT):
        names = [name for name in METHOD_OPTIONS if (shift, seed, held_out, name) not in done]
        if not names:
            continue
        data = fs.load("digits", seed=seed, shift=shift, train=SAMPLES, val=held_out)
        methods = {name: METHODS[name](**METHOD_OPTIONS[name]) for name in names}
        how: dict[str, Any] = {"view": "best"} if held_out else {}
        found = fs.compare(methods, model="mlp", data=data, rounds=ROUNDS, seeds=[seed], eval_every=ROUNDS, **how)
        for name in names:
            result = found[name, seed]
            assert isinstance(result, fs.Result)
            last = result.history[-1]["clients"]
            reported = last[f"accuracy_{methods[name].view}"]
            row: Row = {
                "commit": commit,
                "shift": shift,
                "seed": seed,
                "held_out": held_out,
                "method": name,
                "reported": _percent(reported),
            }
            yield row | ({"chosen": last["chosen"], "best": _percent(last["accuracy"])} if held_out else {})


def _percent(values: list[float]) -> list[float]:
    return [round(100 * v, 2) for v in values]


def table(rows: list[Row]) -> str:
    """Points gained by the choice, and by training on the held-out samples instead: mean, and standard error over seeds."""
    lines = [f"| held out of {SAMPLES} | {' | '.join(map(str, HELD_OUT))} |", "|---|" + "--:|" * len(HELD_OUT)]
    methods = {f"`{m}`": [r for r in rows if r["method"] == m] for m in METHOD_OPTIONS}
    shifts = {f"shift `{s}`": [r for r in rows if r["shift"] == s] for s in SHIFTS}
    for what, said, groups in (
        ("best", "**chosen**", {"all": rows, **methods, **shifts}),
        ("whole", "**trained on instead**", {"all": rows, **methods}),
    ):
        for name, own in groups.items():
            head = f"{said}, {name}" if name == "all" else name
            lines.append(f"| {head} | {' | '.join(_said(by_seed(own, n, what)) for n in HELD_OUT)} |")
    return "\n".join(lines)


def by_seed(rows: list[Row], held_out: int, what: str) -> list[float]:
    """For each seed, how much better than the reported model: the chosen one (best), or training on all samples (whole)."""
    whole = {(r["shift"], r["seed"], r["method"]): r["reported"] for r in rows if r["held_out"] == 0}
    found: dict[int, list[float]] = {}
    for r in rows:
        if r["held_out"] == held_out:
            other = r["best"] if what == "best" else whole[r["shift"], r["seed"], r["method"]]
            found.setdefault(r["seed"], []).append(statistics.fmean(other) - statistics.fmean(r["reported"]))
    return [statistics.fmean(values) for values in found.values()]


def _said(gains: list[float]) -> str:
    error = f" ± {statistics.stdev(gains) / len(gains) ** 0.5:.1f}" if len(gains) > 1 else ""
    return f"{statistics.fmean(gains):+.1f}{error}"


def choices(rows: list[Row]) -> str:
    """What clients chose, in % of them."""
    found = Counter(model for r in rows for model in r.get("chosen", ()))
    return ", ".join(f"{model} {100 * many / found.total():.0f}%" for model, many in found.most_common())


def lost(rows: list[Row]) -> str:
    """How often a choice lost accuracy on test data, among those that took another model than the method reports."""
    changed = [b - a for r in rows if r["held_out"] for a, b in zip(r["reported"], r["best"], strict=True) if a != b]
    worse = 100 * sum(d < 0 for d in changed) / len(changed)
    return f"{worse:.0f}% of the choices that changed a client's accuracy lowered it"


def section(made: Row) -> str:
    """The part of the page that is made from the results."""
    rows, seeds = made["rows"], ", ".join(map(str, made["seeds"]))
    said = [
        "Points of test accuracy above the reported model, trained on the samples that are left, ± standard error over seeds",
        f"{seeds}. Chosen: the model that each client chose. Trained on instead: the reported model trained on all {SAMPLES}.",
        f"Clients chose: {choices(rows)}; {lost(rows)}.",
        f"`python benchmarks/view.py`, commit {made['commit']}, {made['date']}, {made['machine']}.",
    ]
    return table(rows) + "\n\n" + "\n".join(said) + "\n"


def page(text: str, made: Row) -> str:
    before, rest = text.split(BEGIN)
    return before + BEGIN + section(made) + END + rest.split(END, 1)[1]


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("file", type=Path, help="Where rows are kept, a line each.")
    asked.add_argument("--seeds", default="10,11,12")
    asked.add_argument("--shifts", default=",".join(SHIFTS))
    asked.add_argument("--table", action="store_true", help=f"Write {RESULTS.name} and the page's table from it; run nothing.")
    given = asked.parse_args()
    rows: list[Row] = [json.loads(line) for line in given.file.read_text().splitlines()] if given.file.exists() else []
    if given.table:
        commits = ", ".join(sorted({r.pop("commit") for r in rows}))
        about = {
            "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(), "commit": commits,
            "machine": f"{platform.machine()}, one CPU thread, PyTorch {torch.__version__}",
            "rounds": ROUNDS, "seeds": sorted({r["seed"] for r in rows}),
        }  # fmt: skip
        head, body = json.dumps(about)[1:-1], ",\n  ".join(map(json.dumps, rows))
        RESULTS.write_text(f'{{\n {head},\n "rows": [\n  {body}\n ]\n}}\n', encoding="utf-8")
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), json.loads(RESULTS.read_text())), encoding="utf-8")
        print(table(rows))
        return
    torch.set_num_threads(1)
    asked_git = ["git", "rev-parse", "--short=12", "HEAD"]
    commit = subprocess.run(asked_git, capture_output=True, text=True, check=False, cwd=ROOT).stdout.strip()
    done = {(r["shift"], r["seed"], r["held_out"], r["method"]) for r in rows}
    with given.file.open("a") as out:
        for seed in map(int, given.seeds.split(",")):
            for shift in given.shifts.split(","):
                for row in measure(commit, shift, seed, done):
                    print(json.dumps(row), file=out, flush=True)
                print(seed, shift, flush=True)


if __name__ == "__main__":
    main()
