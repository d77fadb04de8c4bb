"""What runs on a GPU, as far as a CPU can show it: types in bf16, a full memory, and nothing that is held between rounds."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import fedselect as fs
from fedselect.simulate import engine
from fedselect.training import prefix, recorded, step, work
from fedselect.training.batches import Split
from fedselect.training.fitted import Fitted


@pytest.fixture(scope="module")
def data():
    g = torch.Generator().manual_seed(0)

    def part(n):
        y = torch.arange(n) % 4
        x = torch.randint(0, 90, (n, 3, 16, 16), generator=g) + 50 * y.view(-1, 1, 1, 1)
        return x.to(torch.uint8), y

    return fs.Federation([fs.ClientData(part(n), part(6)) for n in (20, 11, 8)], 4)


def simulation(model, data, whole=False, method=None, **how):
    given = {"seed": 3, "training": fs.Training(batch_size=8, momentum=0.9), **how}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*one by one.*")
        patch.setattr(engine, "pick_precision", lambda asked, device: "float32" if asked == "auto" else asked)
        if whole:
            patch.setattr(engine, "run_ahead", lambda *given: None)
        return fs.Simulation(method or fs.FedAvgFT(lr=0.005), model, data, **given)


class Foreign(nn.Module):
    """Not in steps: what holds the head is found by running it."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(3))
        self.classifier = nn.Sequential(nn.Dropout(0.5), nn.Linear(54, 4))

    def forward(self, x):
        return self.classifier(self.body(x).flatten(1))


BF16 = {
    "norms of a frozen base": lambda d: fs.head_only(fs.models.small_cnn(d, norm="batch")),
    "kernels of one window": lambda d: fs.lora(fs.models.resnet18(d, stem="imagenet"), 2, "layer4.1.*"),
    "the end of any network": lambda d: fs.head_only(fs.Model.wrap(Foreign, head="classifier")),
    "tokens": lambda d: fs.lora(fs.models.vit_tiny(d, patch=8), 2, "blocks.11.*"),
}


@pytest.mark.parametrize("name", BF16)
def test_kept_outputs_in_bf16_are_about_those_of_the_whole_network(name, data):
    torch.manual_seed(0)
    model = BF16[name](data)
    kept, whole, exact = (
        simulation(model, data, w, precision=p) for w, p in ((False, "bf16"), (True, "bf16"), (False, "float32"))
    )
    assert kept.frozen
    assert whole.frozen is None
    assert kept.frozen.before == exact.frozen.before
    assert kept._split["train"].x.dtype == torch.bfloat16
    losses = [[s.step()[k] for k in ("train_loss", "test_loss")] for s in (kept, whole, exact)]
    assert losses[0] != losses[2]
    for found in losses[:2]:
        assert found == pytest.approx(losses[2], rel=2e-2, abs=1e-2)


def test_outputs_keep_the_type_that_the_network_gives_them(data):
    """So the rest of the network is given no less than in the whole."""

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(768, 8)

        def forward(self, x):
            return self.first(x.flatten(1)).float()

    torch.manual_seed(0)
    model = fs.layers_only(nn.Sequential(Wide(), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 4)), "2.*,3.*")
    kept, whole = (simulation(model, data, w, precision="bf16") for w in (False, True))
    assert kept.frozen.before == "2"
    assert kept._split["train"].x.dtype == torch.float32
    given = []
    for s, norm in ((kept, "2"), (whole, "2")):
        s.fitted.module.get_submodule(norm).register_forward_pre_hook(lambda m, x: given.append(x[0].dtype))
        s.step()
    assert set(given) == {torch.float32}


def test_a_full_gpu_keeps_no_outputs_and_says_so(data, monkeypatch):
    of, asked = prefix.Prefix.of, []

    def full(self, split):
        asked.append((self.before, self.size))
        if self.before == "fc":
            raise torch.cuda.OutOfMemoryError("no room")
        return of(self, split)

    torch.manual_seed(0)
    model = fs.head_only(fs.models.small_cnn(data))
    monkeypatch.setattr(prefix.Prefix, "of", full)
    with pytest.warns(UserWarning, match="the outputs of small_cnn before fc do not fit into the GPU's memory"):
        sim = simulation(model, data)
    assert asked == [("fc", 256)]  # outputs of earlier layers are larger
    assert sim.frozen is None
    monkeypatch.undo()
    assert sim.step()["train_loss"] == pytest.approx(simulation(model, data).step()["train_loss"], rel=1e-4)

    wide = fs.head_only(nn.Sequential(nn.Flatten(), nn.Linear(768, 8), nn.Linear(8, 500), nn.Linear(500, 4)))

    def fuller(self, split):
        if self.before == "3":
            raise torch.cuda.OutOfMemoryError("no room")
        return of(self, split)

    monkeypatch.setattr(prefix.Prefix, "of", fuller)
    with pytest.warns(UserWarning, match="before 3 do not fit"):
        assert simulation(wide, data).frozen.before == "2"


