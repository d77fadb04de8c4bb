"""Stacked layers against torch's own, client by client in float64, and dropout keyed by client."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, vmap

import fedselect as fs
from fedselect.core.random import client_keys
from fedselect.training.layers import AdaptedLinear, BatchNorm, LayerNorm, Linear
from fedselect.training.lifted import for_all
from fedselect.training.stacked import Forward
from fedselect.training.taps import Taps, live_taps

CLIENTS = 3
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_for_all_is_vmap():
    tree, x = {"a": {"w": randn(CLIENTS, 4, 5)}, "b": randn(CLIENTS, 5, seed=1)}, randn(CLIENTS, 2, 5, seed=2)

    def one(tree, x):
        return x @ tree["a"]["w"].T, (x * tree["b"]).sum()

    for got, want in zip(for_all(one, CLIENTS, tree, x), vmap(one)(tree, x), strict=True):
        assert torch.equal(got, want)


def leaves(*tensors):
    return [None if t is None else t.clone().requires_grad_() for t in tensors]


def together_and_alone(module, x, train=True):
    """Outputs, gradients and buffers of C random copies of a module: stacked under Forward, and one by one in torch."""
    module = module.double().train(train)
    names = [n for n, v in module.state_dict().items() if v.is_floating_point()]
    values = {
        n: module.state_dict()[n] + randn(CLIENTS, *module.state_dict()[n].shape, seed=i).abs() for i, n in enumerate(names)
    }
    params = dict(module.named_parameters())
    upstream = None

    stacked = {n: v.clone().requires_grad_(n in params) for n, v in values.items()}
    xs = x.clone().requires_grad_()

    def one(tree, x):
        buffers = {n: v.clone() for n, v in tree.items() if n not in params}
        return functional_call(module, {**tree, **buffers}, (x,)), buffers

    with Forward(None, stacked=True):
        y, buffers = vmap(one)(stacked, xs)
    upstream = randn(*y.shape, seed=9)
    (y * upstream).sum().backward()
    results = []
    for c in range(CLIENTS):
        tree = {n: v[c].clone().requires_grad_(n in params) for n, v in values.items()}
        xc = x[c].clone().requires_grad_()
        yc = functional_call(module, tree, (xc,))  # torch's own layer writes its buffers into the tree
        (yc * upstream[c]).sum().backward()
        got = {"y": y[c], "x": xs.grad[c], **{n: stacked[n].grad[c] for n in params}, **{n: v[c] for n, v in buffers.items()}}
        expected = {"y": yc, "x": xc.grad, **{n: v.grad if n in params else v for n, v in tree.items()}}
        results.append((got, expected))
    return results


def without(name, layer):
    layer.register_parameter(name, None)
    return layer


LAYERS = {
    "batch norm of pictures": (lambda: nn.BatchNorm2d(4), (5, 4, 3, 3)),
    "batch norm of vectors": (lambda: nn.BatchNorm1d(4), (5, 4)),
    "batch norm of sequences": (lambda: nn.BatchNorm1d(4, momentum=0.3, eps=1e-3), (5, 4, 6)),
    "batch norm without affine": (lambda: nn.BatchNorm2d(4, affine=False), (5, 4, 3, 3)),
    "batch norm with a bias alone": (lambda: without("weight", nn.BatchNorm2d(4)), (5, 4, 3, 3)),
    "batch norm with a weight alone": (lambda: without("bias", nn.BatchNorm1d(4)), (5, 4)),
    "batch norm without statistics": (lambda: nn.BatchNorm2d(4, track_running_stats=False), (5, 4, 3, 3)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (5, 4, 3, 3)),
    "group norm without affine": (lambda: nn.GroupNorm(4, 4, affine=False), (5, 4)),
    "layer norm": (lambda: nn.LayerNorm(4), (5, 4)),
    "layer norm without bias": (lambda: nn.LayerNorm(4, bias=False), (5, 4)),
    "convolution": (lambda: nn.Conv2d(4, 2, 3, 2, 1), (5, 4, 6, 6)),
    "convolution padded to the same size": (lambda: nn.Conv2d(4, 2, 3, padding="same"), (5, 4, 6, 6)),
    "grouped convolution": (lambda: nn.Conv2d(4, 4, 3, groups=2), (5, 4, 6, 6)),
    "depthwise convolution": (lambda: nn.Conv2d(4, 8, 3, padding=1, groups=4), (5, 4, 6, 6)),
    "dilated convolution": (lambda: nn.Conv2d(4, 2, 3, padding=2, dilation=2), (5, 4, 6, 6)),
    "convolution over the whole picture": (lambda: nn.Conv2d(4, 2, 6), (5, 4, 6, 6)),
    "convolution with dead taps": (lambda: nn.Conv2d(4, 2, 5, 2, 3), (5, 4, 2, 3)),
    "convolution of sequences": (lambda: nn.Conv1d(4, 2, 3, padding=1), (5, 4, 6)),
    "strided convolution of sequences": (lambda: nn.Conv1d(4, 2, 5, 2, 2), (5, 4, 9)),
    "linear": (lambda: nn.Linear(4, 3), (5, 4)),
    "linear without bias": (lambda: nn.Linear(4, 3, bias=False), (5, 4)),
    "linear of sequences": (lambda: nn.Linear(4, 3), (5, 6, 4)),
    "average pool to one": (lambda: nn.AdaptiveAvgPool2d(1), (5, 4, 6, 6)),
    "average pool to few": (lambda: nn.AdaptiveAvgPool2d((3, 2)), (5, 4, 6, 6)),
    "max pool": (lambda: nn.MaxPool2d(3, 2, 1), (5, 4, 6, 6)),
    "transformer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), (5, 6, 4)),
    "convolution with mirrored borders": (lambda: nn.Conv2d(4, 2, 3, padding=1, padding_mode="reflect"), (5, 4, 6, 6)),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own attention, under vmap
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_stacked_layer_is_torchs_for_every_client(layer, train):
    make, shape = LAYERS[layer]
    for got, expected in together_and_alone(make(), randn(CLIENTS, *shape, seed=20), train):
        assert got.keys() >= expected.keys()
        for n, v in expected.items():
            torch.testing.assert_close(got[n], v, rtol=1e-8, atol=1e-10, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize("how", [{}, {"padding_idx": 2}, {"padding_idx": -1}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_an_embedding_is_torchs_for_every_client(how):
    """Padding above all, which has no gradient."""
    x = torch.randint(0, 6, (CLIENTS, 5, 4), generator=torch.Generator().manual_seed(0))
    (w,) = leaves(randn(CLIENTS, 6, 3))
    with Forward(None, stacked=True):
        y = vmap(lambda x, w: F.embedding(x, w, **how))(x, w)
    upstream = randn(*y.shape, seed=1)
    (y * upstream).sum().backward()
    for c in range(CLIENTS):
        (alone,) = leaves(w[c].detach())
        expected = F.embedding(x[c], alone, **how)
        (expected * upstream[c]).sum().backward()
        torch.testing.assert_close(y[c], expected, **EXACT)
        torch.testing.assert_close(w.grad[c], alone.grad.to_dense(), **EXACT)


@pytest.mark.parametrize("index", [6, -1])
def test_an_index_out_of_an_embedding_does_not_reach_the_next_clients(index):
    x = torch.tensor([[0], [index], [0]])
    with pytest.raises(IndexError), Forward(None, stacked=True):
        vmap(F.embedding)(x, randn(CLIENTS, 6, 3))


def inputs_of(rule):
    x = randn(2, 3, 4, 2, 2) if rule is BatchNorm else randn(2, 3, 4)
    return leaves(x, *([randn(2, 4, seed=1), randn(2, 4, seed=2)] if rule is BatchNorm else [randn(2, 5, 4), randn(2, 5)]))


@pytest.mark.parametrize("rule", [BatchNorm, Linear])
def test_gradients_are_those_of_finite_differences(rule):
    rest = (None, None, 0.1, 1e-5) if rule is BatchNorm else ()
    assert torch.autograd.gradcheck(lambda *a: rule.apply(*a, *rest), inputs_of(rule), check_undefined_grad=False)


@pytest.mark.parametrize("rule", [BatchNorm, Linear])
def test_a_lone_clients_layer_has_the_bits_it_has_in_company(rule):
    inputs = [v.detach().float() for v in inputs_of(rule)]
    rest = (None, None, 0.1, 1e-5) if rule is BatchNorm else ()
    together = rule.apply(*inputs, *rest)
    for c in range(2):
        assert rule.apply(*(v[c : c + 1] for v in inputs), *rest)[0].equal(together[c])


def test_batch_norm_on_one_value_says_what_to_do():
    with Forward(None, stacked=True), pytest.raises(fs.InputError, match="more than one value per channel; leave out clients"):
        vmap(lambda x: F.batch_norm(x, None, None, training=True))(randn(CLIENTS, 1, 4))


@pytest.mark.parametrize("bias", [True, False])
def test_an_adapted_linear_is_its_base_and_its_adapter(bias):
    x, a, b = leaves(randn(CLIENTS, 5, 4), randn(CLIENTS, 2, 4, seed=1), randn(CLIENTS, 6, 2, seed=2))
    w, c = randn(6, 4, seed=3), randn(6, seed=4) if bias else None
    y = AdaptedLinear.apply(x, w, c, a, b, 0.7)
    upstream = randn(*y.shape, seed=5)
    y.backward(upstream)
    for i in range(CLIENTS):
        one = leaves(x[i].detach(), a[i].detach(), b[i].detach())
        expected = one[0] @ (w + 0.7 * one[2] @ one[1]).T + (0 if c is None else c)
        expected.backward(upstream[i])
        torch.testing.assert_close(y[i], expected, **EXACT)
        for stacked, alone in zip((x, a, b), one, strict=True):
            torch.testing.assert_close(stacked.grad[i], alone.grad, **EXACT)


@pytest.mark.parametrize("affine", ["both", "weight", "none"])
@pytest.mark.parametrize("shape", [(4,), (3, 4)])
def test_layer_norm_is_torchs_for_every_client(affine, shape):
    x, w, b = leaves(randn(CLIENTS, 5, 3, 4), randn(CLIENTS, *shape, seed=1), randn(CLIENTS, *shape, seed=2))
    w, b = (None if affine == "none" else w), (b if affine == "both" else None)
    y = LayerNorm.apply(x, w, b, list(shape), 1e-5)
    upstream = randn(*y.shape, seed=3)
    y.backward(upstream)
    for i in range(CLIENTS):
        one = [None if v is None else v[i].detach().requires_grad_() for v in (x, w, b)]
        expected = F.layer_norm(one[0], shape, one[1], one[2], 1e-5)
        expected.backward(upstream[i])
        torch.testing.assert_close(y[i], expected, **EXACT)
        for stacked, alone in zip((x, w, b), one, strict=True):
            if stacked is not None:
                torch.testing.assert_close(stacked.grad[i], alone.grad, **EXACT)


# ---- dropout

KEYS = client_keys(0, torch.arange(CLIENTS), 0, "train")
DROPOUTS = [nn.Dropout(0.3), nn.Dropout1d(0.3), nn.Dropout2d(0.3), nn.Dropout3d(0.3)]


def drop(module, x, keys, times=1):
    """Each client's draws: stacked for several keys, without vmap for one."""

    def one(x, key):
        mode.drawn.key = key
        return torch.stack([module(x) for _ in range(times)])

    with Forward(None, stacked=keys.ndim == 1) as mode:
        return vmap(one)(x, keys) if keys.ndim else one(x, keys)


