"""The named image sets, on small files made here: read, dealt, corrupted, trained on."""

import json

import numpy as np
import pytest
import torch

import fedselect as fs
from fedselect.core.options import options
from fedselect.data import DATA
from fedselect.data.dealt import federate
from fedselect.data.images import Images
from fedselect.data.partition import by_index
from fedselect.runs.config import Config
from fedselect.runs.rundir import identity


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """CIFAR-10 in miniature: 12 training and 8 test images a class, each class a shade of its own."""
    place = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    parts = {}
    for part, each in (("train", 12), ("test", 8)):
        y = np.repeat(np.arange(10), each)
        shade = (25 * y)[:, None, None, None] + draw.integers(0, 25, (len(y), 32, 32, 3))
        parts |= {f"x_{part}": shade.astype(np.uint8), f"y_{part}": y.astype(np.int64)}
    np.savez(place / "cifar10.npz", **parts)
    return place


def load(folder, name="cifar10", **how):
    sizes = {"train": 8, "test": 6, "clients": 5, **how}
    return fs.load(name, data_dir=str(folder), **sizes)


def test_cifar_is_dealt_as_asked(folder):
    data = load(folder)
    assert (data.shape, data.classes, len(data.clients)) == ((3, 32, 32), 10, 5)
    for i, client in enumerate(data.clients):
        assert client.train[0].dtype == torch.uint8
        assert (len(client.train[1]), len(client.test[1])) == (8, 6)
        assert set(client.test[1].tolist()) == set(data.labels(i))
        # the shade tells the class: pixels and labels were picked together
        assert torch.equal(client.train[0].float().flatten(1).mean(1).div(25).long(), client.train[1])


def test_pictures_are_held_once(folder):
    data = load(folder)
    pool = data.split("train", torch.float32).x
    assert pool.data_ptr() == data.clients[0].train[0].data_ptr()


