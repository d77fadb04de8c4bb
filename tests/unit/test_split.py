"""Every client's rows of one pool: fewer clients, their sizes, and batches as a slow loop takes them."""

import pytest
import torch

from fedselect.core.random import client_keys
from fedselect.training.batches import Split
from fedselect.training.transforms import crop_flip

SIZES = (5, 0, 3, 7)
KEYS = client_keys(1, torch.arange(len(SIZES)), 2, "train")
INDEX = torch.tensor([[4, 0, 0], [0, 0, 0], [2, 1, 2], [6, 3, 0]])


def pool(pictures=True, augment="none", scaled=True):
    """Clients lie in the pool neither in order nor without gaps."""
    g = torch.Generator().manual_seed(0)
    shape = (30, 2, 8, 8) if pictures else (30, 6)
    x = torch.randint(0, 256, shape, generator=g, dtype=torch.uint8) if scaled else torch.randn(shape, generator=g)
    y = torch.randint(0, 9, (30,), generator=g)
    scale, shift = (torch.tensor([0.5, 2.0]).view(2, 1, 1), torch.tensor([-1.0, 3.0]).view(2, 1, 1)) if scaled else (None, None)
    return Split(x, y, torch.tensor([20, 2, 10, 3]), torch.tensor(SIZES), scale, shift, augment=augment)


def test_sizes_are_known_without_being_told():
    assert pool().sizes == SIZES
    assert pool().longest == 7


ROWS = {
    "all": slice(None),
    "slice": slice(1, 3),
    "every other": slice(0, None, 2),
    "nobody": slice(2, 2),
    "index": torch.tensor([3, 0]),
    "index, one twice": torch.tensor([2, 2, 1]),
    "nobody by index": torch.tensor([], dtype=torch.int64),
}


@pytest.mark.parametrize("rows", ROWS)
def test_fewer_clients_keep_their_rows_and_sizes_in_step(rows):
    data, rows = pool(), ROWS[rows]
    got = data.rows(rows)
    who = torch.arange(len(SIZES))[rows].tolist()
    assert got.n.tolist() == list(got.sizes) == [SIZES[i] for i in who]
    assert got.start.tolist() == [data.start[i] for i in who]
    assert got.longest == max([SIZES[i] for i in who], default=0)
    assert got.x is data.x
    assert got.y is data.y
    for k, i in enumerate(who):
        x, y = got.batch(INDEX[who])
        assert x[k].equal(data.batch(INDEX)[0][i])
        assert y[k].equal(data.batch(INDEX)[1][i])


def test_rows_of_rows():
    assert pool().rows(torch.tensor([3, 1, 0])).rows(slice(0, 2)).sizes == (7, 0)
    assert pool().rows(slice(1, 4)).rows(torch.tensor([2])).sizes == (7,)


KINDS = {
    "pictures": {},
    "augmented": {"augment": "crop-flip"},
    "numbers": {"pictures": False, "scaled": False},
    "pictures of numbers": {"scaled": False},
    "pictures of numbers, augmented": {"scaled": False, "augment": "crop-flip"},
}


@pytest.mark.parametrize("keys", [None, KEYS], ids=["no keys", "keys"])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_a_slow_loop(kind, keys):
    data = pool(**KINDS[kind])
    x, y = data.batch(INDEX, keys)
    assert x.dtype == torch.float32
    for c in range(len(SIZES)):
        for b, i in enumerate(INDEX[c].tolist()):
            row = int(data.start[c]) + i
            want = data.x[row]
            if keys is not None and data.augment == "crop-flip":
                want = crop_flip(want[None, None], KEYS[c : c + 1], torch.tensor([[i]]))[0, 0]
            if data.scale is not None:
                want = want.float() * data.scale + data.shift
            assert x[c, b].equal(want)
            assert y[c, b] == data.y[row]


def test_augmentation_takes_keys():
    data = pool(augment="crop-flip")
    plain = data.batch(INDEX)[0]
    assert plain.equal(pool().batch(INDEX)[0])
    assert not plain.equal(data.batch(INDEX, KEYS)[0])


def test_to_a_device_and_back_is_the_same():
    data = pool(augment="crop-flip")
    there = data.to(torch.device("cpu"))
    assert there.sizes == data.sizes
    assert there.batch(INDEX, KEYS)[0].equal(data.batch(INDEX, KEYS)[0])
    assert pool(pictures=False, scaled=False).to(torch.device("cpu")).scale is None
