"""Outputs of frozen layers, computed once per sample: the same training, on less work."""

import copy
import io
import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedselect as fs
from fedselect.models import steps
from fedselect.simulate import engine
from fedselect.training import prefix


def pictures(n, seed, classes=4):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    x = torch.randint(0, 90, (n, 3, 16, 16), generator=g) + 50 * y.view(-1, 1, 1, 1)
    return x.to(torch.uint8), y


def federation(*sizes):
    parts = [[pictures(n, 10 * i + j) if n else None for j, n in enumerate(s)] for i, s in enumerate(sizes)]
    return fs.Federation([fs.ClientData(*p) for p in parts], 4)


@pytest.fixture(scope="module")
def data():
    """The second client has no validation data, and the first more training data than fits one chunk."""
    return federation((prefix.CHUNK + 6, 9, 5), (20, 8, 0), (27, 7, 6))


@pytest.fixture(scope="module")
def little():
    """For large networks."""
    return federation((13, 5, 4), (8, 4, 0))


class Foreign(nn.Module):
    """A body, and a head with dropout in a module of its own, as in torchvision."""

    def __init__(self, dropout=0.5):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(3))
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(54, 4))

    def forward(self, x):
        return {"features": x, "logits": self.classifier(self.body(x).flatten(1))}


def sequential():
    torch.manual_seed(5)
    return nn.Sequential(nn.Flatten(), nn.Linear(768, 12), nn.ReLU(inplace=True), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))


def seeded(make):
    torch.manual_seed(6)
    return make()


MODELS = {
    "resnet18, head": (lambda d: fs.head_only(fs.models.resnet18(d)), "fc"),
    "resnet18, lora": (lambda d: fs.lora(fs.models.resnet18(d), 2, "layer4.1.*"), "layer4.1"),
    "resnet18, layers": (lambda d: fs.layers_only(fs.models.resnet18(d), "layer4.1.bn2,fc"), "layer4.1"),
    "resnet18, bias": (lambda d: fs.bias_only(fs.models.resnet18(d)), None),  # of norm layers, from the first on
    "vit_tiny, head": (lambda d: fs.head_only(fs.models.vit_tiny(d, patch=8)), "head"),
    "vit_tiny, lora": (lambda d: fs.lora(fs.models.vit_tiny(d, patch=8), 2, "blocks.11.*"), "blocks.11"),
    "vit_tiny, norm": (lambda d: fs.norm_only(fs.models.vit_tiny(d, patch=8)), None),  # patches alone are little work
    "mlp, head": (lambda d: fs.head_only(fs.models.mlp(d)), "3"),
    "mlp, lora": (lambda d: fs.lora(fs.models.mlp(d), 2), None),
    "small_cnn, head": (lambda d: fs.head_only(fs.models.small_cnn(d, norm="batch")), "fc"),
    "small_cnn, layers": (lambda d: fs.layers_only(fs.models.small_cnn(d, norm="group"), "hidden,fc"), "hidden"),
    "small_cnn, norm": (lambda d: fs.layers_only(fs.models.small_cnn(d, norm="batch"), "norm2.*,fc"), "conv2"),
    "Sequential": (lambda d: fs.layers_only(sequential(), "3.*,5.*"), "3"),
    "foreign": (lambda d: fs.head_only(fs.Model.wrap(seeded(Foreign), head="classifier")), "classifier"),
    "foreign, guessed": (lambda d: fs.head_only(seeded(Foreign)), "classifier"),
}  # fmt: skip


def simulation(model, data, whole=False, method=None, **how):
    how = {"seed": 3, "training": fs.Training(batch_size=8, momentum=0.9), "val": True, **how}
    with pytest.MonkeyPatch.context() as patch:
        if whole:
            patch.setattr(engine, "run_ahead", lambda *given: None)
        return fs.Simulation(method or fs.FedAvgFT(lr=0.02), model, data, **how)


def values(s):
    return {n: v.clone() for n, v in s.models(range(s.clients)).items()}


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.uint8])
def test_samples_of_any_strides_have_a_checksum(dtype):
    """An empty tensor may have the strides of what it was cut from, and is contiguous all the same."""
    nothing = torch.zeros(1, dtype=dtype).expand(4)[:0]
    assert nothing.is_contiguous()
    assert nothing.stride() == (0,)
    assert prefix._checksum(nothing) == prefix._checksum(torch.zeros(0, 3, dtype=dtype))
    v = torch.arange(6).to(dtype).view(2, 3)
    assert prefix._checksum(v.T) == prefix._checksum(v.T.contiguous()) != prefix._checksum(v)


