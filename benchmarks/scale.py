"""How the cost of a federation grows with its clients: on one GPU, and on a CPU with a million clients on disk.

python benchmarks/scale.py [--clients 10,100,1000] [--chunk 50] [--limit 0.3]
    FedSelect on ResNet18, rows packed on the host and streamed in chunks: time and host memory per client.
python benchmarks/scale.py --device cpu [--clients 10000,100000,1000000] [--rounds 20] [--cohort 100] [--rows disk]
    FedPer on mlp, samples and rows in files, 100 clients per round: each size in a process of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import fedselect as fs
from fedselect.simulate import Simulation

SAMPLES, CLASSES, SIDE = 10, 10, 8
BLOCK = 10_000  # clients whose samples are made at once


def on_gpu(clients: int, how: argparse.Namespace) -> dict:
    from gpu import images

    data = images(clients, 100, 50)
    method = fs.FedSelect(lr=0.01, personal_lr=0.01, epochs=1, rate=how.limit, limit=how.limit)  # all it may keep, at once
    sim = Simulation(
        method, fs.models.resnet18(data), data, device=how.device, chunk=min(how.chunk, clients), rows="personal", eval_every=2
    )
    for _ in range(2):  # masks are empty in the first round; by the second everything has been recorded
        sim.step()
    began = time.perf_counter()
    for _ in range(how.rounds or 2):
        sim.step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / (how.rounds or 2)
    held = sim.store.nbytes / clients
    bound = (1.1 * how.limit + 0.05) * 4 * sim.model.size
    return {
        "ms_per_client": round(1e3 * seconds / clients, 3),
        "host_mib_per_client": round(held / 2**20, 3),
        "bound_mib_per_client": round(bound / 2**20, 3),
    }


def make(folder: Path, clients: int) -> None:
    """Write samples to files, client after client: ten classes, of which a client has two, as noisy pictures."""
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (CLASSES, 1, SIDE, SIDE))
    count = clients * SAMPLES
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.uint8, (count, 1, SIDE, SIDE))
    y = np.lib.format.open_memmap(folder / "y.npy", "w+", np.int64, (count,))
    for first in range(0, clients, BLOCK):
        some = min(BLOCK, clients - first)
        own = rng.integers(0, CLASSES, (some, 2))
        label = np.take_along_axis(own, rng.integers(0, 2, (some, SAMPLES)), 1).reshape(-1)
        at = slice(first * SAMPLES, first * SAMPLES + len(label))
        x[at] = np.clip(pictures[label] + rng.normal(0, 96, (len(label), 1, SIDE, SIDE)), 0, 255).astype(np.uint8)
        y[at] = label
    np.save(folder / "client.npy", np.repeat(np.arange(clients), SAMPLES))


def memory() -> dict[str, float]:
    """MiB of this process: its own, and pages of files, which the system takes back when it needs memory."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: round(int(lines[name].split()[0]) / 1024, 1) for name in ("RssAnon", "RssFile", "VmHWM")}


def on_cpu(clients: int, folder: Path, how: argparse.Namespace) -> dict:
    """The rounds of one size, and what they take."""
    before = memory()
    began, cpu = time.perf_counter(), time.process_time()
    x, y, client = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("x", "y", "client"))
    data = fs.Federation.from_arrays(x, y, client, test_share=0.3, seed=0)
    del x, y, client
    method = fs.FedPer(lr=0.1, epochs=5, finetune=5, view="merged")  # most clients evaluated have never trained their heads
    share = how.cohort / clients
    sim = Simulation(
        method,
        fs.models.mlp(data),
        data,
        fraction=share,
        eval_fraction=share,
        rows=how.rows,
        chunk=min(how.cohort, 1000),
        device="cpu",
    )
    setup, setup_cpu, ready = time.perf_counter() - began, time.process_time() - cpu, memory()
    seconds, used, history = [], [], []
    for _ in range(how.rounds or 20):
        began, cpu = time.perf_counter(), time.process_time()
        history.append(sim.step())
        seconds.append(time.perf_counter() - began)
        used.append(time.process_time() - cpu)
    steady = min(3, len(seconds) - 1)  # the first rounds record the steps
    after, lines = memory(), max(len(json.dumps(r)) for r in history)
    began = time.perf_counter()
    sim.save(folder / "checkpoint")
    saved = time.perf_counter() - began
    began = time.perf_counter()
    sim.resume(folder / "checkpoint")
    resumed = time.perf_counter() - began
    return {
        "setup_seconds": round(setup, 2),
        "setup_cpu_seconds": round(setup_cpu, 2),
        "round_ms": round(1e3 * float(np.median(seconds[steady:])), 1),
        "round_cpu_ms": round(1e3 * float(np.median(used[steady:])), 1),
        "memory_before_mib": before["RssAnon"],
        "memory_ready_mib": ready["RssAnon"],
        "memory_after_mib": after["RssAnon"],
        "file_pages_mib": after["RssFile"],
        "peak_mib": after["VmHWM"],
        "joined": int(sim.store.joined.sum()),
        "rows_mib": round(sim.store.nbytes / 2**20, 2),
        "data_mib": round(sum(os.path.getsize(folder / f"{n}.npy") for n in ("x", "y")) / 2**20, 1),
        "record_kib": round(lines / 1024, 1),
        "checkpoint_seconds": round(saved, 2),
        "resume_seconds": round(resumed, 2),
        "checkpoint_mib": round(sum(p.stat().st_size for p in (folder / "checkpoint").rglob("*") if p.is_file()) / 2**20, 2),
        "accuracy_first": history[0]["accuracy"],
        "accuracy_last": history[-1]["accuracy"],
    }


def apart(clients: int, how: argparse.Namespace) -> dict:
    """One size in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), clients)
        asked = [f"--rounds={how.rounds or 20}", f"--cohort={how.cohort}", f"--rows={how.rows}", f"--in={folder}"]
        made = subprocess.run(
            [sys.executable, __file__, "--device=cpu", f"--clients={clients}", *asked], check=True, stdout=subprocess.PIPE
        )
        return json.loads(made.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients")
    parser.add_argument("--chunk", type=int, default=50)
    parser.add_argument("--limit", type=float, default=0.3)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--rows", default="disk", choices=["disk", "personal"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--in", dest="folder", type=Path, help=argparse.SUPPRESS)
    how = parser.parse_args()
    if how.folder:
        print(json.dumps(on_cpu(int(how.clients), how.folder, how)))
        return
    gpu = how.device != "cpu"
    if gpu and not torch.cuda.is_available():
        parser.error("this needs a GPU; add --device cpu for the part that runs on a CPU")
    figures = {}
    for clients in (how.clients or ("10,100,1000" if gpu else "10000,100000,1000000")).split(","):
        figures[clients] = (on_gpu if gpu else apart)(int(clients), how)
        print(f"{clients:>7} clients  {figures[clients]}", flush=True)
    own = {"rows": how.rows, "cohort": how.cohort, "torch": torch.__version__}
    if gpu:
        times = [f["ms_per_client"] for f in figures.values()]
        own = {
            "device": torch.cuda.get_device_name(),
            "chunk": how.chunk,
            "slowest_over_first": round(max(times) / times[0], 3),
        }
    print(json.dumps({"benchmark": "scale", **own, **figures}))


if __name__ == "__main__":
    main()
