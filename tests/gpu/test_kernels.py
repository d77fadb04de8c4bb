"""Every kernel against plain PyTorch on fresh random numbers and awkward shapes, in memory that held NaN before."""

import pytest
import torch
import torch.nn.functional as F

from fedselect.aggregate.masked import MaskedSum
from fedselect.core.random import client_keys
from fedselect.core.tree import block, lay
from fedselect.core.tree import counts as by_tensor
from fedselect.methods.select import top as plain_top
from fedselect.training import layers, transforms
from fedselect.training.batches import Split
from fedselect.training.buffers import Room, copy
from fedselect.training.settings import Training
from fedselect.training.step import _sgd

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*[Dd]eterministic"),  # asked for below only so that memory is filled
]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

DEVICE = "cuda"
OFF = {"float32": 1e-5, "tf32": 2e-3, "bf16": 2e-2}
"""How far a result may be off, by the norm."""


@pytest.fixture(autouse=True)
def poison():
    """What `torch.empty` hands out holds NaN, so that an entry that is never written shows."""
    before = torch.utils.deterministic.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before[0]
    torch.use_deterministic_algorithms(before[1])


def randn(*shape, seed=0):
    """In float64, on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def there(v, kind="float32"):
    """On the GPU, as numbers of this kind."""
    return None if v is None else v.to(DEVICE, torch.bfloat16 if kind == "bf16" else torch.float32)


def rounded(v, kind):
    """The same number as the GPU is given, in float64."""
    return None if v is None else v.to(torch.bfloat16 if kind == "bf16" else torch.float32).double()


def assert_near(got, want, kind="float32"):
    got = got.double().cpu()
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    off = (got - want).norm() / want.norm().clamp_min(1e-30)
    assert float(off) < OFF[kind], float(off)


# ---- convolution

CONVS = {
    # clients, batch, inputs, outputs, (height, width), kernel, stride, padding
    "point": (2, 3, 5, 7, (4, 4), (1, 1), (1, 1), (0, 0)),
    "one channel": (3, 2, 1, 1, (5, 6), (3, 3), (1, 1), (1, 1)),
    "three to odd": (2, 5, 3, 19, (9, 7), (3, 3), (1, 1), (1, 1)),
    "one client": (1, 4, 17, 33, (8, 8), (3, 3), (1, 1), (1, 1)),
    "even channels": (2, 4, 32, 64, (8, 8), (3, 3), (1, 1), (1, 1)),
    "wide channels": (2, 2, 64, 128, (4, 4), (3, 3), (1, 1), (1, 1)),
    "many channels": (2, 3, 130, 70, (3, 3), (3, 3), (1, 1), (1, 1)),
    "strided": (3, 2, 6, 10, (9, 9), (3, 3), (2, 2), (1, 1)),
    "strided, even side": (3, 2, 32, 16, (8, 8), (3, 3), (2, 2), (1, 1)),
    "strided point": (2, 3, 16, 32, (7, 8), (1, 1), (2, 2), (0, 0)),
    "stride beyond the kernel": (2, 2, 4, 5, (11, 10), (2, 2), (3, 4), (0, 1)),
    "stem": (2, 3, 3, 64, (32, 32), (7, 7), (2, 2), (3, 3)),
    "not square": (2, 3, 5, 6, (7, 12), (3, 5), (2, 1), (0, 2)),
    "flat": (2, 3, 4, 4, (1, 9), (1, 3), (1, 2), (0, 1)),
    "the whole picture": (2, 3, 8, 9, (4, 5), (4, 5), (1, 1), (0, 0)),
    "unmet rest": (2, 2, 3, 4, (8, 8), (3, 3), (3, 3), (0, 0)),
    "long sum": (1, 40, 4, 5, (16, 16), (3, 3), (1, 1), (1, 1)),
    "many clients": (40, 2, 5, 8, (4, 4), (3, 3), (1, 1), (1, 1)),
    "large tiles": (70, 6, 128, 128, (5, 5), (3, 3), (1, 1), (1, 1)),  # the largest, with bf16; the last is not whole
    "large tiles, strided": (34, 16, 128, 256, (6, 6), (3, 3), (2, 2), (1, 1)),
}


def conv_case(name):
    clients, batch, inside, out, size, kernel, stride, padding = CONVS[name]
    x, w = randn(clients, batch, inside, *size), randn(clients, out, inside, *kernel, seed=1)
    return x, w, randn(clients, out, seed=2), stride, padding


def plain_conv(x, w, b, stride, padding, upstream=None):
    """torch's own in float64: the result, and given an upstream gradient those of x, w and b."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = torch.stack([F.conv2d(x[c], w[c], None if b is None else b[c], stride, padding) for c in range(len(x))])
    if upstream is None:
        return y.detach()
    return torch.autograd.grad(y, (x, w), upstream)


COARSE = [
    "one channel", "three to odd", "even channels", "many channels", "strided, even side", "not square", "long sum",
    "large tiles", "large tiles, strided",
]  # fmt: skip
BY_KIND = [*((case, "float32") for case in CONVS), *((case, kind) for case in COARSE for kind in ("tf32", "bf16"))]


@pytest.mark.parametrize(("case", "kind"), BY_KIND)
def test_convolution_forward(case, kind):
    from fedselect.kernels import conv

    x, w, b, stride, padding = conv_case(case)
    got = conv.forward(there(x, kind), there(w), there(b), stride, padding, (1, 1), kind)
    assert got.dtype == (torch.bfloat16 if kind == "bf16" else torch.float32)
    assert got.permute(0, 1, 3, 4, 2).is_contiguous()
    assert_near(got, plain_conv(rounded(x, kind), rounded(w, kind), b, stride, padding), kind)


