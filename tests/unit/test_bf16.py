"""bfloat16 on a CPU: about the same losses, float32 parameters, and a client's bits in any company."""

from functools import partial

import pytest
import torch
from cases import MODELS, SIZES, rounds, simulation

import fedselect as fs
from fedselect.models.vit import build_vit
from fedselect.simulate import inputs
from fedselect.training import recorded

able = pytest.mark.skipif(not inputs.multiplies_bf16(), reason="needs a CPU with AVX512_BF16 or AMX")
NEVER = 10**9


def test_a_cpu_without_instructions_for_it_is_told_what_to_use(monkeypatch, digits):
    monkeypatch.setattr(inputs, "multiplies_bf16", lambda: False)
    with pytest.raises(fs.FedselectError, match=r"AVX512_BF16 or AMX.*--precision float32"):
        fs.Simulation(fs.FedAvg(), "mlp", digits, device="cpu", precision="bf16")


def pictures(sizes=(20, 13, 24, 9, 20)):
    g = torch.Generator().manual_seed(0)

    def part(n):
        y = torch.arange(n) % 4
        return torch.randn(n, 3, 8, 8, generator=g) + y.view(-1, 1, 1, 1), y

    return fs.Federation([fs.ClientData(part(n), part(8)) for n in sizes], 4)


def vit(**how):
    """Small enough to be stacked, with dropout and adapters."""
    model = fs.Model.wrap(partial(build_vit, 3, [2, 2], 4, [32, 2, 2], 4, [0.1, 0.1]), head="head")
    training = fs.Training(batch_size=8)
    return fs.Simulation(fs.FedSelect(lr=0.05), fs.lora(model, 4), pictures(), seed=3, training=training, device="cpu", **how)


def resnet(**how):
    """Trained client by client."""
    data, training = pictures((13, 9)), fs.Training(batch_size=8)
    return fs.Simulation(fs.FedBN(lr=0.001), fs.models.resnet18(data), data, seed=3, training=training, device="cpu", **how)


RUNS = {**{name: partial(simulation, "fedselect", name, device="cpu") for name in MODELS if name != "cnn-lora"}, "vit": vit}
RUNS |= {"cnn-lora": partial(simulation, "fedavg", "cnn-lora", device="cpu"), "resnet": resnet}


def values(sim):
    return torch.cat([v.double().flatten() for v in sim.models(range(sim.clients)).values()])


@able
@pytest.mark.parametrize("run", RUNS)
def test_it_leads_to_about_the_same_loss(run):
    ends = {p: RUNS[run](precision=p) for p in ("float32", "bf16")}
    records = {p: rounds(sim, 1)[0] for p, sim in ends.items()}
    for key in ("train_loss", "test_loss"):
        assert records["bf16"][key] == pytest.approx(records["float32"][key], abs=0.15)
    assert all(v.dtype == torch.float32 for v in ends["bf16"].models([0]).values())
    assert not values(ends["bf16"]).equal(values(ends["float32"]))


@able
@pytest.mark.parametrize("run", [name for name in RUNS if name != "resnet"])
def test_a_client_has_the_same_bits_in_any_company(run):
    ends = []
    for chunk in (1, 2, len(SIZES)):
        sim = RUNS[run](precision="bf16", chunk=chunk)
        rounds(sim, 2)
        ends.append(values(sim))
    assert ends[0].equal(ends[1])
    assert ends[0].equal(ends[2])


@able
@pytest.mark.parametrize("run", RUNS)
def test_recorded_and_resumed_it_has_the_same_bits(run, monkeypatch, tmp_path):
    ends = []
    for after in (NEVER, 1):
        monkeypatch.setitem(recorded.RECORD_AFTER, "cpu", after)
        sim = RUNS[run](precision="bf16")
        rounds(sim, 1)
        sim.save(tmp_path / str(after))
        again = RUNS[run](precision="bf16")
        assert again.resume(tmp_path / str(after))
        for one in (sim, again):
            rounds(one, 1)
            ends.append(values(one))
    assert all(end.equal(ends[0]) for end in ends)