def test_the_environment_and_the_option_say_where_data_is(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDSELECT_DATA", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fs.load("cifar10", train=4, test=2, clients=2).name == "cifar10"
    monkeypatch.delenv("FEDSELECT_DATA")
    with pytest.raises(fs.DataError, match=r"the data is missing: place .*cifar10\.npz.*fedselect data fetch cifar10"):
        fs.load("cifar10")


def test_every_client_has_a_corruption_of_its_own(folder):
    clean, corrupted = load(folder), load(folder, "cifar10c")
    for a, b in zip(clean.clients, corrupted.clients, strict=True):
        assert torch.equal(a.train[1], b.train[1])
        for part in ("train", "test"):
            assert not torch.equal(getattr(a, part)[0], getattr(b, part)[0])
    again = load(folder, "cifar10c")
    assert torch.equal(again.clients[3].test[0], corrupted.clients[3].test[0])
    other = load(folder, "cifar10c", seed=1)
    assert not torch.equal(other.clients[3].test[0], corrupted.clients[3].test[0])


def test_a_named_corruption_and_a_wrong_one(folder):
    bright = load(folder, "cifar10c", corruption="brightness", severity=5)
    assert [c.name for c in bright.clients] == [f"{i} brightness" for i in range(len(bright.clients))]
    plain = load(folder)
    for a, b in zip(plain.clients, bright.clients, strict=True):
        assert b.train[0].float().mean() > a.train[0].float().mean()
    with pytest.raises(fs.InputError, match="there is no corruption 'brightnes'; did you mean 'brightness'"):
        load(folder, "cifar10c", corruption="brightnes")
    with pytest.raises(fs.InputError, match="severity must be from 1 to 5, not 6"):
        load(folder, "cifar10c", severity=6)


def test_too_few_images_say_how_many_there_are(folder):
    with pytest.raises(fs.DataError, match=r"class \d has 12 of its 20 samples to train on, but its 1 clients ask for 15"):
        load(folder, train=30)


@pytest.mark.parametrize("split", ["classes", "dirichlet", "iid", "quantity"])
def test_every_split_runs(folder, split):
    data = load(folder, split=split, concentration=5.0, augment="crop-flip", val=1)
    result = fs.run(fs.FedSelect(lr=0.05), model=fs.models.small_cnn(data, width=2), data=data, rounds=1)
    assert 0.0 <= result.accuracy <= 1.0


def test_explicit_lists_of_ones_own_images():
    x = np.arange(10 * 8 * 8 * 3, dtype=np.int64).reshape(10, 8, 8, 3).astype(np.uint8)
    images = Images("mine", x, np.arange(10) % 2, ("a", "b"))
    data = federate(images, by_index([[3, 1, 4], [0, 2]], [[5, 6], [7, 8]]))
    assert torch.equal(data.clients[0].train[0], torch.from_numpy(x[[3, 1, 4]]).permute(0, 3, 1, 2))
    assert data.clients[0].train[1].tolist() == [1, 1, 0]
    assert data.clients[1].test[1].tolist() == [1, 0]


def test_every_image_set_has_the_shared_options():
    for name in ("cifar10", "cifar10c", "cifar100", "miniimagenet", "officehome", "domains", "folder"):
        assert {"clients", "split", "classes_per_client", "train", "test", "val", "augment"} <= set(options(DATA[name]))
    assert "path" in options(DATA["folder"])
    assert "data_dir" in options(DATA["cifar10"])


@pytest.mark.parametrize("domains", [("a", "b", "c"), ("a", "b")])
def test_there_are_as_many_clients_as_domains(tmp_path, domains):
    make_folders(tmp_path, domains)
    data = fs.load("domains", path=str(tmp_path), size=16)
    assert [c.name for c in data.clients] == list(domains)
    with pytest.raises(
        fs.InputError, match=f"clients must be {len(domains)}, not 9; give --clients {len(domains)}, or another"
    ):
        fs.load("domains", path=str(tmp_path), size=16, clients=9)


def test_data_that_counts_its_clients_keeps_the_identity_of_runs_that_were_told():
    one, told, other = (
        identity(Config.from_dict({"data": {"name": "domains", "path": "/p", **more}}, "test"))
        for more in ({}, {"clients": 4}, {"clients": 3})
    )
    assert one == told != other


def make_folders(place, domains=("art", "photo")):
    from PIL import Image

    draw = np.random.default_rng(1)
    for domain in domains:
        for kind in ("cat", "dog"):
            folder = place / domain / kind if domain else place / kind
            folder.mkdir(parents=True)
            for i in range(12):
                Image.fromarray(draw.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(folder / f"{i}.png")


def test_ones_own_folders_on_the_command_line(cli, tmp_path):
    make_folders(tmp_path / "d")
    args = ("--clients", 2, "--size", 16, "--test", 4, "--model", "small_cnn", "--width", 2, "--rounds", 1, "-q")
    assert cli("run", "--data", f"domains:{tmp_path / 'd'}", *args, "--out", tmp_path / "a").code == 0
    saved = json.loads((tmp_path / "a" / "config.json").read_text())["data"]
    assert (saved["name"], saved["path"]) == ("domains", str(tmp_path / "d"))
    make_folders(tmp_path / "f", ("",))
    args = ("--clients", 2, "--classes-per-client", 1, "--size", 16, "--train", 6, *args[4:])
    assert cli("run", "--data", f"folder:{tmp_path / 'f'}", *args, "--out", tmp_path / "b").code == 0


def test_the_papers_test_sizes_go_with_officehome_and_not_with_a_folder_of_its_name(tmp_path):
    names = ("art", "clipart", "photo", "product", "sketch")
    make_folders(tmp_path / "a" / "officehome", names)
    make_folders(tmp_path / "b" / "officehome", names[:4])
    for place, clients in (("a", 5), ("b", 4)):
        data = fs.load("domains", path=str(tmp_path / place / "officehome"), clients=clients, size=16)
        assert [(len(c.train[1]), len(c.test[1])) for c in data.clients] == [(22, 2)] * clients  # a tenth of 24
    with pytest.raises(fs.DataError, match="test sizes are for 4 domains, but there are 5; give test"):
        fs.load("officehome", data_dir=str(tmp_path / "a"), clients=5, size=16)
    data = fs.load("officehome", data_dir=str(tmp_path / "a"), clients=5, size=16, test=3)
    assert [len(c.test[1]) for c in data.clients] == [3] * 5


def test_officehome_has_the_papers_test_sizes(monkeypatch):
    sizes = np.array([300, 500, 500, 500])
    domain = np.repeat(np.arange(4), sizes)
    pixels = np.zeros((len(domain), 4, 4, 3), np.uint8)
    images = Images("officehome", pixels, np.arange(len(domain)) % 2, ("a", "b"), domain=domain, domain_names=tuple("acpr"))
    monkeypatch.setattr("fedselect.data.folders.domains", lambda *_, **__: images)
    monkeypatch.setattr("fedselect.data.folders.find", lambda *_: None)
    data = fs.load("officehome")
    assert [len(c.test[1]) for c in data.clients] == [265, 456, 470, 465]
    assert [len(c.train[1]) for c in data.clients] == [35, 44, 30, 35]


def test_a_class_folder_under_test_alone_is_named(tmp_path):
    make_folders(tmp_path, ("train", "test"))
    (tmp_path / "train" / "dog").rename(tmp_path / "train" / "Dog")
    with pytest.raises(fs.DataError, match="class dog has no samples to train on"):
        fs.load("folder", path=str(tmp_path), size=16, clients=3)


def test_data_show_tells_and_draws(cli, tmp_path):
    said = cli("data", "show", "digits", "--clients", 3, "--out", tmp_path / "p.png")
    assert said.code == 0
    assert "digits: 3 clients, 10 classes" in said.out
    assert (tmp_path / "p.png").stat().st_size > 5_000
    even = cli("data", "show", "digits", "--clients", 3, "--classes-per-client", 10, "--train", 25)
    assert even.out.count("all 10 (2 each)") == 3  # 25 less 5 held out
    assert "give the path of the images" in cli("data", "show", "folder").sentence()
    assert "one client takes one" in cli("data", "show", f"domains:{_two(tmp_path)}", "--clients", 5).sentence()


def _two(tmp_path):
    make_folders(tmp_path / "two")
    return tmp_path / "two"


def test_a_datasets_object_is_dealt():
    """By its shape alone: rows with a picture and a label, features with class names."""
    from PIL import Image

    class Rows(list):
        features = {"image": None, "label": type("Label", (), {"names": ["cat", "dog"]})}  # noqa: RUF012

    draw = np.random.default_rng(2)
    rows = Rows(
        {"image": Image.fromarray(draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)), "label": i % 2} for i in range(40)
    )
    data = fs.deal_images(fs.from_datasets(rows), clients=2, classes_per_client=1, train=6, test=2, seed=3)
    assert data.class_names == ("cat", "dog")
    assert [len(c.train[1]) for c in data.clients] == [6, 6]
    with pytest.raises(fs.InputError, match="there is no option of data"):
        fs.deal_images(fs.from_datasets(rows), client=2)


def test_published_test_images_are_used_when_asked_for(tmp_path):
    """A whole official test set in miniature pixels, and published arrays that tell corruption, severity and row."""
    count = 10_000
    y = np.arange(count) % 10
    marks = np.zeros((5 * count, 8, 8, 3), np.uint8)
    marks[:, 0, 0, 0] = np.repeat(np.arange(1, 6), count)  # the severity
    marks[:, 0, 0, 1] = np.tile(np.arange(count) % 251, 5)  # the row within the test set
    train = {"x_train": np.full((200, 8, 8, 3), 128, np.uint8), "y_train": np.arange(200) % 10}
    np.savez(tmp_path / "cifar10.npz", **train, x_test=marks[:count], y_test=y)
    place = tmp_path / "CIFAR-10-C"
    place.mkdir()
    np.save(place / "labels.npy", np.tile(y, 5))
    np.save(place / "fog.npy", marks)
    data = fs.load(
        "cifar10c", data_dir=str(tmp_path), corruption="fog", severity=4, published=True, clients=2, train=4, test=6, seed=1
    )
    clean = fs.load("cifar10", data_dir=str(tmp_path), clients=2, train=4, test=6, seed=1)
    for a, b in zip(data.clients, clean.clients, strict=True):
        assert torch.equal(a.test[1], b.test[1])
        assert set(a.test[0][:, 0, 0, 0].tolist()) == {4}
        assert torch.equal(a.test[0][:, 1, 0, 0], b.test[0][:, 1, 0, 0])  # the same rows, mark by mark
        assert not torch.equal(a.train[0], b.train[0])  # training pictures are ours


@pytest.mark.parametrize("order", ["sorted", "two swapped", "fewer labels"])
def test_published_images_must_be_of_the_same_test_images_in_the_same_order(tmp_path, order):
    count = 10_000
    y = np.arange(count) % 10
    ours, labels = {
        "sorted": (np.sort(y), np.tile(y, 5)),
        "two swapped": (np.r_[y[:-2], y[-1], y[-2]], np.tile(y, 5)),
        "fewer labels": (y, y[: count - 1]),
    }[order]
    train = {"x_train": np.zeros((200, 8, 8, 3), np.uint8), "y_train": np.arange(200) % 10}
    np.savez(tmp_path / "cifar10.npz", **train, x_test=np.zeros((count, 8, 8, 3), np.uint8), y_test=ours)
    place = tmp_path / "CIFAR-10-C"
    place.mkdir()
    np.save(place / "labels.npy", labels.astype(np.uint8))
    np.save(place / "fog.npy", np.zeros((5 * count, 8, 8, 3), np.uint8))
    how = {"data_dir": str(tmp_path), "corruption": "fog", "clients": 2, "train": 4, "test": 6}
    with pytest.raises(fs.DataError, match=r"labels\.npy in .* does not begin with the labels of CIFAR-10's 10000 test images"):
        fs.load("cifar10c", published=True, **how)
    assert len(fs.load("cifar10c", **how).clients) == 2  # ours ask for no labels


def test_published_needs_the_whole_test_set(folder):
    with pytest.raises(fs.InputError, match="whole official test set"):
        load(folder, "cifar10c", published=True)
