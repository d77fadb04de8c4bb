"""Which tiles are fastest: the three convolution kernels over the layers of a ResNet18, on one GPU.

Beside the choice of fedselect/kernels/conv.py the best of the tiles listed here; a step has each layer as often as said.

    python benchmarks/conv.py [--side 84] [--clients 20] [--precision tf32,bf16] [--batch 32]
"""

import argparse
import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch

import fedselect as fs
from fedselect.kernels import conv
from fedselect.training.taps import live_taps

TILES = {  # rows, columns, depth, warps, stages
    "forward": [(128, 64, 64, 4, 3), (128, 128, 64, 8, 3), (128, 128, 64, 4, 3), (256, 64, 64, 8, 3), (128, 128, 32, 8, 4),
                (128, 64, 32, 4, 4), (64, 128, 64, 4, 3), (256, 128, 64, 8, 3), (64, 64, 64, 4, 4)],
    "to_input": [(64, 64, 32, 2, 3), (64, 64, 64, 4, 3), (128, 64, 64, 4, 3), (128, 128, 64, 8, 3), (128, 128, 64, 4, 3),
                 (128, 64, 32, 4, 4), (64, 128, 64, 4, 3), (64, 64, 32, 4, 4), (128, 128, 32, 8, 4)],
    "to_kernel": [(64, 64, 32, 2, 3), (64, 64, 64, 4, 3), (128, 64, 64, 4, 3), (128, 128, 64, 8, 3), (128, 128, 64, 4, 3),
                  (64, 128, 64, 4, 3), (64, 64, 128, 4, 3), (64, 64, 32, 4, 4), (128, 128, 32, 8, 4)],
}  # fmt: skip
CHOICE = {"forward": "_forward_tiles", "to_input": "_input_tiles", "to_kernel": "_kernel_tiles"}
Tile = tuple[int, int, int, int, int]


class Layer(NamedTuple):
    inside: int
    out: int
    size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]


def layers(side: int) -> Counter[Layer]:
    """The convolutions of a ResNet18, as often as they come, without the taps that only meet padding."""
    found: Counter[Layer] = Counter()

    def note(m: torch.nn.Conv2d, i: tuple[torch.Tensor], o: torch.Tensor) -> None:
        size, kernel, padding = list(i[0].shape[2:]), list(m.kernel_size), list(m.padding)
        for a in (0, 1):
            first, last, before, behind = live_taps(size[a], kernel[a], m.stride[a], m.padding[a], 1)
            if last - first < kernel[a]:
                size[a], kernel[a], padding[a] = size[a] + before + behind, last - first, 0
        found[Layer(m.in_channels, m.out_channels, *map(tuple, (size, kernel, m.stride, padding)))] += 1

    data = fs.Federation([fs.ClientData(*[(torch.zeros(1, 3, side, side), torch.zeros(1, dtype=torch.int64))] * 2)], 10)
    module = fs.models.resnet18(data).build()
    for m in module.modules():
        if isinstance(m, torch.nn.Conv2d):
            m.register_forward_hook(note)
    module.eval()(torch.zeros(1, 3, side, side))
    return found


def work(layer: Layer, kernel: str, clients: int, batch: int, precision: str) -> tuple[Callable[[], Any], float]:
    """One call of a kernel on random numbers, and how many operations it is."""
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    make = lambda *shape: torch.randn(*shape, device="cuda").to(kind)  # noqa: E731
    x = make(clients, batch, *layer.size, layer.inside).permute(0, 1, 4, 2, 3)
    w = make(clients, layer.out, *layer.kernel, layer.inside).permute(0, 1, 4, 2, 3)
    how = (layer.stride, layer.padding, (1, 1), precision)
    y = conv.forward(x, w, None, *how)
    g = y.permute(0, 1, 3, 4, 2).contiguous()
    calls = {
        "forward": lambda: conv.forward(x, w, None, *how),
        "to_input": lambda: conv.to_input(g, w, x.shape, layer.stride, layer.padding, precision),
        "to_kernel": lambda: conv.to_kernel(x, g, layer.kernel, *how),
    }
    return calls[kernel], 2.0 * y.numel() * w[0, 0].numel()


