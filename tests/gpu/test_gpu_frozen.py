"""Frozen layers that run once per sample, rows on disk and samples in a file, on a GPU: as without, and no memory is kept."""

import gc
import warnings
import weakref

import numpy as np
import pytest
import torch

import fedselect as fs
from fedselect.simulate import engine
from fedselect.simulate.stack import Stack
from fedselect.training import prefix

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
DEVICE = "cuda"
OFF = {"float32": 1e-3, "tf32": 5e-3, "bf16": 3e-2}
"""How far a loss may be off after two rounds, as a share of it."""


def pictures(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    x = torch.randint(0, 90, (n, 3, 32, 32), generator=g) + 50 * y.view(-1, 1, 1, 1)
    return x.to(torch.uint8), y


@pytest.fixture(scope="module")
def data():
    """The first client has more training data than runs at once, and the second no validation data."""
    sizes = [(prefix.CHUNK + 6, 9, 5), (20, 8, 0), (27, 7, 6)]
    parts = [[pictures(n, 10 * i + j) if n else None for j, n in enumerate(s)] for i, s in enumerate(sizes)]
    return fs.Federation([fs.ClientData(*p) for p in parts], 4)


MODELS = {
    "resnet18, head": (lambda d: fs.head_only(fs.models.resnet18(d)), "fc", 2),
    "resnet18, lora": (lambda d: fs.lora(fs.models.resnet18(d), 2, "layer4.1.*"), "layer4.1", 4),
    "vit_tiny, head": (lambda d: fs.head_only(fs.models.vit_tiny(d, patch=8)), "head", 2),
    "vit_tiny, lora": (lambda d: fs.lora(fs.models.vit_tiny(d, patch=8), 2, "blocks.11.*"), "blocks.11", 3),
    "small_cnn, layers": (lambda d: fs.layers_only(fs.models.small_cnn(d, norm="group"), "hidden,fc"), "hidden", 4),
}  # fmt: skip
"""The model, the layer that is the first to train, and the dimensions of what it gets."""


def simulation(model, data, whole=False, **how):
    given = {"seed": 3, "training": fs.Training(batch_size=8, momentum=0.9), "val": True, "device": DEVICE, **how}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(slow path|one by one).*")
        if whole:
            patch.setattr(engine, "run_ahead", lambda *given: None)
        return fs.Simulation(fs.FedAvgFT(lr=0.005), model, data, **given)  # at larger rates bf16 drifts apart by itself


def values(sim, view=None):
    return torch.cat([v.double().flatten() for v in sim.models(range(sim.clients), view).values()]).cpu()


@pytest.mark.parametrize("precision", OFF)
@pytest.mark.parametrize("name", MODELS)
def test_training_on_kept_outputs_is_training_the_whole_network(name, precision, data):
    make, before, dims = MODELS[name]
    model = make(data)
    kept, whole = (simulation(model, data, w, precision=precision) for w in (False, True))
    assert (kept.frozen and kept.frozen.before) == before
    assert whole.frozen is None
    made = kept._split["train"].x
    assert made.device.type == DEVICE
    assert made.ndim == dims
    for _ in range(3):  # the steps of later rounds are recorded
        ours, theirs = kept.step(), whole.step()
    for key in ("train_loss", "test_loss", "val_loss"):
        assert ours[key] == pytest.approx(theirs[key], rel=OFF[precision], abs=OFF[precision])


@pytest.mark.parametrize("name", ["resnet18, head", "vit_tiny, lora"])
def test_it_is_the_run_of_a_cpu(name, data):
    model = MODELS[name][0](data)
    cpu, gpu = (simulation(model, data, device=d, precision="float32") for d in ("cpu", DEVICE))
    for _ in range(2):
        want, got = cpu.step(), gpu.step()
    assert got["train_loss"] == pytest.approx(want["train_loss"], rel=1e-3)
    torch.testing.assert_close(values(gpu), values(cpu), rtol=1e-3, atol=1e-3)


def test_outputs_are_shared_by_runs_and_go_with_the_last(data):
    model = MODELS["resnet18, head"][0](data)
    first = simulation(model, data, precision="float32")
    second = simulation(model, data, precision="float32", seed=4, like=first.ready)
    assert second.ready is not first.ready  # recordings hold memory, and what fits depends on what is free
    assert second._split["train"] is first._split["train"]
    stack = Stack([first, second])
    assert stack._split["train"].x is first._split["train"].x
    alone = [simulation(model, data, precision="float32", seed=s) for s in (3, 4)]
    for _ in range(2):
        stack.step()
        for sim in alone:
            sim.step()
    for sim, other in zip((first, second), alone, strict=True):
        torch.testing.assert_close(values(sim), values(other), rtol=1e-4, atol=1e-4)
    there = weakref.ref(first._split["train"])
    del first, second, stack, alone, sim, other
    gc.collect()
    assert there() is None


def test_a_full_gpu_keeps_no_outputs(data, monkeypatch):
    of, refused = prefix.Prefix.of, []

    def full(self, split):
        if self.before == "layer4.1":
            refused.append(self.before)
            raise torch.cuda.OutOfMemoryError("no room")
        return of(self, split)

    model = MODELS["resnet18, lora"][0](data)
    monkeypatch.setattr(prefix.Prefix, "of", full)
    with pytest.warns(UserWarning, match="do not fit into the GPU's memory"):
        sim = simulation(model, data, precision="float32")
    assert refused
    assert sim.frozen is None  # outputs of earlier layers are larger
    sim.step()


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_rows_on_disk_are_rows_in_memory(fraction, data):
    """Clients join in other company, so sums are rounded otherwise."""
    how = {"device": DEVICE, "precision": "float32", "chunk": 2, "fraction": fraction, "seed": 5}
    how["training"] = fs.Training(batch_size=8, momentum=0.9)
    model = fs.models.small_cnn(data, width=4, norm="batch")
    ends = []
    for rows in ("personal", "disk"):
        sim = fs.Simulation(fs.FedSelect(lr=0.02, personal_lr=0.02), model, data, rows=rows, **how)
        ends.append(([sim.step() for _ in range(4)][-1], values(sim, "merged")))
    (one, ours), (other, theirs) = ends
    for key in ("train_loss", "test_loss", "accuracy_local", "bytes_up"):
        assert one[key] == pytest.approx(other[key], rel=1e-3, abs=1e-3)
    off = (ours - theirs).abs()
    assert float((off > 1e-4).double().mean()) < 0.01
    assert float(off.median()) < 1e-6


def test_samples_of_a_file_lie_on_the_gpu_client_after_client(tmp_path):
    """Each part alone, not the whole file three times; so such runs are stacked as others are."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(90, 6)).astype(np.float32), np.arange(90) % 3
    np.save(tmp_path / "x.npy", x)
    client = rng.permutation(np.repeat(np.arange(3), 30))
    split = np.where(np.arange(90) % 3 == 0, "test", "train")
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    ends = []
    for inputs in (x, mapped):
        data = fs.Federation.from_arrays(inputs, y, client, split=split)
        sim = fs.Simulation(fs.FedAvg(lr=0.1), "mlp", data, device=DEVICE, precision="float32", seed=2)
        sim.step()
        ends.append((sim, values(sim)))
    (one, ours), (other, theirs) = ends
    for part, there in other._split.items():
        assert there.index is None
        assert there.x.is_cuda
        assert torch.equal(there.x, one._split[part].x)
        assert torch.equal(there.y, one._split[part].y)
    assert torch.equal(ours, theirs)
