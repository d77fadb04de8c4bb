"""Checkpoints: a simulation between two rounds, as safetensors and JSON, never pickle.

checkpoint/000012/state.safetensors and manifest.json (round, checksum, whose run it is). A checkpoint appears under its
name only when it is whole; the one before it stays, in case a disk damages the newest.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fedselect.errors import CheckpointError, RunError
from fedselect.files import disk, is_part, read_json, replace, write_json
from fedselect.simulate import ranks
from fedselect.simulate.engine import Simulation
from fedselect.simulate.store import Compact, Store
from fedselect.tree import flat, nested, together

FORMAT = 1
ADVICE = "delete this folder to go on from an earlier checkpoint, or start the run again with --overwrite."


def save(folder: Path, simulation: Simulation, run: Mapping[str, Any]) -> Path:
    """Write the simulation's state, then drop all but the last two."""
    place = folder / f"{simulation.round:06d}"
    rows = ranks.collect({**simulation.store.dump(), "": {"joined": simulation.store.joined}}, simulation.clients)
    if ranks.rank() != 0:
        return place
    tensors = {**flat("server", simulation.server), "joined": rows.pop("")["joined"]}
    tensors.update(flat("rows", rows))
    tensors = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}  # no two may share memory
    with disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for left in filter(is_part, folder.iterdir()):
            shutil.rmtree(left)

    def write(fresh: Path) -> None:
        fresh.mkdir()
        try:
            save_file(tensors, fresh / "state.safetensors")
        except SafetensorError as e:
            raise _full_or(e, place) from e
        manifest = {
            "format": FORMAT,
            "round": simulation.round,
            "run": identity(run),
            "config": run,
            "chunk": simulation.chunk,
            "store": simulation.store.kind,
            "tensors": list(tensors),  # in the model's own order, which decides between equals; files sort by name
            "sha256": _digest(fresh / "state.safetensors"),
        }
        write_json(fresh / "manifest.json", manifest)

    replace(place, write)
    for old in _places(folder)[:-2]:
        shutil.rmtree(old, ignore_errors=True)
    return place


def latest(folder: Path) -> Path | None:
    places = _places(folder)
    return places[-1] if places else None


def claim(place: Path, run: Mapping[str, Any], mend: str | None = None) -> dict[str, Any]:
    """What a checkpoint says of itself, which must be of this run; `mend`: what to do where it is not."""
    try:
        said: dict[str, Any] = read_json(place / "manifest.json", ADVICE)
    except RunError as e:
        raise CheckpointError(str(e)) from None
    if said.get("run", identity(run)) != identity(run):
        changed = ", ".join(differing(said["config"], run)) if "config" in said else "config.json was changed since"
        back = f"put {place.parents[1] / 'config.json'} back as it was, or begin another run: --config with a new --out."
        raise CheckpointError(f"{place} is of another configuration ({changed}); {mend or back}")
    return said


def moved(folder: Path, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Make the checkpoints of a run those of the same run whose files lie elsewhere now."""
    for place in _places(folder):
        if read_json(place / "manifest.json", ADVICE).get("run") != identity(now):  # else a kill came in between
            write_json(place / "manifest.json", {**claim(place, was), "run": identity(now), "config": now})


def manifest(place: Path, run: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of itself, once its files are checked."""
    said = claim(place, run)
    if said.get("format") != FORMAT:
        raise CheckpointError(f"{place} has format {said.get('format')}, this version reads {FORMAT}; {ADVICE}")
    if str(said.get("round")) != str(int(place.name)):
        raise CheckpointError(f"{place} says it is of round {said.get('round')}; {ADVICE}")
    state = place / "state.safetensors"
    if not state.is_file() or _digest(state) != said.get("sha256"):
        raise CheckpointError(f"{state} is {'damaged' if state.is_file() else 'missing'}; {ADVICE}")
    return said


def identity(run: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()


def differing(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What changed from one configuration, as it was read from a file, to another: "limit was 0.3, is 0.5"."""
    for name, value in json.loads(json.dumps(now)).items():
        if isinstance(value, dict) and isinstance(was.get(name), dict):
            yield from differing(was[name], value)
        elif was.get(name) != value:
            yield f"{name} was {was.get(name)}, is {value}"


def how(place: Path, run: Mapping[str, Any]) -> tuple[int, str]:
    """In what pieces a run must go on: clients at a time, and what rests of them between rounds."""
    said = manifest(place, run)
    return int(said["chunk"]), "personal" if said.get("store") == Compact.kind else "all"


def load(place: Path, simulation: Simulation, run: Mapping[str, Any]) -> None:
    """Put a simulation where the checkpoint left it."""
    said = manifest(place, run)
    store = simulation.store
    if said.get("store", "resident") != store.kind:
        raise CheckpointError(
            f"{place} was made with clients in a {said.get('store', 'resident')} store, and this run has a {store.kind} one; "
            "resume with the memory and the chunk it was made with."
        )
    found = load_file(place / "state.safetensors")
    tensors = {name: found[name] for name in said["tensors"]}
    simulation.round = int(said["round"])
    server = {k: {n: v.to(simulation.device) for n, v in t.items()} for k, t in nested("server", tensors).items()}
    simulation.server = {k: together(t, clients=False) for k, t in server.items()}
    rows = nested("rows", tensors)
    if store.kind == Store.kind:
        rows = {k: {n: ranks.own_rows(v) for n, v in t.items()} for k, t in rows.items()}
    store.load(rows)
    store.joined = ranks.own_rows(tensors["joined"])


def _places(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.is_dir() and p.name.isdigit())


def _digest(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _full_or(error: SafetensorError, place: Path) -> RunError:
    if "No space left" in str(error):
        return RunError(f"the disk is full: {place} was not written; free some space, then resume.")
    return RunError(f"{place} cannot be written: {error}.")