@pytest.mark.parametrize(("case", "kind"), BY_KIND)
def test_convolution_backward(case, kind):
    from fedselect.kernels import conv

    x, w, _, stride, padding = conv_case(case)
    y = plain_conv(x, w, None, stride, padding)
    g = randn(*y.shape, seed=3)
    dx, dw = plain_conv(rounded(x, kind), rounded(w, kind), None, stride, padding, rounded(g, kind))
    last = there(g, kind).permute(0, 1, 3, 4, 2).contiguous()
    assert_near(conv.to_input(last, there(w), x.shape, stride, padding, kind), dx, kind)
    got = conv.to_kernel(there(x, kind), last, tuple(w.shape[3:]), stride, padding, (1, 1), kind)
    assert got.dtype == torch.float32
    assert_near(got, dw, kind)


def laid_out(v, how):
    """The same numbers in another place: channels last, a part of more, every other row, or the same for all clients."""
    if how == "channels last":
        return v.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    if how == "part":
        room = torch.full([s + 3 for s in v.shape], torch.nan, device=v.device, dtype=v.dtype)
        part = room[tuple(slice(1, 1 + s) for s in v.shape)]
    else:
        room = torch.full([s * 2 for s in v.shape], torch.nan, device=v.device, dtype=v.dtype)
        part = room[tuple(slice(0, None, 2) for _ in v.shape)]
    part.copy_(v)
    return part


@pytest.mark.parametrize("how", ["channels last", "part", "every other"])
@pytest.mark.parametrize("case", ["three to odd", "even channels", "strided", "not square"])
def test_convolution_of_any_layout(case, how):
    """Whatever lies around the tensors is NaN."""
    from fedselect.kernels import conv

    x, w, b, stride, padding = conv_case(case)
    xs, ws = laid_out(there(x), how), laid_out(there(w), how)
    got = conv.forward(xs, ws, there(b), stride, padding, (1, 1), "float32")
    assert_near(got, plain_conv(rounded(x, ""), rounded(w, ""), rounded(b, ""), stride, padding))
    g = randn(*got.shape, seed=3)
    dx, dw = plain_conv(rounded(x, ""), rounded(w, ""), None, stride, padding, rounded(g, ""))
    last = there(g).permute(0, 1, 3, 4, 2).contiguous()
    assert_near(conv.to_input(last, ws, x.shape, stride, padding, "float32"), dx)
    assert_near(conv.to_kernel(xs, last, tuple(w.shape[3:]), stride, padding, (1, 1), "float32"), dw)


def test_convolution_of_one_input_for_all_clients():
    from fedselect.kernels import conv

    x, w, _, stride, padding = conv_case("three to odd")
    shared = there(x[:1]).expand(x.shape)
    got = conv.forward(shared, there(w), None, stride, padding, (1, 1), "float32")
    assert_near(got, plain_conv(rounded(x[:1], "").expand(x.shape), rounded(w, ""), None, stride, padding))


def test_convolution_with_a_cropped_kernel():
    """The live taps are read where they lie; the rest of the kernel is NaN."""
    from fedselect.kernels import conv

    x, w = randn(2, 3, 6, 2, 2), randn(2, 5, 6, 3, 3, seed=1)
    whole = torch.full((2, 5, 7, 7, 6), torch.nan, device=DEVICE).permute(0, 1, 4, 2, 3)
    taps = whole[..., 1:4, 3:6]
    taps.copy_(there(w))
    got = conv.forward(there(x), taps, None, (1, 1), (1, 1), (1, 1), "float32")
    assert_near(got, plain_conv(rounded(x, ""), rounded(w, ""), None, (1, 1), (1, 1)))
    g = randn(*got.shape, seed=3)
    dx, _ = plain_conv(rounded(x, ""), rounded(w, ""), None, (1, 1), (1, 1), rounded(g, ""))
    last = there(g).permute(0, 1, 3, 4, 2).contiguous()
    assert_near(conv.to_input(last, taps, x.shape, (1, 1), (1, 1), "float32"), dx)


@pytest.mark.parametrize("dilation", [(1, 1), (2, 3)])
def test_dilated_forward_and_kernel_gradient(dilation):
    from fedselect.kernels import conv

    x, w = randn(2, 3, 5, 9, 10).requires_grad_(), randn(2, 6, 5, 3, 3, seed=1).requires_grad_()
    y = torch.stack([F.conv2d(x[c], w[c], None, (2, 1), (2, 1), dilation) for c in range(2)])
    g = randn(*y.shape, seed=3)
    (dw,) = torch.autograd.grad(y, w, g)
    xs, ws = there(x.detach()), there(w.detach())
    assert_near(conv.forward(xs, ws, None, (2, 1), (2, 1), dilation, "float32"), y.detach())
    last = there(g).permute(0, 1, 3, 4, 2).contiguous()
    assert_near(conv.to_kernel(xs, last, (3, 3), (2, 1), (2, 1), dilation, "float32"), dw)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("case", ["three to odd", "strided", "stem", "not square"])
def test_the_convolution_rule_is_its_own_twin(case, bias):
    """Conv on the GPU against Conv on a CPU, all gradients."""
    x, w, b, stride, padding = conv_case(case)
    b = b if bias else None
    upstream, ends = None, []
    for place in (lambda v: v.clone(), there):
        given = [None if v is None else place(rounded(v, "")).requires_grad_() for v in (x, w, b)]
        y = layers.Conv.apply(*given, stride, padding, (1, 1), "float32")
        upstream = rounded(randn(*y.shape, seed=3), "") if upstream is None else upstream
        grads = torch.autograd.grad(y, [v for v in given if v is not None], place(upstream))
        ends.append([y.detach(), *grads])
    for got, want in zip(ends[1], ends[0], strict=True):
        assert_near(got, want)


