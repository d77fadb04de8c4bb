"""Generations: the states of a folder by round, as safetensors and JSON, never pickle.

folder/000012/state.safetensors and manifest.json (round, checksum, and what else is said of it). A generation appears under
its name only when it is whole, and is checked before it is read.
"""

import errno
import hashlib
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fedselect.errors import CheckpointError, RunError
from fedselect.files import disk, is_part, read_json, replace, write_json
from fedselect.tree import Tree

FORMAT = 1


def at(folder: Path, round: int) -> Path:
    return folder / f"{round:06d}"


def places(folder: Path) -> list[Path]:
    """All that are there, damaged ones too, the newest last."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.is_dir() and p.name.isdigit())


def save(folder: Path, round: int, tensors: Tree, said: Mapping[str, Any], keep: Iterable[int], private: bool = False) -> None:
    """Write a generation, then drop all others but those of the rounds in `keep`; a private one is for its owner's eyes."""
    whole = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}  # no two may share memory
    with disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for left in filter(is_part, folder.iterdir()):
            shutil.rmtree(left)

    def write(fresh: Path) -> None:
        fresh.mkdir(mode=0o700 if private else 0o777)
        try:
            save_file(whole, fresh / "state.safetensors")
        except SafetensorError as e:
            code = re.search(r"\(os error (\d+)\)", str(e))  # an OSError, told as text
            raise OSError(int(code[1]) if code else errno.EIO, str(e)) from e
        manifest = {
            "format": FORMAT,
            "round": round,
            "tensors": list(whole),  # in the model's own order, which decides between equals; files sort by name
            "sha256": _digest(fresh / "state.safetensors"),
            **said,
        }
        write_json(fresh / "manifest.json", manifest)
        for path in fresh.iterdir() if private else ():
            path.chmod(0o600)

    replace(at(folder, round), write)
    for old in places(folder):
        if int(old.name) not in {round, *keep}:
            shutil.rmtree(old, ignore_errors=True)


def manifest(place: Path, advice: str) -> dict[str, Any]:
    """What a generation says of itself."""
    try:
        return read_json(place / "manifest.json", advice)
    except RunError as e:
        raise CheckpointError(str(e)) from None


def checked(place: Path, advice: str) -> dict[str, Any]:
    """What a generation says of itself, once its files are checked; where they are not as written, `advice` says what to do."""
    said = manifest(place, advice)
    if said.get("format") != FORMAT:
        raise RunError(f"{place} has format {said.get('format')}, this version reads {FORMAT}; {advice}")
    if said.get("round") != int(place.name):
        raise CheckpointError(f"{place} says it is of round {said.get('round')}; {advice}")
    state = place / "state.safetensors"
    try:
        whole = _digest(state) == said.get("sha256")
    except OSError:  # a failing disk, too
        whole = False
    if not whole:
        raise CheckpointError(f"{state} is {'damaged' if state.is_file() else 'missing'}; {advice}")
    return said


def load(place: Path, advice: str) -> tuple[dict[str, Any], Tree]:
    """What a generation says of itself, and its tensors in their own order."""
    said = checked(place, advice)
    found = load_file(place / "state.safetensors")
    return said, {name: found[name] for name in said["tensors"]}


def _digest(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
