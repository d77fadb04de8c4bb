"""Files and folders put in place of old ones: the new one or the old one is there, never neither."""

import os

import pytest

from fedselect.core.errors import RunError
from fedselect.core.files import is_part, replace


def folder(text):
    def write(fresh):
        fresh.mkdir()
        (fresh / "a").write_text(text)

    return write


def test_a_folder_takes_the_place_of_another(tmp_path):
    for text in ("old", "new"):
        replace(tmp_path / "x", folder(text))
    assert (tmp_path / "x" / "a").read_text() == "new"
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("fails", [1, 2])
def test_an_old_folder_stays_where_a_new_one_cannot_be_put(tmp_path, monkeypatch, fails):
    replace(tmp_path / "x", folder("old"))
    renamed, calls = os.replace, []

    def rename(a, b):
        calls.append(a)
        if len(calls) == fails:
            raise OSError(5, "Input/output error")
        renamed(a, b)

    monkeypatch.setattr(os, "replace", rename)
    with pytest.raises(RunError, match="cannot be written"):
        replace(tmp_path / "x", folder("new"))
    assert (tmp_path / "x" / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["x"]


def test_a_kill_between_leaves_the_old_one_aside_whole(tmp_path, monkeypatch):
    replace(tmp_path / "x", folder("old"))
    seen = {}
    renamed = os.replace

    def look(a, b):
        renamed(a, b)
        if not seen:
            seen.update({p.name: (p / "a").read_text() for p in tmp_path.iterdir()})

    monkeypatch.setattr(os, "replace", look)
    replace(tmp_path / "x", folder("new"))
    assert sorted(seen.values()) == ["new", "old"]
    assert all(is_part(tmp_path / name) for name in seen)


def test_a_file_never_takes_the_place_of_a_folder(tmp_path):
    replace(tmp_path / "x", folder("old"))
    with pytest.raises(RunError, match="cannot be written"):
        replace(tmp_path / "x", lambda fresh: fresh.write_text("new"))
    assert (tmp_path / "x" / "a").read_text() == "old"
