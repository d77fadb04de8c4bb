"""The SGD kernel against the plain step in float64, with masks, clips, pulls and cropped kernels."""

import pytest
import torch
from kernel_cases import DEVICE, MARKS, randn, there

from fedselect.training.settings import Training
from fedselect.training.step import _sgd

pytestmark = MARKS

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
