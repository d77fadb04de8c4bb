"""How much faster clients train here than in a loop over them, in one run on this machine.

The one-at-a-time loop is what every framework does: a module and torch.optim.SGD per client. Both walk the same number
of batches of the same data. The two take turns, and the best of each counts, for machines are noisy.

    python benchmarks/engine.py [--device cuda] [--precision bf16] [--repeat 5] [--cases small_cnn_224]

The loop computes in torch's default precision.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import fedselect as fs
from fedselect.core.tree import expand
from fedselect.simulate import Simulation
from fedselect.training.recorded import RECORD_AFTER
from fedselect.training.step import one_by_one
from fedselect.training.work import Pass

CLIENTS = 10
Frozen = Callable[[str], bool]
"""Which parameters, by name, a pass leaves alone."""


def images(shape: tuple[int, ...], samples: int, clients: int = CLIENTS) -> fs.Federation:
    g = torch.Generator().manual_seed(0)
    parts = [(torch.randn(samples, *shape, generator=g), torch.randint(0, 10, (samples,), generator=g)) for _ in range(clients)]
    return fs.Federation([fs.ClientData(p, p) for p in parts], 10)


def one_after_another(sim: Simulation, epochs: int, frozen: Frozen = lambda name: False) -> Callable[[], None]:
    """The usual loop, with modules and optimizers made beforehand."""
    train, size = sim._split["train"], sim.training.batch_size
    modules = [sim.model.build().to(sim.device) for _ in range(sim.clients)]
    for module in modules:
        for name, p in module.named_parameters():
            p.requires_grad_(not frozen(name))
    makers = [
        lambda m=m: torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.01, momentum=sim.training.momentum)
        for m in modules
    ]

    def run() -> None:
        for i, (module, make) in enumerate(zip(modules, makers, strict=True)):
            optimizer, module = make(), module.train()
            at, n = int(train.start[i]), int(train.n[i])
            x, y = train.x[at : at + n], train.y[at : at + n]
            for _ in range(epochs):
                order = torch.randperm(n, device=sim.device)
                for s in range(0, n, size):
                    batch = order[s : s + size]
                    optimizer.zero_grad()
                    F.cross_entropy(module(x[batch]), y[batch]).backward()
                    optimizer.step()

    return run


def all_at_once(sim: Simulation, epochs: int, frozen: Frozen = lambda name: False) -> Callable[[], None]:
    ids = torch.arange(sim.clients)
    only = {n: not frozen(n) for n in sim.model.params}

    def run() -> None:
        for some in sim._chunks(ids):
            sim._work(some, 0).train(expand(sim.initial, len(some)), [Pass(only, 0.01, e) for e in range(epochs)])

    return run


def measure(
    name: str, model: Callable[[fs.Federation], fs.Model], data: fs.Federation, batch: int, epochs: int, how, *,
    early: bool = False, frozen: Frozen = lambda name: False,
) -> dict:  # fmt: skip
    """`early`: as in the first rounds of a run, before a step is recorded."""
    training = fs.Training(batch_size=batch)
    sim = Simulation(fs.FedAvg(), model(data), data, training=training, device=how.device, precision=how.precision)
    loop, stacked = one_after_another(sim, epochs, frozen), all_at_once(sim, epochs, frozen)
    per_run = epochs * -(-int(sim._split["train"].n[0]) // batch)
    if early:
        sim._programs._recording = lambda *_: None
    else:  # as in any run of some length, the step has been recorded
        for _ in range(RECORD_AFTER[sim.device.type] // per_run + 1):
            stacked()
    best = {loop: float("inf"), stacked: float("inf")}
    busy = dict(best)
    for _ in range(how.repeat + 1):
        for run in best:
            if sim.device.type == "cuda":
                torch.cuda.synchronize()
            began, worked = time.perf_counter(), time.process_time()
            run()
            if sim.device.type == "cuda":
                torch.cuda.synchronize()
            best[run] = min(best[run], time.perf_counter() - began)
            busy[run] = min(busy[run], time.process_time() - worked)
    figures = {
        "way": "one by one" if one_by_one(sim.fitted, sim.device) else "stacked",
        "loop_ms_per_step": round(1e3 * best[loop] / per_run, 2),
        "engine_ms_per_step": round(1e3 * best[stacked] / per_run, 2),
        "ratio": round(best[loop] / best[stacked], 2),
        "ratio_of_cpu_time": round(busy[loop] / busy[stacked], 2),
    }
    print(f"{name:<38} loop {figures['loop_ms_per_step']:>9} ms   engine {figures['engine_ms_per_step']:>9} ms   "
          f"{figures['ratio']}x, of CPU time {figures['ratio_of_cpu_time']}x  ({figures['way']})", flush=True)  # fmt: skip
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto", help="of the engine")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--cases", nargs="*", help="only these, by their name in the JSON")
    how = parser.parse_args()
    print(f"{CLIENTS} clients where nothing else is said, one step of all of them, {torch.get_num_threads()} CPU threads")
    digits, three, one = (fs.load("digits", clients=c, classes_per_client=4, train=48, test=40) for c in (CLIENTS, 3, 1))
    hundred = images((1, 8, 8), 48, 100)
    small, large, few = images((3, 32, 32), 96), images((3, 224, 224), 16, 4), images((3, 32, 32), 64, 2)
    cnn, resnet = fs.models.small_cnn, fs.models.resnet18
    cases: dict[str, Callable[[], dict]] = {
        "digits_mlp": lambda: measure("digits, mlp, batch 16", fs.models.mlp, digits, 16, 3, how),
        "digits_small_cnn": lambda: measure("digits, small_cnn, batch 16", cnn, digits, 16, 3, how),
        "digits_small_cnn_bn": lambda: measure(
            "digits, small_cnn, BatchNorm, 16", lambda d: cnn(d, norm="batch"), digits, 16, 3, how
        ),
        "digits_mlp_100": lambda: measure("100 clients, mlp", fs.models.mlp, hundred, 16, 3, how),
        "digits_small_cnn_100": lambda: measure("100 clients, small_cnn", cnn, hundred, 16, 3, how),
        "digits_mlp_1": lambda: measure("1 client, mlp", fs.models.mlp, one, 16, 3, how),
        "digits_small_cnn_1": lambda: measure("1 client, small_cnn", cnn, one, 16, 3, how),
        "digits_mlp_3_early": lambda: measure("3 clients, mlp, first rounds", fs.models.mlp, three, 16, 3, how, early=True),
        "digits_small_cnn_3_early": lambda: measure("3 clients, small_cnn, first rounds", cnn, three, 16, 3, how, early=True),
        "digits_small_cnn_early": lambda: measure("10 clients, small_cnn, first rounds", cnn, digits, 16, 3, how, early=True),
        "small_cnn_32": lambda: measure("10 clients, 32x32, small_cnn, 16", cnn, images((3, 32, 32), 48), 16, 1, how),
        "small_cnn_64": lambda: measure("4 clients, 64x64, small_cnn, 16", cnn, images((3, 64, 64), 48, 4), 16, 1, how),
        "small_cnn_224": lambda: measure("4 clients, 224x224, small_cnn, 16", cnn, large, 16, 1, how),
        "resnet18_32": lambda: measure("32x32 images, resnet18, batch 32", resnet, small, 32, 3, how),
        "resnet18_224": lambda: measure("4 clients, 224x224, resnet18, 16", resnet, large, 16, 1, how),
        "vit_tiny_32": lambda: measure(
            "2 clients, 32x32, vit_tiny, patch 4, 16", lambda d: fs.models.vit_tiny(d, patch=4), few, 16, 1, how
        ),
        "vit_tiny_224": lambda: measure("4 clients, 224x224, vit_tiny, 16", fs.models.vit_tiny, large, 16, 1, how),
        "resnet18_frozen_head": lambda: measure(
            "2 clients, resnet18, head frozen", resnet, few, 32, 1, how, frozen=lambda n: n.startswith("fc.")
        ),
        "resnet18_frozen_body": lambda: measure(
            "2 clients, resnet18, body frozen", resnet, few, 32, 1, how, frozen=lambda n: not n.startswith("fc.")
        ),
    }
    figures = {n: run() for n, run in cases.items() if how.cases is None or n in how.cases}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() and how.device != "cpu" else "cpu"
    print(
        json.dumps(
            {"benchmark": "engine", "device": device, "threads": torch.get_num_threads(), "precision": how.precision, **figures}
        )
    )


if __name__ == "__main__":
    main()
