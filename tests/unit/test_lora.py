"""Adapters on a frozen base: against slow loops of plain modules, and in what they refuse."""

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import fedselect as fs
from fedselect.aggregate.product import factored
from fedselect.core.errors import InputError
from fedselect.methods.units import Units
from fedselect.network.home import Home
from fedselect.network.plan import Limits, Shape, plan
from fedselect.runs.config import Config


class Attentive(nn.Module):
    """A convolution, torch's own encoder layer with its fused projections, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, 8, 3, 2, 1)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.fc = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.block(self.embed(x).flatten(2).transpose(1, 2)).mean(1))


@pytest.fixture(scope="module")
def data() -> fs.Federation:
    return fs.load("digits", clients=3, classes_per_client=3, train=16, test=12, seed=3)


def cnn(data: fs.Federation) -> fs.Model:
    return fs.models.small_cnn(data, width=2, norm="batch")


@pytest.mark.parametrize("make", [cnn, lambda data: fs.Model.wrap(Attentive())], ids=["cnn", "attention"])
def test_training_is_that_of_plain_modules_whose_weights_are_base_plus_product(data, make):
    """W = W0 + 2 B A, written out for each step in float64; a batch holds all samples, so their order means nothing."""
    model = fs.lora(make(data), rank=2)
    training = fs.Training(batch_size=16, momentum=0.9)
    sim = fs.Simulation(fs.Local(epochs=3, lr=0.1), model, data, seed=4, training=training)
    sim.step()
    x, y = data.clients[0].train[0].double(), data.clients[0].train[1]
    net = model.build().double().eval()
    leaves = {n: v.double().requires_grad_() for n, v in model.init(4).items()}
    past = {n: torch.zeros_like(v) for n, v in leaves.items()}
    for _ in range(3):
        values = {
            **{n: v.double() for n, v in net.state_dict().items()},
            **{n: v for n, v in leaves.items() if "lora" not in n},
        }
        for weight, (a, b) in model.pairs.items():
            values[weight] = values[weight] + 2 * (leaves[b] @ leaves[a].flatten(1)).view(values[weight].shape)
        loss = F.cross_entropy(torch.func.functional_call(net, values, (x,)), y)
        grads = torch.autograd.grad(loss, list(leaves.values()))
        with torch.no_grad():
            for (n, v), g in zip(leaves.items(), grads, strict=True):
                past[n].mul_(0.9).add_(g)
                v.sub_(0.1 * past[n])
    for n, v in sim.models([0], "local").items():
        torch.testing.assert_close(v[0].double(), leaves[n].detach(), rtol=1e-4, atol=1e-6)


def test_at_first_a_model_is_its_base_and_merged_it_needs_no_adapter(data, tmp_path):
    model = fs.lora(fs.Model.wrap(Attentive()), rank=2, targets="block.*")
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(
            model.assemble().eval()(x), model.build().eval()(x)
        )  # torch has a shortcut for the plain one
    result = fs.run(fs.FedAvg(lr=0.1), model=model, data=data, rounds=2)
    net = model.build()
    assert type(net.block.self_attn) is nn.MultiheadAttention
    net.load_state_dict(result.personal(0))
    values = {n: v[0] for n, v in result.simulation.models([0]).items()}
    with torch.no_grad():
        whole = result.simulation.fitted.apply(values, x).logits
        assert (whole - model.build().eval()(x)).abs().max() > 1e-3  # it has learned
        torch.testing.assert_close(net.eval()(x), whole, rtol=1e-5, atol=1e-5)
    result.save(tmp_path / "r")
    saved = fs.load_result(tmp_path / "r", model=Attentive())
    assert all(torch.equal(v, saved.personal(2)[n]) for n, v in result.personal(2).items())
    shared = saved._source.shared()  # what a newcomer adapts: its adapters as they began, and where the run left them
    assert all(torch.equal(v, shared.initial[n]) for n, v in model.init(0).items())
    assert fs.adapt(saved, data.clients[0]).model.state_dict().keys() == net.state_dict().keys()


def test_only_what_trains_travels_and_the_base_is_one_for_all_seeds(data):
    model = fs.lora(cnn(data), rank=2)
    assert {n: v.shape for n, v in model.init(0).items()} == {
        "conv1.lora_a": (2, 1, 3, 3), "conv1.lora_b": (2, 2), "conv2.lora_a": (2, 2, 3, 3), "conv2.lora_b": (4, 2),
        "hidden.lora_a": (2, 16), "hidden.lora_b": (8, 2), "fc.weight": (10, 8), "fc.bias": (10,),
    }  # fmt: skip
    assert not model.init(0)["conv1.lora_a"].equal(model.init(1)["conv1.lora_a"])
    runs = [fs.Simulation(fs.FedAvg(), model, data, seed=seed) for seed in (0, 1)]
    record = runs[0].step()
    sent = 2 * 9 + 4 + 4 * 9 + 8 + 2 * 16 + 16 + 80 + 10
    assert model.size == sent
    assert 4 * sent * 3 <= record["bytes_up"] < 4 * sent * 3 + 3 * 200
    bases = [{n: v for n, v in run.fitted.module.state_dict().items() if n not in model.names} for run in runs]
    assert all(torch.equal(v, bases[1][n]) for n, v in bases[0].items())


@pytest.mark.parametrize(
    ("make", "trains", "stats"),
    [
        (fs.head_only, {"fc.weight", "fc.bias"}, False),
        (fs.norm_only, {"norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "fc.weight", "fc.bias"}, True),
        (
            lambda m: fs.bias_only(m, beside="nothing"),
            {"conv1.bias", "norm1.bias", "conv2.bias", "norm2.bias", "hidden.bias", "fc.bias"},
            True,
        ),
        (lambda m: fs.layers_only(m, "hidden,conv2.bias"), {"hidden.weight", "hidden.bias", "conv2.bias"}, False),
    ],
)  # fmt: skip
def test_other_parts_of_a_model_train_on_a_frozen_base(data, make, trains, stats):
    model = make(cnn(data))
    assert set(model.params) == trains
    assert bool(model.stats) == stats  # statistics belong to a norm layer that trains
    result = fs.run(fs.FedAvg(lr=0.1), model=model, data=data, rounds=1)
    before, after = model.build().state_dict(), result.personal(0)
    moved = {n for n, v in after.items() if not torch.equal(v, before[n])}
    assert moved - set(model.stats) <= trains
    assert moved & trains
    assert bool(moved & set(model.stats)) == stats


def test_mistakes_are_said_with_what_to_type(data):
    model = cnn(data)
    with pytest.raises(InputError, match="rank must be at least 1, not 0; 8 is usual"):
        fs.lora(model, 0)
    with pytest.raises(InputError, match="rank 8 is too large for conv1"):
        fs.lora(model, 8)
    with pytest.raises(
        InputError, match=r"no layer of small_cnn matches 'attn' \(--targets\); choose from conv1, conv2, hidden\."
    ):
        fs.lora(model, 2, "attn")
    with pytest.raises(InputError, match="has no norm layer to train"):
        fs.norm_only(fs.models.mlp(data))
    with pytest.raises(InputError, match="already has a frozen base"):
        fs.lora(fs.head_only(model), 2)
    with pytest.raises(InputError, match=r"give a model, not its name: fs\.models\.mlp\(data\)"):
        fs.lora("mlp", 2)
    with pytest.raises(InputError, match="alpha must be positive"):
        fs.lora(model, 2, alpha=0.0)
    with pytest.raises(InputError, match=r"needs a model with low-rank adapters; add --adapt lora"):
        fs.run(fs.FedPersist(unit="rank"), model=model, data=data, rounds=1)
    with pytest.raises(InputError, match=r"is for low-rank adapters, and this model has none; add --adapt lora"):
        fs.run(fs.FedAvg(), model=model, data=data, rounds=1, aggregator="product")


def test_whole_ranks_are_selected_by_how_far_their_product_moved(data):
    model = fs.lora(cnn(data), rank=2)
    sim = fs.Simulation(fs.FedSelect(rate=0.3, limit=0.5, select=fs.Reading(unit="rank")), model, data, seed=1)
    before = {n: v[None] for n, v in sim.initial.items()}
    sim.step()
    after = {n: v[:1] for n, v in sim.models([0], "local").items()}
    far = Units(model).moved({n: before[n] for n in model.params}, {n: after[n] for n in model.params})
    slow = {}
    for weight, (a, b) in model.pairs.items():
        for j in range(2):
            was, now = (torch.outer(t[b][0, :, j], t[a][0, j].flatten()).double() for t in (before, after))
            slow[weight, j] = float((now - was).square().mean().sqrt())
            assert float(far[weight][0, j]) == pytest.approx(slow[weight, j], rel=1e-3)
    head = torch.cat([(after[f"fc.{n}"] - before[f"fc.{n}"]).flatten() for n in ("weight", "bias")])
    slow["fc", 0] = float(head.double().square().mean().sqrt())
    assert float(far["fc"]) == pytest.approx(slow["fc", 0], rel=1e-3)
    chosen = sorted(slow, key=lambda u: -slow[u])[:3]  # ceil(0.3 * 7 units), at most floor(0.5 * 7)
    masks = sim.masks()
    for weight, (a, b) in model.pairs.items():
        for j in range(2):
            marks = torch.cat([masks[a][0, j].flatten(), masks[b][0, :, j]])
            assert marks.all() if (weight, j) in chosen else not marks.any()


@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(1, 4))
def test_factors_of_a_product_are_the_nearest_of_their_rank(seed, rank, clients):
    """Against the singular values (Eckart and Young): what is left out is exactly the tail."""
    g = torch.Generator().manual_seed(seed)
    product = sum(
        torch.randn(5, rank, generator=g).double() @ torch.randn(rank, 7, generator=g).double() for _ in range(clients)
    )
    like = torch.randn(rank, 7, generator=g).double()
    for m, near in ((product, like), (product.T, torch.randn(rank, 5, generator=g).double())):
        low, up = factored(m, near)
        tail = torch.linalg.svdvals(m)[rank:].square().sum().sqrt()
        torch.testing.assert_close((m - up @ low).norm(), tail, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(low @ low.T, torch.eye(rank).double() * near.square().sum(1).mean())
    low, up = factored(torch.zeros(5, 7).double(), like)
    assert torch.equal(low, like)
    assert not up.any()


def test_the_mean_of_products_is_not_the_product_of_means():
    """Two clients: B = 1 with A = e1, and B = -1 with A = e2. The mean of B is 0, the mean of products is not."""
    a, b = torch.eye(2)[:, None, :], torch.tensor([1.0, -1.0]).view(2, 1, 1).expand(2, 3, 1)
    values = {"w.lora_a": a, "w.lora_b": b, "bias": torch.tensor([[1.0], [3.0]])}
    fold = fs.Products().fold({}, {n: v[0] for n, v in values.items()})
    fold.add(values, dict.fromkeys(values, True), torch.tensor([1.0, 1.0]))
    found, heard, _ = fold.finish()
    assert not b.mean(0).any()
    torch.testing.assert_close(found["w.lora_b"] @ found["w.lora_a"], torch.tensor([[0.5, -0.5]]).expand(3, 2))
    assert float(found["bias"]) == 2.0
    assert set(found) == set(heard) == set(values)


def test_a_node_with_another_base_is_refused(tmp_path):
    from fedselect.models.resnet import build_resnet18

    for seed in (0, 1):
        torch.manual_seed(seed)
        net = build_resnet18(3, "small", 4)
        save_file({n: v.contiguous() for n, v in net.state_dict().items()}, tmp_path / f"{seed}.safetensors")
    raw = {
        "method": {"name": "fedavg"}, "data": {"name": "digits"}, "adapt": {"name": "lora", "rank": 2, "targets": "layer4.*"},
        "model": {"name": "resnet18", "stem": "small", "weights": str(tmp_path / "0.safetensors")},
    }  # fmt: skip
    shape = Shape((3, 8, 8), tuple("abcd"))
    made = plan(Config.from_dict(raw, "here"), "site", "r", 2, shape, Limits())
    flat = json.loads(json.dumps(made.to_flat()))
    assert len(flat["base"]) == 64
    again = type(made).from_flat(flat, "r")
    same = Home(0, tmp_path, weights=str(tmp_path / "0.safetensors")).adapt(again).assignment("cpu")
    assert same.model.adapters.rank == 2
    with pytest.raises(InputError, match=r"another frozen base here than on the server .* start with the same weights file"):
        Home(0, tmp_path, weights=str(tmp_path / "1.safetensors")).adapt(again).assignment("cpu")
    with pytest.raises(InputError, match="start the client with --weights FILE"):
        Home(0, tmp_path).adapt(again)


def test_a_checkpoint_holds_no_base_and_goes_on_with_the_same_alone(data, tmp_path):
    net = Attentive()
    model = fs.lora(fs.Model.wrap(net), 2)
    sim = fs.Simulation(fs.FedAvg(), model, data)
    sim.step()
    sim.save(tmp_path / "c")
    held = sum(f.stat().st_size for f in (tmp_path / "c").rglob("*.safetensors"))
    assert held < 4 * model.size * (3 + 1) + 20_000
    nn.init.zeros_(net.embed.bias)
    other = fs.Simulation(fs.FedAvg(), fs.lora(fs.Model.wrap(net), 2), data)
    with pytest.raises(fs.CheckpointError, match="base was"):
        other.resume(tmp_path / "c")
    assert dataclasses.replace(model.adapters, rank=3) != model.adapters


class Tied(nn.Module):
    """Words in, the next word out, by one table."""

    def __init__(self):
        super().__init__()
        self.emb, self.hidden, self.out = nn.Embedding(12, 6), nn.Linear(6, 6), nn.Linear(6, 12, bias=False)
        self.out.weight = self.emb.weight

    def forward(self, x):
        return self.out(torch.relu(self.hidden(self.emb(x).mean(1))))


class Twice(nn.Module):
    """One layer under two names."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 64)
        self.b, self.fc = self.a, nn.Linear(64, 10)

    def forward(self, x):
        return self.fc(torch.relu(self.b(torch.relu(self.a(x.flatten(1))))))


