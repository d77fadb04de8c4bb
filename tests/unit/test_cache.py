"""Pictures are decoded once: again for no one, whoever runs beside or was killed before."""

import os
import signal
import stat
import sys
import time

import numpy as np
import pytest
from children import PATIENCE

from fedselect.core.errors import DataError, RunError
from fedselect.core.files import held
from fedselect.data.cache import decoded, decoded_some, listing_stamp

COUNT, SHAPE = 600, (4, 4, 3)

WORKER = """
import sys, time
import numpy as np
from pathlib import Path
from fedselect.data.cache import decoded

def decode(i):
    if i == 0:
        print("began", flush=True)
    with open(sys.argv[2], "a") as f:
        f.write(f"{i}\\n")
    time.sleep(float(sys.argv[3]))
    return np.full((4, 4, 3), i % 256, np.uint8)

x = decoded("k", Path(sys.argv[1]), 600, (4, 4, 3), decode)
print("done", int(x.sum()), flush=True)
"""
SUM = sum(i % 256 for i in range(COUNT)) * 48


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "source.bin"
    path.write_bytes(b"pictures")
    return path


@pytest.fixture
def calls():
    return []


@pytest.fixture
def decode(calls):
    def one(i):
        calls.append(i)
        return np.full(SHAPE, i % 256, np.uint8)

    return one


def kept(tmp_path, pattern="*"):
    found = (tmp_path / "cache/fedselect/decoded").glob(pattern)
    return sorted(p.name for p in found if not p.name.endswith((".lock", ".about.json")))


def test_decodes_once_and_maps(source, decode, calls, tmp_path):
    seen = []
    first = decoded("k", source, COUNT, SHAPE, decode, progress=lambda done, total: seen.append((done, total)))
    second = decoded("k", source, COUNT, SHAPE, decode)
    assert sorted(calls) == list(range(COUNT))
    assert isinstance(second, np.memmap)
    assert not second.flags.writeable
    assert np.array_equal(first, second)
    assert (second[:, 0, 0, 0] == np.arange(COUNT) % 256).all()
    assert seen[-1] == (COUNT, COUNT)
    assert len(kept(tmp_path)) == 1


@pytest.mark.parametrize("change", ["content", "time", "stamp"])
def test_a_changed_source_is_decoded_again_and_the_old_result_goes(source, decode, calls, change, tmp_path):
    decoded("k", source, COUNT, SHAPE, decode)
    if change == "content":
        source.write_bytes(b"other pictures")
    elif change == "time":
        os.utime(source, (1, 1))
    decoded("k", source, COUNT, SHAPE, decode, stamp="new" if change == "stamp" else "")
    assert len(calls) == 2 * COUNT
    assert len(kept(tmp_path)) == 1


def test_each_size_has_its_own_result(source, decode, tmp_path):
    decoded("k", source, COUNT, SHAPE, decode)
    decoded("k", source, COUNT, (2, 2, 3), lambda i: np.zeros((2, 2, 3), np.uint8))
    assert len(kept(tmp_path)) == 2


def test_a_result_that_was_cut_is_made_again(source, decode, calls, tmp_path):
    decoded("k", source, COUNT, SHAPE, decode)
    path = next((tmp_path / "cache/fedselect/decoded").glob("*.npy"))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.warns(UserWarning, match=f"{path.name} is damaged; its source is decoded again"):
        assert int(decoded("k", source, COUNT, SHAPE, decode).sum()) == SUM
    assert len(calls) == 2 * COUNT


def test_an_error_leaves_nothing_behind(source, tmp_path):
    def fail(i):
        raise DataError("picture seven")

    with pytest.raises(DataError, match="picture seven"):
        decoded("k", source, COUNT, SHAPE, fail)
    assert kept(tmp_path) == kept(tmp_path, ".*") == []


def test_a_wrong_shape_names_the_picture(source):
    with pytest.raises(DataError, match=r"image 0 is uint8 \(1, 1, 3\)"):
        decoded("k", source, 2, SHAPE, lambda i: np.zeros((1, 1, 3), np.uint8))


def test_no_pictures_at_all(source, decode):
    assert decoded("k", source, 0, SHAPE, decode).shape == (0, *SHAPE)


def test_skipped_rows_are_remembered_unless_every_row_is_wanted(source, decode, calls):
    def some(i):
        return None if i % 100 == 7 else decode(i)

    gone = [7, 107, 207, 307, 407, 507]
    for _ in range(2):
        x, rows = decoded_some("k", source, COUNT, SHAPE, some)
        assert len(x) == COUNT - 6
        assert sorted(set(range(COUNT)) - set(rows.tolist())) == gone
        assert (x[:, 0, 0, 0] == rows % 256).all()
    assert len(calls) == COUNT - 6
    assert len(decoded("k", source, COUNT, SHAPE, decode)) == COUNT


@pytest.fixture
def worker(spawn):
    """A process that decodes."""
    return lambda source, log, nap: spawn(sys.executable, "-c", WORKER, source, log, nap)


def test_two_processes_decode_once_between_them(source, worker, tmp_path):
    log = tmp_path / "log"
    both = [worker(source, log, 0.002) for _ in range(2)]
    said = [p.communicate(timeout=PATIENCE)[0] for p in both]
    assert [s.split()[-2:] for s in said] == [["done", str(SUM)]] * 2
    assert len(log.read_text().split()) == COUNT


def test_a_kill_in_the_middle_leaves_no_result_and_no_lock(source, worker, decode, calls, tmp_path):
    victim = worker(source, tmp_path / "log", 0.1)
    assert victim.stdout.readline() == "began\n"
    time.sleep(0.1)
    os.kill(victim.pid, signal.SIGKILL)
    victim.communicate()
    assert kept(tmp_path, "*.npy") == []
    assert len(kept(tmp_path, ".*.part")) == 1
    assert int(decoded("k", source, COUNT, SHAPE, decode).sum()) == SUM
    assert len(calls) == COUNT
    assert kept(tmp_path, ".*.part") == []


def test_a_cache_that_cannot_be_made_says_so(source, decode, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match="set XDG_CACHE_HOME"):
        decoded("k", source, COUNT, SHAPE, decode)


def test_a_lock_in_a_folder_that_is_not_there_says_so(tmp_path):
    said = r"cannot be written \(No such file or directory\); choose a folder"
    with pytest.raises(RunError, match=said), held(tmp_path / "none" / "lock"):
        pass


def test_the_stamp_of_a_listing_follows_every_file(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("1")
    b.write_text("2")
    first = listing_stamp([a, b])
    assert first == listing_stamp([a, b]) != listing_stamp([a])
    b.write_text("22")
    assert first != listing_stamp([a, b])


def test_others_cannot_enter_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "pictures"
    source.mkdir()
    (tmp_path / "fedselect" / "decoded").mkdir(parents=True, mode=0o755)  # as older versions made it
    decoded("x", source, 1, (2, 2, 3), lambda i: np.zeros((2, 2, 3), np.uint8))
    assert stat.S_IMODE((tmp_path / "fedselect" / "decoded").stat().st_mode) == 0o700
