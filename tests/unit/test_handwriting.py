"""MNIST, EMNIST and LEAF's FEMNIST, on small files in the published formats."""

import gzip
import json
import struct
import zipfile

import numpy as np
import pytest
import torch

import fedselect as fs
from fedselect.data.femnist import CLASS_NAMES
from fedselect.data.mnist import CLASSES, emnist, mnist
from fedselect.runs.config import Config

MNIST = {"train": "train", "test": "t10k"}


@pytest.fixture(autouse=True)
def _nothing_else_is_found(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDSELECT_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def pixels(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, 28, 28), dtype=np.uint8)


def idx(array):
    """Two zeros, 8 for bytes, the number of dimensions; the sizes, most significant byte first; the bytes."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write(folder, stems, parts, pack=True):
    """stems: how the names of training and test files begin; parts: (images, labels) of each."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, (x, y) in parts.items():
        for kind, array in (("images-idx3", x), ("labels-idx1", y)):
            raw = idx(np.asarray(array))
            (folder / f"{stems[part]}-{kind}-ubyte{'.gz' if pack else ''}").write_bytes(gzip.compress(raw) if pack else raw)


@pytest.mark.parametrize("pack", [True, False], ids=["gz", "unpacked"])
@pytest.mark.parametrize("place", ["mnist", "MNIST/raw", "."])
def test_mnist(tmp_path, place, pack):
    x, y = pixels(30), np.arange(30) % 10
    write(tmp_path / place, MNIST, {"train": (x[:20], y[:20]), "test": (x[20:], y[20:])}, pack)
    images = mnist(tmp_path)
    assert np.array_equal(images.x[..., 0], x)
    assert images.y.tolist() == y.tolist()
    assert images.test.tolist() == [False] * 20 + [True] * 10
    data = fs.load("MNIST", data_dir=str(tmp_path), clients=2, train=4, test=2)
    assert (data.shape, data.classes, data.class_names) == ((1, 28, 28), 10, tuple("0123456789"))


@pytest.mark.parametrize("subset", sorted(CLASSES))
def test_emnist_is_turned_upright_and_its_classes_have_names(tmp_path, subset):
    first = 1 if subset == "letters" else 0  # as published
    y = np.arange(len(CLASSES[subset]))
    x = pixels(len(y))
    stems = {part: f"emnist-{subset}-{part}" for part in ("train", "test")}
    write(tmp_path / "gzip", stems, dict.fromkeys(stems, (x, y + first)))
    images = emnist(tmp_path, subset)
    assert np.array_equal(images.x[0, :, :, 0], x[0].T)
    assert images.y.tolist() == [*y, *y]
    assert len(images.class_names) == {"byclass": 62, "letters": 26, "balanced": 47, "bymerge": 47}.get(subset, 10)


def test_names_of_emnist_are_those_of_its_mapping():
    """emnist-balanced-mapping.txt gives label 36 the character 97, 46 the character 116; byclass 61 is 122."""
    assert [ord(CLASSES["balanced"][c]) for c in (0, 10, 35, 36, 38, 46)] == [48, 65, 90, 97, 100, 116]
    assert [ord(CLASSES["byclass"][c]) for c in (9, 35, 36, 61)] == [57, 90, 97, 122]


def test_emnist_from_the_published_archive(tmp_path):
    x, y = pixels(94), np.arange(94) % 47
    stems = {part: f"emnist-balanced-{part}" for part in ("train", "test")}
    write(tmp_path / "made", stems, dict.fromkeys(stems, (x, y)))
    with zipfile.ZipFile(tmp_path / "emnist.zip", "w") as archive:
        for file in (tmp_path / "made").iterdir():
            archive.write(file, f"gzip/{file.name}")
    data = fs.load("emnist", data_dir=str(tmp_path), clients=4, train=5, test=5)
    assert (data.shape, data.classes) == ((1, 28, 28), 47)
    with pytest.raises(fs.DataError, match=r"emnist\.zip lacks emnist-letters-train-images-idx3-ubyte\.gz; delete it"):
        fs.load("emnist", data_dir=str(tmp_path), subset="letters")
    with pytest.raises(fs.InputError, match=r"subset is balanced or byclass or .*, not 'all'"):
        fs.load("emnist", data_dir=str(tmp_path), subset="all")


