"""Clients with low-rank adapters stacked, against one client after another with a plain loop in the manner of peft.

    python benchmarks/lora.py [--clients 20] [--turns 3] [--models mlp,small_cnn,resnet18,vit_tiny] [--peft]
    python benchmarks/lora.py --frozen [--clients 4]

Random pictures, rank 8 beside every layer and a head that trains, SGD with momentum, batches of 32. The loop has a frozen
module with A and B beside each layer, and for each client it loads that client's values and makes a fresh optimizer; --peft
takes the modules of peft, if it is installed. Both do the same passes over the same data, in turns in one run; the fastest
turn of each counts. Memory is what a GPU held at most, above the data, by client.

--frozen measures instead what it saves to run frozen layers once per sample: processor time of one thread for a round of
training with it and without, in turns, and for running them once.
"""

import argparse
import copy
import datetime
import json
import platform
import subprocess
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedselect as fs
from fedselect.training.step import precision

BATCH, SAMPLES, RANK = 32, 64, 8
SIDES = {"mlp": 32, "small_cnn": 32, "resnet18": 32, "vit_tiny": 64}


class Beside(nn.Module):
    """A frozen layer and its adapter, as peft has it: A of the layer's own kind, B a product."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        if isinstance(base, nn.Conv2d):
            how: dict[str, Any] = {"kernel_size": base.kernel_size, "stride": base.stride, "padding": base.padding}
            self.a: nn.Module = nn.Conv2d(base.in_channels, RANK, bias=False, **how)
            self.b: nn.Module = nn.Conv2d(RANK, base.out_channels, 1, bias=False)
        else:
            assert isinstance(base, nn.Linear)
            self.a, self.b = nn.Linear(base.in_features, RANK, bias=False), nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.b(self.a(x))  # type: ignore[no-any-return]


def reference(model: fs.Model, peft: bool) -> nn.Module:
    """The same network with the same adapters, as plain modules."""
    net = model.build()
    assert model.adapters is not None
    if peft:
        from peft import LoraConfig, get_peft_model

        how = LoraConfig(
            r=RANK, lora_alpha=2 * RANK, target_modules=list(model.adapters.layers), modules_to_save=[str(model.head)]
        )
        return get_peft_model(net, how)  # type: ignore[no-any-return]
    net.requires_grad_(False)
    for path in model.adapters.layers:
        above, _, name = path.rpartition(".")
        setattr(net.get_submodule(above), name, Beside(net.get_submodule(path)))
    net.get_submodule(str(model.head)).requires_grad_(True)
    return net


class Loop:
    """One client after another."""

    def __init__(self, net: nn.Module, data: fs.Federation, device: torch.device, passes: int) -> None:
        self.net, self.passes = net.to(device).train(), passes
        for m in net.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.eval()
        self.moving = [p for p in net.parameters() if p.requires_grad]
        self.values = [[p.detach().clone() for p in self.moving] for _ in data.clients]
        self.data = [tuple(v.to(device) for v in c.train) for c in data.clients]

    def round(self) -> None:
        for values, (x, y) in zip(self.values, self.data, strict=True):
            with torch.no_grad():
                torch._foreach_copy_(self.moving, values)
            optimizer = torch.optim.SGD(self.moving, lr=0.01, momentum=0.9)
            for _ in range(self.passes):
                order = torch.randperm(len(y), device=y.device)
                for at in torch.split(order, BATCH):
                    optimizer.zero_grad(set_to_none=True)
                    F.cross_entropy(self.net(x[at]), y[at]).backward()
                    optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(values, self.moving)


def federation(clients: int, side: int) -> fs.Federation:
    g = torch.Generator().manual_seed(0)

    def part(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, 3, side, side, generator=g), torch.randint(0, 10, (n,), generator=g)

    return fs.Federation([fs.ClientData(part(SAMPLES), part(2)) for _ in range(clients)], 10)


def timed(run: Callable[[], Any], device: torch.device) -> float:
    sync(device)
    began = time.perf_counter()
    run()
    sync(device)
    return time.perf_counter() - began


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def most(run: Callable[[], Any], device: torch.device) -> float | None:
    """Bytes that a GPU holds at most while this runs, above what it held before."""
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


def measured(name: str, clients: int, turns: int, passes: int, peft: bool) -> dict[str, Any]:
    data = federation(clients, SIDES[name])
    model = fs.lora(fs.MODELS[name](data), RANK)
    training = fs.Training(batch_size=BATCH, momentum=0.9)
    free = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    stacked = fs.Simulation(fs.Local(epochs=passes), model, data, training=training)
    device = stacked.device
    for _ in range(3):
        stacked.step(evaluate=False)
    held = torch.cuda.memory_allocated() - free if device.type == "cuda" else 0
    ours = most(lambda: stacked.step(evaluate=False), device)
    loop = Loop(reference(copy.deepcopy(model), peft), data, device, passes)
    with precision(stacked.precision):
        loop.round()
        times = [(timed(lambda: stacked.step(evaluate=False), device), timed(loop.round, device)) for _ in range(turns)]
    fast, slow = (min(t) for t in zip(*times, strict=True))
    return {
        "model": name, "clients": clients, "trained": model.size, "frozen": model.frozen, "stacked": round(fast, 4),
        "loop": round(slow, 4), "ratio": round(slow / fast, 2), "peft": peft,
        "MB a client": None if ours is None else round((held + ours) / clients / 2**20, 1),
    }  # fmt: skip


def frozen(
    name: str, parts: str, make: Callable[[fs.Model], fs.Model], clients: int, turns: int, passes: int
) -> dict[str, Any]:
    """A round of training with the outputs of frozen layers at hand, and one that runs all layers."""
    model = make(fs.MODELS[name](federation(1, SIDES[name])))
    training, method = fs.Training(batch_size=BATCH, momentum=0.9), fs.Local(epochs=passes)

    def made() -> tuple[fs.Simulation, float]:
        data = federation(clients, SIDES[name])
        began = time.process_time()
        return fs.Simulation(method, model, data, training=training, device="cpu"), time.process_time() - began

    with mock.patch("fedselect.simulate.engine.run_ahead", return_value=None):
        (whole, _), (_, plain) = made(), made()  # the first warms up
    kept, both = made()
    assert kept.frozen is not None
    times = []
    for _ in range(turns + 1):  # the first turn warms up
        for run in (kept, whole):
            began = time.process_time()
            run.step(evaluate=False)
            times.append(time.process_time() - began)
    fast, slow = min(times[2::2]), min(times[3::2])
    return {
        "model": name, "trains": parts, "before": kept.frozen.before, "clients": clients, "once": round(both - plain, 4),
        "kept": round(fast, 4), "whole": round(slow, 4), "ratio": round(slow / fast, 1), "MB": round(kept.frozen.size / 1e6, 2),
    }  # fmt: skip


FROZEN: list[tuple[str, str, Callable[[fs.Model], fs.Model]]] = [
    ("resnet18", "head", fs.head_only),
    ("resnet18", 'lora --targets "layer4.*"', lambda model: fs.lora(model, RANK, "layer4.*")),
    ("resnet18", 'lora --targets "layer3.*,layer4.*"', lambda model: fs.lora(model, RANK, "layer3.*,layer4.*")),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--models", default=",".join(n for n in SIDES if n in fs.MODELS))
    parser.add_argument("--peft", action="store_true")
    parser.add_argument("--frozen", action="store_true")
    parser.add_argument("--machine", help="its name in the results, if not a GPU's")
    args = parser.parse_args()
    if args.frozen:
        torch.set_num_threads(1)
    gpu = torch.cuda.is_available() and not args.frozen
    machine = torch.cuda.get_device_name() if gpu else args.machine or platform.machine()
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False).stdout
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    made = {"torch": torch.__version__, "threads": torch.get_num_threads(), "commit": commit.strip(), "date": date}
    print(json.dumps({"machine": machine, **made}))
    for name, parts, make in FROZEN if args.frozen else ():
        print(json.dumps(frozen(name, parts, make, args.clients, args.turns, args.passes)), flush=True)
    for name in () if args.frozen else args.models.split(","):
        print(json.dumps(measured(name, args.clients, args.turns, args.passes, args.peft)), flush=True)


if __name__ == "__main__":
    main()
