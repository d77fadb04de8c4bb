"""The same runs on a GPU: equal to the CPU's within float32, recorded or not, in any precision, and repeatable."""

import warnings

import pytest
import torch
from cases import AGGREGATES, CASES, MODELS, PAIRS, SIZES, TRAINING, federation, rounds, simulation
from torch import nn

import fedselect as fs
from fedselect.simulate import Simulation
from fedselect.simulate.stack import Stack
from fedselect.training import recorded
from fedselect.training.settings import Training

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
NEVER = 10**9


def values(sim):
    """Every client's model, in a line."""
    return torch.cat([v.double().flatten() for v in sim.models(range(sim.clients), "local").values()]).cpu()


@pytest.mark.parametrize(("case", "model"), PAIRS)
def test_gpu_is_cpu(case, model):
    """Two rounds in float32: sums in another order, so entries agree to 1e-4 but for those a mask chose otherwise.

    A bias before BatchNorm has no gradient but rounding errors. Adam makes whole steps of those, and the mean that the norm
    subtracts follows: both are left out with it.
    """
    models, noise = [], ("conv1.bias", "conv2.bias", "norm1.running_mean", "norm2.running_mean") if "adam" in case else ()
    for device in ("cpu", "cuda"):
        sim = simulation(case, model, device=device, precision="float32")
        rounds(sim, 2)
        models.append({n: v.cpu() for n, v in sim.models(range(len(SIZES)), "local").items()})
    off = torch.cat([(models[0][n] - models[1][n]).abs().flatten() for n in models[0] if n not in noise])
    assert float((off > 1e-4).double().mean()) < 0.01
    assert float(off.median()) < 1e-6


@pytest.mark.parametrize("case", AGGREGATES)
def test_aggregators_are_those_of_the_cpu_in_chunks_and_resumed(case, tmp_path):
    method, model, aggregator = AGGREGATES[case]
    ends = []
    for device, chunk in (("cpu", "auto"), ("cuda", "auto"), ("cuda", 4)):
        sim = simulation(method, model, device=device, chunk=chunk, precision="float32", aggregator=aggregator)
        rounds(sim, 1)
        sim.save(tmp_path / f"{device} {chunk}")
        again = simulation(method, model, device=device, chunk=chunk, precision="float32", aggregator=aggregator)
        assert again.resume(tmp_path / f"{device} {chunk}")
        rounds(again, 1)
        ends.append(values(again))
    for end in ends[1:]:
        off = (ends[0] - end).abs()
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


def test_a_stack_of_unequal_clients_is_each_run_alone(made):
    """And what it records is known again: a third round makes nothing new."""

    def run(seed, data):
        how = {"seed": seed, "training": TRAINING, "device": "cuda", "precision": "float32"}
        return Simulation(CASES["fedselect"](), MODELS["cnn-batchnorm"](data), data, **how)

    stacked, alone = ([run(seed, federation()) for seed in (7, 3)] for _ in range(2))
    stack, many = Stack(stacked), []
    for _ in range(3):
        stack.step()
        many.append(len(made))
    assert many[0] > 0
    assert many[2] == many[1]
    for one, other in zip(stacked, alone, strict=True):
        rounds(other, 3)
        off = (values(one) - values(other)).abs()
        assert float((off > 1e-4).double().mean()) < 0.01  # but for what a mask chose otherwise
        assert float(off.median()) < 1e-6