@pytest.mark.parametrize(
    ("name", "raw", "said"),
    [
        ("train-images-idx3-ubyte.gz", gzip.compress(idx(pixels(3)))[:-40], "is truncated or damaged"),
        ("train-images-idx3-ubyte.gz", gzip.compress(idx(pixels(3))[:-1]), "truncated: it says 3 x 28 x 28 bytes and has 2351"),
        ("train-images-idx3-ubyte.gz", gzip.compress(idx(np.zeros(3))), "is no idx file of images"),
        ("train-images-idx3-ubyte.gz", gzip.compress(idx(pixels(3)[:, :8])), "has images of 8x28, not 28x28"),
        ("train-images-idx3-ubyte.gz", gzip.compress(b""), "is no idx file of images"),
        ("train-labels-idx1-ubyte.gz", gzip.compress(idx(np.zeros(2))), "has 3 images, but .* has 2 labels"),
        ("train-labels-idx1-ubyte.gz", gzip.compress(idx(np.full(3, 10))), "has labels outside 0 to 9"),
    ],
    ids=["truncated", "short", "labels", "8x28", "empty", "too few labels", "label 10"],
)  # fmt: skip
def test_files_that_are_damaged_or_of_another_kind(tmp_path, name, raw, said):
    write(tmp_path, MNIST, dict.fromkeys(MNIST, (pixels(3), np.arange(3))))
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(fs.DataError, match=said):
        mnist(tmp_path)


def test_a_file_that_is_missing_is_named(tmp_path):
    write(tmp_path, MNIST, {"train": (pixels(3), np.arange(3))})
    with pytest.raises(fs.DataError, match=r"lacks t10k-images-idx3-ubyte\.gz; place it there"):
        mnist(tmp_path)


@pytest.mark.parametrize(
    ("name", "said"), [("mnist", "data fetch mnist"), ("emnist", "data fetch emnist"), ("femnist", "get it from .*leaf")]
)
def test_data_that_is_not_there_says_where_to_get_it(name, said, tmp_path):
    with pytest.raises(fs.DataError, match=rf"the data is missing: place .*{said}"):
        fs.load(name, data_dir=str(tmp_path))


# --- LEAF


def leaf(users, keys=("users", "num_samples", "user_data")):
    """users: name -> (bytes (N, 28, 28), labels)"""
    held = {u: {"x": (x.reshape(len(x), -1) / 255).tolist(), "y": [int(c) for c in y]} for u, (x, y) in users.items()}
    return json.dumps(dict(zip(keys, (list(users), [len(y) for _, y in users.values()], held), strict=True)))


def writer(number, count=8):
    return pixels(count, number), (np.arange(count) * 7 + number) % 62


def put(file, users, **how):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(leaf(users, **how))


def test_each_writer_is_a_client_and_pictures_keep_their_bytes(tmp_path):
    """2 comes before 10, as LEAF counts its files."""
    put(tmp_path / "femnist" / "data" / "all_data" / "all_data_10.json", {"f9_9": writer(9)})
    put(tmp_path / "femnist" / "data" / "all_data" / "all_data_2.json", {"f1_0": writer(1), "f2_0": writer(2)})
    for _ in range(2):  # then from what was kept
        data = fs.load("femnist", data_dir=str(tmp_path))
        assert [c.name for c in data.clients] == ["f1_0", "f2_0", "f9_9"]
        assert (data.shape, data.classes, data.class_names) == ((1, 28, 28), 62, CLASS_NAMES)
        for client, number in zip(data.clients, (1, 2, 9), strict=True):
            x, y = writer(number)
            assert (len(client.train[1]), len(client.test[1])) == (6, 2)
            got = torch.cat([client.train[0], client.test[0]])[:, 0]
            labels = torch.cat([client.train[1], client.test[1]])
            assert got.dtype == torch.uint8
            at = [int(np.flatnonzero((x == g.numpy()).all((1, 2)))[0]) for g in got]
            assert sorted(at) == list(range(8))
            assert labels.tolist() == y[at].tolist()
    assert (CLASS_NAMES[0], CLASS_NAMES[10], CLASS_NAMES[36]) == ("0", "A", "a")