@pytest.mark.parametrize("name", MODELS)
def test_training_on_kept_outputs_is_training_the_whole_network(name, data, little):
    make, before = MODELS[name]
    data = little if name.startswith(("resnet", "vit")) else data
    model = make(data)
    kept, whole = simulation(model, data), simulation(model, data, whole=True)
    assert (kept.frozen and kept.frozen.before) == before
    assert whole.frozen is None
    if before is None:
        assert kept.fitted.model is model
        return
    assert kept.fitted.model.names == model.names
    assert kept.fitted.model.frozen < model.frozen
    records = [(kept.step(), whole.step()) for _ in range(2)][-1]
    for key in ("accuracy", "val_accuracy", "bytes_up", "bytes_down"):
        assert records[0][key] == records[1][key]
    assert records[0]["train_loss"] == pytest.approx(records[1]["train_loss"], rel=1e-4)
    ours, theirs = values(kept), values(whole)
    start = model.init(3)
    moved = max(float((v - start[n]).abs().max()) for n, v in theirs.items())
    assert moved > 1e-3  # both trained
    for n, v in theirs.items():
        torch.testing.assert_close(ours[n], v, rtol=1e-3, atol=1e-4 * max(1.0, moved))


def test_it_is_the_plain_loop_of_a_head_on_features(data):
    """Full batches, so that their order means nothing; in float64."""
    model = fs.head_only(fs.models.small_cnn(data, norm="batch"))
    s = simulation(model, data, method=fs.Local(epochs=3, lr=0.1), training=fs.Training(batch_size=128, momentum=0.9))
    s.step()
    net = model.build().double().eval()
    for i, client in enumerate(data.clients):
        x, y = (client.train[0].double() / 255 - 0.5) / 0.5, client.train[1]
        with torch.no_grad():
            h = F.max_pool2d(F.relu(net.norm1(net.conv1(x))), 2)
            h = F.max_pool2d(F.relu(net.norm2(net.conv2(h))), 2)
            h = F.relu(net.hidden(h.flatten(1)))
        w, b = (model.init(3)[f"fc.{n}"].double().requires_grad_() for n in ("weight", "bias"))
        past = [torch.zeros_like(w), torch.zeros_like(b)]
        for _ in range(3):
            grads = torch.autograd.grad(F.cross_entropy(h @ w.T + b, y), (w, b))
            for v, m, g in zip((w, b), past, grads, strict=True):
                m.mul_(0.9).add_(g)
                v.data.sub_(0.1 * m)
        found = s.models([i], "local")
        torch.testing.assert_close(found["fc.weight"][0].double(), w.detach(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found["fc.bias"][0].double(), b.detach(), rtol=1e-4, atol=1e-6)


class Noisy(nn.Module):
    """Draws in training, mixes the samples of a batch, or writes to a buffer."""

    def __init__(self, how):
        super().__init__()
        self.how, self.body, self.fc = how, nn.Linear(768, 16), nn.Linear(16, 4)
        self.register_buffer("seen", torch.zeros(()), persistent=how == "remembers")

    def forward(self, x):
        h = self.body(x.flatten(1))
        if self.how == "draws":
            h = F.dropout(h, 0.1, self.training)
        if self.how == "mixes":
            h = h - h.mean(0)
        if self.how == "remembers" and self.training:
            self.seen = self.seen + h.mean()
        out = self.fc(h)
        if self.how == "goes on":
            out = out * 2
        if self.how == "goes on in place":
            out = out.mul_(2)
        return (self.fc(h + 1), out)[1] if self.how == "twice" else out


@pytest.mark.filterwarnings("ignore:Noisy cannot run for all clients")
@pytest.mark.parametrize(
    ("make", "before"),
    [
        (lambda d: fs.head_only(fs.models.vit_tiny(d, patch=8, dropout=0.1)), None),
        (lambda d: fs.head_only(fs.models.vit_tiny(d, patch=8, drop_path=0.3)), "blocks.1"),  # the first block drops nothing
        (lambda d: fs.layers_only(fs.models.small_cnn(d, norm="batch"), "norm1.*,fc"), None),
        (lambda d: fs.head_only(nn.Sequential(nn.Flatten(), nn.Linear(768, 9), nn.Dropout(0.1), nn.Linear(9, 4))), "2"),
        *[
            (lambda d, how=how: fs.head_only(fs.Model.wrap(Noisy(how), head="fc")), before)
            for how, before in {
                "": "fc", "draws": None, "mixes": None, "remembers": None, "twice": None,
                "goes on": None, "goes on in place": None,
            }.items()
        ],
        (lambda d: fs.models.small_cnn(d), None),
    ],
)  # fmt: skip
def test_what_is_random_or_trains_or_mixes_samples_is_not_kept(data, make, before):
    s = simulation(make(data), data)
    assert (s.frozen and s.frozen.before) == before


def test_nothing_is_kept_of_augmented_samples(data):
    model = fs.head_only(fs.models.small_cnn(data))
    assert simulation(model, data).frozen
    moved = simulation(model, replace(data, augment="crop-flip"))
    assert moved.frozen is None
    assert moved.fitted.model is model


def test_an_earlier_cut_or_none_if_memory_is_short(data, monkeypatch):
    model = fs.head_only(fs.models.small_cnn(data))
    samples = sum(len(p[1]) for c in data.clients for p in (c.train, c.test, c.val) if p)
    (bytes_,) = {4 * 4 * 16}  # float32, four times the width
    assert simulation(model, data).frozen.size == samples * bytes_
    asked = []

    def memory(device):
        asked.append(device)
        return 4 * (samples * bytes_ - 1)

    monkeypatch.setattr("fedselect.simulate.frozen.memory", memory)
    assert simulation(model, data).frozen is None  # what comes before is larger still
    assert asked == [torch.device("cpu")]
    wide = fs.head_only(nn.Sequential(nn.Flatten(), nn.Linear(768, 8), nn.Linear(8, 500), nn.Linear(500, 4)))
    found = simulation(wide, data).frozen
    assert (found.before, found.size) == ("2", samples * 8 * 4)


def test_memory_is_what_the_machine_or_its_container_has(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(prefix, "Path", lambda name: limit)
    cpu = torch.device("cpu")
    whole = prefix.memory(cpu)
    for said, found in (("max\n", whole), ("1000000\n", 1_000_000), (f"{whole * 2}\n", whole)):
        limit.write_text(said)
        assert prefix.memory(cpu) == found


def test_a_network_in_steps_is_what_its_parts_compute(data):
    """For every network of the package that runs in steps, each cut is exact, and the rest has nothing of what came before."""
    text = fs.Federation([fs.ClientData((torch.randint(0, 9, (4, 6)), torch.randint(0, 9, (4, 6))))], 9)
    waves = fs.Federation([fs.ClientData((torch.randn(4, 2, 40), torch.arange(4)))], 4)
    made = [
        *((fs.models.small_cnn(data, norm=n), data) for n in ("none", "batch", "group")), (fs.models.resnet18(data), data),
        (fs.models.resnet50(data, stem="small"), data), (fs.models.vit_tiny(data), data), (fs.models.mlp(data), data),
        (fs.models.conv1d(waves), waves), (fs.models.gru(text), text),
    ]  # fmt: skip
    for model, own in made:
        net, x = model.module.eval(), own.clients[0].train[0][:2]
        x = x.float() if x.dtype == torch.uint8 else x
        with torch.no_grad():
            whole, paths, h = net(x), steps.parts(net), x
            assert len(paths) > 2
            names = set(net.state_dict())
            for at, path in enumerate(paths):
                rest = copy.deepcopy(net)
                steps.drop(rest, path)
                assert torch.equal(rest(h), whole)
                before = {n for p in paths[:at] for n in steps.used(net, p)}
                assert set(rest.state_dict()) == {n for n in names if not any(n == b or n.startswith(f"{b}.") for b in before)}
                h = steps.run(net, path, h)
            assert torch.equal(h, whole)


@pytest.mark.parametrize(
    "method",
    [
        fs.FedAlike(lr=0.05),
        fs.FedPAC(lr=0.05),
        fs.FedSelect(lr=0.05, rate=0.3, limit=0.5),
        fs.FedPer(lr=0.05),
        fs.Ditto(lr=0.05),
    ],
    ids=lambda m: type(m).__name__,
)
def test_methods_see_the_same_features(data, method):
    model = fs.layers_only(fs.models.small_cnn(data), "hidden,fc")
    kept, whole = simulation(model, data, method=method), simulation(model, data, whole=True, method=method)
    assert kept.frozen.before == "hidden"
    for _ in range(2):
        a, b = kept.step(), whole.step()
    assert a["accuracy"] == b["accuracy"]
    for n, v in values(whole).items():
        torch.testing.assert_close(values(kept)[n], v, rtol=1e-3, atol=1e-5)
    assert kept.groups() == whole.groups()


def test_resumed_and_pickled_runs_end_as_uninterrupted_ones(little, tmp_path):
    model = fs.lora(fs.models.resnet18(little), 2, "layer4.1.*")
    straight = simulation(model, little, keep="best")
    for _ in range(3):
        straight.step()
    first = simulation(model, little, keep="best")
    first.step()
    first.save(tmp_path)
    resumed = simulation(model, little, keep="best")
    assert resumed.resume(tmp_path)
    copied = pickle.loads(pickle.dumps(first))
    for s in (resumed, copied):
        assert s.frozen == straight.frozen
        for _ in range(2):
            s.step()
        assert all(torch.equal(v, values(straight)[n]) for n, v in values(s).items())
    whole = simulation(model, little, whole=True, keep="best")
    assert whole.resume(tmp_path)  # what a checkpoint holds does not depend on it


def test_results_take_raw_inputs_and_hold_the_whole_network(data, tmp_path, capsys):
    model = fs.head_only(fs.Model.wrap(seeded(Foreign), head="classifier"))
    result = fs.run(fs.FedAvg(lr=0.05), model=model, data=data, rounds=2, progress=True)
    assert (
        "Foreign: the layers before classifier are frozen; their outputs are computed once per sample"
        in capsys.readouterr().err
    )
    s = result.simulation
    net = model.build()
    net.load_state_dict(result.personal(0))
    x, y = data.clients[0].test
    with torch.no_grad():
        own = net.eval()((x.float() / 255 - 0.5) / 0.5)["logits"].argmax(1)
    assert torch.equal(torch.as_tensor(result.predict(0, x)), own)
    assert float((own == y).double().mean()) == pytest.approx(result.clients[0]["accuracy"])
    assert result.scores("val")[0]["accuracy"] is not None
    result.save(tmp_path / "r")
    saved = fs.load_result(tmp_path / "r", model=Foreign())
    assert torch.equal(torch.as_tensor(saved.predict(0, x)), own)
    assert s.raw.x.dtype == torch.uint8
    assert s.bare is False  # exported files say that the network returns a dict, although what trained returns a tensor
    assert fs.adapt(result, data.clients[1]).model.state_dict().keys() == net.state_dict().keys()


def test_runs_side_by_side_share_outputs_and_end_as_alone(data):
    model = fs.head_only(fs.models.small_cnn(data))
    methods = {"a": fs.FedAvg(lr=0.02), "b": fs.FedAvg(lr=0.05)}
    found = fs.compare(methods, model=model, data=data, rounds=2, training=fs.Training(batch_size=8), seeds=[0, 1])
    pools = {r.simulation._split["train"].x.data_ptr() for r in found.values()}
    assert len(pools) == 1
    for (name, seed), result in found.items():
        alone = fs.run(methods[name], model=model, data=data, rounds=2, training=fs.Training(batch_size=8), seed=seed)
        assert alone.headline == result.headline
        assert all(torch.equal(v, alone.models()[i][n]) for i in range(3) for n, v in result.models()[i].items())


def test_changed_samples_are_run_again(data):
    """Also if they were changed in place, and by what they are rather than by which object holds them."""
    own = copy.deepcopy(data)
    model = fs.head_only(fs.models.small_cnn(data))
    first, again = simulation(model, own), simulation(model, own)
    assert again._split["train"].x is first._split["train"].x
    rebuilt = simulation(fs.head_only(fs.models.small_cnn(data)), own)
    assert rebuilt._split["train"].x is first._split["train"].x
    for pool in own.clients:
        pool.train[0].copy_(255 - pool.train[0])
    changed = simulation(model, own)
    assert not torch.equal(changed._split["train"].x, first._split["train"].x)
    own.clients[0].train[1].copy_(3 - own.clients[0].train[1])
    assert torch.equal(simulation(model, own)._split["train"].y[: len(own.clients[0].train[1])], own.clients[0].train[1])
    other = simulation(fs.head_only(seeded(Foreign)), own)
    assert other._split["train"].x.shape[1:] == (54,)


def test_single_samples_are_private_on_kept_outputs(little):
    """The head of a network that is too large for a gradient per sample, as its own, small network."""
    model = fs.head_only(fs.models.resnet18(little))
    s = simulation(
        model, little, method=fs.FedAvg(lr=0.05), val=False, rounds=2, private=fs.Private(epsilon=8, unit="sample", delta=1e-3)
    )
    assert s.frozen.before == "fc"
    assert s.step()["epsilon"] > 0


def test_each_client_chooses_its_model(data):
    both = fs.Federation([c for c in data.clients if c.val is not None], 4)
    model = fs.head_only(fs.models.small_cnn(data))
    a, b = (simulation(model, both, whole=w, view="best", method=fs.FedAvgFT(lr=0.02)) for w in (False, True))
    assert a.step()["clients"]["chosen"] == b.step()["clients"]["chosen"]


def test_an_embedding_without_a_row_is_named_as_before():
    x = torch.randint(0, 9, (8, 6), generator=torch.Generator().manual_seed(0))
    far = x.clone()
    far[5, 2] = 40
    clients = [fs.ClientData((v, v % 9), (x, x % 9), name=n) for v, n in ((x, "north"), (far, "south"))]
    text = fs.Federation(clients, 9)
    model = fs.head_only(fs.models.gru(text, tokens=9))
    with pytest.raises(
        fs.InputError, match=r"no row for one of its inputs, which range from 0 \(client north\) to 40 \(client south\)"
    ):
        fs.Simulation(fs.FedAvg(), model, text)


def test_several_inputs_reach_the_body_of_a_foreign_module():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.numbers, self.fc = nn.Embedding(9, 64), nn.Linear(30, 64), nn.Linear(64, 3)

        def forward(self, words, numbers):
            return self.fc(torch.tanh(self.words(words).mean(1) + self.numbers(numbers)))

    g = torch.Generator().manual_seed(0)

    def part(n):
        x = {"words": torch.randint(0, 9, (n, 5), generator=g), "numbers": torch.randn(n, 30, generator=g)}
        return x, torch.randint(0, 3, (n,), generator=g)

    data = fs.Federation([fs.ClientData(part(9 + i), part(4)) for i in range(2)], 3)
    model = fs.head_only(seeded(Both))
    kept, whole = simulation(model, data, val=False), simulation(model, data, whole=True, val=False)
    assert kept.frozen.before == "fc"
    kept.step(), whole.step()
    for n, v in values(whole).items():
        torch.testing.assert_close(values(kept)[n], v)


def test_recomputed_blocks_may_be_frozen(data):
    for targets, still in (("blocks.9.*,blocks.11.*", True), ("blocks.11.*", False)):
        model = fs.lora(fs.models.vit_tiny(data, patch=8), 2, targets)
        one = fs.Federation([fs.ClientData(pictures(8, 1), pictures(4, 2))], 4)
        a, b = simulation(model, one, recompute=True, val=False), simulation(model, one, val=False)
        assert a.fitted.recompute == still
        a.step(), b.step()
        for n, v in values(b).items():
            torch.testing.assert_close(values(a)[n], v, rtol=1e-4, atol=1e-6)


def test_the_rest_of_a_network_can_be_stored():
    net = steps.Tail("a.b", nn.Linear(3, 2))
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    assert list(again.state_dict()) == ["a.b.weight", "a.b.bias"]
    assert torch.equal(again(torch.ones(1, 3)), net(torch.ones(1, 3)))


def test_a_run_says_it_once(cli, tmp_path):
    how = ["--data", "digits", "--clients", 3, "--model", "small_cnn", "--rounds", 1, "--device", "cpu"]
    note = "note: small_cnn: the layers before fc are frozen; their outputs are computed once per sample ("
    one = cli("run", *how, "--adapt", "head", "--method", "fedavg", "--out", tmp_path / "one")
    assert (one.code, one.err.count(note)) == (0, 1)
    several = cli("compare", *how, "--adapt", "head", "--methods", "fedavg,local", "--seeds", 2, "--out", tmp_path / "several")
    assert (several.code, several.err.count(note)) == (0, 1)
    whole = cli("run", *how, "--method", "fedavg", "--out", tmp_path / "whole")
    assert (whole.code, whole.err.count("note:")) == (0, 0)
