"""Every source reads small extracts of real photographs, and says what is wrong with damaged ones."""

import gzip
import io
import json
import os
import pickle
import shutil
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest

from fedselect.core.errors import DataError, InputError
from fedselect.data import load, places
from fedselect.data.cifar import CIFAR10_CLASSES, cifar10, cifar10c_published, cifar100
from fedselect.data.folders import domains, image_folder, officehome
from fedselect.data.hub import from_datasets
from fedselect.data.images import Images
from fedselect.data.miniimagenet import miniimagenet

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
pa = pytest.importorskip("pyarrow")
SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the folder of real data is not here")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Nothing of the user's own is read or written."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDSELECT_DATA", raising=False)
    yield
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)  # pytest keeps its folders, and real data is large


@pytest.fixture(scope="module")
def photo():
    from sklearn.datasets import load_sample_image

    return load_sample_image("china.jpg")


@pytest.fixture(scope="module")
def patches(photo):
    """Sixty pieces of 32x32, none like another."""
    return np.stack([photo[32 * (i // 15) : 32 * (i // 15) + 32, 40 * (i % 15) : 40 * (i % 15) + 32] for i in range(60)])


def encoded(x, kind="PNG", **options):
    out = io.BytesIO()
    Image.fromarray(x).save(out, kind, **options)
    return out.getvalue()


def parquet(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


# --- CIFAR: the official pickles


class Python2Pickler(pickle._Pickler):
    """Writes bytes as Python 2 wrote its strings, which is how the official files are written."""

    dispatch = dict(pickle._Pickler.dispatch)  # noqa: RUF012

    def save_str(self, value):
        raw = value if isinstance(value, bytes) else value.encode("latin1")
        self.write(pickle.BINSTRING + struct.pack("<i", len(raw)) + raw)

    dispatch[bytes] = dispatch[str] = save_str


def pickled(value):
    out = io.BytesIO()
    Python2Pickler(out, protocol=2).dump(value)
    return out.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def batch(x, y, label="labels"):
    return pickled({"batch_label": "some", label: [int(v) for v in y], "data": x.transpose(0, 3, 1, 2).reshape(len(x), -1)})


def cifar10_files(x, labels):
    files = {f"data_batch_{i + 1}": batch(x[10 * i : 10 * i + 10], labels[10 * i : 10 * i + 10]) for i in range(5)}
    files["test_batch"] = batch(x[50:], labels[50:])
    files["batches.meta"] = pickled({"label_names": list(CIFAR10_CLASSES), "num_vis": 3072})
    return files


def folder_of(path, files):
    path.mkdir()
    for name, raw in files.items():
        (path / name).write_bytes(raw)


def archive_of(path, folder, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, raw in files.items():
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size = len(raw)
            archive.addfile(entry, io.BytesIO(raw))


LABELS = np.arange(60) % 10


def check_cifar(got, patches):
    assert got.x.shape == (60, 32, 32, 3)
    assert np.array_equal(got.x, patches)
    assert np.array_equal(got.y, LABELS)
    assert got.y.dtype == np.int64
    assert got.class_names == CIFAR10_CLASSES
    assert np.array_equal(np.flatnonzero(got.test), np.arange(50, 60))
    assert len(got.mean) == len(got.std) == 3


def test_cifar10_archive(tmp_path, patches):
    archive_of(tmp_path / "cifar-10-python.tar.gz", "cifar-10-batches-py", cifar10_files(patches, LABELS))
    check_cifar(cifar10(tmp_path), patches)


def test_cifar10_folder_is_read_before_the_archive(tmp_path, patches):
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"never opened")
    folder_of(tmp_path / "cifar-10-batches-py", cifar10_files(patches, LABELS))
    check_cifar(cifar10(tmp_path), patches)
    check_cifar(cifar10(tmp_path / "cifar-10-batches-py"), patches)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_pickles_of_python_3_are_read_too(tmp_path, patches, protocol):
    files = {
        n: pickle.dumps(pickle.loads(raw, encoding="bytes"), protocol) for n, raw in cifar10_files(patches, LABELS).items()
    }
    folder_of(tmp_path / "cifar-10-batches-py", files)
    check_cifar(cifar10(tmp_path), patches)


@pytest.mark.parametrize("named", [True, False])
def test_cifar100(tmp_path, patches, named):
    fine = np.arange(60)
    files = {"train": batch(patches[:50], fine[:50], "fine_labels"), "test": batch(patches[50:], fine[50:], "fine_labels")}
    if named:
        files["meta"] = pickled({"fine_label_names": [f"thing{i}" for i in range(100)], "coarse_label_names": []})
    archive_of(tmp_path / "cifar-100-python.tar.gz", "cifar-100-python", files)
    got = cifar100(tmp_path)
    assert np.array_equal(got.x, patches)
    assert np.array_equal(got.y, fine)
    assert got.class_names[:2] == (("thing0", "thing1") if named else ("0", "1"))
    assert got.test.sum() == 10


class Malice:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("spot", ["data_batch_3", "batches.meta"])
def test_a_malicious_pickle_is_refused_and_does_not_run(tmp_path, patches, spot):
    evil = pickle.dumps({"data": Malice(tmp_path / "harm")}, 2)
    archive_of(tmp_path / "cifar-10-python.tar.gz", "cifar-10-batches-py", cifar10_files(patches, LABELS) | {spot: evil})
    with pytest.raises(
        DataError, match=rf"{spot} in .*cifar-10-python.tar.gz is not a CIFAR batch \(it asks for posix.mkdir\)"
    ):
        cifar10(tmp_path)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    "asked", [b"cbuiltins\neval\n", b"cnumpy\nload\n", b"cnumpy.core.multiarray\nfromfile\n", b"cos\nsystem\n"]
)
def test_only_what_arrays_need_may_be_named(tmp_path, patches, asked):
    evil = b"\x80\x02" + asked + b"X\x01\x00\x00\x001\x85R."
    folder_of(tmp_path / "cifar-10-batches-py", cifar10_files(patches, LABELS) | {"test_batch": evil})
    with pytest.raises(DataError, match="it asks for"):
        cifar10(tmp_path)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([1, 2], "it has no table"),
        ({"data": np.zeros((4, 3072), np.float32), "labels": [0] * 4}, "rows of 3072 bytes"),
        ({"data": np.zeros((4, 3071), np.uint8), "labels": [0] * 4}, "rows of 3072 bytes"),
        ({"data": np.zeros((4, 3072), np.uint8), "labels": [0] * 3}, "not 4 class numbers"),
        ({"labels": [0] * 3}, "rows of 3072 bytes"),
    ],
)
def test_batches_of_another_kind(tmp_path, patches, value, why):
    folder_of(tmp_path / "cifar-10-batches-py", cifar10_files(patches, LABELS) | {"data_batch_1": pickled(value)})
    with pytest.raises(DataError, match=f"data_batch_1 in .*{why}"):
        cifar10(tmp_path)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 0.999])