@pytest.mark.parametrize("module", DROPOUTS, ids=lambda m: type(m).__name__)
def test_a_client_drops_the_same_stacked_or_alone(module):
    x = torch.ones(CLIENTS, 4, 5, *[2] * max(1, int(type(module).__name__[7:-1] or 1)))
    together = drop(module, x, KEYS, times=2)
    for c in range(CLIENTS):
        assert together[c].equal(drop(module, x[c], KEYS[c], times=2))


def test_draws_differ_by_client_and_by_call():
    got = drop(nn.Dropout(0.5), torch.ones(CLIENTS, 4, 50), KEYS, times=2) > 0
    assert not got[0, 0].equal(got[1, 0])
    assert not got[0, 0].equal(got[0, 1])


def test_dropout_keeps_the_expectation():
    got = drop(nn.Dropout(0.3), torch.ones(CLIENTS, 100, 100), KEYS)
    # 3e4 draws of 0 or 1/.7: mean 1 with standard deviation sqrt(.3/.7 / 3e4) = 0.004
    assert got.mean().item() == pytest.approx(1.0, abs=0.02)
    assert set(got.unique().tolist()) == {0.0, torch.tensor(1 / 0.7).item()}


def test_channel_dropout_drops_whole_channels():
    got = drop(nn.Dropout2d(0.5), torch.ones(CLIENTS, 4, 8, 3, 3), KEYS)
    assert (got.flatten(-2).amax(-1) == got.flatten(-2).amin(-1)).all()
    assert 0 < (got == 0).float().mean() < 1