def test_a_convolution_does_not_depend_on_company():
    from fedselect.kernels import conv

    x, w, b, stride, padding = (there(v) if isinstance(v, torch.Tensor) else v for v in conv_case("many clients"))
    together = conv.forward(x, w, b, stride, padding, (1, 1), "float32")
    alone = conv.forward(x[7:9], w[7:9], b[7:9], stride, padding, (1, 1), "float32")
    torch.testing.assert_close(together[7:9], alone, rtol=1e-5, atol=1e-5)


# ---- batch norm

NORMS = [
    *((1, 2, 1), (2, 5, 3), (3, 33, 16), (2, 100, 65), (5, 7, 130), (30, 96, 8), (40, 130, 70), (2, 512, 40)),  # at once
    *((2, 513, 5), (1, 3000, 20), (2, 4097, 64)),  # in blocks
]


def plain_norm(x, weight, bias, mean, var, momentum, eps, upstream, relu=False, other=None):
    """torch's own in float64, client by client: result, gradients of x, what is added, weight and bias, running statistics."""
    found = []
    for c in range(len(x)):
        given = [None if v is None else v[c].clone().requires_grad_() for v in (x, other, weight, bias)]
        stats = [None if v is None else v[c].clone() for v in (mean, var)]
        y = F.batch_norm(given[0], *stats, *given[2:], training=True, momentum=momentum, eps=eps)
        y = y if other is None else y + given[1]
        y = y.relu() if relu else y
        grads = torch.autograd.grad(y, [v for v in given if v is not None], upstream[c])
        found.append([y.detach(), *grads, *(v for v in stats if v is not None)])
    return [torch.stack(v) for v in zip(*found, strict=True)]


@pytest.mark.parametrize(
    ("affine", "track", "kind"), [(True, True, "float32"), (False, True, "float32"), (True, False, "bf16")], ids=str
)
@pytest.mark.parametrize("end", [(), ("relu",), ("sum",), ("sum", "relu")], ids=" ".join)
@pytest.mark.parametrize("shape", NORMS, ids=str)
def test_batch_norm(shape, end, track, affine, kind):
    from fedselect.kernels import norm

    clients, _, channels = shape
    x, g = randn(*shape) * 3 + 5, randn(*shape, seed=1)  # far from zero: sums of squares would cancel
    weight, bias = (randn(clients, channels, seed=2), randn(clients, channels, seed=3)) if affine else (None, None)
    mean, var = (randn(clients, channels, seed=4), randn(clients, channels, seed=5).abs()) if track else (None, None)
    other, relu = randn(*shape, seed=6) if "sum" in end else None, "relu" in end
    mean32, var32 = there(mean), there(var)
    settings = (rounded(x, kind), *(rounded(v, "") for v in (weight, bias, mean, var)), 0.3, 1e-3)
    if relu:  # where rounding decides what a ReLU lets through, nothing flows back
        before = plain_norm(*settings, rounded(g, kind), False, rounded(other, kind))[0]
        g = g.masked_fill(before.to(g).abs() < 1e-4, 0.0)
    given = there(x, kind), there(weight), there(bias)
    y, saved = norm.forward(*given, mean32, var32, 0.3, 1e-3, relu, there(other, kind))
    dx, dweight, dbias, passed = norm.backward(given[0], there(g, kind), saved, *given[1:], relu, None if other is None else y)
    got = [
        y,
        dx,
        *([] if other is None else [passed]),
        *([dweight, dbias] if affine else []),
        *([mean32, var32] if track else []),
    ]
    plain = (*settings, rounded(g, kind), relu)
    want = plain_norm(*plain, rounded(other, kind))
    assert y.dtype == dx.dtype == (torch.bfloat16 if kind == "bf16" else torch.float32)
    assert affine or (dweight is None and dbias is None)
    if shape[1] == 2:  # of two rows the gradient all but cancels
        del got[1], want[1]
    for a, b in zip(got, want, strict=True):
        off = (a.double().cpu() - b).norm() / b.norm().clamp_min(1e-30)  # a ReLU may let nothing pass
        assert float(off) < (1e-4 if kind == "float32" else OFF[kind])