def test_a_truncated_archive(tmp_path, patches, share):
    path = tmp_path / "cifar-10-python.tar.gz"
    archive_of(path, "cifar-10-batches-py", cifar10_files(patches, LABELS))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(DataError, match=r"cifar-10-python.tar.gz (is truncated or damaged|lacks)"):
        cifar10(tmp_path)


@pytest.mark.parametrize(
    "raw", [b"", b"<html>not found</html>", gzip.compress(b"hello")], ids=["empty", "a page", "no archive"]
)
def test_an_archive_that_is_none(tmp_path, raw):
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(raw)
    with pytest.raises(DataError, match=r"truncated or damaged|lacks"):
        cifar10(tmp_path)


def test_a_batch_that_is_missing_is_named(tmp_path, patches):
    files = cifar10_files(patches, LABELS)
    del files["data_batch_4"]
    folder_of(tmp_path / "cifar-10-batches-py", files)
    with pytest.raises(DataError, match="lacks data_batch_4"):
        cifar10(tmp_path)


def test_no_cifar_anywhere_says_what_to_place_and_how_to_fetch(tmp_path):
    with pytest.raises(DataError, match=rf"cifar-10-python.tar.gz.* in {tmp_path} .*fedselect data fetch cifar10$"):
        cifar10(tmp_path)


# --- CIFAR: parquet, npz, the published corruptions


