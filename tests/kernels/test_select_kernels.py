"""The selection of the largest entries is that of a sort, ties included."""

import pytest
import torch
from kernel_cases import DEVICE, LARGE, MARKS, plain, randn

from fedselect.methods.select import top

pytestmark = MARKS


def plain_top(*given):
    with plain():
        return top(*given)


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
LENGTHS = [1, 2, 100, pytest.param(4096, marks=LARGE), 4097, pytest.param(40000, marks=LARGE)]


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
@pytest.mark.parametrize("length", [2, 4097, pytest.param(40000, marks=LARGE)])
def test_the_largest_of_those_not_taken(length, values):
    from fedselect.kernels import select

    value = VALUES[values](length)
    taken = randn(4, length, seed=5) > torch.tensor([-9.0, 0.0, 1.0, 9.0]).unsqueeze(1)  # all, half, few, none
    left = length - taken.sum(1)
    for count in (torch.zeros_like(left), left // 3, left):
        want = plain_top(value, count, taken)
        assert want.sum(1).tolist() == (taken.sum(1) + count).tolist()
        assert select.top(value.to(DEVICE), count.to(DEVICE), taken.to(DEVICE)).cpu().equal(want), count.tolist()


@pytest.mark.parametrize("length", [2, 4097, pytest.param(40000, marks=LARGE)])
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
