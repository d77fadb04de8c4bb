"""Vault: states that survive any crash, at a client and at the server.

folder/000012/state.safetensors and manifest.json (round, checksum, notes). A generation appears under its name only when
it is whole; the one before it stays. Files are readable by their owner alone.
"""

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fedselect.errors import CheckpointError, RunError
from fedselect.files import disk, is_part, read_json, replace, write_json
from fedselect.tree import Tree

FORMAT = 1


@dataclass(frozen=True)
class Generation:
    """One saved state: its tensors, in their own order, and what was noted with them."""

    round: int
    tensors: Tree
    notes: dict[str, Any]


def private(path: Path) -> None:
    """A folder that its owner alone can enter."""
    with disk(path):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)


def claim(folder: Path, identity: dict[str, str]) -> None:
    """Make a folder this identity's, or refuse one that belongs to another."""
    private(folder)
    card = folder / "identity.json"
    if not card.exists():
        write_private_json(card, identity)
    found = read_json(card, "it should say whose vault this is; restore it, or use another --vault.")
    for name, value in identity.items():
        if found.get(name) != value:
            raise CheckpointError(
                f"this client's vault belongs to {name} {found.get(name)!r}, not {value!r}; "
                "use another --vault, or move this one away."
            )


class Vault:
    """Generations of one run in one folder, by round."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rounds(self) -> list[int]:
        """The rounds whose generation is whole and undamaged."""
        return [int(p.name) for p in self._places() if self._intact(p)]

    def save(self, round: int, tensors: Tree, notes: dict[str, Any], keep: set[int]) -> None:
        """Write a generation, then drop all others but those of the rounds in `keep`."""
        private(self.folder)
        place = self.folder / f"{round:06d}"
        for left in filter(is_part, self.folder.iterdir()):
            shutil.rmtree(left)

        def write(fresh: Path) -> None:
            fresh.mkdir(mode=0o700)
            save_private(fresh / "state.safetensors", tensors)
            manifest = {
                "format": FORMAT,
                "round": round,
                "tensors": list(tensors),  # in the model's own order, which decides between equals; files sort by name
                "sha256": _digest(fresh / "state.safetensors"),
                "notes": notes,
            }
            write_private_json(fresh / "manifest.json", manifest)

        replace(place, write)
        for old in self._places():
            if int(old.name) not in {round, *keep}:
                shutil.rmtree(old, ignore_errors=True)

    def find(self, round: int) -> Generation | None:
        """The generation of a round, if it is there and undamaged."""
        place = self.folder / f"{round:06d}"
        if not self._intact(place):
            return None
        manifest = _manifest(place)
        found = load_file(place / "state.safetensors")
        return Generation(round, {n: found[n] for n in manifest["tensors"]}, manifest["notes"])

    def load(self, round: int) -> Generation:
        found = self.find(round)
        if found is None:
            place = self.folder / f"{round:06d}"
            raise CheckpointError(f"{place} is damaged or missing; delete it to go on from the generation before it.")
        return found

    def _places(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return sorted(p for p in self.folder.iterdir() if p.is_dir() and p.name.isdigit())

    def _intact(self, place: Path) -> bool:
        try:
            manifest = _manifest(place)
            digest = _digest(place / "state.safetensors")
        except (RunError, OSError):
            return False
        return manifest.get("format") == FORMAT and manifest.get("round") == int(place.name) and manifest["sha256"] == digest


def write_private_json(path: Path, value: Any) -> None:
    write_json(path, value)
    path.chmod(0o600)


def save_private(path: Path, tensors: Tree) -> None:
    """A safetensors file for its owner's eyes, in a folder that nobody else can enter."""
    whole = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}  # no two may share memory
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600))
    try:
        save_file(whole, path)
    except SafetensorError as e:
        why = "the disk is full" if "No space left" in str(e) else str(e)
        raise RunError(f"{path} was not written: {why}; free some space, then start again.") from e
    path.chmod(0o600)


def _manifest(place: Path) -> dict[str, Any]:
    return read_json(place / "manifest.json", "it should describe a generation.")


def _digest(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
