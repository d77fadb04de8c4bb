"""How long a round takes here and in other frameworks: the same data, model, batches, epochs and learning rate, in one process.

A peer takes part where its folder is given, as its authors publish it; nothing of theirs is copied. What it imports only for
data sets, and is not installed, is replaced by a stub. Everybody trains and aggregates; nobody evaluates. Contestants take
turns, and the best turn of each counts: wall time, and CPU time of the process, which says more where a machine is busy.

    python benchmarks/peers.py --pfllib ~/PFLlib --fluke ~/fluke [--threads 1] [--clients 3 10 100] [--models mlp small_cnn]
"""

import argparse
import contextlib
import copy
import importlib.abc
import importlib.machinery
import io
import json
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import torch
from torch import nn

import fedselect as fs
from fedselect.simulate import Simulation
from fedselect.training.recorded import RECORD_AFTER

BATCH, EPOCHS, LR, SAMPLES = 16, 3, 0.05, 48
ROUNDS = 200  # as in an ordinary run; ours traces its step at once where many more are to come
METHODS = {"fedavg": fs.FedAvg, "fedper": fs.FedPer, "fedselect": fs.FedSelect}
ABSENT = ("torchvision", "h5py")
Round = Callable[[], None]


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that are not installed and that a peer needs for nothing this benchmark does."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ABSENT else None

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: MagicMock(name=name)
        return module

    def exec_module(self, module):
        pass


def pictures(clients: int) -> fs.Federation:
    """Noise of 8x8 pixels, for what is measured is time."""
    g = torch.Generator().manual_seed(0)
    dealt = [
        (torch.randn(SAMPLES, 1, 8, 8, generator=g), torch.randint(0, 10, (SAMPLES,), generator=g)) for _ in range(clients)
    ]
    return fs.Federation([fs.ClientData(part, part) for part in dealt], 10)


def ours(method: str, model: fs.Model, data: fs.Federation) -> Round:
    training = fs.Training(batch_size=BATCH, momentum=0.0)
    made = METHODS[method](lr=LR, **({"epochs": EPOCHS} if method == "fedavg" else {}))
    simulation = Simulation(made, model, data, training=training, device="cpu", rounds=ROUNDS)
    return lambda: simulation.step(evaluate=False)


class Split(nn.Module):
    """A network in two parts, as peers ask for it: all up to the last Linear, and that."""

    def __init__(self, model: fs.Model) -> None:
        super().__init__()
        self.base, self.head = model.build(), nn.Identity()
        parent, _, name = (model.head or "").rpartition(".")
        home = self.base.get_submodule(parent)
        self.head = getattr(home, name)
        setattr(home, name, nn.Identity())

    def forward(self, x):
        return self.head(self.base(x))


def pfllib(method: str, model: fs.Model, data: fs.Federation) -> Round | None:
    from flcore.clients import clientbase
    from flcore.servers import serverbase
    from flcore.servers.serveravg import FedAvg
    from flcore.servers.serverper import FedPer

    makers = {"fedavg": FedAvg, "fedper": FedPer}
    if method not in makers:
        return None
    parts = [list(zip(*c.train, strict=True)) for c in data.clients]
    clientbase.read_client_data = serverbase.read_client_data = lambda name, i, is_train=True, few_shot=0: parts[i]
    args = SimpleNamespace(
        device="cpu", dataset="noise", num_classes=10, global_rounds=1, local_epochs=EPOCHS, batch_size=BATCH,
        local_learning_rate=LR, model=Split(model), num_clients=len(parts), join_ratio=1.0, random_join_ratio=False, few_shot=0,
        algorithm=method, time_select=False, goal="test", time_threthold=1e9, save_folder_name="", top_cnt=1, auto_break=False,
        eval_gap=1, client_drop_rate=0.0, train_slow_rate=0.0, send_slow_rate=0.0, dlg_eval=False, dlg_gap=1,
        batch_num_per_client=1, num_new_clients=0, fine_tuning_epoch_new=0, learning_rate_decay=False,
        learning_rate_decay_gamma=1.0,
    )  # fmt: skip
    server = makers[method](args, 0)
    if method == "fedper":
        server.global_model = copy.deepcopy(args.model.base)

    def run() -> None:
        server.selected_clients = server.select_clients()
        server.send_models()
        for client in server.selected_clients:
            client.train()
        server.receive_models()
        server.aggregate_parameters()

    return run