@pytest.mark.parametrize(("make", "layer", "free"), [(Tied, "out", "hidden"), (Twice, "a", "fc")])
def test_a_weight_that_is_used_twice_gets_no_adapter(make, layer, free):
    """Merged into it, the adapter would also change what it was not trained for."""
    found = fs.lora(make(), 2, beside="nothing")
    assert found.adapters.layers == (free,)
    with pytest.raises(fs.InputError, match=f"the weight of {layer} is used elsewhere in {make.__name__}, too"):
        fs.lora(make(), 2, targets=layer, beside="nothing")


def test_a_bias_that_trains_beside_leaves_its_layer_the_adapter(data):
    found = fs.lora(fs.models.mlp(data), 2, beside="1.bias")
    assert found.params == ["1.bias", "1.lora_a", "1.lora_b", "3.lora_a", "3.lora_b"]
    attention = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    net = nn.Sequential(nn.Flatten(2), nn.Linear(64, 8), attention, nn.Flatten(), nn.Linear(8, 10))
    found = fs.lora(net, 2, beside="2.self_attn.out_proj.bias")
    assert "2.self_attn" in found.adapters.layers
    found = fs.lora(net, 2, beside="2.self_attn.out_proj.weight")
    assert "2.self_attn" not in found.adapters.layers
    with pytest.raises(fs.InputError, match=r"no layer for an adapter: all of them train whole \(--beside\)"):
        fs.lora(fs.models.mlp(data), 2, beside="*")


def test_a_head_that_is_frozen_is_said_to_be(data):
    model = fs.layers_only(fs.models.mlp(data), "1")
    with pytest.raises(fs.InputError, match=r"that of mlp \(3\) is frozen; let it train, too: add it to --targets"):
        model.need_head("fedper")
