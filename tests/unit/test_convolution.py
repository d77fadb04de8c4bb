"""Convolutions of stacked clients on a CPU, each of three ways, against torch's own, client by client in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap

from fedselect.training import convolution
from fedselect.training.convolution import Conv, How
from fedselect.training.stacked import Forward

CLIENTS = 3
EXACT = {"rtol": 1e-10, "atol": 1e-12}
WAYS = ["windows", "grouped", "alone"]
CONVS = [
    # kernel, stride, padding, dilation
    ((1, 1), (1, 1), (0, 0), (1, 1)),
    ((3, 3), (1, 1), (1, 1), (1, 1)),
    ((3, 3), (2, 2), (1, 1), (1, 1)),
    ((3, 3), (2, 3), (0, 2), (1, 1)),
    ((2, 3), (1, 2), (1, 0), (2, 1)),
    ((3, 2), (3, 1), (2, 3), (1, 3)),
    ((7, 7), (2, 2), (3, 3), (1, 1)),
    ((2, 2), (1, 1), (2, 1), (1, 1)),  # some windows meet nothing but padding
    ((3, 2), (1, 1), (1, 1), (2, 3)),
    ((3, 5), (1, 1), (2, 2), (2, 1)),
]
SIZE = (7, 8)
CASES = [(way, *conv) for way in WAYS for conv in CONVS if way != "grouped" or How(*conv[1:]).keeps(SIZE, conv[0])]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    take(monkeypatch, request.param)
    return request.param


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def leaves(*tensors):
    return [None if t is None else t.clone().requires_grad_() for t in tensors]


def take(monkeypatch, way):
    monkeypatch.setattr(convolution, "_way", lambda x, w, how: way)


def inputs(kernel, bias=True, *, size=SIZE, batch=2, clients=CLIENTS, inside=3, out=4):
    x, w = randn(clients, batch, inside, *size), randn(clients, out, inside, *kernel, seed=1)
    return x, w, randn(clients, out, seed=2) if bias else None


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize(("way", "kernel", "stride", "padding", "dilation"), CASES)
def test_convolution_is_torchs_for_every_client(way, kernel, stride, padding, dilation, bias, monkeypatch):
    take(monkeypatch, way)
    x, w, b = leaves(*inputs(kernel, bias))
    y = Conv.apply(x, w, b, stride, padding, dilation)
    upstream = randn(*y.shape, seed=3)
    y.backward(upstream)
    for c in range(CLIENTS):
        one = leaves(*(None if t is None else t[c].detach() for t in (x, w, b)))
        expected = F.conv2d(*one, stride, padding, dilation)
        expected.backward(upstream[c])
        torch.testing.assert_close(y[c], expected, **EXACT)
        for stacked, alone in zip((x, w, b), one, strict=True):
            if alone is not None:
                torch.testing.assert_close(stacked.grad[c], alone.grad, **EXACT)


@pytest.mark.parametrize(("way", "kernel", "stride", "padding", "dilation"), CASES)
def test_gradients_are_those_of_finite_differences(way, kernel, stride, padding, dilation, monkeypatch):
    take(monkeypatch, way)
    given = leaves(*inputs(kernel, size=(5, 6), batch=1, clients=2, inside=2, out=3))
    # undefined upstream gradients cannot occur: the picture is the one output that has a gradient

    def convolve(x, w, b):
        return Conv.apply(x, w, b, stride, padding, dilation)

    assert torch.autograd.gradcheck(convolve, given, check_undefined_grad=False)


@pytest.mark.parametrize("wanted", [(True, False), (False, True)], ids=["input", "kernel"])
def test_only_the_gradients_that_are_needed_are_computed(wanted, way):
    x, w, _ = inputs((3, 3), False)
    x, w = (t.requires_grad_(want) for t, want in zip((x, w), wanted, strict=True))
    Conv.apply(x, w, None, (1, 1), (1, 1), (1, 1)).sum().backward()
    one = [t.detach().clone().requires_grad_(t.requires_grad) for t in (x, w)]
    sum(F.conv2d(a, k, None, 1, 1).sum() for a, k in zip(*one, strict=True)).backward()
    for stacked, alone in zip((x, w), one, strict=True):
        assert (stacked.grad is None) == (alone.grad is None)
        if alone.grad is not None:
            torch.testing.assert_close(stacked.grad, alone.grad, **EXACT)


SHAPES = [
    # batch, channels in and out, side, kernel
    (16, 16, 32, 4, 3),
    (1, 8, 8, 5, 3),
    (7, 24, 8, 6, 5),
    (16, 1, 16, 8, 3),
    (5, 3, 10, 9, 5),
    (2, 6, 3, 7, 1),
]
ALLOWED = [(way, shape) for way in WAYS for shape in (SHAPES[:3] if way == "grouped" else SHAPES)]


@pytest.mark.parametrize(("way", "shape"), ALLOWED, ids=str)
def test_a_client_gets_the_bits_that_it_gets_in_any_company(way, shape, monkeypatch):
    if way == "grouped" and not torch.backends.mkldnn.is_available():
        pytest.skip("torch has no oneDNN here")
    take(monkeypatch, way)
    batch, inside, out, side, kernel = shape
    padding = (kernel // 2, kernel // 2)
    given = inputs((kernel, kernel), size=(side, side), batch=batch, clients=11, inside=inside, out=out)

    def both(rows):
        x, w, b = leaves(*(t[rows].float() for t in given))
        y = Conv.apply(x, w, b, (1, 1), padding, (1, 1))
        y.backward(randn(11, *y.shape[1:], seed=3)[rows].float())
        return y, x.grad, w.grad, b.grad

    everybody = both(slice(None))
    for rows in (slice(0, 1), slice(4, 6), slice(8, 11), slice(1, 10)):
        for got, want in zip(both(rows), everybody, strict=True):
            assert got.equal(want[rows])


@pytest.mark.parametrize(
    ("out", "how", "expected"),
    [
        # products of a client: 16 samples, 16 * 8 channels, 9 taps, a place for every number of the result
        (8, How((1, 1), (1, 1), (1, 1)), {4: "windows", 8: "grouped", 14: "grouped", 16: "alone"}),
        (7, How((1, 1), (1, 1), (1, 1)), {4: "windows", 8: "windows", 14: "alone", 16: "alone"}),
        (8, How((1, 1), (0, 0), (1, 1)), {4: "windows", 8: "windows", 14: "alone", 16: "alone"}),
        (8, How((2, 2), (1, 1), (1, 1)), {4: "windows", 8: "windows", 14: "windows", 32: "alone"}),
    ],
    ids=["groups", "odd channels", "no padding", "stride"],
)
def test_the_way_depends_on_the_work_of_a_client_not_on_how_many_there_are(out, how, expected, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)

    def way(side, clients):
        x, w, _ = inputs((3, 3), size=(side, side), batch=16, clients=clients, inside=16, out=out)
        return convolution._way(x.float(), w.float(), how)

    assert {side: way(side, 3) for side in expected} == expected
    assert all(way(side, clients) == of_three for clients in (1, 50) for side, of_three in expected.items())
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert way(32, 3) == "windows"


def test_a_frozen_convolution_passes_gradients_on(way):
    x, w, _ = inputs((3, 3), False)
    (xs,) = leaves(x)
    with Forward(None, stacked=True):
        vmap(lambda x: torch.conv2d(x, w[0], padding=1))(xs).sum().backward()
    (alone,) = leaves(x.flatten(0, 1))
    F.conv2d(alone, w[0], padding=1).sum().backward()
    torch.testing.assert_close(xs.grad.flatten(0, 1), alone.grad, **EXACT)


@pytest.mark.parametrize("way", [*WAYS, "not stacked"])
@pytest.mark.parametrize("seed", range(40))
def test_any_convolution_is_torchs(seed, way, monkeypatch):
    """Taps that only meet padding are left out; strides, paddings and dilations of all kinds must not show it."""
    draw = torch.Generator().manual_seed(seed)
    pick = lambda low, high: int(torch.randint(low, high + 1, (1,), generator=draw))  # noqa: E731
    while True:
        size, kernel, stride, padding, dilation = pick(1, 7), pick(1, 5), pick(1, 3), pick(0, 4), pick(1, 4)
        if way == "grouped":
            stride, padding = 1, dilation * (kernel - 1) // 2
            if not How((1, 1), (padding, padding), (dilation, dilation)).keeps((size, size), (kernel, kernel)):
                continue
        if size + 2 * padding >= dilation * (kernel - 1) + 1:
            break
    take(monkeypatch, way)
    x = torch.randn(2, 3, 2, size, size + 1, generator=draw, dtype=torch.float64)
    w = torch.randn(2, 4, 2, kernel, kernel, generator=draw, dtype=torch.float64)
    stacked = way in WAYS
    for c in range(2):
        xs, ws = leaves(x, w) if stacked else leaves(x[c], w[c])
        one = leaves(x[c], w[c])
        want = F.conv2d(*one, None, stride, padding, dilation)
        with Forward(None, stacked=stacked):
            convolve = lambda a, b: F.conv2d(a, b, None, stride, padding, dilation)  # noqa: E731
            got = vmap(convolve)(xs, ws)[c] if stacked else convolve(xs, ws)
        upstream = torch.randn(*want.shape, generator=draw, dtype=torch.float64)
        want.backward(upstream)
        got.backward(upstream)
        torch.testing.assert_close(got, want, **EXACT)
        for ours, theirs in zip((xs, ws), one, strict=True):
            torch.testing.assert_close(ours.grad[c] if stacked else ours.grad, theirs.grad, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_other_device_is_asked_for_what_onednn_can_do(dtype):
    """Where kernels do not serve, as for dilated windows on a GPU; the same work on a CPU is done by groups, or alone."""
    x, w = (torch.zeros(shape, dtype=dtype, device="meta") for shape in ((3, 20, 8, 8, 8), (3, 8, 8, 3, 3)))
    how = How((1, 1), (2, 2), (2, 2))
    assert convolution._way(x, w, how) == "windows"
    assert convolution._way(torch.empty_like(x, device="cpu"), torch.empty_like(w, device="cpu"), how) != "windows"