def fluke(method: str, model: fs.Model, data: fs.Federation) -> Round | None:
    from fluke import DDict, FlukeENV
    from fluke.algorithms.fedavg import FedAVG
    from fluke.algorithms.fedper import FedPer
    from fluke.data import FastDataLoader
    from fluke.nets import EncoderHeadNet

    makers = {"fedavg": FedAVG, "fedper": FedPer}
    if method not in makers:
        return None
    FlukeENV().set_eval_cfg(server=False)

    def loader(client: fs.ClientData) -> FastDataLoader:
        return FastDataLoader(*client.train, num_labels=10, batch_size=BATCH, shuffle=True)

    dealt = SimpleNamespace(assign=lambda n, batch: (([loader(c) for c in data.clients], [None] * n), None))
    split = Split(model)
    whole = EncoderHeadNet(split.base, split.head)
    own = {"model": whole} if method == "fedper" else {}
    asked = DDict(
        client=DDict(batch_size=BATCH, local_epochs=EPOCHS, loss=nn.CrossEntropyLoss, optimizer=DDict(name="SGD", lr=LR),
                     scheduler=DDict(name="StepLR", step_size=1, gamma=1), **own),
        server=DDict(weighted=True), model=split.base if own else whole,
    )  # fmt: skip
    algorithm = makers[method](len(data.clients), dealt, asked)
    server = algorithm.server

    def run() -> None:
        server.broadcast_model(algorithm.clients)
        for client in algorithm.clients:
            client.local_update(1)
        server.aggregate(algorithm.clients, server.receive_client_models(algorithm.clients, state_dict=False))

    return run


PEERS = {"pfllib": ("system", pfllib), "fluke": (".", fluke)}


def timed(run: Round) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        run()
    return time.perf_counter() - wall, time.process_time() - cpu


def turns(contest: dict[str, Round], count: int) -> dict[str, tuple[float, float]]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contest}
    for _ in range(count):
        for name, run in contest.items():
            found[name].append(timed(run))
    return {name: (min(w for w, _ in v), min(c for _, c in v)) for name, v in found.items()}


def compete(method: str, name: str, clients: int, chosen: dict[str, Callable[..., Round | None]], count: int) -> list[dict]:
    data = pictures(clients)
    model = getattr(fs.models, name)(data)
    made = {"fedselect": ours, **chosen}
    with contextlib.redirect_stdout(io.StringIO()):
        contest = {who: run for who, make in made.items() if (run := make(method, model, data)) is not None}
    first = turns(contest, 1)
    steps = EPOCHS * SAMPLES // BATCH
    for _ in range(RECORD_AFTER["cpu"] // steps + 1):  # as in a run of some length: the step is traced
        contest["fedselect"]()
    steady = turns(contest, count)
    rows = []
    for who in contest:
        row = {"method": method, "model": name, "clients": clients, "framework": who}
        for stage, found in (("first", first), ("steady", steady)):
            row[stage] = {"wall_ms": round(1e3 * found[who][0], 2), "cpu_ms": round(1e3 * found[who][1], 2)}
        rows.append(row)
        print(f"{method:<9} {name:<9} {clients:>3} clients  {who:<9}  " + "  ".join(
            f"{stage} {row[stage]['wall_ms']:>8} ms (CPU {row[stage]['cpu_ms']})" for stage in ("first", "steady")),
            flush=True)  # fmt: skip
    return rows


def commit(folder: Path) -> str | None:
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for peer in PEERS:
        parser.add_argument(f"--{peer}", type=Path, help=f"the folder of {peer}'s repository")
        parser.add_argument(f"--{peer}-commit", help="which commit that is, where git does not know")
    parser.add_argument("--clients", type=int, nargs="*", default=[3, 10, 100])
    parser.add_argument("--models", nargs="*", default=["mlp", "small_cnn"])
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--turns", type=int, default=6)
    how = parser.parse_args()
    torch.set_num_threads(how.threads)
    chosen, versions = {}, {}
    sys.meta_path.append(Stubs())
    for peer, (inside, make) in PEERS.items():
        folder = getattr(how, peer)
        if folder is not None:
            sys.path.append(str(folder / inside))
            chosen[peer], versions[peer] = make, getattr(how, f"{peer}_commit") or commit(folder)
    timed(ours("fedavg", fs.models.mlp(data := pictures(2)), data))  # torch's own start
    rows: list[dict] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for m in how.methods:
            for n in how.models:
                for c in how.clients:
                    rows += compete(m, n, c, chosen, how.turns)
    except KeyboardInterrupt:
        print("stopped early; here is what was measured", flush=True)
    print(json.dumps({
        "benchmark": "peers", "date": str(date.today()), "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__, "threads": how.threads, "commits": {"fedselect": commit(Path(__file__).parent), **versions},
        "batch": BATCH, "epochs": EPOCHS, "lr": LR, "samples": SAMPLES, "turns": how.turns, "rounds": rows,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
