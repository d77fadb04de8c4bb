"""Checkpoints: a simulation between two rounds. The generation before the newest stays, in case a disk damages that one."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedselect import generations
from fedselect.errors import CheckpointError
from fedselect.files import write_json
from fedselect.simulate import ranks
from fedselect.simulate.engine import Simulation
from fedselect.simulate.store import Compact, Store
from fedselect.tree import flat, nested, together

ADVICE = "delete this folder to go on from an earlier checkpoint, or start the run again with --overwrite."


def save(folder: Path, simulation: Simulation, run: Mapping[str, Any]) -> Path:
    """Write the simulation's state, then drop all but the last two."""
    store, round = simulation.store, simulation.round
    rows = ranks.collect({**store.dump(), "": {"joined": store.joined}}, simulation.clients)
    if ranks.rank() == 0:
        tensors = {**flat("server", simulation.server), "joined": rows.pop("")["joined"], **flat("rows", rows)}
        said = {"run": identity(run), "config": run, "chunk": simulation.chunk, "store": store.kind}
        before = [int(p.name) for p in generations.places(folder) if int(p.name) < round]
        generations.save(folder, round, tensors, said, keep=before[-1:])
    return generations.at(folder, round)


def latest(folder: Path) -> Path | None:
    places = generations.places(folder)
    return places[-1] if places else None


def claim(place: Path, run: Mapping[str, Any], mend: str | None = None) -> None:
    """Refuse a checkpoint that is not of this run; `mend`: what to do then."""
    said = generations.manifest(place, ADVICE)
    if said.get("run", identity(run)) != identity(run):
        changed = ", ".join(differing(said["config"], run)) if "config" in said else "config.json was changed since"
        back = f"put {place.parents[1] / 'config.json'} back as it was, or begin another run: --config with a new --out."
        raise CheckpointError(f"{place} is of another configuration ({changed}); {mend or back}")


def moved(folder: Path, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Make the checkpoints of a run those of the same run whose files lie elsewhere now."""
    for place in generations.places(folder):
        said = generations.manifest(place, ADVICE)
        if said.get("run") != identity(now):  # else a kill came in between
            claim(place, was)
            write_json(place / "manifest.json", {**said, "run": identity(now), "config": now})


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
    claim(place, run)
    said = generations.checked(place, ADVICE)
    return int(said["chunk"]), "personal" if said.get("store") == Compact.kind else "all"


def load(place: Path, simulation: Simulation, run: Mapping[str, Any]) -> None:
    """Put a simulation where the checkpoint left it."""
    claim(place, run)
    said, tensors = generations.load(place, ADVICE)
    store = simulation.store
    if said.get("store", "resident") != store.kind:
        raise CheckpointError(
            f"{place} was made with clients in a {said.get('store', 'resident')} store, and this run has a {store.kind} one; "
            "resume with the memory and the chunk it was made with."
        )
    simulation.round = int(said["round"])
    server = {k: {n: v.to(simulation.device) for n, v in t.items()} for k, t in nested("server", tensors).items()}
    simulation.server = {k: together(t, clients=False) for k, t in server.items()}
    rows = nested("rows", tensors)
    if store.kind == Store.kind:
        rows = {k: {n: ranks.own_rows(v) for n, v in t.items()} for k, t in rows.items()}
    store.load(rows)
    store.joined = ranks.own_rows(tensors["joined"])
