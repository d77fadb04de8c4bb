"""Memory is poisoned: what `torch.empty` hands out holds NaN, so that an entry that is never written shows."""

import pytest
import torch


@pytest.fixture(autouse=True)
def poison():
    before = torch.utils.deterministic.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before[0]
    torch.use_deterministic_algorithms(before[1])
