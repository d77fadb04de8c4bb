"""A job of `peers.py` in Flower's simulation, in a process of its own: `pip install "flwr[simulation]==1.41.0"`.

Flower runs clients in Ray's processes, so CPU time is that of this process and all its children. One client runs at a time,
with one thread. A worker keeps the module and the clients' data from one message to the next, which the tutorials do not.

    python benchmarks/peers_flower.py mlp 10 --rounds 6
"""

import argparse
import json
import os
import time
from functools import cache
from importlib.metadata import version
from itertools import pairwise
from typing import ClassVar

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}

import psutil
import torch
import torch.nn.functional as F
from contestants import BATCH, EPOCHS, LR, pictures
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

import fedselect as fs


@cache
def given(name: str, clients: int):
    """The module and all clients' samples, once for each process."""
    torch.set_num_threads(1)
    data = pictures(clients)
    return getattr(fs.models, name)(data).build(), [c.train for c in data.clients]


client = ClientApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    config = message.content["config"]
    module, parts = given(str(config["model"]), int(config["clients"]))
    x, y = parts[int(context.node_config["partition-id"])]
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(module.train().parameters(), lr=LR)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(module(x[batch]), y[batch]).backward()
            optimizer.step()
    reply = {"arrays": ArrayRecord(module.state_dict()), "metrics": MetricRecord({"num-examples": len(x)})}
    return Message(content=RecordDict(reply), reply_to=message)


def spent() -> float:
    """CPU time of this process and its children, in seconds."""
    me, total = psutil.Process(), 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


class Timed(FedAvg):
    """FedAvg that notes wall and CPU time before each round, and after the last."""

    marks: ClassVar[list[tuple[float, float]]] = []

    def configure_train(self, *args, **kwargs):
        self.marks.append((time.perf_counter(), spent()))
        return super().configure_train(*args, **kwargs)

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        if failed := [r for r in replies if r.has_error()]:
            raise RuntimeError(f"round {server_round}: {len(failed)} clients failed: {failed[0].error}")
        return super().aggregate_train(server_round, replies)


def measure(name: str, clients: int, rounds: int) -> dict:
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        module, _ = given(name, clients)
        strategy = Timed(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
        config = ConfigRecord({"model": name, "clients": clients})
        strategy.start(grid, ArrayRecord(module.state_dict()), num_rounds=rounds, train_config=config)
        Timed.marks.append((time.perf_counter(), spent()))

    backend = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 1, "include_dashboard": False}}
    run_simulation(server, client, num_supernodes=clients, backend_config=backend)
    marks = Timed.marks
    taken = [[1e3 * (b - a) for a, b in zip(one, two, strict=True)] for one, two in pairwise(marks)]
    wall, cpu = zip(*taken, strict=True)
    return {
        "versions": {p: version(p) for p in ("flwr", "ray")}, "rounds": len(taken),
        "first": {"wall_ms": round(wall[0], 1), "cpu_ms": round(cpu[0], 1)},
        "steady": {"wall_ms": round(min(wall[1:]), 1), "cpu_ms": round(sum(cpu[1:]) / len(cpu[1:]), 1)},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("clients", type=int)
    parser.add_argument("--rounds", type=int, default=6)
    how = parser.parse_args()
    print(json.dumps(measure(how.model, how.clients, how.rounds)))


if __name__ == "__main__":
    import peers_flower  # the workers import it by this name

    peers_flower.main()
