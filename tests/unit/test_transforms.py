"""Pictures as uint8, normalised and augmented batch by batch, keyed by client and image."""

import pytest
import torch

import fedselect as fs
from fedselect.core.random import client_keys
from fedselect.training.transforms import crop_flip

G = torch.Generator().manual_seed(0)
X = torch.randint(0, 256, (3, 5, 2, 16, 24), generator=G, dtype=torch.uint8)  # clients, batch, channels, height, width
KEYS = client_keys(1, torch.arange(3), 4, "train")
INDEX = torch.randint(0, 100, (3, 5), generator=G)


def candidates(picture):
    """Every crop and mirror image that may come out: shifts of up to 16 / 8 = 2 and 24 / 8 = 3."""
    height, width = picture.shape[-2:]
    padded = torch.nn.functional.pad(picture, (3, 3, 2, 2))
    for down in range(5):
        for right in range(7):
            crop = padded[:, down : down + height, right : right + width]
            yield crop
            yield crop.flip(-1)


def test_every_picture_is_a_crop_of_itself():
    got = crop_flip(X, KEYS, INDEX)
    assert got.dtype == torch.uint8
    for c in range(3):
        for b in range(5):
            assert any(torch.equal(got[c, b], want) for want in candidates(X[c, b]))


def test_a_picture_is_treated_alike_in_any_company():
    got = crop_flip(X, KEYS, INDEX)
    alone = crop_flip(X[1:2, 3:4], KEYS[1:2], INDEX[1:2, 3:4])
    assert torch.equal(alone[0, 0], got[1, 3])


def test_pictures_differ_and_rounds_differ():
    same = X[:1, :1].expand(1, 64, -1, -1, -1)
    got = crop_flip(same, KEYS[:1], torch.arange(64).unsqueeze(0))
    kinds = {tuple(p.flatten().tolist()) for p in got[0]}
    assert len(kinds) > 30  # of 70 possible ones, 64 draws
    assert not torch.equal(got, crop_flip(same, KEYS[1:2], torch.arange(64).unsqueeze(0)))


def pictures(**how):
    g = torch.Generator().manual_seed(3)
    made = []
    for n in (9, 14):
        x = torch.randint(0, 256, (n, 3, 8, 8), generator=g, dtype=torch.uint8)
        made.append(fs.ClientData((x, torch.arange(n) % 2), (x[:4], torch.arange(4) % 2)))
    return fs.Federation(made, 2, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3), **how)


def test_pixels_become_numbers_by_channel():
    data = pictures()
    split = data.split("train", torch.float64)
    assert split.x.dtype == torch.uint8
    x, _ = split.batch(torch.tensor([[2], [5]]))
    want = data.clients[1].train[0][5].double() / 255
    for channel, (mean, std) in enumerate(zip((0.4, 0.5, 0.6), (0.2, 0.25, 0.3), strict=True)):
        torch.testing.assert_close(x[1, 0, channel], (want[channel] - mean) / std)


def test_training_is_augmented_and_testing_is_not():
    data = pictures(augment="crop-flip")
    index, keys = torch.arange(4).repeat(2, 1), client_keys(0, torch.arange(2), 0, "train")
    plain, _ = data.split("train", torch.float32).batch(index)
    assert not torch.equal(data.split("train", torch.float32).batch(index, keys)[0], plain)
    test = data.split("test", torch.float32)
    assert torch.equal(test.batch(index, keys)[0], test.batch(index)[0])


@pytest.mark.parametrize("augment", ["none", "crop-flip"])
def test_runs_do_not_depend_on_chunks(augment):
    data = pictures(augment=augment)
    ends = []
    for chunk in (1, 2):
        result = fs.run(fs.FedSelect(lr=0.1), model=fs.models.small_cnn(data, width=2), data=data, rounds=2, chunk=chunk)
        ends.append(result.personal(1))
    assert all(torch.equal(ends[0][n], ends[1][n]) for n in ends[0])


def test_bad_augmentation():
    with pytest.raises(fs.InputError, match="augment must be none or crop-flip, not 'flop'"):
        pictures(augment="flop")
    x = torch.randn(4, 5)
    with pytest.raises(fs.DataError, match="augment=crop-flip is for images"):
        fs.Federation(
            [fs.ClientData((x, torch.zeros(4, dtype=torch.int64)), (x, torch.zeros(4, dtype=torch.int64)))],
            2,
            augment="crop-flip",
        )
