"""The kernel that gathers, shifts, mirrors and scales pictures makes the pixels of the plain transforms."""

import pytest
import torch
from kernel_cases import DEVICE, MARKS, plain, randn, there

from fedselect.core.random import client_keys
from fedselect.training import transforms
from fedselect.training.batches import Split

pytestmark = MARKS


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
def test_a_split_is_that_of_a_cpu(dtype, augment):
    x = picture_pool((3, 16, 16), dtype)
    y = torch.arange(23) % 5
    data = Split(x, y, torch.tensor([12, 0, 5]), torch.tensor([11, 5, 7]), augment=augment)
    index = torch.tensor([[10, 0, 3], [4, 4, 1], [6, 2, 0]])
    there_ = data.to(torch.device(DEVICE))
    for keys in (None, KEYS):
        with plain():
            want = data.batch(index, keys)
        got = there_.batch(index.to(DEVICE), None if keys is None else keys.to(DEVICE))
        assert got[0].cpu().equal(want[0].float())
        assert got[1].cpu().equal(want[1])