@pytest.mark.parametrize("struct_", [False, True])
@pytest.mark.parametrize("shape", ["two files", "split column", "split numbers"])
def test_cifar10_parquet(tmp_path, patches, shape, struct_):
    images = [encoded(x) for x in patches]
    cells = [{"bytes": b, "path": None} for b in images] if struct_ else images
    labels = pa.array(LABELS, pa.uint8())
    if shape == "two files":
        parquet(tmp_path / "cifar10_train.parquet", img=cells[:50], label=labels[:50])
        parquet(tmp_path / "cifar10_test.parquet", img=cells[50:], label=labels[50:])
    else:
        split = (["train"] * 50 + ["test"] * 10) if shape == "split column" else [0] * 50 + [1] * 10
        parquet(tmp_path / "cifar10.parquet", image=cells, label=labels, split=split)
    check_cifar(cifar10(tmp_path), patches)
    assert isinstance(cifar10(tmp_path).x, np.memmap)


def test_a_test_file_alone_is_a_pool_and_a_training_file_alone_an_error(tmp_path, patches):
    path = parquet(tmp_path / "cifar10_test.parquet", image=[encoded(x) for x in patches], label=LABELS)
    with pytest.warns(UserWarning, match="has only the official test images of"):
        got = cifar10(tmp_path)
    assert got.test is None
    assert np.array_equal(got.x, patches)
    path.rename(tmp_path / "cifar10_train.parquet")
    with pytest.raises(DataError, match=r"cifar10_test.parquet does not; place it in"):
        cifar10(tmp_path)


def test_parquet_that_does_not_fit(tmp_path, patches):
    path = parquet(tmp_path / "cifar10.parquet", picture=[b"x"], label=[0])
    with pytest.raises(DataError, match="no column image or img, only picture, label"):
        cifar10(tmp_path)
    parquet(path, image=[encoded(patches[0]), b"no picture"], label=[0, 1])
    with pytest.raises(DataError, match=r"row 1 of .*cifar10.parquet cannot be read as an image"):
        cifar10(tmp_path)
    parquet(path, image=[encoded(patches[0]), None], label=[0, 1])
    with pytest.raises(DataError, match="row 1 of"):
        cifar10(tmp_path)
    parquet(path, image=[encoded(patches[0])] * 2, label=[0, 1], split=["train", "train"])
    with pytest.raises(DataError, match="split column"):
        cifar10(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="damaged or not parquet"):
        cifar10(tmp_path)


def test_pictures_stream_over_row_groups(tmp_path, patches):
    order = np.arange(1500) % 60
    path = tmp_path / "cifar10.parquet"
    table = pa.table({"image": [encoded(patches[i]) for i in order], "label": order % 10})
    pq.write_table(table, path, row_group_size=130)
    assert np.array_equal(cifar10(tmp_path).x, patches[order])


def test_cifar10_npz(tmp_path, patches):
    path = tmp_path / "cifar10_subset.npz"
    y = LABELS.astype(np.uint8)
    np.savez_compressed(path, x_train=patches[:50], y_train=y[:50], x_test=patches[50:], y_test=y[50:, None], idx_test=y)
    check_cifar(cifar10(tmp_path), patches)
    check_cifar(cifar10(path), patches)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError, match="truncated or no npz"):
        cifar10(tmp_path)
    np.savez(path, x_train=patches, y_train=y)
    with pytest.raises(DataError, match="lacks x_test, y_test"):
        cifar10(tmp_path)
    np.savez(path, x_train=patches[:, 0], y_train=y, x_test=patches, y_test=y)
    with pytest.raises(DataError, match="must be \\(N, height"):
        cifar10(tmp_path)


@pytest.mark.parametrize("part", ["train", "test"])
def test_npz_images_must_be_in_colour_and_as_many_as_labels(tmp_path, patches, part):
    path = tmp_path / "cifar10.npz"
    good = {"x_train": patches[:50], "y_train": LABELS[:50], "x_test": patches[50:], "y_test": LABELS[50:]}
    x, y = good[f"x_{part}"], good[f"y_{part}"]
    turned = {f"x_{p}": good[f"x_{p}"].transpose(0, 3, 1, 2) for p in ("train", "test")}
    for spoiled, said in (
        ({f"x_{part}": x[..., :1]}, rf"cifar10\.npz: x_{part} must be \(N, height, width, 3\), not \({len(x)}, 32, 32, 1\)"),
        (turned, r"cifar10\.npz: x_train must be \(N, height, width, 3\), not \(50, 3, 32, 32\)"),
        ({f"x_{part}": x[:, :16]}, r"cifar10\.npz: x_train .* and x_test .* must have one height and width"),
        ({f"y_{part}": y[:-5]}, rf"cifar10\.npz has {len(x)} images in x_{part} but {len(x) - 5} labels in y_{part}"),
    ):
        np.savez(path, **{**good, **spoiled})
        with pytest.raises(DataError, match=said):
            cifar10(path)
    # five labels fewer to train on and five more to test on: as many as there are images, but not theirs
    np.savez(path, **{**good, "y_train": LABELS[:45], "y_test": LABELS[45:]})
    with pytest.raises(DataError, match=r"has 50 images in x_train but 45 labels in y_train"):
        cifar10(path)


