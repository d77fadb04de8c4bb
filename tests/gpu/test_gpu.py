"""The same runs on a GPU: equal to the CPU's within float32, and repeatable."""

import pytest
import torch
from cases import CASES, MODELS, SIZES, rounds, simulation

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", MODELS)
def test_gpu_is_cpu(case, model):
    """Two rounds in float32: sums in another order, so entries agree to 1e-4 but for those a mask chose otherwise."""
    models = []
    for device in ("cpu", "cuda"):
        sim = simulation(case, model, device=device, precision="float32")
        rounds(sim, 2)
        models.append({n: v.cpu() for n, v in sim.models(range(len(SIZES)), "local").items()})
    off = torch.cat([(models[0][n] - models[1][n]).abs().flatten() for n in models[0]])
    assert float((off > 1e-4).double().mean()) < 0.01
    assert float(off.median()) < 1e-6


@pytest.mark.parametrize("case", ["fedselect", "fedavg"])
def test_chunks_do_not_show(case):
    runs = []
    for chunk in (2, 6):
        sim = simulation(case, "mlp", device="cuda", chunk=chunk, precision="float32")
        rounds(sim, 2)
        runs.append(torch.cat([v.flatten() for v in sim.models(range(len(SIZES))).values()]).cpu())
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-5, atol=1e-6)


def test_the_same_run_twice():
    runs = [rounds(simulation("fedselect", "cnn-batchnorm", device="cuda"), 2) for _ in range(2)]
    assert runs[0] == runs[1]