def test_samples_that_leaf_set_aside_are_tested_on(tmp_path):
    x, y = writer(3, 10)
    put(tmp_path / "femnist" / "data" / "train" / "a.json", {"f3": (x[:8], y[:8]), "f4": writer(4)})
    put(tmp_path / "femnist" / "data" / "test" / "a.json", {"f4": writer(5, 3), "f3": (x[8:], y[8:])})
    data = fs.load("femnist", data_dir=str(tmp_path), val=2, seed=1)
    first = data.clients[0]
    assert (first.name, len(first.train[1]), len(first.val[1]), len(first.test[1])) == ("f3", 6, 2, 2)
    assert sorted(first.test[1].tolist()) == sorted(y[8:].tolist())
    assert sorted(torch.cat([first.train[1], first.val[1]]).tolist()) == sorted(y[:8].tolist())
    assert len(fs.load("femnist", data_dir=str(tmp_path), clients=1, train=3).clients[0].train[1]) == 3
    with pytest.raises(fs.InputError, match="clients must lie in 1 to 2, not 3"):
        fs.load("femnist", data_dir=str(tmp_path), clients=3)
    put(tmp_path / "femnist" / "data" / "test" / "a.json", {"f4": writer(5, 3)})
    with pytest.raises(
        fs.DataError, match=r"writer f3 is in .* but not in .*; divide samples, not writers: preprocess.sh -t sam"
    ):
        fs.load("femnist", data_dir=str(tmp_path))


def test_only_files_that_are_needed_are_read(tmp_path):
    put(tmp_path / "all_data" / "all_data_0.json", {"a": writer(1), "b": writer(2)})
    (tmp_path / "all_data" / "all_data_1.json").write_text("no JSON")
    (tmp_path / "femnist").symlink_to(tmp_path)
    assert len(fs.load("femnist", data_dir=str(tmp_path), clients=2).clients) == 2
    with pytest.raises(fs.DataError, match=r"all_data_1\.json is no file of LEAF with users, num_samples and user_data"):
        fs.load("femnist", data_dir=str(tmp_path), clients=3)


def test_a_file_that_changed_is_read_again_and_a_damaged_copy_is_made_again(tmp_path):
    file = tmp_path / "femnist" / "a.json"
    put(file, {"a": writer(1)})
    assert len(fs.load("femnist", data_dir=str(tmp_path)).clients) == 1
    put(file, {"a": writer(1), "b": writer(2)})
    assert len(fs.load("femnist", data_dir=str(tmp_path)).clients) == 2
    (kept,) = (tmp_path / "cache" / "fedselect" / "decoded").glob("femnist-*.npz")
    kept.write_bytes(kept.read_bytes()[:100])
    with pytest.warns(UserWarning, match="is damaged; what it was made from is read again"):
        assert len(fs.load("femnist", data_dir=str(tmp_path)).clients) == 2


def edited(change):
    said = json.loads(leaf({"a": writer(1, 4)}))
    change(said)
    return said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s["user_data"]["a"]["y"].pop(), "writer a has 4 images and 3 labels, not 4 of each"),
        (lambda s: s.update(num_samples=[5]), "writer a has 4 images and 4 labels, not 5 of each"),
        (lambda s: s["user_data"]["a"]["y"].__setitem__(0, 62), "writer a has a label outside 0 to 61"),
        (lambda s: s["user_data"]["a"]["x"][0].__setitem__(0, 1.5), "images of 784 numbers from 0 to 1"),
        (lambda s: s["user_data"]["a"].update(x=[[0.5] * 9] * 4), "images of 784 numbers from 0 to 1"),
        (lambda s: s.pop("num_samples"), r"is no file of LEAF .*KeyError: 'num_samples'"),
        (lambda s: s["user_data"].clear(), r"is no file of LEAF .*KeyError: 'a'"),
    ],
)
def test_files_that_leaf_did_not_write_so(tmp_path, change, said):
    (tmp_path / "femnist").mkdir()
    (tmp_path / "femnist" / "a.json").write_text(json.dumps(edited(change)))
    with pytest.raises(fs.DataError, match=said):
        fs.load("femnist", data_dir=str(tmp_path))


def test_the_command_line_trains_on_each(cli, tmp_path):
    y = np.arange(40) % 10
    write(tmp_path / "mnist", MNIST, dict.fromkeys(MNIST, (pixels(40), y)))
    put(tmp_path / "femnist" / "a.json", {"a": writer(1), "b": writer(2)})
    for name, more in (("mnist", ("--train", 4, "--test", 2, "--clients", 2)), ("femnist", ())):
        how = ("--data", name, "--data-dir", tmp_path, "--method", "fedavg", "--width", 2, "--rounds", 1, "-q", *more)
        assert cli("run", *how, "--out", tmp_path / f"run-{name}").code == 0


@pytest.mark.parametrize("name", ["mnist", "emnist", "femnist"])
def test_each_has_a_model_that_suits(name):
    assert Config.from_dict({"data": {"name": name}}, "test").model["name"] == "small_cnn"