@pytest.mark.parametrize("packed", [False, True])
def test_published_corruptions(tmp_path, patches, packed):
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    np.save(folder / "labels.npy", np.tile(LABELS[:12], 5))
    np.save(folder / "fog.npy", patches)
    np.save(folder / "jpeg_compression.npy", patches[::-1])
    np.save(folder / "snow.npy", patches[:50])
    if packed:
        with tarfile.open(tmp_path / "CIFAR-10-C.tar", "w") as archive:
            archive.add(folder, "CIFAR-10-C")
        folder.rename(tmp_path / "away")
    read = cifar10c_published(tmp_path)
    for severity in range(1, 6):
        got = read("fog", severity)
        assert isinstance(got, np.memmap)
        assert np.array_equal(got, patches[12 * severity - 12 : 12 * severity])
    assert np.array_equal(read("jpeg", 1), patches[::-1][:12])
    with pytest.raises(InputError, match="severity must be from 1 to 5, not 6"):
        read("fog", 6)
    with pytest.raises(InputError, match="did you mean 'fog'"):
        read("frog", 1)
    with pytest.raises(DataError, match=r"snow.npy in .* with 60 labels"):
        read("snow", 1)


def test_published_corruptions_without_labels(tmp_path, patches):
    (tmp_path / "CIFAR-10-C").mkdir()
    np.save(tmp_path / "CIFAR-10-C" / "fog.npy", patches)
    with pytest.raises(DataError, match=r"lacks labels.npy"):
        cifar10c_published(tmp_path)


# --- Mini-ImageNet


@pytest.fixture
def mini(tmp_path, patches):
    """Pictures of three classes in mini-imagenet/images, without a split file."""
    images = tmp_path / "mini-imagenet" / "images"
    images.mkdir(parents=True)
    for i in range(12):
        Image.fromarray(patches[i]).save(images / f"n0{i % 3}_{i}.png")
    return images.parent


def split_csv(path, rows):
    path.write_text("filename,label\n" + "".join(f"n0{i % 3}_{i}.png,n0{i % 3}\n" for i in rows))


def test_miniimagenet_folder_with_csv(tmp_path, mini, patches):
    split_csv(mini / "train.csv", range(6))
    split_csv(mini / "val.csv", range(6, 9))
    split_csv(mini / "test.csv", range(9, 12))
    got = miniimagenet(tmp_path, size=32)
    assert np.array_equal(got.x, patches[:12])
    assert got.class_names == ("n00", "n01", "n02")
    assert got.y.tolist() == [0, 1, 2] * 4
    assert np.flatnonzero(got.test).tolist() == [9, 10, 11]
    assert miniimagenet(mini, size=84).x.shape == (12, 84, 84, 3)


def test_fewer_classes_are_evenly_spaced_and_numbered_anew(tmp_path, mini, patches):
    split_csv(mini / "train.csv", range(9))
    split_csv(mini / "test.csv", range(9, 12))
    got = miniimagenet(tmp_path, size=32, classes=2)  # 0 * 3 // 2 and 1 * 3 // 2 of three
    assert got.class_names == ("n00", "n01")
    assert got.y.tolist() == [0, 1] * 4
    assert np.array_equal(got.x, patches[[0, 1, 3, 4, 6, 7, 9, 10]])
    assert np.flatnonzero(got.test).tolist() == [6, 7]
    assert miniimagenet(tmp_path, size=32, classes=1).y.tolist() == [0] * 4
    assert len(miniimagenet(tmp_path, size=32, classes=200).y) == 12
    with pytest.raises(InputError, match="classes must be at least 1, not 0"):
        miniimagenet(tmp_path, classes=0)