class Pairs(nn.Module):
    """Runs on no single sample, which the trial of a cut asks for."""

    def __init__(self):
        super().__init__()
        self.body, self.fc = nn.Linear(768, 8), nn.Linear(8, 4)

    def forward(self, x):
        if len(x) == 1:
            raise RuntimeError("one sample is too little")
        return self.fc(self.body(x.flatten(1)))


def test_a_network_that_cannot_be_tried_in_parts_runs_whole(data):
    sim = simulation(fs.head_only(Pairs()), data, training=fs.Training(batch_size=4))
    assert sim.frozen is None
    sim.step()


def test_a_gpu_too_full_for_a_few_samples_is_said(data, monkeypatch):
    def full(*given, **how):
        raise torch.cuda.OutOfMemoryError("no room")

    monkeypatch.setattr("fedselect.simulate.frozen.find", full)
    with pytest.raises(fs.RunError, match="not even one client fits into the GPU's memory"):
        simulation(fs.head_only(fs.models.small_cnn(data)), data)


def test_a_device_gets_the_samples_of_an_index_and_not_the_pool(monkeypatch):
    pool, targets = torch.arange(60.0).view(20, 3), torch.arange(20)
    index = torch.tensor([7, 3, 19, 0, 4, 11], dtype=torch.int32)
    split = Split(pool, targets, torch.tensor([0, 4]), torch.tensor([4, 2]), index=index)
    there = split.to(torch.device("meta"))
    assert there.index is None
    assert there.x.shape == (6, 3)
    assert there.y.shape == (6,)
    assert there.sizes == (4, 2)
    monkeypatch.setattr("fedselect.training.batches.READ", 24)  # two rows at a time
    x, y = (split._picked(v, torch.device("cpu")) for v in (pool, targets))
    whole = replace(split, x=x, y=y, index=None)
    at = torch.tensor([[0, 3], [1, 0]])
    for a, b in zip(split.batch(at), whole.batch(at), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(split.targets, whole.targets)
    assert split.to(torch.device("cpu")).x is pool


def test_epochs_are_shuffled_alike_all_at_once_or_one_by_one(data, monkeypatch):
    def run():
        s = simulation(fs.models.small_cnn(data), data, method=fs.FedRep(lr=0.01, epochs=3))
        s.step()
        return s.models(range(3))

    first, orders = run(), []
    usual = work.random.permutations
    monkeypatch.setattr(work, "AT_ONCE", 1)
    monkeypatch.setattr(work.random, "permutations", lambda k, n, m: orders.append(k.shape[0]) or usual(k, n, m))
    again = run()
    assert set(orders) == {1}
    assert all(torch.equal(v, again[n]) for n, v in first.items())


def test_clients_values_are_let_go_after_they_trained_one_by_one(monkeypatch):
    """What is prepared of a frozen kernel shows from which values it was prepared, and these hold all of a client's."""
    monkeypatch.setattr(step, "HEAVY", 0)
    held = []
    usual = recorded.hold
    monkeypatch.setattr(recorded, "hold", lambda fitted, frozen: held.append(len(frozen)) or usual(fitted, frozen))
    g = torch.Generator().manual_seed(0)
    clients = [fs.ClientData((torch.randn(12, 2, 2, 2, generator=g), torch.arange(12) % 2)) for _ in range(2)]
    net = nn.Sequential(nn.Conv2d(2, 4, 5, padding=2), nn.Flatten(), nn.Linear(16, 2))
    s = fs.Simulation(fs.FedAvg(lr=0.1), fs.Model.wrap(net), clients, training=fs.Training(batch_size=4))
    held.clear()
    s._work(torch.arange(2), 0).train(
        {n: v.expand(2, *v.shape) for n, v in s.initial.items()}, [fs.Pass({"2.weight": True}, 0.1, 0)]
    )
    assert held == [1]  # for both clients, whose kernel is one
    assert s._programs._held == ({}, [], {})


def test_a_gpu_runs_a_step_before_it_records_one():
    assert [recorded._wait("cuda", left) for left in (0, 1000)] == [1, 1]
    assert [recorded._wait("cpu", left) for left in (0, 1000)] == [recorded.RECORD_AFTER["cpu"], 0]


def test_a_cut_is_compared_in_the_precision_that_layers_run_in(data, monkeypatch):
    """Elsewhere a GPU rounds products to TF32, and the outputs of a cut network would differ from those of the whole."""
    seen = []
    usual = Fitted.check
    monkeypatch.setattr(Fitted, "check", lambda *a: seen.append(torch.backends.cudnn.conv.fp32_precision) or usual(*a))
    fitted = Fitted(fs.head_only(fs.models.small_cnn(data)), precision="float32")
    x, _ = data.clients[0].train
    assert prefix.find(fitted, x[:2].float(), fs.Classification(), data) is not None
    assert seen == ["ieee"] * 2
