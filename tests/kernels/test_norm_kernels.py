"""BatchNorm kernels against torch's own in float64, client by client, alone or with a sum and a ReLU."""

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import LARGE, MARKS, OFF, randn, rounded, there

from fedselect.training import layers

pytestmark = MARKS

NORMS = [
    *((1, 2, 1), (2, 5, 3), (3, 33, 16), (2, 100, 65), (5, 7, 130), (30, 96, 8), (2, 512, 40)),  # at once
    *((2, 513, 5), (1, 3000, 20)),  # in blocks
    *(pytest.param(shape, marks=LARGE) for shape in ((40, 130, 70), (2, 4097, 64))),
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
