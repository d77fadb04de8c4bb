"""A user's own tensors: what is wrong with them is said before training, by client."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import fedselect as fs


def part(n=4, shape=(2,), labels=(0, 1)):
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(n)), torch.tensor(labels).repeat(n)[:n]


def federation(*, train=None, test=None, val=None, classes=2, name=None):
    """Two clients; the second has the parts that are given."""
    good = fs.ClientData(part(), part(2))
    return fs.Federation([good, fs.ClientData(train or part(), test or part(2), val, name)], classes)


def spoiled(value):
    x, y = part()
    x[2, 1] = value
    return x, y


def relabelled(label):
    x, y = part()
    y[1] = label
    return x, y


X, Y = part()


def test_good_data_passes():
    got = federation(val=part(3))
    assert (got.classes, got.shape) == (2, (2,))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"train": (X[:0], Y[:0])}, "client 1 has no training data; leave it out or give it some"),
        ({"test": (X[:0], Y[:0])}, "client 1 has no test data"),
        ({"val": (X[:0], Y[:0])}, "client 1 has no validation data"),
        ({"train": (X, Y[:3])}, "a client: train has 4 inputs but 3 targets; give one target per input"),
        ({"train": part(shape=(3,))}, r"client 1 has training inputs of shape \(3,\); the first client has \(2,\)"),
        ({"test": part(shape=(2, 1))}, r"client 1 has test inputs of shape \(2, 1\)"),
        ({"train": ((X * 255).to(torch.uint8), Y)}, r"client 1 has training inputs of type torch.uint8; give floats"),
        (
            {"train": (X > 0.5, Y)},
            r"client 1 has training inputs of type torch.bool; give floats, .* or int64 for an embedding",
        ),
        (
            {"train": (X.long(), Y)},
            r"client 1 has training inputs of type torch.int64; the first client trains on torch.float32",
        ),
        ({"train": (X.to("meta"), Y)}, "client 1 has training data on meta and cpu; put all of it on cpu"),
        ({"train": (X, Y.float())}, "client 1 has training labels of type torch.float32"),
        ({"train": (X, Y.view(-1, 1))}, r"client 1 has training labels of type torch.int64 and shape \(4, 1\)"),
        ({"train": relabelled(2)}, "client 1 has the training label 2; labels must lie in 0 to 1"),
        ({"test": relabelled(-1)}, "client 1 has the test label -1; labels must lie in 0 to 1"),
        ({"val": relabelled(7)}, "client 1 has the validation label 7"),
        ({"train": spoiled(torch.nan)}, "client 1 has NaN or Inf in its training inputs, first in sample 2"),
        ({"test": spoiled(-torch.inf)}, "client 1 has NaN or Inf in its test inputs, first in sample 2"),
        ({"train": spoiled(torch.nan), "name": "Lyon"}, "client Lyon has NaN"),
    ],
)
def test_what_is_wrong_is_said_with_the_clients_name(how, said):
    with pytest.raises(fs.DataError, match=said):
        federation(**how)


@pytest.mark.parametrize("wrong", [X, (X, Y, Y), (X,), "text"], ids=["inputs alone", "three", "one", "text"])
@pytest.mark.parametrize("which", ["train", "test", "val"])
def test_a_part_is_a_pair(wrong, which):
    parts = {"train": (X, Y), "test": (X, Y), which: wrong}
    with pytest.raises(fs.DataError, match=rf"client Lyon: {which} must be a pair \(inputs, targets\) of arrays or tensors"):
        fs.ClientData(**parts, name="Lyon")


def test_there_is_something_to_train_on():
    with pytest.raises(fs.DataError, match="a client: train must be a pair"):
        fs.ClientData(None)


def test_no_clients():
    with pytest.raises(fs.DataError, match="there are no clients"):
        fs.Federation([])


def test_one_client_without_any_data():
    with pytest.raises(fs.DataError, match="client 0 has no training data"):
        fs.Federation([fs.ClientData((X[:0], Y[:0]), (X[:0], Y[:0]))])


def test_the_number_of_classes_is_found_from_training_and_test_labels():
    assert federation(classes=0, test=part(2, labels=(1, 4))).classes == 5


def test_a_label_only_validation_has_is_no_class():
    with pytest.raises(fs.DataError, match="client 1 has the validation label 6; labels must lie in 0 to 1"):
        federation(classes=0, val=relabelled(6))


def test_labels_lists_a_clients_training_classes():
    assert federation(classes=5, train=part(labels=(3, 0))).labels(1) == [0, 3]


def test_split_pools_ragged_clients_and_finds_each_ones_rows():
    data = fs.Federation([fs.ClientData(part(3), part(1)), fs.ClientData(part(5), part(2), part(4))], 2)
    split = data.split("train", torch.float64)
    assert (split.start.tolist(), split.n.tolist(), split.x.dtype) == ([0, 3], [3, 5], torch.float64)
    x, y = split.batch(torch.tensor([[2, 0], [4, 1]]))
    assert x[1, 0].equal(part(5)[0][4].double())
    assert y.tolist() == [[0, 0], [0, 1]]  # labels alternate 0, 1
    assert data.split("val", torch.float32).n.tolist() == [0, 4]


def dealt():
    """160 pictures, each of a shade of its own, dealt to four clients in pools."""
    shades = np.arange(160, dtype=np.uint8)[:, None, None, None] * np.ones((1, 4, 4, 3), np.uint8)
    images = fs.Images("mine", shades, np.arange(160) % 4, tuple("abcd"))
    return fs.deal_images(images, clients=4, classes_per_client=2, train=12, test=6, val=4)


def held(data, part):
    """The shades and labels each client has in a split."""
    split = data.split(part, torch.float32)
    rows = [slice(s, s + n) for s, n in zip(split.start.tolist(), split.n.tolist(), strict=True)]
    assert len(split.x) == int(split.n.sum())
    return [(split.x[r, 0, 0, 0].tolist(), split.y[r].tolist()) for r in rows]


def own(pairs):
    return [(x[:, 0, 0, 0].tolist(), y.tolist()) for x, y in pairs]


@pytest.mark.parametrize(
    "change",
    [
        lambda clients: clients[2:],
        lambda clients: clients[:2],
        lambda clients: clients[::-1],
        lambda clients: [clients[1], *clients[:1], *clients[2:]],
        lambda clients: [replace(c, train=(c.train[0], 3 - c.train[1])) for c in clients],
        lambda clients: [replace(c, train=(c.train[0].flip(0), c.train[1])) for c in clients],
        lambda clients: [replace(clients[0], train=(clients[0].train[0][:3], clients[0].train[1][:3])), *clients[1:]],
        lambda clients: [replace(clients[0], val=None), *clients[1:]],
    ],
    ids=["last", "first", "turned round", "two swapped", "labels", "pictures", "fewer samples", "no validation"],
)
def test_a_federation_of_other_clients_has_their_samples_and_no_others(change):
    data = dealt()
    other = replace(data, clients=change(data.clients))
    for part in ("train", "val", "test"):
        pairs = [getattr(c, part) or (c.train[0][:0], c.train[1][:0]) for c in other.clients]
        assert held(other, part) == own(pairs)


def test_on_validation_the_validation_samples_are_tested_on():
    data = dealt()
    scored = data.on_validation()
    assert held(scored, "test") == own([c.val for c in data.clients]) != own([c.test for c in data.clients])
    assert held(scored, "train") == own([c.train for c in data.clients])
    assert scored.split("test", torch.float32).x.data_ptr() == data.pools["val"][0].data_ptr()  # not copied
    some = replace(data, clients=data.clients[1:3]).on_validation()
    assert held(some, "test") == own([c.val for c in data.clients[1:3]])


def test_load_names_what_it_does_not_know():
    with pytest.raises(fs.InputError, match="there is no data 'digts'; did you mean 'digits'"):
        fs.load("digts")
    with pytest.raises(fs.InputError, match="there is no option of data digits: 'client'; did you mean 'clients'"):
        fs.load("digits", client=3)


def test_load_is_decided_by_its_seed():
    a, b, c = (fs.load("digits", clients=2, train=8, test=4, seed=s).clients[0].train[0] for s in (1, 1, 2))
    assert a.equal(b)
    assert not a.equal(c)


def test_a_federation_is_shown_in_a_line_and_clients_may_be_compared():
    data = fs.load("digits")
    assert repr(data) == "Federation('digits': 10 clients, 10 classes, inputs (1, 8, 8))"
    assert repr(data.clients[0]).startswith("ClientData(train 20, val 5, test 100, name=")
    assert data.clients[0] == data.clients[0]
    assert data.clients[0] != data.clients[1]