def test_only_keeps_domains_and_the_order_asked_for():
    images = Images("x", np.arange(6, dtype=np.uint8).reshape(6, 1, 1, 1), np.array([0, 1, 2, 0, 1, 2]), ("a", "b", "c"),
                    domain=np.arange(6), domain_names=tuple("uvwxyz"))  # fmt: skip
    got = images.only([2, 0])
    assert got.class_names == ("c", "a")
    assert got.x.ravel().tolist() == got.domain.tolist() == [0, 2, 3, 5]
    assert got.y.tolist() == [1, 0, 1, 0]


def test_the_few_shot_split_becomes_one_pool(tmp_path, mini):
    split_csv(mini / "train.csv", [0, 3, 6])
    split_csv(mini / "test.csv", [1, 4, 7])
    assert miniimagenet(tmp_path).test is None


@pytest.mark.parametrize("pairs", [True, False])
def test_miniimagenet_class_folders_with_json(tmp_path, mini, patches, pairs):
    for i in range(12):
        (mini / f"n0{i % 3}").mkdir(exist_ok=True)
        (mini / "images" / f"n0{i % 3}_{i}.png").rename(mini / f"n0{i % 3}" / f"{i}.png")
    rows = [[f"{i}.png", f"n0{i % 3}"] if pairs else f"n0{i % 3}/{i}.png" for i in range(12)]
    (mini / "split.json").write_text(json.dumps({"train": rows[:9], "test": rows[9:]}))
    got = miniimagenet(tmp_path, size=32)
    assert np.array_equal(got.x, patches[:12])
    assert got.test.sum() == 3


def test_missing_split_files_are_named(tmp_path, mini):
    with pytest.raises(DataError, match=r"mini-imagenet lacks train.csv and test.csv \(or split.json"):
        miniimagenet(tmp_path)
    split_csv(mini / "train.csv", range(6))
    with pytest.raises(DataError, match=r"lacks test.csv"):
        miniimagenet(tmp_path)


def test_split_files_that_do_not_fit(tmp_path, mini):
    split_csv(mini / "test.csv", range(3))
    split_csv(mini / "train.csv", range(20))
    with pytest.raises(DataError, match=r"the train split names n00_12.png of class n00"):
        miniimagenet(tmp_path)
    (mini / "train.csv").write_text("filename,label\nonly\n")
    with pytest.raises(DataError, match=r"line 2 of .*train.csv"):
        miniimagenet(tmp_path)
    for text, why in (
        ("[", "cannot be read"),
        ('{"train": []}', "lists train and test"),
        ('{"train": [3], "test": []}', "entry 3"),
    ):
        (mini / "split.json").write_text(text)
        with pytest.raises(DataError, match=why):
            miniimagenet(tmp_path)


def test_miniimagenet_parquet(tmp_path, patches):
    images = [encoded(x, "JPEG", quality=95) for x in patches[:12]]
    parquet(tmp_path / "miniimagenet.parquet", image=images, label=[0, 1, 2] * 4, split=[0] * 9 + [1] * 3)
    (tmp_path / "miniimagenet_classes.json").write_text('["n7", "n8", "n9"]')
    got = miniimagenet(tmp_path, size=32)
    assert got.class_names == ("n7", "n8", "n9")
    assert got.test.sum() == 3
    assert np.abs(got.x.astype(int) - patches[:12]).mean() < 6  # JPEG


# --- folders


@pytest.fixture
def office(tmp_path, photo):
    """Two domains, two classes, of several formats and shapes."""
    root = tmp_path / "OfficeHome"
    for d, domain in enumerate(["Art", "Real World"]):
        for c, kind in enumerate(["Bed", "Mug"]):
            (root / domain / kind).mkdir(parents=True)
            for i in range(3):
                piece = photo[100 * d : 100 * d + 60 + 20 * i, 100 * c : 100 * c + 80]
                Image.fromarray(piece).save(root / domain / kind / f"{i:05d}.{['jpg', 'png', 'JPG'][i]}")
    (root / "ImageInfo.csv").write_text("not a folder")
    (root / "Art" / "Bed" / "Thumbs.db").write_text("not a picture")
    return root


def test_domains(office):
    got = officehome(office.parent, size=40)
    assert np.array_equal(got.x, officehome(office, size=40).x)
    assert got.x.shape == (12, 40, 40, 3)
    assert got.name == "officehome"
    assert got.class_names == ("Bed", "Mug")
    assert got.domain_names == ("Art", "Real World")
    assert got.domain.tolist() == [0] * 6 + [1] * 6
    assert got.y.tolist() == [0, 0, 0, 1, 1, 1] * 2
    assert got.test is None


