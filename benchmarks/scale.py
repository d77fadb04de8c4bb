"""Time and host memory per client as a federation grows, on one GPU: rows rest packed on the host and stream in chunks.

python benchmarks/scale.py [--clients 10,100,1000] [--chunk 50] [--limit 0.3]
"""

import argparse
import json
import time

import torch
from gpu import images

import fedselect as fs
from fedselect.simulate import Simulation


def measure(clients: int, how: argparse.Namespace) -> dict:
    data = images(clients, 100, 50)
    method = fs.FedSelect(lr=0.01, personal_lr=0.01, epochs=1, rate=how.limit, limit=how.limit)  # all it may keep, at once
    sim = Simulation(
        method, fs.models.resnet18(data), data, device=how.device, chunk=min(how.chunk, clients), rows="personal", eval_every=2
    )
    for _ in range(2):  # masks are empty in the first round; by the second everything has been recorded
        sim.step()
    began = time.perf_counter()
    for _ in range(how.rounds):
        sim.step()
    if sim.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / how.rounds
    held = sim.store.nbytes / clients
    bound = (1.1 * how.limit + 0.05) * 4 * sim.model.size
    figures = {
        "ms_per_client": round(1e3 * seconds / clients, 3),
        "host_mib_per_client": round(held / 2**20, 3),
        "bound_mib_per_client": round(bound / 2**20, 3),
    }
    print(f"{clients:>5} clients  {figures}", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="10,100,1000")
    parser.add_argument("--chunk", type=int, default=50)
    parser.add_argument("--limit", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    how = parser.parse_args()
    if how.device == "cuda" and not torch.cuda.is_available():
        parser.error("this needs a GPU; benchmarks/engine.py measures a CPU")
    figures = {c: measure(int(c), how) for c in how.clients.split(",")}
    times = [f["ms_per_client"] for f in figures.values()]
    name = torch.cuda.get_device_name() if how.device == "cuda" else "cpu"
    flat = round(max(times) / times[0], 3)
    print(json.dumps({"benchmark": "scale", "device": name, "chunk": how.chunk, "slowest_over_first": flat,
                      **figures}))  # fmt: skip


if __name__ == "__main__":
    main()
