"""The dropout kernel keeps what the keys of the plain rule keep."""

import pytest
import torch
from kernel_cases import DEVICE, MARKS

from fedselect.core import random
from fedselect.training.drawn import PER_WORD, _dropped, threshold

pytestmark = MARKS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 7, 33, 65), (4, 1024)])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.999])
def test_dropout_is_that_of_the_cpu(shape, p, dtype):
    keys = random.client_keys(3, torch.arange(shape[0]), 0, "train")
    x = torch.randn(shape, dtype=dtype)
    got = _dropped(x.to(DEVICE), keys.to(DEVICE), p).cpu()
    words = random.bits(keys, -(-x[0].numel() // PER_WORD)).view(torch.int16)[:, : x[0].numel()]
    keep = (words >= threshold(p)).view(shape)
    torch.testing.assert_close(got, (torch.where(keep, x.float(), 0.0) / (1 - p)).to(dtype))
