"""How often FedAlike's groups are right, where it is known how clients differ: the table of docs/diagnose.md.

    python benchmarks/alike.py --data digits --model mlp --train 40

Nothing is trained: groups are found from what classes look like to the untrained network. Ten clients, three federations.
"""

import argparse
from itertools import combinations

import fedselect as fs
from fedselect.diagnosis.diagnosis import sharing

CLIENTS = 10
KINDS = {
    "none": {"shift": "none"},
    "labels": {"shift": "labels", "classes_per_client": 2},
    "five classes": {"shift": "labels", "classes_per_client": 5},
    "dirichlet": {"shift": "labels", "split": "dirichlet", "concentration": 0.5},
    "meaning": {"shift": "meaning"},
    "groups": {"shift": "groups"},
    "camera": {"shift": "camera"},
    "motley": {"shift": "motley", "classes_per_client": 2},
}


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--data", default="digits")
    asked.add_argument("--model", default="mlp")
    asked.add_argument("--train", type=int, default=40, help="training samples a client")
    asked.add_argument("--seeds", type=int, nargs="+", default=[60, 61, 62])
    how = asked.parse_args()
    for kind, options in KINDS.items():
        found = [groups(how, options, seed) for seed in how.seeds]
        print(f"{kind:13s} groups: {', '.join(str(len(set(g))) for g in found)}{told(kind, found)}", flush=True)


def groups(how: argparse.Namespace, options: dict[str, object], seed: int) -> list[int]:
    data = fs.load(how.data, clients=CLIENTS, train=how.train, val=0, test=10, seed=seed, **options)
    return sharing(fs.Simulation("fedalike", how.model, data, seed=seed))


def told(kind: str, found: list[list[int]]) -> str:
    """What there is to say beside the number of groups."""
    if kind == "meaning":
        alone = sum(g.count(own) == 1 for g in found for own in g)
        return f"; alone: {alone} of {CLIENTS * len(found)} clients"
    if kind == "groups":
        pairs = [
            (g[i] == g[j], (i < CLIENTS / 2) == (j < CLIENTS / 2)) for g in found for i, j in combinations(range(CLIENTS), 2)
        ]
        together, apart = [same for same, alike in pairs if alike], [not same for same, alike in pairs if not alike]
        return f"; pairs rightly together: {sum(together)} of {len(together)}, rightly apart: {sum(apart)} of {len(apart)}"
    return ""


if __name__ == "__main__":
    main()