def test_each_domain_may_have_training_and_test_pictures(office):
    for domain in ("Art", "Real World"):
        kinds = list((office / domain).iterdir())
        for part in ("train", "test"):
            for kind in kinds:
                (office / domain / part / kind.name).mkdir(parents=True)
        for kind in kinds:
            for file in kind.iterdir():
                file.rename(office / domain / ("test" if file.stem == "00002" else "train") / kind.name / file.name)
            kind.rmdir()
    got = domains(office, size=16)
    assert got.test.tolist() == [False] * 4 + [True] * 2 + [False] * 4 + [True] * 2
    assert got.domain.tolist() == [0] * 6 + [1] * 6
    assert got.y.tolist() == [0, 0, 1, 1, 0, 1] * 2
    data = load("domains", path=str(office), size=16, clients=2)
    assert [(len(c.train[1]), len(c.test[1])) for c in data.clients] == [(4, 2), (4, 2)]
    alone = load("folder", path=str(office / "Art"), size=16, clients=1, split="iid")  # as over a network
    assert (len(alone.clients[0].train[1]), len(alone.clients[0].test[1])) == (4, 2)
    for kind in ("Bed", "Mug"):
        (office / "Art" / "train" / kind).rename(office / "Art" / kind)
    (office / "Art" / "train").rmdir()
    with pytest.raises(DataError, match=r"Real World has train/ and test/, but .*Art has not"):
        domains(office, size=16)


def test_office31_has_a_folder_more(office):
    for domain in ("Art", "Real World"):
        kinds = list((office / domain).iterdir())
        (office / domain / "images").mkdir()
        for kind in kinds:
            kind.rename(office / domain / "images" / kind.name)
    got = domains(office, size=16)
    assert (len(got.x), got.class_names, got.domain_names) == (12, ("Bed", "Mug"), ("Art", "Real World"))


def test_the_middle_is_kept(tmp_path, photo):
    (tmp_path / "set" / "a").mkdir(parents=True)
    Image.fromarray(photo[:40, :100]).save(tmp_path / "set" / "a" / "0.png")
    Image.fromarray(photo[:90, :40]).save(tmp_path / "set" / "a" / "1.png")
    x = image_folder(tmp_path / "set", size=40).x
    assert np.array_equal(x[0], photo[:40, 30:70])
    assert np.array_equal(x[1], photo[25:65, :40])
    half = np.asarray(Image.fromarray(photo[:40, :100]).resize((50, 20), Image.Resampling.BILINEAR))[:, 15:35]
    assert np.array_equal(image_folder(tmp_path / "set", size=20).x[0], half)


def test_grey_palette_and_transparent_among_colour(tmp_path, patches):
    (tmp_path / "set" / "a").mkdir(parents=True)
    colour = Image.fromarray(patches[40])
    grey = np.asarray(colour.convert("L"))
    made = {
        "0": colour,
        "1": colour.convert("L"),
        "2": colour.convert("RGBA"),
        "3": colour.quantize(256),
        "4": colour.convert("LA"),
        "5": Image.fromarray(grey.astype(np.uint16) * 256),
    }
    for name, image in made.items():
        image.save(tmp_path / "set" / "a" / f"{name}.png")
    colour.quantize(16).save(tmp_path / "set" / "a" / "6.png", transparency=b"\x00\x80")
    x = image_folder(tmp_path / "set", size=32).x
    assert x.shape == (7, 32, 32, 3)
    assert np.array_equal(x[0], x[2])
    for i in (1, 4, 5):
        assert np.array_equal(x[i], np.repeat(grey[:, :, None], 3, 2))
    assert np.abs(x[3].astype(int) - x[0]).mean() < 8


def spoil(office):
    bad = [office / "Art" / "Mug" / "00000.jpg", office / "Real World" / "Bed" / "00001.png"]
    bad[0].write_bytes(b"no picture at all")
    bad[1].write_bytes(bad[1].read_bytes()[:300])
    return bad


def test_an_unreadable_picture_is_named(office):
    bad = spoil(office)
    with pytest.raises(DataError, match=rf"({bad[0]}|{bad[1]}) cannot be read as an image .*skip_unreadable"):
        domains(office, size=16)


