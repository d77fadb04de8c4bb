"""Which blocks are fastest: BatchNorm's kernels over the layers of a ResNet18, on one GPU.

Beside the choice of fedselect/kernels/norm.py the best of the blocks listed here, forward and backward; a step has each layer
as often as said. The share is of the bytes that must be moved, at the copy bandwidth measured in the same run.

    python benchmarks/norm.py [--side 84] [--clients 20] [--precision bf16] [--batch 32]
"""

import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch
from conv import asked, layers, timed

from fedselect.kernels import norm

CHOICES = [  # rows at a time, programs, warps
    None, (64, 1056, 4), (128, 1056, 4), (128, 1056, 8), (64, 2112, 4), (128, 528, 8), (32, 2112, 4),
]  # fmt: skip
USUAL = norm._blocks


def choose(choice: tuple[int, int, int] | None) -> None:
    """Have the kernels cut their work so; None: as they do by themselves."""
    norm._blocks = (
        USUAL if choice is None else partial(USUAL, **dict(zip(("at_once", "programs", "warps"), choice, strict=True)))
    )


def shapes(side: int, batch: int) -> Counter[tuple[int, int]]:
    """Rows and channels of what is normalised, as often as they come."""
    found: Counter[tuple[int, int]] = Counter()
    for layer, times in layers(side).items():
        high, wide = (
            (s + 2 * p - k) // t + 1 for s, p, k, t in zip(layer.size, layer.padding, layer.kernel, layer.stride, strict=True)
        )
        found[batch * high * wide, layer.out] += times
    return found


def work(clients: int, rows: int, channels: int, kind: torch.dtype) -> dict[str, tuple[Callable[[], Any], int]]:
    """Calls of the kernels on random numbers, and how often they must read or write all of x."""
    x, g = (torch.randn(clients, rows, channels, device="cuda").to(kind) for _ in "xg")
    weight, bias, mean, var = (torch.rand(clients, channels, device="cuda") for _ in "wbmv")
    _, saved = norm.forward(x, weight, bias, mean, var, 0.1, 1e-5, True)
    return {
        "forward": (lambda: norm.forward(x, weight, bias, mean, var, 0.1, 1e-5, True), 3),
        "backward": (lambda: norm.backward(x, g, saved, weight, bias, True), 5),
    }


def compiled(task: tuple[tuple[int, int], Any, int, torch.dtype]) -> None:
    """So that it is in Triton's cache."""
    shape, choice, clients, kind = task
    choose(choice)
    for call, _ in work(clients, *shape, kind).values():
        call()
    torch.cuda.synchronize()


def bandwidth() -> float:
    """Bytes a millisecond of a large copy, read and written."""
    a = torch.randn(2**28, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.nbytes / timed(lambda: b.copy_(a))


def main() -> None:
    how = asked(__doc__, "bf16")
    kinds = {p: torch.bfloat16 if p == "bf16" else torch.float32 for p in how.precision.split(",")}
    found = shapes(how.side, how.batch)
    tasks = [(shape, choice, how.clients, kind) for kind in kinds.values() for shape in found for choice in CHOICES]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compiled, tasks))
    copied = bandwidth()
    rows = []
    for precision, kind in kinds.items():
        for (many, channels), times in found.items():
            for way, (call, moved) in work(how.clients, many, channels, kind).items():
                tried: dict[Any, float] = {}
                for choice in CHOICES:
                    choose(choice)
                    tried[choice] = timed(call)
                choose(None)
                best = min(tried, key=lambda c: tried[c])
                least = moved * how.clients * many * channels * kind.itemsize / copied
                print(
                    f"{precision} {way:8} {many}x{channels} x{times}: {tried[None]:.4f} ms, {100 * least / tried[None]:.0f}%,",
                    f"best {tried[best]:.4f} {best};",
                    ", ".join(f"{c} {v:.4f}" for v, c in sorted((v, c) for c, v in tried.items() if c not in (None, best))[:3]),
                    flush=True,
                )
                rows.append({"precision": precision, "way": way, "rows": many, "channels": channels, "times": times,
                             "tried": {str(c): round(v, 5) for c, v in tried.items()}})  # fmt: skip
        own = [r for r in rows if r["precision"] == precision]
        for choice in CHOICES:
            total = sum(r["times"] * r["tried"][str(choice)] for r in own)
            print(f"{precision} {choice}: {total:.3f} ms a step")
    device = torch.cuda.get_device_name()
    print(json.dumps({"benchmark": "norm", "device": device, "side": how.side, "clients": how.clients, "rows": rows}))


if __name__ == "__main__":
    main()