def test_dropout_of_everything_and_of_nothing():
    x = torch.ones(CLIENTS, 4, 5)
    assert (drop(nn.Dropout(1.0), x, KEYS) == 0).all()
    assert drop(nn.Dropout(0.0), x, KEYS)[:, 0].equal(x)
    assert drop(nn.Dropout(0.5).eval(), x, KEYS)[:, 0].equal(x)


def test_dropout_leaves_torchs_generator_alone():
    before = torch.get_rng_state()
    drop(nn.Dropout(0.5), torch.ones(CLIENTS, 4, 5), KEYS)
    assert torch.get_rng_state().equal(before)


ATTENTION = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
DRAWS = {
    "rand": lambda x: x + torch.rand(3, 4),
    "randn_like": lambda x: x + torch.randn_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full((3, 4), 0.5)),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "alpha_dropout": nn.AlphaDropout(0.5),
    "torch.dropout": lambda x: torch.dropout(x, 0.5, True),
    "bernoulli_ in place": lambda x: x * x.new_empty(3, 4).bernoulli_(0.5).div_(0.5),
    "in place, by its side effect": lambda x: [noise := torch.empty(3, 4), noise.normal_(), x + noise][2],
    "MultiheadAttention": lambda x: ATTENTION(x[None], x[None], x[None])[0][0],
    "MultiheadAttention without weights": lambda x: ATTENTION(x[None], x[None], x[None], need_weights=False)[0][0],
}
OTHER_DRAWS = {
    "normal": lambda x: x + torch.normal(0.0, 1.0, (4,)),
    "rrelu": nn.RReLU(),
    "LSTM with dropout": nn.LSTM(4, 4, num_layers=2, dropout=0.5),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_whatever_a_model_draws_is_keyed(draw):
    """Stacked as alone, other numbers for each client and call, and torch's generator stays where it was."""
    before = torch.get_rng_state()
    x = -torch.ones(CLIENTS, 3, 4)
    together = drop(DRAWS[draw], x, KEYS, times=2)
    for c in range(CLIENTS):
        torch.testing.assert_close(together[c], drop(DRAWS[draw], x[c], KEYS[c], times=2))
    parts = [v for client in together for v in client]
    assert not any(a.equal(b) for i, a in enumerate(parts) for b in parts[:i])
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize(
    ("draw", "mean", "std"),
    [
        ("rand", -0.5, 12**-0.5),
        ("randn_like", -1, 1),
        ("bernoulli", -0.5, 0.5),
        ("gumbel", 0.5772, math.pi / 6**0.5),
        ("alpha", 0, 1),
    ],
)
def test_what_is_drawn_has_the_distribution_of_torchs(draw, mean, std):
    """Means and deviations by formula; of 90,000 numbers they are off by less than 1% of a deviation or so."""
    big = {
        "rand": lambda x: x + torch.rand(300, 100),
        "randn_like": DRAWS["randn_like"],
        "bernoulli": lambda x: x * torch.bernoulli(torch.full((300, 100), 0.5)),
        "gumbel": lambda x: -torch.empty_like(x).exponential_().log(),
        "alpha": nn.AlphaDropout(0.4),
    }[draw]
    x = torch.randn(CLIENTS, 300, 100) if draw == "alpha" else -torch.ones(CLIENTS, 300, 100)
    got = drop(big, x, KEYS)
    assert got.mean().item() == pytest.approx(mean, abs=0.02 * std)
    assert got.std().item() == pytest.approx(std, rel=0.02)


@pytest.mark.parametrize("draw", OTHER_DRAWS)
def test_a_model_that_draws_otherwise_is_refused(draw):
    """Unkeyed numbers would depend on how clients are stacked, and on where a run was resumed."""
    with pytest.raises(fs.InputError, match="in a way that cannot be keyed by client"), Forward(KEYS[0], stacked=False):
        OTHER_DRAWS[draw](-torch.ones(3, 4))


@pytest.mark.parametrize("draw", OTHER_DRAWS)
def test_stacked_clients_never_draw_otherwise(draw):
    """torch itself refuses, or cannot stack it at all, and then clients run one by one."""
    with pytest.raises(RuntimeError), Forward(None, stacked=True):
        vmap(OTHER_DRAWS[draw])(-torch.ones(2, 3, 4))


KEEP = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 0, 0, 1]], dtype=torch.bool)  # (queries, keys)
MASKS = {
    "none": {},
    "bools": {"attn_mask": KEEP},
    "added": {"attn_mask": torch.where(KEEP, 0.5, -2.0).double()},
    "a row of nothing": {"attn_mask": KEEP & torch.tensor([[True], [False], [True]])},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "fewer keys and values": {"enable_gqa": True},
}


