"""Why FedAvg + FT falls: how often a fine-tuned model answers with a class that its client does not have.

Partitions and images are those of results/explored.json; methods with the rates they have there. Writes results/stray.json:

    python scripts/stray.py [--seeds 100,101,102] [--rounds 60,200] [--device auto]
"""

import argparse
import datetime
import json
from typing import Any

from pooled import RESULTS, answers, numbers

from fedselect.experiments.config import Config
from fedselect.experiments.environment import environment
from fedselect.experiments.reproduce.write import lean

TUNED = {"finetune": 3, "finetune_lr": 0.01, "lr": 0.1}
METHODS: list[dict[str, Any]] = [
    {"name": "fedavg+ft", **TUNED},
    {"name": "fedselect", **TUNED, "limit": 0.002, "personal_lr": 0.01, "norm_stats": "shared", "view": "merged"},
    {"name": "fedbabu", **TUNED},
]


def one(config: Config, rounds: list[int]) -> list[dict[str, float]]:
    """What the fine-tuned models answer after each of these rounds."""
    sim = config.simulation()
    found = []
    for r in range(1, max(rounds) + 1):
        sim.step(evaluate=False)
        if r in rounds:
            said = answers(sim, sim.models(range(sim.clients)))
            found.append({"round": r, **{k: round(v, 2) for k, v in said.items()}})
    print(config.method["name"], config.seed, found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=numbers, default=[100, 101, 102], metavar="N,N")
    parser.add_argument("--rounds", type=numbers, default=[60, 200], metavar="N,N", help="after which to look")
    parser.add_argument("--device", default="auto")
    how = parser.parse_args()
    about = json.loads((RESULTS / "explored.json").read_text(encoding="utf-8"))[-1]["about"]["config"]
    about |= {"rounds": max(how.rounds), "device": how.device, "precision": "auto"}
    rows = []
    for method in METHODS:
        configs = [Config.from_dict({**about, "method": method, "seed": s}, "explored.json") for s in how.seeds]
        rows.append({"method": method, "found": [one(c, how.rounds) for c in configs]})
    made = {
        "about": "answers of fine-tuned models on the images held out, percentages, means over clients; by seed and round",
        "seeds": how.seeds, "rows": rows,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "environment": environment(how.device),
    }  # fmt: skip
    (RESULTS / "stray.json").write_text(lean(made) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