def test_the_same_run_twice():
    runs = [rounds(simulation("fedselect", "cnn-batchnorm", device="cuda"), 2) for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("case", ["fedselect", "fedavg", "ditto"])
def test_rounds_that_begin_early_are_those_that_do_not(case):
    usual, early = (Stack([simulation(case, "cnn-batchnorm", device="cuda")]) for _ in range(2))
    for _ in range(4):
        (one,), (other,) = usual.step(), early.step(more=True)
        del one["seconds"], other["seconds"]
        assert one == other
    assert early._begun
    assert torch.equal(values(usual.runs[0]), values(early.runs[0]))


def test_what_is_compiled_beforehand_does_not_run():
    from fedselect.kernels.compiling import compile_for
    from fedselect.kernels.select import top

    v, k = torch.arange(10.0, device="cuda").expand(2, -1).contiguous(), torch.tensor([3, 4], device="cuda")
    layers = torch.zeros(2, 5, 3, device="cuda", requires_grad=True)
    given = torch.full((2, 5, 3), 7.0, device="cuda")
    ran = []

    def program():
        from fedselect.kernels import norm

        norm._forward_few[(1, 2)](
            layers.detach(), layers, layers, layers, given, given, given, given, 5, 3, 0.1, 1e-5,
            False, False, False, False, 8, 16,
        )  # fmt: skip
        ran.append(1)

    compile_for(program)
    assert ran
    assert bool((given == 7.0).all())
    assert top(v, k).sum(1).tolist() == [3, 4]  # and now kernels run


# ---- recordings


@pytest.fixture
def made(monkeypatch):
    """How many recordings were tried."""
    tried = []

    class Counted(recorded._Captured):
        def __init__(self, *args):
            tried.append(1)
            super().__init__(*args)

    monkeypatch.setattr(recorded, "_Captured", Counted)
    return tried


@pytest.mark.parametrize("case", ["fedselect", "fedprox", "fedrep", "fedpac"])
@pytest.mark.parametrize("model", MODELS)
def test_a_recorded_run_is_that_as_written(case, model, made, monkeypatch):
    ends = []
    for after in (NEVER, 1):
        monkeypatch.setitem(recorded.RECORD_AFTER, "cuda", after)
        sim = simulation(case, model, device="cuda", precision="float32")
        rounds(sim, 1)
        ends.append(values(sim))
        assert bool(made) == (after == 1)
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=1e-6)


def alike(build, clients=4, n=24, training=None, **how):
    """FedAvg on clients of one size: one kind of step, so one recording of it."""
    g = torch.Generator().manual_seed(0)
    made = []
    for c in range(clients):
        y = torch.randint(0, 4, (n,), generator=g)
        x = torch.randn(n, 4, 8, 8, generator=g) + y.view(-1, 1, 1, 1) * 0.5 + 0.1 * c
        made.append(fs.ClientData((x, y), (x[:8], y[:8])))
    data = fs.Federation(made, 4)
    training = training or Training(batch_size=8, momentum=0.9)
    return Simulation(fs.FedAvg(epochs=2, lr=0.02), fs.Model.wrap(build), data, seed=3, training=training, **how)


def plain():
    return nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(384, 4))


def test_recordings_serve_all_rounds_to_come(made):
    sim = alike(plain, device="cuda", precision="float32")
    rounds(sim, 2)
    after = len(made)
    assert after >= 2  # training and evaluation
    rounds(sim, 3)
    assert len(made) == after


def test_evaluation_is_right_in_every_round():
    """Also while training changes the values under the recording."""
    sims = [alike(plain, device=device, precision="float32") for device in ("cpu", "cuda")]
    for _ in range(3):
        cpu, gpu = (sim.step() for sim in sims)
        assert gpu["accuracy"] == cpu["accuracy"]
        assert gpu["test_loss"] == pytest.approx(cpu["test_loss"], abs=1e-3)
        assert gpu["train_loss"] == pytest.approx(cpu["train_loss"], abs=1e-3)


# ---- precision


@pytest.mark.parametrize(("precision", "off"), [("tf32", 0.02), ("bf16", 0.1)])
@pytest.mark.parametrize("model", MODELS)
def test_less_precision_leads_to_about_the_same_loss(model, precision, off):
    losses = {}
    for p in ("float32", precision):
        sim = simulation("fedavg", model, device="cuda", precision=p)
        record = sim.step()
        losses[p] = record["train_loss"], record["test_loss"]
        assert all(v.dtype == torch.float32 for v in sim.models(range(len(SIZES))).values())
    assert losses[precision] == pytest.approx(losses["float32"], abs=off)


def test_bf16_is_not_float32():
    """The option does something."""
    ends = []
    for p in ("float32", "bf16"):
        sim = simulation("fedavg", "mlp", device="cuda", precision=p)
        rounds(sim, 1)
        ends.append(values(sim))
    assert not ends[0].equal(ends[1])


# ---- models of all kinds


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(self.block(x.flatten(1, 2)).mean(1))  # 32 rows of 8


