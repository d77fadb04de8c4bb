"""Snapshots: states by round in a folder, as safetensors and JSON, never pickle.

folder/000012/state.safetensors and manifest.json (round, checksums of all files, and further fields); rows.bin, if the state is
too large to be in memory. A snapshot appears under
its name only once it is complete, and is checked before it is read. A folder that contains anything else is not a snapshot,
whatever its name, and is never removed.
"""

import errno
import hashlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from fedselect.core.errors import CheckpointError, RunError
from fedselect.core.files import disk, is_part, read_json, replace, write_bytes
from fedselect.core.tree import Tree

FORMAT = 1
SEAL = "manifest_sha256"
FILES = {"state.safetensors", "manifest.json", "rows.bin"}


def at(folder: Path, round: int) -> Path:
    return folder / f"{round:06d}"


def places(folder: Path) -> list[Path]:
    """All snapshots in a folder, including damaged ones, newest last."""
    return sorted(filter(_is_snapshot, folder.iterdir()), key=lambda p: int(p.name)) if folder.is_dir() else []


def _is_snapshot(place: Path) -> bool:
    named = re.fullmatch(r"\d{6,}", place.name, re.ASCII) is not None
    return named and _is_folder(place) and all(p.name in FILES or is_part(p) for p in place.iterdir())


def _is_folder(place: Path) -> bool:
    return place.is_dir() and not place.is_symlink()


def save(
    folder: Path,
    round: int,
    tensors: Tree,
    said: Mapping[str, Any],
    keep: Iterable[int],
    *,
    private: bool = False,
    files: Mapping[str, Callable[[IO[bytes]], None]] = MappingProxyType({}),
) -> None:
    """Write a snapshot, then remove all others except those of the rounds in `keep`; a private one only its owner can read.

    files: further files of the snapshot, and what writes them.
    """
    whole = _apart({k: v.detach().cpu().contiguous() for k, v in tensors.items()})
    with disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.iterdir():
            if is_part(left) and _is_folder(left):
                shutil.rmtree(left)

    def write(fresh: Path) -> None:
        fresh.mkdir(mode=0o700 if private else 0o777)
        try:
            save_file(whole, fresh / "state.safetensors")
        except SafetensorError as e:
            code = re.search(r"\(os error (\d+)\)", str(e))  # an OSError as text
            raise OSError(int(code[1]) if code else errno.EIO, str(e)) from e
        for name, fill in files.items():
            with (fresh / name).open("wb") as file:
                fill(file)
        manifest = {
            "format": FORMAT,
            "round": round,
            "tensors": list(whole),  # in the model's order, which breaks ties; files sort by name
            "sha256": _digest(fresh / "state.safetensors"),
            **({"files": {name: _digest(fresh / name) for name in files}} if files else {}),
            **said,
        }
        write_manifest(fresh, manifest)
        for path in fresh.iterdir() if private else ():
            path.chmod(0o600)

    place = at(folder, round)
    if place.is_symlink() or (place.exists() and not _is_snapshot(place)):
        raise RunError(f"{place} is not a saved state; move it away, or save to another folder.")
    replace(place, write)
    for old in places(folder):
        if int(old.name) not in {round, *keep}:
            shutil.rmtree(old, ignore_errors=True)


def _apart(tensors: Tree) -> Tree:
    """The tensors, copied if they share memory, which safetensors refuses."""
    pieces = Counter(v.untyped_storage().data_ptr() for v in tensors.values())
    shared = {
        n: pieces[v.untyped_storage().data_ptr()] > 1 or v.untyped_storage().nbytes() > v.nbytes for n, v in tensors.items()
    }
    return {n: v.clone() if shared[n] else v for n, v in tensors.items()}


def write_manifest(place: Path, said: Mapping[str, Any]) -> None:
    """Write the manifest of a snapshot with its checksum."""
    write_bytes(place / "manifest.json", (json.dumps({**said, SEAL: _seal(said)}, indent=2) + "\n").encode())


def manifest(place: Path, advice: str) -> dict[str, Any]:
    """The manifest of a snapshot, after checking its checksum."""
    path = place / "manifest.json"
    try:
        said = read_json(path, advice)
    except RunError as e:
        raise CheckpointError(str(e)) from None
    seal = said.pop(SEAL, None)
    if not (_first_written(said) if seal is None else seal == _seal(said)):
        raise CheckpointError(f"{path} is damaged; {advice}")
    return said


def checked(place: Path, advice: str) -> dict[str, Any]:
    """The manifest of a snapshot, after checking all its files; `advice` completes the error if one is damaged."""
    said = manifest(place, advice)
    if said.get("format") != FORMAT:
        raise RunError(f"{place} has format {said.get('format')}, but this version reads {FORMAT}; {advice}")
    if said.get("round") != int(place.name):
        raise CheckpointError(f"{place} contains round {said.get('round')}; {advice}")
    state = place / "state.safetensors"
    for path, digest in {state: said.get("sha256"), **{place / n: d for n, d in said.get("files", {}).items()}}.items():
        try:
            whole = _digest(path) == digest
        except OSError:  # also from a failing disk
            whole = False
        if not whole:
            raise CheckpointError(f"{path} is {'damaged' if path.is_file() else 'missing'}; {advice}")
    with safe_open(state, "pt") as file:
        if set(file.keys()) != set(said["tensors"]):
            raise CheckpointError(f"{place / 'manifest.json'} is damaged: it lists other tensors than the file has; {advice}")
    return said


def load(place: Path, advice: str) -> tuple[dict[str, Any], Tree]:
    """The manifest of a snapshot, and its tensors in their original order."""
    said = checked(place, advice)
    found = load_file(place / "state.safetensors")
    return said, {name: found[name] for name in said["tensors"]}


def _first_written(said: dict[str, Any]) -> bool:
    """Whether this is a manifest of the first version, without a checksum, and not one whose checksum key is damaged."""
    named, last = said.get("tensors"), next(reversed(said), "")
    named_well = isinstance(named, list) and all(isinstance(n, str) for n in named)
    lost_name = said.get(last) == _seal({k: v for k, v in said.items() if k != last})
    return named_well and isinstance(said.get("format"), int) and not lost_name


def _seal(said: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
