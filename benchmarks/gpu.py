"""One FedSelect step and whole FedSelect runs on one GPU, against the one-client-at-a-time eager loop, in one run.

Both do the same: batches of 32 of each client's own images, crop-flip, ResNet18, momentum SGD on the entries a mask
marks. The loop is what every framework does: a module and an optimizer per client, one after the other.

    python benchmarks/gpu.py [--precision tf32] [--rounds 200] [--skip-runs] [--profile]
    python benchmarks/gpu.py --side 84 --clients 20 --skip-runs    # steps with larger images
"""

import argparse
import gc
import json
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import fedselect as fs
from fedselect.core.tree import expand, negate
from fedselect.simulate import Simulation
from fedselect.simulate.stack import Stack
from fedselect.training.work import Pass

BATCH, IMAGES, TEST = 32, 96, 100


def images(clients: int, train: int, test: int, side: int = 32) -> fs.Federation:
    g = torch.Generator().manual_seed(0)

    def part(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randint(0, 256, (n, 3, side, side), generator=g, dtype=torch.uint8)
        return x, torch.randint(0, 10, (n,), generator=g)

    return fs.Federation([fs.ClientData(part(train), part(test)) for _ in range(clients)], 10, augment="crop-flip")


def simulation(clients: int, precision: str, train: int = IMAGES, limit: float = 0.3, side: int = 32, **how) -> Simulation:
    data = images(clients, train, TEST, side)
    method = fs.FedSelect(lr=0.01, personal_lr=0.01, epochs=3, limit=limit)
    return Simulation(method, fs.models.resnet18(data), data, device="cuda", precision=precision, **how)


def masks(sim: Simulation, clients: int) -> dict[str, torch.Tensor]:
    g = torch.Generator(device="cuda").manual_seed(0)
    return {n: torch.rand(clients, *sim.initial[n].shape, generator=g, device="cuda") < 0.3 for n in sim.model.params}


def engine(sim: Simulation, clients: int, passes: int) -> tuple[Callable[[], None], int]:
    mask = masks(sim, clients)
    both = [mask, negate(mask)]
    ids = torch.arange(clients)
    walks = [Pass(both[e % 2], 0.01, e // 2) for e in range(passes)]
    return lambda: sim._work(ids, 0).train(expand(sim.initial, clients), walks), passes * IMAGES // BATCH


def loop(sim: Simulation, clients: int, passes: int) -> tuple[Callable[[], None], int]:
    mask = masks(sim, clients)
    both = [mask, negate(mask)]
    modules = [sim.model.build().cuda().train() for _ in range(clients)]
    train = sim._split["train"]
    zero = torch.zeros(1, dtype=torch.int64, device="cuda")

    def run() -> None:
        for c, module in enumerate(modules):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.5)
            own = train.rows(slice(c, c + 1))
            for e in range(passes):
                order = torch.randperm(IMAGES, device="cuda")
                marks = [both[e % 2][n][c] for n, _ in module.named_parameters()]
                for s in range(0, IMAGES, BATCH):
                    x, y = own.batch(order[s : s + BATCH].unsqueeze(0), zero)
                    optimizer.zero_grad()
                    with torch.autocast("cuda", torch.bfloat16, enabled=sim.precision == "bf16"):
                        loss = F.cross_entropy(module(x[0]), y[0])
                    loss.backward()
                    for p, m in zip(module.parameters(), marks, strict=True):
                        p.grad.mul_(m)
                    optimizer.step()

    return run, passes * IMAGES // BATCH


def timed(run: Callable[[], None], repeat: int) -> float:
    best = float("inf")
    for _ in range(repeat + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def ceilings() -> tuple[float, float]:
    """Measured here: bytes a second of a large copy (read and written), operations a second of a large TF32 product."""
    a = torch.randn(2**28, device="cuda")
    b = torch.empty_like(a)
    copy = timed(lambda: [b.copy_(a) for _ in range(10)], 3) / 10
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    m = torch.randn(8192, 8192, device="cuda")
    product = timed(lambda: [m @ m for _ in range(10)], 3) / 10
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    return 2 * a.nbytes / copy, 2 * 8192**3 / product


def operations(sim: Simulation) -> float:
    """Multiplications and additions of one client's step as the layers are written: forward, and twice that back."""
    total = 0

    def count(m: torch.nn.Module, i: tuple[torch.Tensor], o: torch.Tensor) -> None:
        nonlocal total
        total += 6 * o.numel() * m.weight[0].numel()

    module = sim.model.build()
    for m in module.modules():
        if isinstance(m, torch.nn.Conv2d | torch.nn.Linear):
            m.register_forward_hook(count)
    module(torch.zeros(BATCH, *sim.data.shape))
    return float(total)


def shares(sim: Simulation, clients: int, seconds: float, rates: tuple[float, float]) -> dict[str, float]:
    """Of what memory and matrix units could do, what a step that takes so long asks of them."""
    moved = 7 * 4 * sim.model.size * clients  # values, gradients, momentum and masks once through memory
    return {
        "bandwidth_share": moved / seconds / rates[0],
        "matrix_share": operations(sim) * clients / seconds / rates[1],
    }


def step_row(name: str, clients: int, precision: str, rates: tuple[float, float], how) -> dict:
    sim = simulation(clients, precision, side=how.side)
    run, steps = engine(sim, clients, 8)
    slow, few = loop(sim, clients, 2)
    torch.cuda.reset_peak_memory_stats()
    ours = timed(run, how.repeat) / steps
    peak = torch.cuda.max_memory_allocated()
    theirs = timed(slow, 1) / few
    figures = {"loop_ms": 1e3 * theirs, "engine_ms": 1e3 * ours, "ratio": theirs / ours, **shares(sim, clients, ours, rates)}
    figures = {k: round(v, 4) for k, v in figures.items()} | {"peak_gib": round(peak / 2**30, 2)}
    print(name, figures, flush=True)
    if how.profile:
        run()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
            run()
            torch.cuda.synchronize()
        print(p.key_averages().table(sort_by="cuda_time_total", row_limit=how.profile, max_name_column_width=60))
    return figures


def run_row(name: str, settings: int, precision: str, rounds: int, rates: tuple[float, float]) -> dict:
    """Whole runs from nothing: building them, recording, rounds that are all evaluated.

    Two rounds of the same go before, so that a machine that has never run these kernels has compiled them.
    """

    def build() -> Stack:
        return Stack([simulation(10, precision, train=100, limit=0.3 + 0.05 * i, seed=i) for i in range(settings)])

    stack = build()
    for _ in range(2):
        stack.step()
    del stack
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    stack = build()
    made = time.perf_counter() - began
    for _ in range(rounds):
        stack.step()
    torch.cuda.synchronize()
    total = time.perf_counter() - began
    began = time.perf_counter()
    for _ in range(5):
        stack.step()
    torch.cuda.synchronize()
    five = time.perf_counter() - began
    steps = rounds * 2 * 3 * 4  # personal and shared passes, epochs, batches; evaluation is not counted
    asked = shares(stack.runs[0], 10 * settings, total / steps, rates)
    figures = {"rounds": rounds, "seconds": round(total, 2), "seconds_per_setting": round(total / settings, 2),
               "setup_seconds": round(made, 2), "round_ms": round(200 * five, 1),
               **{k: round(v, 4) for k, v in asked.items()},
               "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)}  # fmt: skip
    print(name, figures, flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="tf32")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--clients", default="10,80")
    parser.add_argument("--side", type=int, default=32, help="of the images, for single steps; whole runs have 32x32")
    parser.add_argument("--skip-runs", action="store_true")
    parser.add_argument("--profile", type=int, default=10, help="kernels to list; 0 for none")
    how = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a GPU; benchmarks/engine.py measures a CPU")
    rates = ceilings()
    print(f"copy {rates[0] / 1e12:.2f} TB/s, TF32 product {rates[1] / 1e12:.0f} TFLOP/s", flush=True)
    figures = {
        f"step_{c}": step_row(f"one step, {c} ResNet18 clients", int(c), how.precision, rates, how)
        for c in how.clients.split(",")
    }
    if not how.skip_runs:
        figures["run_1"] = run_row("a whole run", 1, how.precision, how.rounds, rates)
        figures["run_8"] = run_row("eight settings stacked", 8, how.precision, how.rounds, rates)
    print(json.dumps({"benchmark": "gpu", "device": torch.cuda.get_device_name(), "precision": how.precision,
                      "copy_bytes_per_s": rates[0], "tf32_flop_per_s": rates[1], **figures}))  # fmt: skip


if __name__ == "__main__":
    main()