class Centred(nn.Module):
    """Keeps a statistic of its own, written in the middle of a forward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.fc = nn.Linear(256, 8), nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        x = self.first(x.flatten(1)).relu()
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.fc(x - self.mean)


KINDS = {
    "batch norm": plain,
    "own statistics": Centred,
    "dropout": lambda: nn.Sequential(nn.Flatten(), nn.Linear(256, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 4)),
    "channel dropout": lambda: nn.Sequential(
        nn.Conv2d(4, 6, 3), nn.Dropout2d(0.3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 4)
    ),
    "group norm": lambda: nn.Sequential(
        nn.Conv2d(4, 6, 3, 2, 1), nn.GroupNorm(2, 6), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Flatten(), nn.Linear(24, 4)
    ),
    "layer norm": lambda: nn.Sequential(nn.Flatten(), nn.Linear(256, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4)),
    "transformer": Attention,
    "depthwise convolution": lambda: nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1, groups=4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4)
    ),
    "dilated convolution": lambda: nn.Sequential(
        nn.Conv2d(4, 6, 3, padding=2, dilation=2), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(24, 4)
    ),
    "dilated convolution, even channels": lambda: nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=2, dilation=2), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(),
        nn.Linear(32, 4),
    ),
    "dead taps": lambda: nn.Sequential(
        nn.Conv2d(4, 6, 3, 4, 1), nn.ReLU(), nn.Conv2d(6, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1), nn.Flatten(), nn.Linear(8, 4),
    ),
    "one window": lambda: nn.Sequential(nn.Conv2d(4, 6, 8), nn.ReLU(), nn.Flatten(), nn.Linear(6, 4)),
    "sequences": lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), nn.Flatten(), nn.Linear(372, 4)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own attention, under vmap
@pytest.mark.filterwarnings("ignore:.*is slow to train")  # grouped convolutions
@pytest.mark.parametrize("training", [None, TRAINING], ids=["momentum", "momentum, decay, clip"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_any_kind_runs_stacked_as_on_a_cpu(kind, training, made):
    ends = []
    for device in ("cpu", "cuda"):
        sim = alike(KINDS[kind], device=device, precision="float32", training=training)
        sim.step(evaluate=False)
        assert sim.fitted.stackable
        ends.append(values(sim))
    assert made
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=1e-4)


class Several(nn.Module):
    """Words, a picture and a mask; looks at the mask's values unless it is being compiled, and drops in attention."""

    def __init__(self):
        super().__init__()
        self.embed, self.conv, self.fc = nn.Embedding(3000, 8), nn.Conv2d(1, 4, 3), nn.Linear(12, 4)

    def forward(self, words, picture, mask):
        h, p = self.embed(words), 0.2 if self.training else 0.0
        mask = None if not torch.compiler.is_compiling() and bool(mask.all()) else mask[:, None]
        h = nn.functional.scaled_dot_product_attention(h, h, h, mask, p).mean(1)
        seen = torch.relu(self.conv(picture)).mean((-2, -1))
        return {"logits": self.fc(torch.cat([h.to(seen.dtype), seen], 1))}


def several():
    g = torch.Generator().manual_seed(0)

    def part(n):
        mask = torch.rand(n, 5, generator=g) < 0.7
        mask[:, 0] = True
        x = {
            "words": torch.randint(2000, 3000, (n, 5), generator=g),
            "picture": torch.randn(n, 1, 6, 6, generator=g),
            "mask": mask,
        }
        return x, torch.arange(n) % 4

    return fs.Federation([fs.ClientData(part(n), part(8)) for n in (33, 64, 20)], 4)


@pytest.mark.parametrize("after", [1, NEVER], ids=["recorded", "not recorded"])
def test_several_inputs_train_as_on_a_cpu(after, monkeypatch):
    monkeypatch.setitem(recorded.RECORD_AFTER, "cuda", after)
    ends = []
    for device in ("cpu", "cuda"):
        sim = Simulation(fs.FedAvg(lr=0.1), fs.Model.wrap(Several), several(), device=device, precision="float32")
        for _ in range(2):
            sim.step()
        assert sim.fitted.stackable
        ends.append(values(sim))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=1e-4)


def test_whole_numbers_among_several_inputs_are_exact_in_bf16():
    """Of words from 2000 on, bfloat16 would tell one in eight or sixteen: rows of others would move."""
    data = several()
    sim = Simulation(fs.Local(lr=0.1), fs.Model.wrap(Several), data, device="cuda", precision="bf16")
    sim.step()
    for i in range(3):
        moved = (sim.models([i])["embed.weight"][0].cpu() != sim.initial["embed.weight"].cpu()).any(1)
        (words, _, _) = data.layout.parts(data.clients[i].train[0])
        assert set(moved.nonzero().flatten().tolist()) <= set(words.flatten().tolist())
        assert moved.any()


