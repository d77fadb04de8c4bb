"""A small federation for the deployment's tests: three clients, a growing mask, letters in one process."""

import pytest
from local import QUICK, Room, assignment

import fedselect as fs
from fedselect.network.server import Server
from fedselect.training.settings import Training


@pytest.fixture
def small(digits):
    """What everybody works on."""
    method = fs.FedSelect(rate=0.2, limit=0.5, epochs=1, lr=0.1, personal_lr=0.1)
    return assignment(method, lambda data: fs.models.mlp(data, hidden=8), digits, seed=4, training=Training(batch_size=8))


@pytest.fixture
def room(small, digits, tmp_path):
    return Room(small, digits, tmp_path)


@pytest.fixture
def server(small, tmp_path):
    return Server(small, QUICK, tmp_path / "masks")
