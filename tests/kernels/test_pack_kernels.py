"""The kernels that pack clients' rows equal their plain twins."""

import pytest
import torch
from kernel_cases import DEVICE, MARKS, plain

from fedselect.simulate import ragged

pytestmark = MARKS


def there_and_back(values, marks, device):
    """The marked entries of each row in a buffer, and out of it again: how many, the buffer, and the rows."""
    size = marks.shape[1]
    start = torch.arange(len(marks)) * 8 * (size + 3)
    out = torch.zeros(len(marks) * 8 * (size + 3), dtype=torch.uint8, device=device)
    values, marks = values.to(device), marks.to(device)
    found = ragged.found(marks)
    count = found.sum(1).cpu()
    ragged.lay(ragged.tighten(values, marks, found), count, out, start)
    back = ragged.spread(ragged.lift(out, count, start, size, values.dtype), marks, found)
    return count, out.cpu(), back.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.float16, torch.int64])
@pytest.mark.parametrize("size", [1, 7, 4096, 4097, 100_001])
def test_kernels_are_their_twins(dtype, size):
    g = torch.Generator().manual_seed(size)
    share = torch.tensor([0.0, 0.01, 0.3, 0.9, 1.0]).unsqueeze(1)  # none, few, many, all
    marks = torch.rand(5, size, generator=g) < share
    values = torch.randint(-1000, 1000, (5, size), generator=g).to(dtype)
    with plain():
        wanted = there_and_back(values, marks, "cpu")
    got = there_and_back(values, marks, DEVICE)
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(got[2], torch.where(marks, values, torch.zeros_like(values)))