@pytest.mark.parametrize("how", MASKS)
def test_attention_is_torchs_for_every_client(how):
    heads = 2 if how == "fewer keys and values" else 4
    q, k, v = leaves(randn(CLIENTS, 2, 4, 3, 5), randn(CLIENTS, 2, heads, 4, 5, seed=1), randn(CLIENTS, 2, heads, 4, 6, seed=2))
    with Forward(None, stacked=True):
        y = vmap(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **MASKS[how]))(q, k, v)
    upstream = randn(*y.shape, seed=3)
    y.backward(upstream)
    for c in range(CLIENTS):
        one = leaves(*(t[c].detach() for t in (q, k, v)))
        expected = F.scaled_dot_product_attention(*one, **MASKS[how])
        expected.backward(upstream[c])
        torch.testing.assert_close(y[c], expected, **EXACT)
        for stacked, alone in zip((q, k, v), one, strict=True):
            torch.testing.assert_close(stacked.grad[c], alone.grad, **EXACT)


def test_attention_drops_by_key():
    """With v the identity, attention returns its weights: equal ones, of which some are dropped and the others doubled."""

    def weights(key, stacked):
        with Forward(key, stacked=stacked) as mode:
            if not stacked:
                return F.scaled_dot_product_attention(zeros, zeros, eye, dropout_p=0.5)

            def one(key, q):
                mode.drawn.key = key
                return F.scaled_dot_product_attention(q, q, eye, None, 0.5)

            return vmap(one)(key, zeros.expand(CLIENTS, -1, -1, -1))

    zeros, eye = torch.zeros(2, 64, 64), torch.eye(64).expand(2, -1, -1)
    together = weights(KEYS, True)
    assert torch.equal(together.unique(), torch.tensor([0.0, 2 / 64]))
    assert abs(float((together > 0).double().mean()) - 0.5) < 0.02
    assert not torch.equal(together[0], together[1])
    for c in range(CLIENTS):
        assert torch.equal(together[c], weights(KEYS[c], False))