def choose(kernel: str, tile: Tile | None) -> None:
    """Have a kernel cut into these tiles; None: as it does by itself."""
    own = getattr(conv, "_own" + CHOICE[kernel], None) or getattr(conv, CHOICE[kernel])
    setattr(conv, "_own" + CHOICE[kernel], own)
    names = ("BM", "BN", "BK", "num_warps", "num_stages")
    setattr(conv, CHOICE[kernel], own if tile is None else lambda *_: dict(zip(names, tile, strict=True)))


def fits(layer: Layer, kernel: str, tile: Tile) -> bool:
    rows, columns, depth = tile[:3]
    if layer.inside < 16:  # the stem, whose taps are taken as channels
        return False
    if kernel == "forward":
        return layer.inside % depth == 0 and columns <= max(64, layer.out)
    if kernel == "to_input":
        return columns <= max(64, layer.inside)
    return rows <= layer.out and layer.inside % columns == 0


def compiled(task: tuple[Layer, str, Tile, int, str]) -> bool:
    """Whether it runs at all; it is then in Triton's cache."""
    layer, kernel, tile, batch, precision = task
    try:
        call, _ = work(layer, kernel, 1, batch, precision)
        choose(kernel, tile)
        call()
        torch.cuda.synchronize()
        return True
    except Exception as e:  # too large for the chip's shared memory
        print(f"{kernel} {tile}: {type(e).__name__}", flush=True)
        return False


def timed(call: Callable[[], Any], repeat: int = 5, calls: int = 10) -> float:
    """Milliseconds a call, the best of several, as a CUDA graph: without the time the host takes to launch it."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    best = float("inf")
    for _ in range(repeat):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / calls)
    return best


def asked(about: str | None, precision: str) -> argparse.Namespace:
    """What the command line says: which images, how many clients, which precisions."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=84)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--precision", default=precision)
    how = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a GPU")
    return how


def main() -> None:
    how = asked(__doc__, "tf32,bf16")
    found = layers(how.side)
    tasks = [
        (layer, kernel, tile, how.batch, precision)
        for precision in how.precision.split(",")
        for layer in found
        for kernel, tiles in TILES.items()
        for tile in tiles
        if fits(layer, kernel, tile)
    ]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        good = {t for t, ok in zip(tasks, pool.map(compiled, tasks), strict=True) if ok}
    rows = []
    for precision in how.precision.split(","):
        for layer, times in found.items():
            for kernel in TILES:
                call, operations = work(layer, kernel, how.clients, how.batch, precision)
                choose(kernel, None)
                now = timed(call)
                tried: dict[Tile | None, float] = {None: now}
                for tile in TILES[kernel]:
                    if (layer, kernel, tile, how.batch, precision) in good:
                        choose(kernel, tile)
                        tried[tile] = timed(call)
                choose(kernel, None)
                best = min(tried, key=lambda t: tried[t])
                rate = operations / 1e9
                others = sorted((v, t) for t, v in tried.items() if t not in (None, best))[:3]
                print(
                    f"{precision} {kernel:9} {layer.inside:3}->{layer.out:3} {layer.size} {layer.kernel} /{layer.stride[0]}",
                    f"x{times}:",
                    f"{now:.3f} ms {rate / now:.0f} TFLOP/s, best {tried[best]:.3f} ms {rate / tried[best]:.0f} {best};",
                    ", ".join(f"{t} {v:.3f}" for v, t in others),
                    flush=True,
                )
                rows.append({"precision": precision, "kernel": kernel, "layer": layer, "times": times, "now_ms": round(now, 4),
                             "best_ms": round(tried[best], 4), "best": best})  # fmt: skip
    for p in how.precision.split(","):
        for k in TILES:
            own = [r for r in rows if (r["precision"], r["kernel"]) == (p, k)]
            now, best = (sum(r["times"] * r[w] for r in own) for w in ("now_ms", "best_ms"))
            print(f"{p} {k}: {now:.2f} ms a step, {best:.2f} with the best of each")
    device = torch.cuda.get_device_name()
    print(json.dumps({"benchmark": "conv", "device": device, "side": how.side, "clients": how.clients, "rows": rows}))


if __name__ == "__main__":
    main()
