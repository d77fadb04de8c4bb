"""Models: names, sizes and initial values of the networks, and any nn.Module as body and head."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fedselect as fs
from fedselect.models import MODELS, conv1d, mlp, resnet18, small_cnn
from fedselect.simulate import Simulation
from fedselect.training.fitted import Fitted

GREY = SimpleNamespace(shape=(1, 8, 8), classes=10)
COLOUR = SimpleNamespace(shape=(3, 32, 32), classes=10)
SIGNAL = SimpleNamespace(shape=(6, 50), classes=5)


def classes_of(count):
    """Data with so many classes, as a task asks for it."""
    return SimpleNamespace(classes=count)


@pytest.fixture(scope="module")
def resnet():
    return resnet18(COLOUR)


def torchvision_names():
    """resnet18's state_dict keys, by rule."""

    def norm(at):
        return {f"{at}.{n}" for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}

    names = {"conv1.weight", "fc.weight", "fc.bias"} | norm("bn1")
    for layer in (1, 2, 3, 4):
        for block in (0, 1):
            at = f"layer{layer}.{block}"
            names |= {f"{at}.conv1.weight", f"{at}.conv2.weight"} | norm(f"{at}.bn1") | norm(f"{at}.bn2")
            if layer > 1 and block == 0:  # where width doubles and the picture halves
                names |= {f"{at}.downsample.0.weight"} | norm(f"{at}.downsample.1")
    return names


def test_resnet18_has_torchvisions_names(resnet):
    assert set(resnet.state_dict(resnet.init(0))) == torchvision_names()


@pytest.mark.parametrize("classes", [10, 65, 100])
def test_resnet18_has_torchvisions_size(classes):
    # torchvision's resnet18 has 11,689,512 parameters with 1000 classes, 512 + 1 of them for each class
    expected = 11_689_512 - (1000 - classes) * 513
    assert expected == 11_181_642 + (classes - 10) * 513
    model = resnet18(SimpleNamespace(shape=(3, 32, 32), classes=classes))
    assert model.size == expected
    Fitted(model).check(torch.zeros(2, 3, 32, 32), fs.Classification(), classes_of(classes))


def test_resnet18s_blocks_have_torchvisions_shapes(resnet):
    shapes = {n: tuple(v.shape) for n, v in resnet.init(0).items()}
    assert shapes["conv1.weight"] == (64, 3, 7, 7)
    assert shapes["layer1.1.conv2.weight"] == (64, 64, 3, 3)
    assert shapes["layer3.0.conv1.weight"] == (256, 128, 3, 3)
    assert shapes["layer4.0.downsample.0.weight"] == (512, 256, 1, 1)
    assert shapes["fc.weight"] == (10, 512)


def test_the_small_stem_keeps_small_pictures_large():
    assert tuple(resnet18(COLOUR, stem="small").init(0)["conv1.weight"].shape) == (64, 3, 3, 3)
    made = resnet18(COLOUR, stem="small").module
    seen = {}
    made.layer1.register_forward_pre_hook(lambda m, i: seen.update(shape=i[0].shape))
    made.eval()(torch.zeros(1, 3, 32, 32))
    assert tuple(seen["shape"]) == (1, 64, 32, 32)  # neither strided nor pooled


def test_convolutions_start_as_kaiming_fan_out_and_norms_as_identity(resnet):
    values = resnet.init(1)
    w = values["layer4.1.conv2.weight"]
    # std = sqrt(2 / (out channels * 3 * 3)); 2.4 million draws hold it to a fraction of a percent
    assert w.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)
    assert values["conv1.weight"].std().item() == pytest.approx((2 / (64 * 49)) ** 0.5, rel=0.05)
    assert (values["bn1.weight"] == 1).all()
    assert (values["bn1.bias"] == 0).all()


@pytest.mark.parametrize(
    ("name", "data"), [("mlp", GREY), ("small_cnn", GREY), ("conv1d", SIGNAL)], ids=["mlp", "small_cnn", "conv1d"]
)
def test_init_depends_on_the_seed_alone(name, data):
    torch.manual_seed(5)
    model = MODELS[name](data)
    first = model.init(3)
    torch.manual_seed(6)
    again = MODELS[name](data).init(3)
    assert all(first[n].equal(v) for n, v in again.items())
    assert not any(first[n].equal(v) for n, v in model.init(4).items())


def test_making_and_initialising_leaves_torchs_generator_alone():
    before = torch.get_rng_state()
    mlp(GREY).init(3)
    assert torch.get_rng_state().equal(before)


