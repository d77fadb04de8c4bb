"""Max-pooling kernels equal torch's on a CPU, ties and infinities included."""

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import MARKS, randn, there

pytestmark = MARKS

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