@pytest.mark.parametrize("case", ["far from zero", "a wild first row", "constant"])
def test_variances_do_not_cancel(case):
    from fedselect.kernels import norm

    x = randn(2, 4097, 20).float() + 1000
    if case == "a wild first row":
        x[:, 0] += 300
    elif case == "constant":
        x[:] = 1000.5
    _, saved = norm.forward(there(x), None, None, None, None, 0.1, 1e-5, False)
    want = 1 / (x.double().var(1, unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(saved[:, 1].cpu().double(), want, rtol=1e-4, atol=0)


@pytest.mark.parametrize("end", [(), ("relu",), ("sum",), ("sum", "relu")], ids=" ".join)
@pytest.mark.parametrize("shape", [(4, 5, 3, 7), (3, 6, 9), (2, 7)], ids=str)
def test_the_norm_rule_is_its_own_twin(shape, end):
    """BatchNorm on the GPU against BatchNorm on a CPU: pictures, sequences and vectors, statistics in place."""
    clients, batch, channels, *rest = (3, shape[0], shape[1], *shape[2:])
    x, g = randn(clients, batch, channels, *rest), randn(clients, batch, channels, *rest, seed=1)
    base = [randn(clients, channels, seed=s) for s in (2, 3)]
    more = [randn(clients, batch, channels, *rest, seed=4)] if "sum" in end else []
    ends = []
    for place in (lambda v: v.clone(), there):
        given = [place(rounded(v, "")).requires_grad_() for v in (x, *base, *more)]
        stats = [place(torch.zeros(clients, channels)), place(torch.ones(clients, channels))]
        y = layers.BatchNorm.apply(*given[:3], *stats, 0.1, 1e-5, "relu" in end, *given[3:])
        ends.append([y.detach(), *torch.autograd.grad(y, given, place(rounded(g, ""))), *stats])
    for got, want in zip(ends[1], ends[0], strict=True):
        torch.testing.assert_close(got.cpu().double(), want.double(), rtol=1e-4, atol=1e-4)


# ---- pooling

POOLS = {
    # (height, width), channels, kernel, stride, padding
    "halves": ((8, 8), 5, (2, 2), (2, 2), (0, 0)),
    "odd side": ((7, 9), 3, (2, 2), (2, 2), (0, 0)),
    "stem": ((8, 8), 16, (3, 3), (2, 2), (1, 1)),
    "overlapping": ((6, 7), 4, (3, 3), (1, 1), (1, 1)),
    "not square": ((9, 8), 6, (3, 2), (2, 3), (1, 0)),
    "stride beyond the kernel": ((11, 10), 2, (2, 2), (3, 4), (0, 0)),
    "whole": ((4, 5), 7, (4, 5), (4, 5), (0, 0)),
}


def pool_input(size, channels, values):
    if values == "random":
        return randn(2, 3, *size, channels).float()
    g = torch.Generator().manual_seed(1)
    ties = torch.randint(-2, 1, (2, 3, *size, channels), generator=g).float()
    if values == "all alike":
        ties.zero_()
    return torch.where(ties == -2, -torch.inf, ties) if values == "minus infinity" else ties


@pytest.mark.parametrize("kind", ["float32", "bf16"])
@pytest.mark.parametrize("values", ["random", "ties", "all alike", "minus infinity"])
@pytest.mark.parametrize("case", POOLS)
def test_max_pool(case, values, kind):
    """Equal to torch's on a CPU: of equal values the first of the window gets the gradient."""
    from fedselect.kernels import pool

    size, channels, *how = POOLS[case]
    x = pool_input(size, channels, values)
    x = x.bfloat16().float() if kind == "bf16" else x
    usual = x.flatten(0, 1).permute(0, 3, 1, 2).contiguous().requires_grad_()
    want = F.max_pool2d(usual, *how)
    g = torch.randint(-8, 9, want.shape, generator=torch.Generator().manual_seed(2)).float()  # whole: sums are exact
    g = torch.where(want.isinf(), 0.0, g)  # who won a window of nothing is nobody's business
    want.backward(g)
    y, tap = pool.forward(there(x, kind), *how)
    last = g.permute(0, 2, 3, 1).unflatten(0, (2, 3)).contiguous()
    dx = pool.backward(there(last, kind), tap, size, *how)
    assert y.float().cpu().equal(want.detach().permute(0, 2, 3, 1).unflatten(0, (2, 3)))
    assert dx.float().cpu().equal(usual.grad.permute(0, 2, 3, 1).unflatten(0, (2, 3)))


def test_max_pool_lets_nan_through():
    from fedselect.kernels import pool

    x = randn(1, 2, 4, 4, 3).float()
    x[0, 1, 2, 1, 2] = torch.nan
    y, _ = pool.forward(there(x), (2, 2), (2, 2), (0, 0))
    want = F.max_pool2d(x[0].permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)[None]
    torch.testing.assert_close(y.cpu(), want, rtol=0, atol=0, equal_nan=True)


# ---- SGD

HOWS = {
    "plain": Training(momentum=0.0),
    "momentum": Training(momentum=0.9),
    "decay": Training(momentum=0.5, weight_decay=0.1),
    "decay alone": Training(momentum=0.0, weight_decay=0.1),
}
SHAPES = {
    "single numbers": (),
    "one block": (7,),
    "one block exactly": (1024,),
    "more than a block": (1025,),
    "matrix": (37, 41),
    "kernels": (6, 5, 3, 3),
    "many kernels": (40, 33, 3, 3),
}


def sgd_case(shape, clients=3, mask="entries", pulled=False):
    p, v, g = (randn(clients, *shape, seed=s).float() for s in (0, 1, 2))
    m = randn(clients, *shape, seed=3) > 0 if mask == "entries" else mask
    return p, v, g, m, randn(clients, *shape, seed=4).float() if pulled else None


def both_ways(tensors, rates, scale, how):
    """The kernel on the GPU and `step._sgd` in float64 on a CPU, each on (values, momentum, gradient, mask, anchor)."""
    from fedselect.kernels.sgd import sgd

    def along(row, t):
        return row.double().view(-1, *[1] * (t.ndim - 1))

    wanted = []
    for p, v, g, m, a in tensors:  # pulled and scaled by hand
        g = g.double() if a is None else g.double() + along(PULLS, g) * (p.double() - a.double())
        wanted.append((p.double(), v.double(), g if scale is None else g * along(scale, g), m, None))
    _sgd(wanted, [rates.double()] * len(wanted), how)
    moved = [(there(p), there(v), there(g), m if isinstance(m, bool) else m.to(DEVICE), there(a)) for p, v, g, m, a in tensors]
    sgd(moved, there(rates), there(scale), how.momentum, how.weight_decay, there(PULLS))
    return moved, wanted


RATES = torch.tensor([0.1, 0.0, 0.7])
PULLS = torch.tensor([0.5, 0.75, 0.0])


@pytest.mark.parametrize("pulled", [False, True], ids=["", "pulled"])
@pytest.mark.parametrize("scaled", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("mask", ["entries", True], ids=["masked", "whole"])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_sgd(shape, how, mask, scaled, pulled):
    case = sgd_case(SHAPES[shape], mask=mask, pulled=pulled)
    if len(SHAPES[shape]) == 0:
        case = tuple(t.view(3) if isinstance(t, torch.Tensor) else t for t in case)
    scale = torch.tensor([1.0, 0.3, 0.01]) if scaled else None
    ((p, v, _, m, _),), ((want_p, want_v, *_),) = both_ways([case], RATES, scale, HOWS[how])
    torch.testing.assert_close(p.cpu().double(), want_p, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(v.cpu().double(), want_v, rtol=1e-6, atol=1e-6)
    assert p[1].cpu().equal(case[0][1])  # a rate of zero
    if isinstance(m, torch.Tensor):  # what is frozen keeps its very bits
        assert p.cpu()[~case[3]].equal(case[0][~case[3]])
        assert v.cpu()[~case[3]].equal(case[1][~case[3]])


@pytest.mark.parametrize("mask", ["entries", True], ids=["masked", "whole"])
def test_sgd_of_more_tensors_than_fit_one_launch(mask):
    cases = [sgd_case((i + 1,), mask=mask if i % 3 else True, pulled=i % 2 > 0) for i in range(37)]
    cases.append(sgd_case((50, 50), mask=mask))
    moved, wanted = both_ways(cases, RATES, torch.tensor([1.0, 0.5, 0.2]), HOWS["decay"])
    for (p, v, *_), (want_p, want_v, *_) in zip(moved, wanted, strict=True):
        torch.testing.assert_close(p.cpu().double(), want_p, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(v.cpu().double(), want_v, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pulled", [False, True], ids=["", "pulled"])
@pytest.mark.parametrize("mask", ["entries", True], ids=["masked", "whole"])
@pytest.mark.parametrize("taps", [(slice(0, 3), slice(0, 3)), (slice(1, 2), slice(1, 2)), (slice(1, 3), slice(0, 2))], ids=str)
@pytest.mark.parametrize("shape", [(6, 5, 3, 3), (20, 70, 3, 3)], ids=str)
def test_sgd_of_cropped_kernels_with_channels_last(shape, taps, mask, pulled):
    """Only the live taps move; the others are not touched at all."""
    from fedselect.kernels.sgd import fits, sgd

    def last(t):
        return t.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)

    p, v, g, m, a = sgd_case(shape, mask=mask, pulled=pulled)
    live = (..., *taps)
    want = [t.double() for t in (p, v)]
    part = m if isinstance(m, bool) else m[live]
    plain = (want[0][live], want[1][live], g[live].double(), part, a[live].double() if pulled else None)
    _sgd([plain], [RATES.double()], HOWS["momentum"], PULLS.double())
    ps, vs, gs = (last(there(t)) for t in (p, v, g))
    marks = m if isinstance(m, bool) else last(m.to(DEVICE))[live]
    moved = ps[live], vs[live], gs[live], marks, last(there(a))[live] if pulled else None
    assert fits(moved)
    sgd([moved], there(RATES), None, 0.9, 0.0, there(PULLS))
    for got, wanted, before in ((ps, want[0], p), (vs, want[1], v)):
        torch.testing.assert_close(got.cpu().double(), wanted, rtol=1e-6, atol=1e-6)
        dead = torch.ones(shape, dtype=torch.bool)
        dead[live] = False
        assert got.cpu()[:, dead].equal(before[:, dead])


def test_sgd_of_some_clients_of_a_stack():
    from fedselect.kernels.sgd import sgd

    p, v, g, m, a = sgd_case((33, 40), clients=5, pulled=True)
    want = [t[1:4].double() for t in (p, v)]
    _sgd([(*want, g[1:4].double(), m[1:4], a[1:4].double())], [RATES.double()], HOWS["momentum"], PULLS.double())
    ps, vs, gs, ms, anchors = there(p), there(v), there(g), m.to(DEVICE), there(a)
    sgd([(ps[1:4], vs[1:4], gs[1:4], ms[1:4], anchors[1:4])], there(RATES), None, 0.9, 0.0, there(PULLS))
    torch.testing.assert_close(ps[1:4].cpu().double(), want[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(vs[1:4].cpu().double(), want[1], rtol=1e-6, atol=1e-6)
    assert ps[[0, 4]].cpu().equal(p[[0, 4]])


def test_what_sgd_cannot_walk_is_left_to_torch():
    from fedselect.kernels.sgd import fits

    p = torch.zeros(2, 4, 6, 3, 3, device=DEVICE)
    last = torch.zeros(2, 4, 3, 3, 6, device=DEVICE).permute(0, 1, 4, 2, 3)
    assert fits((p, p, p, True, None))
    assert fits((last, last, p, True, last))
    assert not fits((p, last, p, True, None))
    assert not fits((p, p, p, last.bool(), None))
    assert not fits((p, p, p, True, last))
    assert not fits((p[..., 1:2, 1:2], p[..., 1:2, 1:2], p, True, None))  # cropped, but not with channels last
    assert not fits((p.half(), p.half(), p, True, None))


@pytest.mark.parametrize("pulled", [False, True], ids=["", "pulled"])
@pytest.mark.parametrize(
    "how", [Training(momentum=0.9, clip=0.1), Training(momentum=0.0, clip=10.0, weight_decay=0.1), Training(momentum=0.9)]
)
def test_the_step_moves_all_kinds_of_rates_and_clips(how, pulled):
    """Some parameters go by the kernel, others by torch: a rate for each client, for all, for each entry."""
    cases = [sgd_case((5,)), sgd_case((40, 40)), sgd_case((6, 5, 3, 3), mask=True), sgd_case((9,), mask=True, pulled=pulled)]
    cases += [sgd_case((50, 30), pulled=pulled), sgd_case((8,), pulled=pulled)]
    rates = [RATES, 0.2, RATES, randn(3, 9).abs().float(), RATES, RATES]
    plain = [tuple(t.double() if i != 3 and isinstance(t, torch.Tensor) else t for i, t in enumerate(c)) for c in cases]
    _sgd(plain, [r.double() if isinstance(r, torch.Tensor) else r for r in rates], how, PULLS.double())
    moved = [tuple(t.clone().to(DEVICE) if isinstance(t, torch.Tensor) else t for t in c) for c in cases]
    _sgd(moved, [there(r) if isinstance(r, torch.Tensor) else r for r in rates], how, there(PULLS))
    for (p, v, *_), (want_p, want_v, *_) in zip(moved, plain, strict=True):
        torch.testing.assert_close(p.cpu().double(), want_p, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(v.cpu().double(), want_v, rtol=1e-5, atol=1e-6)


# ---- pictures


def picture_pool(shape, dtype):
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (23, *shape), generator=g, dtype=torch.uint8)
    return x if dtype == "uint8" else x.float() / 255


PLACES = torch.randint(0, 23, (3, 9), generator=torch.Generator().manual_seed(1))
INDEX = torch.randint(0, 1000, (3, 9), generator=torch.Generator().manual_seed(2))
KEYS = client_keys(1, torch.arange(3), 4, "train")


@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "as they are"])
@pytest.mark.parametrize("augment", [True, False], ids=["crop-flip", "none"])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (2, 16, 24), (3, 7, 9), (4, 1, 1)], ids=str)
def test_pictures(shape, dtype, augment, scaled):
    """The same random numbers as transforms.crop_flip, so the same pixels; scaled ones up to one rounding."""
    from fedselect.kernels.batch import pictures

    x = picture_pool(shape, dtype)
    scale, shift = (randn(shape[0], 1, 1, seed=s).float() for s in (1, 2)) if scaled else (None, None)
    want = x[PLACES]
    want = (transforms.crop_flip(want, KEYS, INDEX) if augment else want).float()
    want = want * scale + shift if scaled else want
    keys = KEYS.to(DEVICE) if augment else None
    got = pictures(x.to(DEVICE), PLACES.to(DEVICE), INDEX.to(DEVICE), keys, there(scale), there(shift))
    assert got.dtype == torch.float32
    assert got.permute(0, 1, 3, 4, 2).is_contiguous()
    if scaled:
        torch.testing.assert_close(got.cpu(), want, rtol=1e-6, atol=1e-5)
    else:
        assert got.cpu().equal(want)


@pytest.mark.parametrize("augment", ["none", "crop-flip"])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_a_split_on_the_gpu_is_that_on_a_cpu(dtype, augment):
    x = picture_pool((3, 16, 16), dtype)
    y = torch.arange(23) % 5
    data = Split(x, y, torch.tensor([12, 0, 5]), torch.tensor([11, 5, 7]), augment=augment)
    index = torch.tensor([[10, 0, 3], [4, 4, 1], [6, 2, 0]])
    there_ = data.to(torch.device(DEVICE))
    for keys in (None, KEYS):
        want = data.batch(index, keys)
        got = there_.batch(index.to(DEVICE), None if keys is None else keys.to(DEVICE))
        assert got[0].cpu().equal(want[0].float())
        assert got[1].cpu().equal(want[1])


# ---- the largest entries

VALUES = {
    "random": lambda n: randn(4, n).float(),
    "ties": lambda n: torch.randint(-3, 4, (4, n), generator=torch.Generator().manual_seed(n)).float(),
    "all alike": lambda n: torch.full((4, n), 0.25),
    "half gone": lambda n: torch.where(randn(4, n, seed=1) > 0, -torch.inf, randn(4, n).float()),
    "all gone": lambda n: torch.full((4, n), -torch.inf),
    "infinite": lambda n: torch.where(randn(4, n, seed=1) > 1, torch.inf, randn(4, n).float()),
    "tiny": lambda n: randn(4, n).float() * 1e-42,  # denormal
    "signed zeros": lambda n: torch.where(randn(4, n, seed=1) > 0, 0.0, -0.0),
    "zeros among others": lambda n: (
        torch.where(randn(4, n, seed=1) > 0, torch.tensor(-0.0), torch.tensor(0.0))
        + torch.where(randn(4, n, seed=2) > 1, randn(4, n).float(), 0.0).where(randn(4, n, seed=2) > 1, torch.tensor(-0.0))
    ),
}
LENGTHS = [1, 2, 100, 4096, 4097, 40000]


def counts(n):
    """Nothing, something, nearly all, all; each row another."""
    return [torch.tensor(k).clamp(0, n) for k in ([0, 1, n // 2, n], [n, n - 1, 0, 2], [1, 1, 1, 1], [n // 3, 0, n, 3])]


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_largest_entries_are_those_of_a_sort(length, values):
    """Of equal ones the earlier wins, 0 and -0 being equal."""
    from fedselect.kernels import select

    value = VALUES[values](length)
    for count in counts(length):
        want = plain_top(value, count)
        assert want.sum(1).tolist() == count.tolist()
        got = select.top(value.to(DEVICE), count.to(DEVICE))
        assert got.dtype == torch.bool
        assert got.cpu().equal(want), count.tolist()


@pytest.mark.parametrize("values", ["random", "ties", "half gone", "infinite", "tiny"])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_threshold_is_the_kth_largest(length, values):
    from fedselect.kernels import select

    value = VALUES[values](length)
    for count in counts(length):
        k = count.clamp_min(1)
        want = value.sort(1, descending=True).values.gather(1, (k - 1).unsqueeze(1)).squeeze(1)
        assert select.largest(value.to(DEVICE), k.to(DEVICE)).cpu().equal(want)


@pytest.mark.parametrize("values", ["random", "ties", "tiny", "signed zeros", "zeros among others"])
@pytest.mark.parametrize("length", [2, 4097, 40000])
def test_the_largest_of_those_not_taken(length, values):
    from fedselect.kernels import select

    value = VALUES[values](length)
    taken = randn(4, length, seed=5) > torch.tensor([-9.0, 0.0, 1.0, 9.0]).unsqueeze(1)  # all, half, few, none
    left = length - taken.sum(1)
    for count in (torch.zeros_like(left), left // 3, left):
        want = plain_top(value, count, taken)
        assert want.sum(1).tolist() == (taken.sum(1) + count).tolist()
        assert select.top(value.to(DEVICE), count.to(DEVICE), taken.to(DEVICE)).cpu().equal(want), count.tolist()


@pytest.mark.parametrize("length", [2, 4097, 40000])
def test_those_that_moved_farthest(length):
    """Half of them have not moved at all."""
    from fedselect.kernels import select

    now = randn(4, length).float()
    then = torch.where(randn(4, length, seed=1) > 0, now, randn(4, length, seed=2).float())
    taken = randn(4, length, seed=3) > 1
    left = length - taken.sum(1)
    for count in (torch.zeros_like(left), left // 3, left):
        want = plain_top(now, count, taken, then)
        got = select.top(*(v.to(DEVICE) for v in (now, count, taken, then)))
        assert got.cpu().equal(want), count.tolist()


def test_the_largest_of_a_part_of_a_tensor():
    from fedselect.kernels import select

    value = randn(4, 900).float()
    part = value.to(DEVICE)[:, ::3]
    count = torch.tensor([0, 1, 150, 300])
    assert select.top(part, count.to(DEVICE)).cpu().equal(plain_top(value[:, ::3], count))
    front, taken = value.to(DEVICE)[:, :300], randn(4, 900, seed=1) > 1
    marks = taken.to(DEVICE)[:, 300:600]
    want = plain_top(value[:, :300], count.clamp_max(200), taken[:, 300:600])
    assert select.top(front, count.clamp_max(200).to(DEVICE), marks).cpu().equal(want)


# ---- sums over senders


def plain_fold(values, sent, weight, so_far=None):
    marks = torch.as_tensor(sent).expand_as(values)
    row = weight.view(-1, *[1] * (values.ndim - 1))
    total = torch.where(marks, values.double() * row, 0.0).sum(0)
    heavy = torch.where(marks, row, 0.0).sum(0)
    return (total, heavy) if so_far is None else (total + so_far[0], heavy + so_far[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [True, False], ids=["entries", "whole"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 512), (4, 513), (7, 6, 5, 3, 3), (3,)], ids=str)
def test_fold(shape, masked, dtype):
    """Values of like size add up exactly in float64, so to the bit; what was not sent is NaN."""
    from fedselect.kernels.fold import fold

    values = (randn(*shape) * 64).round().div(64).to(dtype)
    weight = torch.arange(1, shape[0] + 1).double()
    sent = randn(*shape, seed=1) > 0 if masked else True
    given = torch.where(sent, values, torch.nan) if masked else values
    marks = sent.to(DEVICE) if masked else True
    got = fold(given.to(DEVICE), marks, weight.to(DEVICE), None)
    want = plain_fold(values, sent, weight)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float64
        assert a.cpu().equal(b)
    more = fold(given.to(DEVICE), marks, (weight * 2).to(DEVICE), got)
    for a, b, first in zip(more, plain_fold(values, sent, weight * 2, want), got, strict=True):
        assert a.cpu().equal(b)
        assert a.data_ptr() == first.data_ptr()


@pytest.mark.parametrize("masked", [True, False], ids=["entries", "whole"])
def test_fold_of_views(masked):
    from fedselect.kernels.fold import fold

    values = (randn(3, 8, 6) * 64).round().div(64).float()
    sent = randn(3, 6, 8, seed=1) > 0 if masked else True
    weight = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    got = fold(values.to(DEVICE).transpose(1, 2), sent.to(DEVICE) if masked else True, weight.to(DEVICE), None)
    for a, b in zip(got, plain_fold(values.transpose(1, 2), sent, weight), strict=True):
        assert a.cpu().equal(b)


def test_masked_sums_are_those_of_a_cpu():
    ends = []
    for device in ("cpu", DEVICE):
        total = MaskedSum()
        for part in range(3):
            tree = {
                n: (randn(2, *s, seed=part) * 64).round().div(64).float() for n, s in {"a": (5, 4), "b": (3,), "c": ()}.items()
            }
            sent = {"a": randn(2, 5, 4, seed=part + 9) > 0, "b": True, "c": part == 1}
            put = {n: v.to(device) for n, v in tree.items()}
            marks = {n: m.to(device) if isinstance(m, torch.Tensor) else m for n, m in sent.items()}
            total.add(put, marks, torch.tensor([1, 2 + part], device=device))
        mean, heard = total.mean()
        ends.append({**{n: v.cpu() for n, v in mean.items()}, **{f"heard {n}": v.cpu() for n, v in heard.items()}})
    assert ends[0].keys() == ends[1].keys()
    assert all(v.equal(ends[1][n]) for n, v in ends[0].items())


@pytest.mark.parametrize("masked", [True, False], ids=["entries", "whole"])
@pytest.mark.parametrize("lying", [(True, True), (True, False), (False, True)], ids=["blocks", "block first", "block last"])
def test_masked_sums_of_blocks_are_those_of_tensors(lying, masked):
    """One part of the cohort comes in one block, the other perhaps tensor by tensor."""
    shapes = {"a": (5, 4), "b": (7,), "c": (), "stat": (3,)}
    ends = []
    for together in (lying, (False, False)):
        total = MaskedSum()
        for part, as_block in enumerate(together):
            tree = {n: (randn(2, *s, seed=part) * 64).round().div(64).float().to(DEVICE) for n, s in shapes.items()}
            sent = {n: randn(2, *s, seed=part + 9).to(DEVICE) > 0 for n, s in shapes.items() if n != "stat"}
            if as_block:
                tree, sent = (lay(torch.cat([v.reshape(2, -1) for v in t.values()], 1), t) for t in (tree, sent))
            total.add(
                tree,
                {**(sent if masked else dict.fromkeys(sent, True)), "stat": False},
                torch.tensor([1, 2 + part], device=DEVICE),
            )
        mean, heard = total.mean()
        assert list(mean) == list(heard) == ["a", "b", "c"]
        ends.append({**mean, **{f"heard {n}": v for n, v in heard.items()}})
    assert all(v.equal(ends[1][n]) and v.shape == ends[1][n].shape for n, v in ends[0].items())


@pytest.mark.parametrize("size", [1, 7, 4096, 10_001])
def test_count(size):
    from fedselect.kernels import pack

    marks = randn(3, size + 3) > 0.5
    for part in (marks, marks[:, 2:-1], marks[::2], marks[:, ::2], marks[:1].expand(4, -1)):
        there = marks.to(DEVICE).as_strided(part.shape, part.stride(), part.storage_offset())
        assert pack.count(there).sum(1).cpu().equal(part.sum(1))


@pytest.mark.parametrize("sizes", [(1,), (4097,), (5000, 3, 4096, 1, 8192)], ids=str)
def test_counts_by_tensor(sizes):
    marks = randn(3, sum(sizes) + 2) > 0.5
    tree = lay(marks[:, : sum(sizes)], {str(i): torch.empty(3, k) for i, k in enumerate(sizes)})
    moved = marks.to(DEVICE)
    there = {n: moved.as_strided(m.shape, m.stride(), m.storage_offset()) for n, m in tree.items()}
    assert block(there) is not None
    assert by_tensor(there).cpu().equal(torch.stack([m.sum(1) for m in tree.values()], 1))


# ---- copies between orders


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 1), (2, 3, 5, 3, 3), (3, 4, 16, 1, 1), (2, 5, 130, 3, 3), (2, 3, 64, 7, 7), (2, 2, 3, 2, 5)], ids=str
)
def test_relay(shape, dtype):
    from fedselect.kernels.layout import fits, relay

    def last(t):
        return t.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)

    value = (randn(*shape).float() if dtype == torch.float32 else randn(*shape) > 0).to(DEVICE)
    poison = torch.nan if dtype == torch.float32 else True
    for src in (value, last(value)):
        for into in (torch.full_like(value, poison), last(torch.full_like(value, poison))):
            assert fits(into, src)
            relay(into, src)
            assert into.equal(value)


def test_relay_of_some_clients():
    from fedselect.kernels.layout import fits, relay

    value = randn(5, 3, 6, 3, 3).float().to(DEVICE)
    room = torch.full((7, 3, 3, 3, 6), torch.nan, device=DEVICE).permute(0, 1, 4, 2, 3)
    into, src = room[2:5], value[1:4]
    assert fits(into, src)
    relay(into, src)
    assert into.equal(src)
    assert room[[0, 1, 5, 6]].isnan().all()
    shared = value[:1].expand(3, -1, -1, -1, -1)  # one client's values for all
    assert fits(into, shared)
    relay(into, shared)
    assert into.equal(shared)


def test_what_relay_cannot_read_goes_by_torch():
    from fedselect.kernels.layout import fits

    value = randn(2, 3, 6, 3, 3).float().to(DEVICE)
    last = torch.full((2, 3, 3, 3, 6), torch.nan, device=DEVICE).permute(0, 1, 4, 2, 3)
    turned = value.transpose(3, 4)
    assert not fits(last, turned)
    assert not fits(last, value.double())
    tree = {"turned": turned, "plain": value, "bias": value[:, :, 0, 0, 0]}
    into = {"turned": last.clone(), "plain": last.clone(), "bias": torch.full((2, 3), torch.nan, device=DEVICE)}
    copy(into, tree)
    assert all(into[n].equal(v) for n, v in tree.items())


KERNELS = {
    "stem": (6, 3, 7, 7),
    "bias": (6,),
    "deep": (5, 300, 3, 3),
    "point": (40, 70, 1, 1),
    "line": (2, 9, 1, 3),
    "head": (10, 513),
    "one": (),
}


@pytest.mark.parametrize("lying", ["block", "part of a block", "one for all", "tensors"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
def test_a_room_holds_what_is_placed_in_it(dtype, lying):
    """All tensors in one launch for each number of taps; the twin is the copy tensor by tensor."""
    clients = 3
    tree = {n: randn(clients, *s).float() for n, s in KERNELS.items()}
    tree = {n: (v if dtype == torch.float32 else v > 0).to(DEVICE) for n, v in tree.items()}
    whole = torch.cat([v.reshape(clients, -1) for v in tree.values()], 1)
    if lying == "part of a block":
        whole = torch.cat([whole[:, :5], whole, whole[:, :2]], 1)[:, 5:-2]
    if lying == "one for all":
        whole = whole[:1].expand(clients, -1)
    if lying != "tensors":
        tree = lay(whole, tree)
    assert (block(tree) is None) == (lying == "tensors")
    room = Room({n: torch.empty(clients + 1, *s, dtype=dtype, device=DEVICE) for n, s in KERNELS.items()}, frozenset(KERNELS))
    room.memory.fill_(255 if dtype == torch.float32 else 1)  # NaN, or True
    placed = room.write(tree)
    assert list(placed) == list(tree)
    for n, v in tree.items():
        assert placed[n].equal(v), n
        assert placed[n].data_ptr() == room.tensors[n].data_ptr()
        assert v.ndim != 5 or placed[n].permute(0, 1, 3, 4, 2).is_contiguous()
        left = room.tensors[n][clients:]
        assert (left.isnan() if dtype == torch.float32 else left).all()  # nobody's
    back = room.read(clients)
    assert all(back[n].equal(v) and back[n][0].is_contiguous() for n, v in tree.items())
    assert not {v.data_ptr() for v in back.values()} & {v.data_ptr() for v in placed.values()}


def test_kernels_of_more_clients_than_an_axis_of_a_grid_holds():
    """140 clients with 512 outputs each: 71,680 rows, and 65,535 fit on all axes but the first."""
    usual = randn(140, 512, 4, 1, 3).float().to(DEVICE)
    last = torch.empty(140, 512, 1, 3, 4, device=DEVICE).permute(0, 1, 4, 2, 3)
    copy({"w": last}, {"w": usual})
    assert last.equal(usual)
    back = torch.empty_like(usual)
    copy({"w": back}, {"w": last})
    assert back.equal(usual)