def test_unreadable_pictures_are_skipped_with_one_warning(office):
    bad = spoil(office)
    for _ in range(2):  # the second time from the cache
        with pytest.warns(UserWarning, match=rf"2 of 12 images in .* are skipped, first {bad[0]}") as said:
            got = domains(office, size=16, skip_unreadable=True)
        assert len(said) == 1
        assert len(got.x) == len(got.y) == len(got.domain) == 10
        assert got.y.tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1, 1]
    with pytest.raises(DataError, match="cannot be read as an image"):
        domains(office, size=16)


def test_no_readable_picture_at_all(office):
    for file in office.rglob("*.*"):
        file.write_bytes(b"none")
    with pytest.raises(DataError, match="none of the 12 images"):
        domains(office, size=16, skip_unreadable=True)


def test_without_pillow_nothing_passes_for_unreadable(office, monkeypatch):
    monkeypatch.setattr(places.importlib, "import_module", lambda module: exec("raise ImportError"))
    with pytest.raises(DataError, match="needs pillow"):
        domains(office, size=16, skip_unreadable=True)


def test_a_mended_picture_is_read_anew(office, patches):
    before = domains(office, size=16).x[0].copy()
    Image.fromarray(patches[30]).save(office / "Art" / "Bed" / "00000.jpg")
    assert not np.array_equal(before, domains(office, size=16).x[0])


def test_folders_of_another_shape(tmp_path, office):
    with pytest.raises(DataError, match="holds images where class folders belong"):
        domains(office / "Art")
    with pytest.raises(DataError, match="no images in domain/class folders"):
        domains(office / "Art" / "Bed")
    with pytest.raises(DataError, match="no images in class folders"):
        image_folder(office)
    with pytest.raises(DataError, match="cannot be read as a folder"):
        image_folder(tmp_path / "none")
    with pytest.raises(InputError, match="size must be at least 1"):
        domains(office, size=0)
    with pytest.raises(DataError, match="OfficeHomeDataset_10072016, OfficeHome or officehome"):
        officehome(office / "Art")


def test_image_folder_with_and_without_a_split(tmp_path, office):
    plain = image_folder(office / "Art", size=16)
    assert (plain.test, plain.class_names, len(plain.x)) == (None, ("Bed", "Mug"), 6)
    (office / "Art").rename(office / "train")
    (office / "Real World").rename(office / "test")
    got = image_folder(office, size=16)
    assert got.test.tolist() == [False] * 6 + [True] * 6
    assert got.class_names == ("Bed", "Mug")
    (office / "test").rename(office / "val")
    assert image_folder(office, size=16).test.sum() == 6


@pytest.mark.parametrize("named", [True, False])
def test_domains_parquet(tmp_path, patches, named):
    cells = [encoded(x) for x in patches[:6]]
    path = tmp_path / "pacs_32.parquet"
    if named:
        parquet(path, image=cells, domain=[0, 0, 1, 1, 1, 1], label=[0, 1, 2] * 2)
        (tmp_path / "pacs_meta.json").write_text('{"domains": ["art", "photo"], "classes": ["cat", "dog", "elk"]}')
    else:
        parquet(path, image=cells, domain=["art"] * 2 + ["photo"] * 4, label=["cat", "dog", "elk"] * 2)
    got = domains(path, size=32)
    assert np.array_equal(got.x, patches[:6])
    assert (got.class_names, got.domain_names) == (("cat", "dog", "elk"), ("art", "photo"))
    assert got.domain.tolist() == [0, 0, 1, 1, 1, 1]


def test_a_row_without_label_is_an_error(tmp_path, patches):
    path = parquet(tmp_path / "set.parquet", image=[encoded(patches[0])] * 2, domain=["a", None], label=[0, 1])
    with pytest.raises(DataError, match="label or domain is missing"):
        domains(path, size=32)
    parquet(tmp_path / "cifar10.parquet", image=[encoded(patches[0])] * 2, label=["cat", "dog"])
    with pytest.raises(DataError, match="labels must be whole numbers"):
        cifar10(tmp_path)


def test_a_missing_package_says_how_to_install_it(monkeypatch):
    def without(module):
        raise ImportError(module)

    monkeypatch.setattr(places.importlib, "import_module", without)
    with pytest.raises(DataError, match=r"needs pillow; install it with: pip install 'fedselect\[data\]'"):
        places.optional("PIL.Image")
    with pytest.raises(DataError, match="needs pyarrow"):
        places.optional("pyarrow.parquet")