# ---- what cannot be recorded


class Reads(nn.Module):
    """Looks at a number of its own on the way, for which the host has to wait: no CUDA graph can hold that."""

    def __init__(self, always=True):
        super().__init__()
        self.always = always
        self.register_buffer("times", torch.tensor(2))
        self.fc = nn.Linear(256, 4)

    def forward(self, x):
        return self.fc(x.flatten(1) * (self.times.item() if self.training or self.always else 2))


def said_while(run):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in said if "cannot be recorded" in str(w.message)]


def test_a_model_that_cannot_be_recorded_runs_and_says_so_once(made):
    sims = [alike(Reads, device=device, precision="float32") for device in ("cpu", "cuda")]
    said_while(lambda: [sims[0].step(evaluate=False) for _ in range(2)])
    said = said_while(lambda: [sims[1].step(evaluate=False) for _ in range(2)])
    assert len(said) == 1
    assert said[0].startswith("Reads cannot be recorded and runs on the slow path (")
    assert len(made) == 2  # tries
    torch.testing.assert_close(values(sims[1]), values(sims[0]), rtol=1e-4, atol=1e-4)


def test_one_recording_that_fails_does_not_spoil_the_others(made):
    """Training cannot be recorded, evaluation can."""
    sims = [alike(lambda: Reads(always=False), device=device, precision="float32") for device in ("cpu", "cuda")]
    records: list = []
    said_while(lambda: records.append([sims[0].step() for _ in range(2)]))
    said = said_while(lambda: records.append([sims[1].step() for _ in range(2)]))
    assert len(said) == 1
    assert len(made) >= 2
    for cpu, gpu in zip(*records, strict=True):
        assert gpu["accuracy"] == cpu["accuracy"]
        assert gpu["test_loss"] == pytest.approx(cpu["test_loss"], abs=1e-3)
    torch.testing.assert_close(values(sims[1]), values(sims[0]), rtol=1e-4, atol=1e-4)


def test_pictures_of_bytes_train_as_on_a_cpu():
    """Gathered, shifted, mirrored and scaled in one kernel, from the same random numbers."""
    g = torch.Generator().manual_seed(1)
    made = []
    for _ in range(3):
        x, y = torch.randint(0, 256, (20, 3, 8, 8), generator=g, dtype=torch.uint8), torch.arange(20) % 4
        made.append(fs.ClientData((x, y), (x[:8], y[:8])))
    ends = []
    for device in ("cpu", "cuda"):
        data = fs.Federation(made, 4, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3), augment="crop-flip")
        model = fs.models.small_cnn(data, width=4, norm="batch")
        sim = Simulation(fs.FedSelect(lr=0.02), model, data, seed=3, training=TRAINING, device=device, precision="float32")
        sim.step(evaluate=False)
        ends.append(values(sim))
    off = (ends[0] - ends[1]).abs()
    assert float((off > 1e-4).double().mean()) < 0.01
    assert float(off.median()) < 1e-6


@pytest.mark.parametrize("there", ["cpu", "cuda"])
def test_a_model_serves_several_runs_wherever_it_and_the_data_lie(there):
    clients = [fs.ClientData(*[(x.to(there), y.to(there)) for x, y in (c.train, c.test)]) for c in federation().clients]
    data = fs.Federation(clients, federation().classes)
    plain = MODELS["cnn-batchnorm"](data).build().to(there)
    model = fs.Model.wrap(plain)
    first, again, cpu = (
        fs.run(fs.FedSelect(lr=0.02), model=model, data=data, rounds=1, training=TRAINING, device=d, precision="float32")
        for d in ("cuda", "cuda", "cpu")
    )
    assert first.accuracy == again.accuracy
    for n, v in cpu.personal(0).items():
        assert v.device.type == "cpu"
        torch.testing.assert_close(again.personal(0)[n], v, rtol=1e-4, atol=1e-4)


# ---- tasks other than classification


class Regression(fs.Task):
    metrics = (
        fs.Metric("mae", more_is_better=False, of=lambda out, y: (out.squeeze(-1) - y).abs(), by_sample=True),
        fs.Metric("worst", more_is_better=False, of=lambda out, y: (out.squeeze(-1) - y).abs().max()),
    )

    def loss(self, outputs, targets):
        return (outputs.squeeze(-1) - targets) ** 2


