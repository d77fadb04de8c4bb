"""Flipped bits: what is read is what was written, or the file is named; it is never silently something else."""

import gzip
import io
import pickle
import random
import tarfile
import warnings
import zipfile

import numpy as np
import pytest
import torch

import fedselect as fs
from fedselect.core import snapshots, tensors
from fedselect.core.errors import FedselectError
from fedselect.core.files import read_json, write_json
from fedselect.data import archives, cifar, mnist
from fedselect.data.cache import decoded
from fedselect.data.frame_files import read_frame
from fedselect.network import vault
from fedselect.runs import config, rundir
from fedselect.runs.masks import read_lines

FLIPS = 60


def same(a, b):
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.equal(b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return bool(a == b)


def flips(path, seed):
    """The file with one bit flipped: in each byte of its beginning and its end, and at places all over it."""
    content, draw = path.read_bytes(), random.Random(seed)
    ends = [*range(min(8, len(content))), *range(max(0, len(content) - 24), len(content))]
    for at in sorted({*ends, *(draw.randrange(len(content)) for _ in range(FLIPS))}):
        flipped = bytearray(content)
        flipped[at] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        try:
            yield at
        finally:
            path.write_bytes(content)


def check(path, read, called=None):
    """Every flip is named, or changes nothing that is read. Returns how many were named."""
    whole, called, named = read(), called or path.name, 0
    for at in flips(path, seed=len(path.name)):
        found, said = reading(read)
        named += called in said
        assert called in said if found is None else same(found, whole), f"byte {at} of {path.name} was flipped: {said}"
    assert same(read(), whole)
    return named


def reading(read):
    """What was read, if anything, and what was said of it."""
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        try:
            found = read()
        except FedselectError as e:
            return None, str(e)
    return found, " ".join(str(n.message) for n in notes)


@pytest.fixture(scope="module")
def run(tmp_path_factory, digits):
    """What a run leaves on disk, and its models."""
    out = tmp_path_factory.mktemp("run") / "saved"
    made = fs.run(fs.FedSelect(epochs=1), model=fs.models.mlp(digits, hidden=4), data=digits, rounds=2, seed=1)
    made.save(out)
    return out


READ = {
    "config.json": lambda out: rundir.read_config(out),
    "task.json": lambda out: [m.to_json() for m in rundir.measures(out)],
    "federation.json": lambda out: fs.load_result(out)._source.names,
    "result.json": lambda out: fs.load_result(out)._source._about,
    "summary.json": lambda out: rundir.outcome(out),
    "metrics.jsonl": lambda out: rundir.read_records(out / "metrics.jsonl"),
    "masks.jsonl": lambda out: read_lines(out / "masks.jsonl"),
    "models.safetensors": lambda out: fs.load_result(out)._source.trees([0, 1, 2]),
    "masks.safetensors": lambda out: fs.load_result(out)._source.masks(),
}


@pytest.mark.parametrize("name", READ)
def test_files_of_a_run(run, name):
    assert check(run / name, lambda: READ[name](run)) > FLIPS / 2


def test_a_growing_file_loses_no_line_to_a_flip(run):
    """Half a line at the end is what a writer leaves; a whole one whose end of line flipped is damage."""
    path = run / "metrics.jsonl"
    assert check(path, lambda: rundir.read_records(path, growing=True)) > FLIPS / 2


def test_a_configuration_that_is_given_again(run, tmp_path):
    path = tmp_path / "again.json"
    write_json(path, read_json(run / "config.json", ""))
    assert check(path, lambda: config.read(path)) > FLIPS / 2


@pytest.mark.parametrize("name", ["state.safetensors", "manifest.json"])
def test_checkpoints_and_vaults(tmp_path, name):
    folder = vault.Vault(tmp_path / "v")
    values = {"b": torch.arange(40.0), "a": torch.eye(5, dtype=torch.bool)}
    folder.save(3, values, {"base": 2, "reply": "x"}, keep=set())

    def read():
        found = folder.load(3)
        assert folder.rounds() == [3]
        return found.tensors, found.notes

    assert check(tmp_path / "v" / "000003" / name, read, called="000003") > FLIPS / 2
    assert check(tmp_path / "v" / "000003" / name, lambda: snapshots.load(tmp_path / "v" / "000003", "x"), "000003") > FLIPS / 2


def test_whose_vault_it_is(tmp_path):
    own = {"federation": "f", "method": "fedselect", "model": "mlp 12", "client": "3"}
    vault.claim(tmp_path, own)
    assert check(tmp_path / "identity.json", lambda: vault.claim(tmp_path, own) or "claimed", called="vault") > FLIPS / 2


def test_exported_models(tmp_path):
    path = tmp_path / "client-0.safetensors"
    path.write_bytes(tensors.to_bytes({"w": torch.randn(30), "b": torch.zeros(2)}, {"classes": '["a", "b"]'}))
    assert check(path, lambda: fs.models.load_values(path)) > FLIPS / 2


# ---- data


def batch(rows, seed):
    draw = np.random.default_rng(seed)
    return {b"data": draw.integers(0, 256, (rows, 3072), dtype=np.uint8), b"labels": [i % 10 for i in range(rows)]}


@pytest.fixture
def archive(tmp_path):
    """The official archive, with three pictures a batch."""
    path = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for i, name in enumerate([*cifar.TRAIN["cifar10"], cifar.TEST["cifar10"]]):
            raw = pickle.dumps(batch(3, i))
            info = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    return path


def test_the_archive_of_cifar(archive):
    def read():
        found = cifar.cifar10(archive.parent)
        return found.x, found.y

    assert check(archive, read, called=archive.parent.name) > FLIPS * 0.8


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_in_npz(tmp_path, save):
    path = tmp_path / "a.npz"
    save(path, x=np.random.default_rng(0).integers(0, 99, (40, 5)), y=np.arange(40))
    assert check(path, lambda: dict(archives.arrays(path))) > FLIPS / 3
    assert check(path, lambda: dict(read_frame(path).columns)) > FLIPS / 3


def test_packed_digits(tmp_path):
    path = tmp_path / "train-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(b"\0\0\x08\x01\0\0\0\x40" + bytes(random.Random(1).randbytes(64))))
    assert check(path, lambda: mnist._idx(path, "train-labels-idx1-ubyte", 2049, 1)[0], "train-labels") > FLIPS / 2
    zipped = tmp_path / "emnist.zip"
    with zipfile.ZipFile(zipped, "w") as made:
        made.write(path, f"gzip/{path.name}")
    assert check(zipped, lambda: mnist._idx(zipped, "train-labels-idx1-ubyte", 2049, 1)[0]) > FLIPS / 3


@pytest.mark.parametrize("name", ["*.npy", "*.about.json"])
def test_decoded_pictures_are_decoded_again(tmp_path, monkeypatch, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "source.bin"
    source.write_bytes(b"pictures")

    def read():
        return np.array(decoded("k", source, 9, (4, 4, 3), lambda i: np.full((4, 4, 3), i, np.uint8)))

    read()
    (path,) = (tmp_path / "cache" / "fedselect" / "decoded").glob(name)
    assert check(path, read, called=path.name.removesuffix(".about.json").removesuffix(".npy")) > FLIPS / 2
