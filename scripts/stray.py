"""How often a model answers with a class that its client does not have, and what it would get if it did not.

Partitions and images are those of results/explored.json; methods with the rates they have there, and as in the target `plain`:
the paper's rate, nothing augmented. Writes results/stray.json:

    python scripts/stray.py [--seeds 100,101,102] [--rounds 20,60,200] [--device auto]
"""

import argparse
import datetime
import json
from typing import Any

from pooled import RESULTS, answers, numbers

from fedselect.paper.write import lean
from fedselect.runs.config import Config
from fedselect.runs.environment import environment
from fedselect.simulate.stack import Stack

TUNED = {"finetune": 3, "finetune_lr": 0.01, "lr": 0.1}
METHODS: list[dict[str, Any]] = [
    {"name": "fedavg", "lr": 0.1},
    {"name": "fedavg+ft", **TUNED},
    {"name": "fedselect", **TUNED, "limit": 0.002, "personal_lr": 0.01, "norm_stats": "shared", "view": "merged"},
    {"name": "fedbabu", **TUNED},
]
PLAIN: list[dict[str, Any]] = [{"name": name, "lr": 0.01} for name in ("fedavg+ft", "fedbabu")]


def looked(configs: list[Config], rounds: list[int]) -> list[list[dict[str, float]]]:
    """What models answer after each of these rounds, configuration by configuration."""
    stack = Stack([c.simulation() for c in configs])
    found: list[list[dict[str, float]]] = [[] for _ in configs]
    for r in range(1, max(rounds) + 1):
        stack.step(evaluate=False)
        for sim, own in zip(stack.runs, found, strict=True):
            if r in rounds:
                own.append({"round": r, **{k: round(v, 2) for k, v in answers(sim, sim.models(range(sim.clients))).items()}})
                print(configs[0].method["name"], sim.seed, own[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=numbers, default=[100, 101, 102], metavar="N,N")
    parser.add_argument("--rounds", type=numbers, default=[20, 60, 200], metavar="N,N", help="after which to look")
    parser.add_argument("--device", default="auto")
    how = parser.parse_args()
    about = json.loads((RESULTS / "explored.json").read_text(encoding="utf-8"))[-1]["about"]["config"]
    about |= {"rounds": max(how.rounds), "device": how.device, "precision": "auto"}
    rows = []
    for method, augment in [*((m, about["data"]["augment"]) for m in METHODS), *((m, "none") for m in PLAIN)]:
        asked = {**about, "method": method, "data": {**about["data"], "augment": augment}}
        configs = [Config.from_dict({**asked, "seed": s}, "explored.json") for s in how.seeds]
        rows.append({"method": method, "augment": augment, "found": looked(configs, how.rounds)})
    made = {
        "about": "answers on the images held out, percentages, means over clients; by seed and round",
        "seeds": how.seeds, "rows": rows,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "environment": environment(how.device),
    }  # fmt: skip
    (RESULTS / "stray.json").write_text(lean(made) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