# --- Hugging Face datasets


class Names:
    names = ("cat", "dog")


class Rows:
    """The shape of a datasets.Dataset."""

    def __init__(self, images, labels, feature=None):
        self.features = {"image": object(), "label": feature or object()}
        self.rows = [{"image": i, "label": v} for i, v in zip(images, labels, strict=True)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def test_from_datasets(patches):
    cells = [
        Image.fromarray(patches[0]),
        encoded(patches[1]),
        {"bytes": encoded(patches[2]), "path": None},
        patches[3].tolist(),
    ]
    got = from_datasets(Rows(cells, [0, 1, 0, 1], Names()))
    assert np.array_equal(got.x, patches[:4])
    assert got.class_names == ("cat", "dog")
    assert got.test is None
    both = from_datasets({"train": Rows(cells, [0, 1, 0, 1]), "test": Rows(cells[:1], [0])}, size=16)
    assert both.x.shape == (5, 16, 16, 3)
    assert both.test.tolist() == [False] * 4 + [True]
    assert from_datasets(Rows(cells, ["b", "a", "b", "a"])).class_names == ("a", "b")
    grey = from_datasets(Rows([patches[0][:, :, :1]], [0]))
    assert grey.x.shape == (1, 32, 32, 3)


def test_datasets_that_do_not_fit(patches, photo):
    with pytest.raises(InputError, match=r"datasets.Dataset or DatasetDict"):
        from_datasets([1, 2])
    with pytest.raises(InputError, match="no column 'img', only image, label"):
        from_datasets(Rows([patches[0]], [0]), image="img")
    with pytest.raises(InputError, match="row 1 of the dataset is 50x40, row 0 is 32x32; give size"):
        from_datasets(Rows([patches[0], photo[:40, :50]], [0, 0]))
    with pytest.raises(InputError, match="are 50x40, not square; give size"):
        from_datasets(Rows([photo[:40, :50]], [0]))
    with pytest.raises(DataError, match="row 0 of the dataset holds no image"):
        from_datasets(Rows([b"none"], [0]))
    with pytest.raises(DataError, match="no rows"):
        from_datasets(Rows([], []))
    with pytest.raises(InputError, match="splits dev but no train"):
        from_datasets({"dev": Rows([patches[0]], [0])})


# --- the real thing


@shared
def test_real_cifar10():
    with pytest.warns(UserWarning, match="has only the official test images"):
        got = cifar10(SHARED / "cifar10_test.parquet")
    assert got.x.shape == (10000, 32, 32, 3)
    assert np.bincount(got.y).tolist() == [1000] * 10
    assert got.y[:5].tolist() == [3, 8, 8, 0, 6]  # cat, ship, ship, airplane, frog: the official order
    assert got.test is None
    subset = cifar10(SHARED)
    assert np.bincount(subset.y[~subset.test]).tolist() == [500] * 10
    assert np.bincount(subset.y[subset.test]).tolist() == [200] * 10
    with np.load(SHARED / "cifar10_subset.npz") as file:
        rows = file["idx_test"]
    assert np.array_equal(got.x[rows], subset.x[subset.test])  # two readers, the same pixels
    assert np.abs(subset.x[:5000].mean((0, 1, 2)) / 255 - got.mean).max() < 0.01


@shared
def test_real_miniimagenet():
    got = miniimagenet(SHARED)
    assert got.x.shape == (20000, 84, 84, 3)
    assert np.bincount(got.y[~got.test]).tolist() == np.bincount(got.y[got.test]).tolist() == [100] * 100
    assert got.class_names[0] == "n01532829"


@shared
def test_real_pacs():
    got = domains(SHARED / "pacs_96.parquet", size=96)
    counted = dict(zip(got.domain_names, np.bincount(got.domain).tolist(), strict=True))
    assert counted == {"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929}
    assert got.x.shape == (9991, 96, 96, 3)
    assert got.class_names == ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    paths = pq.read_table(SHARED / "pacs_96.parquet", columns=["path"]).column(0).to_pylist()
    assert [p.split("/")[:2] for p in paths] == [
        [got.domain_names[d], got.class_names[c]] for d, c in zip(got.domain, got.y, strict=True)
    ]
