"""How much faster ten clients train stacked than one after another, in one run on this machine.

The one-at-a-time loop is what every framework does: a module and torch.optim.SGD per client. Both walk the same number
of batches of the same data. The two take turns, and the best of each counts, for machines are noisy.

    python benchmarks/engine.py [--device cuda] [--repeat 5]
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


def images(shape: tuple[int, ...], samples: int) -> fs.Federation:
    g = torch.Generator().manual_seed(0)
    parts = [(torch.randn(samples, *shape, generator=g), torch.randint(0, 10, (samples,), generator=g)) for _ in range(CLIENTS)]
    return fs.Federation([fs.ClientData(p, p) for p in parts], 10)


def one_after_another(sim: Simulation, epochs: int) -> Callable[[], None]:
    """The usual loop, with modules and optimizers made beforehand."""
    train, size = sim._split["train"], sim.training.batch_size
    modules = [sim.model.build().to(sim.device) for _ in range(CLIENTS)]
    makers = [lambda m=m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=sim.training.momentum) for m in modules]

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


def all_at_once(sim: Simulation, epochs: int) -> Callable[[], None]:
    ids = torch.arange(CLIENTS)
    everything = dict.fromkeys(sim.model.params, True)

    def run() -> None:
        work = sim._work(ids, 0)
        work.train(expand(sim.initial, CLIENTS), [Pass(everything, 0.01, e) for e in range(epochs)])

    return run


def measure(name: str, model: Callable[[fs.Federation], fs.Model], data: fs.Federation, batch: int, epochs: int, how) -> dict:
    sim = Simulation(fs.FedAvg(), model(data), data, training=fs.Training(batch_size=batch), device=how.device)
    loop, stacked = one_after_another(sim, epochs), all_at_once(sim, epochs)
    if not one_by_one(sim.fitted, sim.device):  # as in any run of some length, the step has been recorded
        per_run = epochs * -(-int(sim._split["train"].n[0]) // batch)
        for _ in range(RECORD_AFTER[sim.device.type] // per_run + 1):
            stacked()
    best = {loop: float("inf"), stacked: float("inf")}
    for _ in range(how.repeat + 1):
        for run in best:
            if sim.device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            run()
            if sim.device.type == "cuda":
                torch.cuda.synchronize()
            best[run] = min(best[run], time.perf_counter() - began)
    steps = epochs * -(-int(sim._split["train"].n[0]) // batch)
    figures = {
        "loop_ms_per_step": round(1e3 * best[loop] / steps, 3),
        "engine_ms_per_step": round(1e3 * best[stacked] / steps, 3),
        "ratio": round(best[loop] / best[stacked], 2),
        "way": "one by one" if one_by_one(sim.fitted, sim.device) else "stacked",
    }
    print(f"{name:<34} loop {figures['loop_ms_per_step']:>9} ms   engine {figures['engine_ms_per_step']:>9} ms   "
          f"{figures['ratio']}x  ({figures['way']})", flush=True)  # fmt: skip
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeat", type=int, default=5)
    how = parser.parse_args()
    print(f"{CLIENTS} clients, one step of all of them, {torch.get_num_threads()} CPU threads")
    digits = fs.load("digits", clients=CLIENTS, classes_per_client=4, train=48, test=40)
    figures = {
        "digits_mlp": measure("digits, mlp, batch 16", fs.models.mlp, digits, 16, 3, how),
        "digits_small_cnn": measure("digits, small_cnn, batch 16", fs.models.small_cnn, digits, 16, 3, how),
        "digits_small_cnn_bn": measure(
            "digits, small_cnn, BatchNorm, 16", lambda d: fs.models.small_cnn(d, norm="batch"), digits, 16, 3, how
        ),
        "resnet18_32": measure("32x32 images, resnet18, batch 32", fs.models.resnet18, images((3, 32, 32), 96), 32, 3, how),
    }
    device = torch.cuda.get_device_name() if torch.cuda.is_available() and how.device != "cpu" else "cpu"
    print(json.dumps({"benchmark": "engine", "device": device, "threads": torch.get_num_threads(), **figures}))


if __name__ == "__main__":
    main()
