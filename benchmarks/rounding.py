"""Whether a CPU rounds for a client as it does in other company, and what other rounding does to accuracy.

    python benchmarks/rounding.py bits --threads 8    # random convolutions and products, of all clients and of some
    python benchmarks/rounding.py accuracy digits
    python benchmarks/rounding.py accuracy samples.npz --rounds 15 --seeds 5 --methods FedSelect

`bits` draws sizes that meet every way of `training/convolution.py`; ONEDNN_MAX_CPU_ISA=AVX2 (or SSE41) and
MKL_ENABLE_INSTRUCTIONS=AVX2 stand for older machines. `accuracy` trains small_cnn with default settings on 70% of each client's
samples; run it with two versions, or in two precisions, to compare them. A file has `x` (uint8 or float pictures, channels
first) and `y`; without `client`, each class is divided among clients by a Dirichlet distribution.
"""

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits

import fedselect as fs
from fedselect.training import convolution
from fedselect.training.convolution import Conv, How
from fedselect.training.products import bmm

CONCENTRATION = 0.3
LARGEST = 1e8
"""Products of all clients together in a random case."""


def differ(clients: int, compute: Callable[[slice], tuple[torch.Tensor, ...]]) -> list[int]:
    """Which of the results have other bits for some of the clients."""
    some = random.randint(1, clients - 1)
    at = random.randint(0, clients - some)
    rows = slice(at, at + some)
    pairs = zip(compute(rows), compute(slice(None)), strict=True)
    return [i for i, (few, all_) in enumerate(pairs) if not few.equal(all_[rows])]


def product() -> tuple[str, list[int]] | None:
    rows, summed, columns = (random.choice([random.randint(1, 40), random.randint(40, 420)]) for _ in range(3))
    clients, turned = random.choice([2, 3, 5, 9, 17, 40]), random.random() < 0.5
    if clients * rows * summed * columns > LARGEST:
        return None
    a, b = torch.randn(clients, rows, summed), torch.randn(clients, summed, columns)
    if turned:
        a = a.transpose(1, 2).contiguous().transpose(1, 2)
    return "product", differ(clients, lambda some: (bmm(a[some], b[some]),))


def convolved() -> tuple[str, list[int]] | None:
    eights = random.random() < 0.7  # what may become groups of one convolution
    channels = [8, 16, 24, 32, 40, 64, 128] if eights else [1, 3, 8, 12, 16, 24, 32, 64, 128]
    inside, outside, batch = random.choice(channels), random.choice(channels), random.choice([1, 2, 5, 10, 16, 32, 64])
    side, kernel = random.choice([4, 5, 7, 8, 14, 16, 28, 32]), random.choice([3, 3, 5, 7] if eights else [1, 2, 3, 5, 7])
    stride, padding = (1, kernel // 2) if eights else (random.choice([1, 2]), random.choice([0, kernel // 2]))
    how = How((stride, stride), (padding, padding), (1, 1))
    clients = random.choice([2, 3, 5, 9, 17])
    if side < kernel or clients * batch * inside * outside * (side * kernel) ** 2 > LARGEST:
        return None
    x = torch.randn(clients, batch, inside, side, side)
    w, b = torch.randn(clients, outside, inside, kernel, kernel), torch.randn(clients, outside)
    upstream = torch.randn(clients, batch, outside, *how.sides((side, side), (kernel, kernel)))

    def compute(some: slice) -> tuple[torch.Tensor, ...]:
        given = [v[some].clone().requires_grad_() for v in (x, w, b)]
        y = Conv.apply(*given, *how)
        return (y, *torch.autograd.grad(y, given, upstream[some]))

    return convolution._way(x, w, how), differ(clients, compute)


def bits(how: argparse.Namespace) -> dict[str, object]:
    random.seed(how.seed)
    torch.manual_seed(how.seed)
    torch.set_num_threads(how.threads)
    cases: Counter[str] = Counter()
    other: Counter[str] = Counter()
    until = time.monotonic() + how.seconds
    while time.monotonic() < until:
        if (found := random.choice([product, convolved])()) is not None:
            cases[found[0]] += 1
            other[found[0]] += bool(found[1])
    return {"threads": torch.get_num_threads(), "cases": dict(cases), "other bits": dict(other)}


def federation(samples: str, clients: int) -> fs.Federation:
    if samples == "digits":
        digits = load_digits()
        x, y, client = digits.images[:, None].astype(np.float32) / 16, digits.target, None
    else:
        read = np.load(samples)
        x, y, client = read["x"].astype(np.float32), read["y"].astype(int), read.get("client")
        x = x / 255 if x.max() > 1 else x
    if client is None:
        draw, client = np.random.default_rng(0), np.zeros(len(y), int)
        for c in np.unique(y):
            of_class = draw.permutation(np.flatnonzero(y == c))
            cuts = (np.cumsum(draw.dirichlet([CONCENTRATION] * clients))[:-1] * len(of_class)).astype(int)
            for k, part in enumerate(np.split(of_class, cuts)):
                client[part] = k
    return fs.Federation.from_arrays(x, y, client, test_share=0.3)


def accuracy(how: argparse.Namespace) -> dict[str, object]:
    data = federation(how.samples, how.clients)
    found = {}
    for method in how.methods:
        began, each = time.process_time(), []
        for seed in range(how.seeds):
            result = fs.run(
                getattr(fs, method)(),
                model="small_cnn",
                data=data,
                rounds=how.rounds,
                seed=seed,
                eval_every=how.rounds,
                device="cpu",
                precision=how.precision,
            )
            each.append(round(100 * result.accuracy, 2))
        found[method] = {
            "accuracy": each,
            "mean": round(float(np.mean(each)), 2),
            "cpu_s": round(time.process_time() - began, 1),
        }
        print(method, found[method], flush=True)
    return {"samples": Path(how.samples).name, "rounds": how.rounds, "precision": how.precision, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    of_bits = what.add_parser("bits")
    of_bits.add_argument("--threads", type=int, default=2)
    of_bits.add_argument("--seconds", type=float, default=60)
    of_bits.add_argument("--seed", type=int, default=0)
    of_accuracy = what.add_parser("accuracy")
    of_accuracy.add_argument("samples", help="digits, or a .npz file with x, y and maybe client")
    of_accuracy.add_argument("--clients", type=int, default=10)
    of_accuracy.add_argument("--rounds", type=int, default=20)
    of_accuracy.add_argument("--seeds", type=int, default=10)
    of_accuracy.add_argument("--precision", default="float32", choices=["float32", "bf16"])
    of_accuracy.add_argument("--methods", nargs="+", default=["FedAvg", "FedSelect"])
    how = parser.parse_args()
    print(json.dumps({"benchmark": "rounding", **(bits(how) if how.what == "bits" else accuracy(how))}))


if __name__ == "__main__":
    main()
