"""The vault: whole or absent, the snapshots it is told to keep, private, and refused where it is somebody else's."""

import json
import os
import stat

import pytest
import torch
from safetensors import SafetensorError

import fedselect as fs
from fedselect.core import snapshots
from fedselect.network.vault import Vault, claim


def state(round):
    return {"z/w": torch.full((3,), float(round)), "a/w": torch.eye(2, dtype=torch.bool)}


@pytest.fixture
def vault(tmp_path):
    vault = Vault(tmp_path / "v")
    for round in (1, 2, 3):
        vault.save(round, state(round), {"base": round - 1}, keep={round - 1})
    return vault


def test_two_snapshots_are_kept_and_come_back_in_order(vault):
    assert vault.rounds() == [2, 3]
    found = vault.load(3)
    assert list(found.tensors) == ["z/w", "a/w"]  # as they were given, not by the alphabet
    assert all(v.equal(found.tensors[n]) for n, v in state(3).items())
    assert found.notes == {"base": 2}


@pytest.mark.parametrize("name", ["state.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_a_damaged_snapshot_counts_as_absent_and_the_one_before_it_stays(vault, name, damage):
    path = vault.folder / "000003" / name
    content = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    else:
        content[-20] ^= 1
        path.write_bytes(content[: -1 if damage == "cut" else None])
    if name == "manifest.json" and damage == "flip":
        path.write_text(path.read_text().replace('"round": 3', '"round": 2'))
    assert vault.rounds() == [2]
    with pytest.raises(fs.CheckpointError, match="000003 is damaged or missing"):
        vault.load(3)


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "as they were at first"])
@pytest.mark.parametrize(
    ("old", "new"),
    [('"sha256', '"sha255'), ('"tensors"', '"tensor_"'), ('"z/w"', '"z/v"'), ('"notes"', '"notez"'), ('"format"', '"formas"')],
)
def test_a_manifest_in_which_a_name_is_flipped_counts_as_damaged(vault, sealed, old, new):
    path = vault.folder / "000003" / "manifest.json"
    if not sealed:
        said = json.loads(path.read_text())
        said.pop("manifest_sha256")
        path.write_text(json.dumps(said))
    assert vault.rounds() == [2, 3]
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert vault.rounds() == [2]
    assert vault.find(3) is None


def test_everything_is_private(vault):
    for path in [vault.folder, *vault.folder.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_what_a_killed_writer_left_is_cleared_away(vault):
    left = vault.folder / ".000004.123.part"
    left.mkdir()
    vault.save(4, state(4), {}, keep={3})
    assert sorted(p.name for p in vault.folder.iterdir()) == ["000003", "000004"]


FULL = {
    "rename": (os, "replace", OSError(28, os.strerror(28))),
    "tensors": (snapshots, "save_file", SafetensorError("I/O error: No space left on device (os error 28)")),
    "quota": (snapshots, "save_file", SafetensorError("I/O error: Disk quota exceeded (os error 122)")),
}


@pytest.mark.parametrize("at", FULL)
def test_a_full_disk_leaves_what_was_there(vault, monkeypatch, at):
    module, name, error = FULL[at]

    def full(*args):
        raise error

    monkeypatch.setattr(module, name, full)
    with pytest.raises(fs.RunError, match="the disk is full"):
        vault.save(4, state(4), {}, keep={3})
    assert vault.rounds() == [2, 3]


OWN = {"federation": "f", "method": "fedselect", "model": "mlp 12", "client": "3"}


@pytest.mark.parametrize("name", OWN)
def test_somebody_elses_vault_is_refused_by_name(tmp_path, name):
    claim(tmp_path / "v", OWN)
    claim(tmp_path / "v", OWN)  # one's own opens again
    with pytest.raises(fs.CheckpointError, match=f"belongs to {name} '{OWN[name]}', not 'other'"):
        claim(tmp_path / "v", {**OWN, name: "other"})
