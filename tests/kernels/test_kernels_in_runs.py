"""Whole runs with kernels are the runs without them, in float32."""

from functools import partial

import pytest
import torch
from cases import TRAINING, rounds, simulation
from kernel_cases import DEVICE, MARKS, plain

import fedselect as fs
from fedselect import kernels
from fedselect.models.vit import build_vit

pytestmark = MARKS


def pictures(side, n=12):
    """Three clients with pictures of bytes, which are shifted, mirrored and scaled."""
    g, made = torch.Generator().manual_seed(1), []
    for _ in range(3):
        x, y = torch.randint(0, 256, (n, 3, side, side), generator=g, dtype=torch.uint8), torch.arange(n) % 4
        made.append(fs.ClientData((x, y), (x[:8], y[:8])))
    return fs.Federation(made, 4, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3), augment="crop-flip")


def cnn(device):
    data = pictures(8)
    model = fs.models.small_cnn(data, width=4, norm="batch")
    return fs.Simulation(fs.FedSelect(lr=0.02), model, data, seed=3, training=TRAINING, device=device, precision="float32")


def vit(device):
    data = pictures(8)
    model = fs.Model.wrap(partial(build_vit, 3, [2, 2], 4, [32, 2, 2], 4, [0.1, 0.1]), head="head")
    method, training = fs.FedSelect(lr=0.05, personal_lr=0.05), fs.Training(batch_size=8)
    return fs.Simulation(method, fs.lora(model, 4), data, seed=3, training=training, device=device, precision="float32")


def case(name, model, device):
    return simulation(name, model, device=device, precision="float32")


RUNS = {
    "fedselect, mlp": (partial(case, "fedselect", "mlp"), 2),
    "ditto, mlp": (partial(case, "ditto", "mlp"), 2),
    "fedselect, pictures": (cnn, 1),
    "fedselect, vit with adapters": (vit, 1),
}
"""What is run, and for how many rounds."""


@pytest.mark.parametrize("run", RUNS)
def test_a_run_with_kernels_is_the_run_without(run, monkeypatch):
    make, count = RUNS[run]
    with plain():
        without = make("cpu")
        rounds(without, count)
    asked, serve = [], kernels.serve
    monkeypatch.setattr(kernels, "serve", lambda x: asked.append(serve(x)) or asked[-1])
    with_kernels = make(DEVICE)
    rounds(with_kernels, count)
    assert any(asked)
    for name, v in without.models(range(without.clients), "local").items():
        torch.testing.assert_close(with_kernels.models(range(without.clients), "local")[name].cpu(), v, rtol=1e-4, atol=1e-5)
