"""Convolution kernels against torch's own in float64, on awkward shapes and any layout."""

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import DEVICE, LARGE, LOW_PRODUCTS, MARKS, assert_near, randn, rounded, there

from fedselect.training.convolution import Conv

pytestmark = MARKS

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
SLOW = {"stem", "long sum", "large tiles", "large tiles, strided"}
BY_KIND = [
    pytest.param(case, kind, marks=LOW_PRODUCTS if kind != "float32" else LARGE if case in SLOW else ())
    for case, kind in [*((case, "float32") for case in CONVS), *((case, kind) for case in COARSE for kind in ("tf32", "bf16"))]
]


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
@pytest.mark.parametrize("case", ["three to odd", "strided", pytest.param("stem", marks=LARGE), "not square"])
def test_the_convolution_rule_is_its_own_twin(case, bias):
    """Conv on the GPU against Conv on a CPU, all gradients."""
    x, w, b, stride, padding = conv_case(case)
    b = b if bias else None
    upstream, ends = None, []
    for place in (lambda v: v.clone(), there):
        given = [None if v is None else place(rounded(v, "")).requires_grad_() for v in (x, w, b)]
        y = Conv.apply(*given, stride, padding, (1, 1), "float32")
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
