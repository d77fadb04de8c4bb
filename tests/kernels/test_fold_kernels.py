"""Sums over senders and counts of marks are those of plain PyTorch, to the bit where sums are exact."""

import pytest
import torch
from kernel_cases import DEVICE, MARKS, plain, randn

from fedselect.aggregate.masked import MaskedSum
from fedselect.core.tree import block, lay
from fedselect.core.tree import counts as by_tensor

pytestmark = MARKS


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


def masked_sum(device):
    """Of three parts of two clients each, on this device: the means and the weights behind them."""
    shapes, total = {"a": (5, 4), "b": (3,), "c": ()}, MaskedSum()
    for part in range(3):
        tree = {n: (randn(2, *s, seed=part) * 64).round().div(64).float().to(device) for n, s in shapes.items()}
        sent = {"a": (randn(2, 5, 4, seed=part + 9) > 0).to(device), "b": True, "c": part == 1}
        total.add(tree, sent, torch.tensor([1, 2 + part], device=device))
    mean, heard = total.mean()
    return {**{n: v.cpu() for n, v in mean.items()}, **{f"heard {n}": v.cpu() for n, v in heard.items()}}


def test_masked_sums_are_those_of_a_cpu():
    with plain():
        want = masked_sum("cpu")
    got = masked_sum(DEVICE)
    assert want.keys() == got.keys()
    assert all(v.equal(got[n]) for n, v in want.items())


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
