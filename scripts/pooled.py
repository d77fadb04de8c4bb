"""The room above: one network trained on the images of all clients in one place, asked for each client's own classes.

Partitions, images to train on and images held out are those of results/explored.json. The rate falls to a tenth for the last
quarter. Writes results/pooled.json:

    python scripts/pooled.py [--seeds 100,101,102] [--rounds 40] [--lr 0.1]
"""

import argparse
import dataclasses
import datetime
import json
from pathlib import Path

import torch

import fedselect as fs
from fedselect.core.tree import Tree, expand
from fedselect.paper.write import lean
from fedselect.runs.config import Config
from fedselect.runs.environment import environment
from fedselect.simulate import Simulation
from fedselect.training.step import precision
from fedselect.training.work import predictions

RESULTS = Path(__file__).resolve().parents[1] / "results"


def pooled(data: fs.Federation) -> fs.Federation:
    """One client with the training images of all."""
    x, y = (torch.cat([c.train[i] for c in data.clients]) for i in (0, 1))
    return dataclasses.replace(data, clients=[fs.ClientData((x, y), data.clients[0].test)], pools={})


def answers(apart: Simulation, models: Tree) -> dict[str, float]:
    """What models answer on their clients' images, percentages, means over clients.

    right_among_own: where only classes count that the client trains on.   stray: answers that are another class.
    """
    test = apart._split["test"]
    own = torch.zeros(apart.clients, 1, apart.data.classes, dtype=torch.bool, device=apart.device)
    for i, client in enumerate(apart.data.clients):
        own[i, 0, client.train[1].unique()] = True
    found = torch.zeros(3, apart.clients, device=apart.device)
    with precision(apart.precision):
        for logits, _, y, inside in predictions(apart._programs, models, test):
            said, among = logits.argmax(-1), logits.masked_fill(~own, -torch.inf).argmax(-1)
            stray = ~own.expand_as(logits).gather(-1, said.unsqueeze(-1)).squeeze(-1)
            found += torch.stack([(inside & of).sum(1) for of in (said == y, among == y, stray)])
    return dict(zip(("right", "right_among_own", "stray"), (100 * (found / test.n).mean(1)).tolist(), strict=True))


def one(config: Config, rounds: int, lr: float) -> list[float]:
    """Accuracy after the last tenth of the rounds, one by one."""
    apart = config.simulation()
    data = pooled(apart.data)
    how = {"seed": config.seed, "training": apart.training, "device": config.device, "eval_every": rounds + 1}
    sim = Simulation(fs.FedAvg(lr=lr), config.make_model(data), data, **how)
    found = []
    for r in range(rounds):
        if r == rounds - rounds // 4:
            sim.method = dataclasses.replace(sim.method, lr=lr / 10)
        sim.step()
        if r >= rounds - max(1, rounds // 10):
            one_for_all = expand(sim.server["params"], apart.clients)
            found.append(round(answers(apart, one_for_all)["right_among_own"], 2))
    print(config.seed, found, flush=True)
    return found


def numbers(said: str) -> list[int]:
    return [int(s) for s in said.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=numbers, default=[100, 101, 102], metavar="N,N")
    parser.add_argument("--rounds", type=int, default=40, help="of three epochs each")
    parser.add_argument("--lr", type=float, default=0.1)
    how = parser.parse_args()
    if how.rounds < 4:
        parser.error("at least four rounds: the last quarter has a rate of its own")
    about = json.loads((RESULTS / "explored.json").read_text(encoding="utf-8"))[-1]["about"]["config"]
    configs = [Config.from_dict({**about, "seed": s}, "explored.json") for s in how.seeds]
    made = {
        "about": "one network on the training images of all clients, its answers among a client's own classes, "
        "on the images held out; by seed, after each of the last rounds",
        "rounds": how.rounds, "lr": how.lr, "seeds": how.seeds,
        "accuracy": [one(c, how.rounds, how.lr) for c in configs],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "environment": environment(configs[0].device, configs[0].precision),
    }  # fmt: skip
    (RESULTS / "pooled.json").write_text(lean(made) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