@pytest.mark.parametrize("stacked", [True, False])
def test_another_threads_random_numbers_are_not_the_models(stacked):
    before = torch.get_rng_state()
    with ThreadPoolExecutor(1) as other, Forward(KEYS[0], stacked=stacked):
        other.submit(torch.rand, 4).result()
        kept = F.dropout(torch.ones(3, 4))
    assert not torch.equal(torch.get_rng_state(), before)  # it is the generator that a model would draw from
    assert set(kept.unique().tolist()) <= {0.0, 2.0}


@pytest.mark.parametrize("seed", range(40))
def test_the_live_taps_are_those_that_a_slow_loop_finds(seed):
    draw = torch.Generator().manual_seed(seed)
    pick = lambda low, high: int(torch.randint(low, high + 1, (1,), generator=draw))  # noqa: E731
    size, kernel, stride, padding, dilation = pick(1, 7), pick(1, 5), pick(1, 3), pick(0, 4), pick(1, 4)
    ones = torch.ones(1, 1, 1, size, dtype=torch.float64)
    padding = max(padding, -(-(dilation * (kernel - 1) + 1 - size) // 2))
    w = torch.zeros(1, 1, 1, kernel, dtype=torch.float64, requires_grad=True)
    F.conv2d(ones, w, None, (1, stride), (0, padding), (1, dilation)).sum().backward()
    met = w.grad.flatten().nonzero().flatten().tolist()
    first, last, _, _ = live_taps(size, kernel, stride, padding, dilation)
    assert (first, last) == ((met[0], met[-1] + 1) if met else (0, kernel))


def test_the_live_taps_of_a_kernel():
    kernel = torch.arange(2 * 5 * 4).view(2, 5, 4)
    assert Taps(1, 4, 0, 2).of(kernel).equal(kernel[:, 1:4, 0:2])


def test_only_what_is_watched_and_used_once_may_be_cropped():
    x, w = randn(1, 2, 2, 2), {n: randn(3, 2, 5, 5, seed=i) for i, n in enumerate(("once", "twice", "unseen", "whole"))}
    w["whole"] = w["whole"][..., :3, :3]
    with Forward(None, stacked=False) as mode:
        mode.watched = {id(v): n for n, v in w.items() if n != "unseen"}
        for n in ("once", "twice", "twice", "unseen"):
            F.conv2d(x, w[n], padding=2)
        F.conv2d(x, weight=w["whole"], padding=1)
        assert w["once"].shape == (3, 2, 5, 5)  # a look at the shape is no use of the values
    assert mode.crops() == {"once": Taps(1, 4, 1, 4)}