def test_initial_values_are_a_fresh_copy():
    model = mlp(GREY)
    model.init(0)["1.weight"].zero_()
    assert model.init(0)["1.weight"].abs().sum() > 0


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: mlp(GREY, hidden=0), "hidden must be at least 1, not 0"),
        (lambda: small_cnn(GREY, norm="layer"), "norm is none, batch or group, not 'layer'"),
        (lambda: small_cnn(SimpleNamespace(shape=(64,), classes=2)), r"needs inputs of shape \(channels, height, width\)"),
        (lambda: small_cnn(SimpleNamespace(shape=(1, 3, 3), classes=2)), "at least 4x4"),
        (lambda: conv1d(GREY), r"conv1d needs signals of shape \(channels, time\), .* for images use small_cnn"),
        (lambda: conv1d(SIGNAL, width=0), "width must be at least 1, not 0"),
        (lambda: resnet18(COLOUR, stem="large"), "stem must be imagenet or small, not 'large'"),
    ],
)
def test_a_model_that_cannot_be_made_says_why(make, said):
    with pytest.raises(fs.InputError, match=said):
        make()


# ---- Model.wrap


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.fc = nn.Linear(4, 3)
        self.aux = nn.Linear(4, 3)

    def forward(self, x):
        x = self.body(x)
        self.aux(x)
        return self.fc(x)


def test_the_last_linear_is_the_head():
    model = fs.Model.wrap(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)))
    assert model.head == "2"
    assert [n for n in model.names if model.is_head(n)] == ["2.weight", "2.bias"]


def test_a_named_head_may_be_any_submodule_and_is_not_confused_with_its_namesakes():
    model = fs.Model.wrap(nn.ModuleDict({"fc": nn.Linear(4, 4), "fc2": nn.Linear(4, 4)}), head="fc")
    assert [n for n in model.names if model.is_head(n)] == ["fc.weight", "fc.bias"]


def test_features_are_what_the_head_was_given():
    module = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    model, x = fs.Model.wrap(module), torch.randn(2, 4)
    out = Fitted(model).apply(model.init(0), x)
    torch.testing.assert_close(out.features, module[:2](x))
    torch.testing.assert_close(out.logits, module(x))


def test_an_ambiguous_split_lists_the_candidates():
    with pytest.raises(fs.InputError, match=r"last layer '3' is not a Linear; name it: .* with one of 0, 2\."):
        fs.Model.wrap(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), nn.LayerNorm(3)))


def test_a_wrong_head_lists_the_nearest():
    with pytest.raises(fs.InputError, match="TwoHeads has no submodule 'fcc'; candidates: fc"):
        fs.Model.wrap(TwoHeads(), head="fcc")


def test_a_head_that_does_not_produce_the_output_is_found_out():
    with pytest.raises(fs.InputError, match=r"'aux', does not produce its output; .* with one of body, fc, aux\."):
        Fitted(fs.Model.wrap(TwoHeads())).check(torch.zeros(2, 4), fs.Classification(), classes_of(3))
    Fitted(fs.Model.wrap(TwoHeads(), head="fc")).check(torch.zeros(2, 4), fs.Classification(), classes_of(3))


def test_a_model_that_does_not_fit_the_data_says_so():
    model = fs.Model.wrap(nn.Linear(4, 3))
    with pytest.raises(fs.InputError, match=r"Linear cannot take inputs of shape \(5,\)"):
        Fitted(model).check(torch.zeros(2, 5), fs.Classification(), classes_of(3))
    with pytest.raises(fs.InputError, match=r"returns \(2, 3\) for 2 inputs; labels from 0 to 6 need \(2, 7\)"):
        Fitted(model).check(torch.zeros(2, 4), fs.Classification(), classes_of(7))


def test_a_head_without_trainable_parameters_is_refused():
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    net[1].requires_grad_(False)
    for named in ("1", None):  # named or found by itself
        with pytest.raises(fs.InputError, match="head '1' of Sequential has no trainable parameter"):
            fs.Model.wrap(net, head=named)


def test_frozen_parameters_and_counters_are_constants():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    net[0].weight.requires_grad_(False)
    model = fs.Model.wrap(net)
    assert set(model.params) == {"0.bias", "1.weight", "1.bias", "2.weight", "2.bias"}
    assert set(model.stats) == {"1.running_mean", "1.running_var"}
    assert set(model.constants) == {"0.weight", "1.num_batches_tracked"}
    assert model.size == 4 + 4 + 4 + 12 + 3


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(fs.InputError, match="no trainable parameter"):
        fs.Model.wrap(nn.Flatten())


def test_batch_norm_that_counts_its_batches_is_refused():
    with pytest.raises(fs.InputError, match="1: BatchNorm with momentum=None"):
        fs.Model.wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 3)))


def test_state_dict_loads_strictly_into_the_plain_module():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    net[0].weight.requires_grad_(False)
    model = fs.Model.wrap(net)
    tree = {n: v + 1 for n, v in model.init(0).items()}
    fresh = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    fresh.load_state_dict(model.state_dict(tree), strict=True)
    assert fresh[0].weight.equal(net[0].weight)
    assert fresh[1].running_mean.equal(torch.ones(4))  # zero at first, plus one