def test_a_task_of_its_own_measures_what_it_does_on_a_cpu(made):
    g, clients = torch.Generator().manual_seed(0), []
    for n in (30, 17, 30):
        x = torch.randn(n + 9, 5, generator=g)
        clients.append(fs.ClientData((x[:n], x[:n].sum(1)), (x[n:], x[n:].sum(1))))
    found = []
    for device in ("cpu", "cuda"):
        model = fs.Model.wrap(lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1)))
        how = {"device": device, "precision": "float32", "task": Regression(), "training": Training(optimizer="adam")}
        sim = Simulation(fs.FedPer(lr=0.01), model, clients, **how)
        found.append([sim.step()["clients"] for _ in range(3)][-1])
    assert made
    for name in ("mae", "worst", "test_loss", "train_loss"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-3)


# ---- halves of the data


def persisting(device, **how):
    """Clients of unequal size, a window of 4, and an end two rounds after the test."""
    data = federation()
    method = fs.FedPersist(4, threshold=0.3, epochs=2, lr=0.05, finetune=1)
    training = Training(batch_size=8, momentum=0.9)
    sim = Simulation(
        method, fs.models.small_cnn(data), data, seed=11, training=training, device=device, precision="float32", **how
    )
    rounds(sim, 6)
    return {k: {n: v.cpu() for n, v in sim.store.rows[k].items()} for k in ("persistence", "mask")}


@pytest.mark.parametrize("how", [{}, {"chunk": 2}, {"fraction": 0.8}], ids=["all", "chunks", "some sit out"])
def test_fedpersist_keeps_what_it_does_on_a_cpu(how, made):
    """The persistence of four rounds agrees to rounding, and so do the layers that are kept."""
    cpu, gpu = (persisting(device, **how) for device in ("cpu", "cuda"))
    assert made
    for n, v in cpu["persistence"].items():
        torch.testing.assert_close(gpu["persistence"][n], v, rtol=0, atol=1e-3, equal_nan=True)
        assert torch.equal(gpu["mask"][n], cpu["mask"][n])
    assert any(m.any() for m in cpu["mask"].values())


def grouping(device, **how):
    """Two kinds of clients, six rounds."""
    data = fs.load("digits", clients=6, shift="groups", train=120, test=10, seed=4)
    training = Training(batch_size=20, momentum=0.9)
    method, model = fs.FedAlike(epochs=2, lr=0.02, finetune=1), fs.models.mlp(data, hidden=32)
    sim = Simulation(method, model, data, seed=4, training=training, device=device, precision="float32", **how)
    rounds(sim, 6)
    models = {view: {n: v.cpu() for n, v in sim.models(range(6), view).items()} for view in ("local", "merged")}
    return method.groups(sim.server).tolist(), models


@pytest.mark.parametrize("how", [{}, {"chunk": 2}, {"fraction": 0.8}], ids=["all", "chunks", "some sit out"])
def test_fedalike_groups_as_on_a_cpu(how, made):
    (groups, cpu), (found, gpu) = (grouping(device, **how) for device in ("cpu", "cuda"))
    assert made
    assert found == groups
    assert 1 < len(set(groups) - {-1}) < 6
    torch.testing.assert_close(gpu, cpu, rtol=0, atol=1e-3)


@pytest.mark.parametrize("after", [NEVER, 1], ids=["as written", "recorded"])
def test_halves_train_as_on_a_cpu(after, made, monkeypatch):
    """Also those of clients of which some are not cut: recorded programs are given which samples to take."""
    monkeypatch.setitem(recorded.RECORD_AFTER, "cuda", after)
    ends = []
    for device in ("cpu", "cuda"):
        sim = simulation("fedavg", "cnn-batchnorm", device=device, precision="float32")
        ids = torch.arange(len(SIZES))
        tree = {n: v.expand(len(SIZES), *v.shape) for n, v in sim.initial.items()}
        whose = torch.tensor([True, True, False, True, False, True], device=sim.device)
        passes = [fs.Pass(dict.fromkeys(sim.model.params, True), 0.05, epoch) for epoch in range(3)]
        doors = [sim._work(ids, 0).half(which, some) for some in (None, whose) for which in (0, 1)]
        trees = [door.train(tree, passes) for door in doors]
        pairs = zip(doors, trees, strict=True)
        ends.append([torch.cat([v.flatten() for v in tree.values()] + [d.loss]).cpu() for d, tree in pairs])
    assert bool(made) == (after == 1)
    for cpu, gpu in zip(*ends, strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=1e-4, atol=1e-4)
