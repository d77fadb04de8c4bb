# ruff: noqa: E402 - the driver must be in place before kernels are imported
"""Compile every GPU kernel as it is really launched, on a machine without a GPU: does it compile, and does it fit?

Launches are collected from the tests of kernels and from short runs, on CPU tensors: Triton specializes a kernel by types,
alignment and constants, not by where a tensor lies. Nothing runs on a GPU, so results mean nothing; each kind of launch is
compiled by Triton and ptxas to the code of the GPU. Takes ten minutes on one core.

    python scripts/compile_kernels.py [--arch 90] [--tests-only | --runs-only]
"""

import argparse
import os
import sys
import tempfile
import time
import types
import warnings
from collections import defaultdict
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--arch", type=int, default=90, help="80 for A100, 89 for RTX 40, 90 for H100 and H200, 120 for RTX 50")
parser.add_argument("--tests-only", action="store_true")
parser.add_argument("--runs-only", action="store_true")
HOW = parser.parse_args()
os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()  # times are those of a new machine

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime.jit import JITFunction

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), *(str(ROOT / p) for p in ("tests", "tests/conformance", "tests/network", "tests/kernels"))]


class NoGPU(CudaDriver):
    """A driver that names a GPU and has none."""

    def __init__(self):
        pass

    def get_current_target(self):
        return GPUTarget("cuda", HOW.arch, 32)

    def get_current_device(self):
        return 0

    def set_current_device(self, device):
        pass

    def get_current_stream(self, device):
        return 0


triton.runtime.driver.set_active(NoGPU())
import fedselect as fs
from fedselect import kernels
from fedselect.kernels import compiling, conv
from fedselect.simulate import engine, stack, trial
from fedselect.training import recorded, step

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}.get(HOW.arch, 99) * 1024
"""Bytes of shared memory that a block may have."""
run = JITFunction.run
made: dict[int, tuple[str, float, object]] = {}
failed: dict[tuple[str, str], int] = defaultdict(int)
launches: dict[str, int] = defaultdict(int)
grids: list[str] = []


def compile_only(self, *args, grid, warmup, **kwargs):
    name = f"{self.__module__.rsplit('.', 1)[-1]}.{self.__name__}"
    launches[name] += 1
    whole = (*grid, 1, 1)[:3]
    if whole[1] > 65_535 or whole[2] > 65_535 or min(whole) < 0:
        grids.append(f"{name}: {whole}")
    began = time.perf_counter()
    try:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
    except Exception as e:
        failed[name, f"{type(e).__name__}: {e}"[:600]] += 1
        return
    if id(kernel) not in made:
        made[id(kernel)] = name, time.perf_counter() - began, kernel


JITFunction.run = compile_only
kernels.serve = lambda x: x.element_size() <= 4
conv._roomy = lambda: SHARED >= 160 * 1024


def collect_tests() -> None:
    """The tests of kernels, also those that take too long in the interpreter, as if there were a GPU."""
    source = (ROOT / "tests/kernels/kernel_cases.py").read_text()
    assert source.count('DEVICE = "cpu" if INTERPRETED else "cuda"') == 1
    source = source.replace('DEVICE = "cpu" if INTERPRETED else "cuda"', 'DEVICE = "cpu"')
    source = source.replace("if not (torch.cuda.is_available() or INTERPRETED):", "if False:")
    cases = types.ModuleType("kernel_cases")
    exec(compile(source, "kernel_cases.py", "exec"), cases.__dict__)
    cases.assert_near = torch.testing.assert_close = lambda *given, **how: None  # a test goes on to what follows
    sys.modules["kernel_cases"] = cases
    names = [str(p) for p in sorted((ROOT / "tests/kernels").glob("test_*.py")) if p.name != "test_kernels_in_runs.py"]
    pytest.main(["-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-W", "ignore", "-r", "N", *names])


def pictures(side: int, n: int = 20):
    g, clients = torch.Generator().manual_seed(1), []
    for _ in range(3):
        x, y = torch.randint(0, 256, (n, 3, side, side), generator=g, dtype=torch.uint8), torch.arange(n) % 4
        clients.append(fs.ClientData((x, y), (x[:8], y[:8])))
    return fs.Federation(clients, 4, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3), augment="crop-flip")


def collect_runs() -> None:
    """Two rounds of each kind of run, as written and with the shortcuts of a recording."""
    for module in (step, recorded, stack, trial):
        module.one_by_one = lambda fitted, device: not fitted.stackable
    engine.pick_precision = lambda name, device: name
    compiling.compile_for = lambda *programs: None  # it compiles side by side, so that no kernel has a time of its own
    usual = recorded.Programs.train

    def train(self, tree, memory, aim, data, walks, **how):  # what a recording does, without recording
        kept = recorded.Traced
        recorded.Traced = lambda body, inputs: lambda inputs, times: body(inputs)
        recorded.RECORD_AFTER["cpu"] = 1
        try:
            return usual(self, tree, memory, aim, data, walks, **how)
        finally:
            recorded.Traced = kept

    recorded.Programs.train = train
    small, large = pictures(16), pictures(32, 12)
    models = {
        "small_cnn": (fs.models.small_cnn(small, norm="batch"), small),
        "resnet18": (fs.models.resnet18(large), large),
        "vit_tiny, lora": (fs.lora(fs.models.vit_tiny(small, patch=8, dropout=0.1), 2), small),
    }
    methods = {"fedselect": fs.FedSelect(lr=0.02), "ditto": fs.Ditto(lr=0.02)}
    for title, (model, data) in models.items():
        for precision in ("float32", "tf32", "bf16"):
            for name, method in methods.items() if title == "small_cnn" else [("fedselect", methods["fedselect"])]:
                began, before = time.perf_counter(), len(made)
                training = fs.Training(batch_size=8, momentum=0.9, weight_decay=1e-3, clip=1.0 if name == "ditto" else None)
                how = {"training": training, "device": "cpu", "precision": precision}
                try:
                    sim = fs.Simulation(method, model, data, **how)
                    for _ in range(2):
                        sim.step()
                    said = "ran"
                except fs.TrainingError:
                    said = "ran to the end of a round"  # numbers mean nothing here
                except Exception as e:
                    said = f"{type(e).__name__}: {e}"[:200]
                new = len(made) - before
                print(f"{title}, {name}, {precision}: {said}; {new} kernels, {time.perf_counter() - began:.0f} s", flush=True)


def main() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not HOW.runs_only:
            collect_tests()
        if not HOW.tests_only:
            collect_runs()
    by: dict[str, list[tuple[float, object]]] = defaultdict(list)
    for name, seconds, kernel in made.values():
        by[name].append((seconds, kernel))
    print(f"\n{'kernel':24}{'launches':>9}{'compiled':>9}{'mean s':>8}{'max s':>8}{'shared KiB':>11}")
    for name in sorted(by):
        times, most = [t for t, _ in by[name]], max(k.metadata.shared for _, k in by[name])
        mean = sum(times) / len(times)
        print(f"{name:24}{launches[name]:9}{len(times):9}{mean:8.2f}{max(times):8.2f}{most / 1024:11.1f}")
        if most > SHARED:
            failed[name, f"needs {most} bytes of shared memory, there are {SHARED}"] += 1
    print(f"{'all':24}{sum(launches.values()):9}{len(made):9}{sum(t for _, t, _ in made.values()):18.1f} s in all")
    print("grids too large:", grids or "none")
    for (name, why), times in failed.items():
        print(f"FAILED {name} ({times} times): {why}")
    sys.exit(bool(failed or grids))


if __name__ == "__main__":
    main()