def test_tied_weights_are_exported_as_trained():
    def tied():
        net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
        net[2].weight = net[0].weight
        return net

    model = fs.Model.wrap(tied, head="2")
    trained = {n: torch.full_like(v, 7.0) for n, v in model.init(0).items()}
    fresh = tied()
    fresh.load_state_dict(model.state_dict(trained), strict=True)
    assert (fresh[0].weight == 7.0).all()


def test_a_wrapped_module_keeps_its_values_and_a_wrapped_function_follows_the_seed():
    net = nn.Linear(4, 3)
    model = fs.Model.wrap(net)
    assert all(v.equal(net.state_dict()[n]) for seed in (0, 1) for n, v in model.init(seed).items())
    made = fs.Model.wrap(lambda: nn.Linear(4, 3))
    assert not made.init(0)["weight"].equal(made.init(1)["weight"])


def test_the_users_own_module_is_left_alone():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    before = {n: v.clone() for n, v in net.state_dict().items()}
    model = fs.Model.wrap(net)
    fitted = Fitted(model)
    for train in (True, False):
        fitted.apply(model.init(0), torch.randn(5, 4), train=train)
    assert all(v.equal(before[n]) for n, v in net.state_dict().items())
    assert net.training


@pytest.mark.parametrize("method", [fs.FedAvg(epochs=1), fs.FedSelect(epochs=1)], ids=["fedavg", "fedselect"])
def test_a_model_may_have_a_parameter_that_is_one_number(method, digits):
    class Warm(nn.Module):
        def __init__(self):
            super().__init__()
            self.heat = nn.Parameter(torch.tensor(2.0))
            self.fc = nn.Linear(64, 10)

        def forward(self, x):
            return self.fc(x.flatten(1) * self.heat)

    result = fs.run(method, model=fs.Model.wrap(Warm), data=digits, rounds=2)
    assert result.personal(0)["heat"] != 2.0


def test_something_that_is_no_module_is_refused():
    with pytest.raises(fs.InputError, match=r"a model must be an nn\.Module or a function that creates one, not int"):
        fs.Model.wrap(3)


def test_a_model_knows_which_of_its_entries_never_move():
    """At 32x32 the last stage of ResNet18 sees single pixels: the outer taps of its kernels only ever meet padding."""
    model = resnet18(SimpleNamespace(shape=(3, 32, 32), classes=3))
    fitted = Fitted(model)
    assert fitted.dead() == {}
    fitted.check(torch.randn(4, 3, 32, 32), fs.Classification(), classes_of(3))
    dead = fitted.dead()
    values = {n: v.requires_grad_(n in model.params) for n, v in model.init(0).items()}
    fitted.apply(values, torch.randn(4, 3, 32, 32), train=True).logits.square().sum().backward()
    for n in model.params:
        never = dead.get(n, torch.zeros(values[n].numel(), dtype=torch.bool))
        assert (values[n].grad.flatten() == 0)[never].all()
        assert n in dead or (values[n].grad != 0).any()
    assert sum(int(d.sum()) for d in dead.values()) == 6_946_816  # of 11.2 million


def test_the_personal_share_of_what_lives():
    part = (torch.rand(4, 3, 4, 4), torch.tensor([0, 1, 2, 0]))
    data = fs.Federation([fs.ClientData(part, part)] * 2, 3)
    net = fs.Model.wrap(lambda: torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, 4, 1), torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.Flatten(),
        torch.nn.Linear(4, 3)))  # fmt: skip
    sim = Simulation(fs.FedSelect(rate=1.0, limit=0.25, select=fs.Reading(counts="live")), net, data)
    record = sim.step()
    whole, dead = net.size, sum(int(d.sum()) for d in sim.fitted.dead().values())
    assert dead > 4 * 4 * 8  # all taps of the second convolution but the middle one, and some of the first
    live = whole - dead
    assert record["share"] == pytest.approx((live // 4) / whole, abs=1e-6)
    assert sim.live_share() == pytest.approx((live // 4) / live)
    marks = fs.Result(sim, []).masks
    assert not any((m.flatten(1) & sim.fitted.dead()[n]).any() for n, m in marks.items() if n in sim.fitted.dead())


def test_a_norm_layer_of_ones_own_may_count_its_batches():
    class Mine(nn.modules.batchnorm._BatchNorm):
        def _check_input_dim(self, x):
            pass

    model = fs.Model.wrap(lambda: nn.Sequential(nn.Linear(4, 3), Mine(3), nn.Linear(3, 2)))
    assert Fitted(model).others() == {}
