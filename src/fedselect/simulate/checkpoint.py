"""Checkpoints: a simulation between two rounds. The snapshot before the newest is kept, in case a disk damages that one."""

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedselect.aggregate.aggregator import Mean
from fedselect.core import snapshots
from fedselect.core.errors import CheckpointError
from fedselect.core.files import disk
from fedselect.core.tree import State, flat, nested, together
from fedselect.simulate import ranks
from fedselect.simulate.disk import Disk
from fedselect.simulate.store import Compact, Store
from fedselect.tasks import Classification

if TYPE_CHECKING:
    from fedselect.simulate.engine import Simulation

ROWS = {Store.kind: "all", Compact.kind: "personal", Disk.kind: "disk"}
"""Which rows each kind of store keeps, as the option says it."""
LISTED = 100_000
"""With more clients than this, a manifest has a digest of when they join."""
ROWS_FILE = "rows.bin"
"""In a checkpoint: the rows of a store on disk, one after another."""
ADVICE = "delete this folder to continue from an earlier checkpoint, or start the run again with --overwrite."


@dataclass(frozen=True)
class Run:
    """Whose checkpoints these are: a configuration, and a function that reads those of other versions as this one's."""

    config: Mapping[str, Any]
    renewed: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: config
    mend: str | None = None  # what to do about a checkpoint of another run; by default the advice for run directories

    def unlike(self, said: Mapping[str, Any]) -> str:
        """How the run of a checkpoint differs from this one, if it does."""
        if said.get("run", identity(self.config)) == identity(self.config):
            return ""
        if "config" not in said:
            return "config.json was changed since"
        return ", ".join(differing(self.renewed(said["config"]), self.config))


LATER: dict[str, Any] = {
    "recompute": False,
    "plugins": [],
    "data": {"shift": "labels", "classes": 100},
    "adapt": {"name": "all"},
    "task": {"name": "classification", "class_weights": None, "label_smoothing": 0.0},
    "headline": None,
    "metrics": [],
    "secret": False,
    "mean": "senders",
    "private": None,
    "keep": "last",
    "view": None,
    "patience": None,
    "eval_fraction": 1.0,
    "aggregate": {"name": "mean", "server_momentum": 0.0},
    "training": {
        "optimizer": "sgd", "nesterov": False, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8,
        "schedule": "constant", "warmup": 0, "decay": 1.0, "decay_every": 1,
    },
}  # fmt: skip
"""Settings added since runs were first identified by their configuration, each with the value that equals the old behavior."""
_MOVED = {"decay": 1.0, "server_momentum": 0.0}
GONE: dict[str, dict[str, Any]] = {"fedselect": _MOVED, "Partial": _MOVED}
"""Options that a method (by name or class) no longer has, each with the value at which it did nothing."""
_TUNED = {"finetune": 0, "finetune_lr": None}
GAINED: dict[str, dict[str, Any]] = {
    "fedper": {"warmup": 0, **_TUNED},
    "fedselect": {"unit": "entry"},
    "fedpersist": {"unit": "layer"},
    "Partial": {"select": {"unit": "entry"}},
    **dict.fromkeys(("ditto", "Ditto", "fedpac", "FedPAC"), _TUNED),
}
"""Options that a method (by name or class) has gained since, each with the value at which it does nothing."""
GAINED_AGGREGATE: dict[str, dict[str, Any]] = {name: {"least_senders": 1} for name in ("median", "Median")}
"""The same for aggregators."""
COUNTED = {"domains": 4}
"""Data sets that determine their number of clients themselves, with the number that stood for it before."""


def as_first_written(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as the first version wrote it, so that old and new runs with equal settings have one identity."""
    out = _without(config, LATER)
    method = out.get("method")
    if isinstance(method, dict):
        name = str(method.get("name", method.get("kind")))
        out["method"] = _without({**GONE.get(name, {}), **method}, GAINED.get(name, {}))
    aggregate = out.get("aggregate")
    if isinstance(aggregate, dict):
        out["aggregate"] = _without(aggregate, GAINED_AGGREGATE.get(str(aggregate.get("name", aggregate.get("kind"))), {}))
    data = out.get("data")
    if isinstance(data, dict) and (once := COUNTED.get(str(data.get("name")))) and data.get("clients", once) is None:
        out["data"] = {**data, "clients": once}
    return out


def _without(config: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(config)
    for name, value in later.items():
        if isinstance(value, dict) and isinstance(out.get(name), dict) and out[name] != value:
            out[name] = _without(out[name], value)
        elif name in out and out[name] == value:
            del out[name]
    return out


def owner(simulation: "Simulation") -> Run:
    """The identity of a simulation that is stepped by a user's own program."""
    s = simulation
    config = {
        "method": _plain(s.method), "seed": s.seed, "training": _plain(s.training), "fraction": s.fraction,
        "task": LATER["task"] if s.task == Classification() else _plain(s.task),
        "metrics": [name for name in s._kept if name not in {m.name for m in s.task.measured()}],
        "late": s._from.tolist() if s.clients <= LISTED else _digest(s._from),
        "parameters": identity({n: list(v.shape) for n, v in s.initial.items()})[:12],
        "initial values": _digest(*s.initial.values()),
        **({} if s.aggregator == Mean() else {"aggregate": _plain(s.aggregator)}),
        **({"secret": True, "mean": s.secret.mean} if s.secret else {}),
        **({} if s.private is None else {"private": str(s.private), "rounds": s.total}),
        **{f"{part} data": f"{sum(v.sizes or ())} samples {_digest(v.n, v.targets)}" for part, v in s._split.items()},
    }  # fmt: skip
    config |= {} if s.keep == "last" else {"keep": s.keep}
    config |= {} if s.eval_fraction == 1.0 else {"eval_fraction": s.eval_fraction}
    config |= {"view": s.view} if s.view == "best" else {}
    config |= {} if s.model.adapters is None else {"adapters": s.model.adapters.to_json(), "base": s.model.base[:12]}
    if s.training.the_schedule.needs_rounds:
        config["rounds"] = s.total
    return Run(
        as_first_written(config),
        mend="restore its old settings (make the model with a function, so that the seed decides), or save to another folder.",
    )


def _plain(value: Any) -> Any:
    """An option as JSON, the same in every process."""
    if is_dataclass(value):
        return {"kind": type(value).__name__, **{f.name: _plain(getattr(value, f.name)) for f in fields(value)}}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, FunctionType) and "<" in value.__qualname__:  # its name is not unique: a lambda or an inner function
        held = [_plain(c.cell_contents) for c in value.__closure__ or ()]
        says = [s for s in value.__code__.co_consts if isinstance(s, str)]
        return f"{value.__qualname__} {held} {identity({'asks': value.__code__.co_names, 'says': says})[:6]}"
    return value if isinstance(value, str | int | float | None) else getattr(value, "__qualname__", type(value).__name__)


def _digest(*tensors: Tensor) -> str:
    sum_ = hashlib.sha256()
    for v in tensors:
        sum_.update(v.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sum_.hexdigest()[:12]


def save(folder: Path, simulation: "Simulation", run: Run) -> Path:
    """Write the simulation's state, then drop all but the last two."""
    store, round = simulation.store, simulation.round
    files = {ROWS_FILE: store.save} if isinstance(store, Disk) else {}
    rows = ranks.collect({**({} if files else store.dump()), "": {"joined": store.joined}}, simulation.clients)
    if ranks.rank() == 0:
        tensors = {
            **flat("server", simulation.server),
            **flat("aggregate", simulation.memory),
            "joined": rows.pop("")["joined"],
            **flat("rows", rows),
            **(flat("kept", simulation.kept.dump()[1]) if simulation.kept else {}),
        }
        said = {"run": identity(run.config), "config": run.config, "chunk": simulation.chunk, "store": store.kind}
        said |= {"base": simulation.model.base} if simulation.model.adapters else {}
        said |= {"charged": simulation.budget.charged} if simulation.budget else {}
        said |= {"kept": simulation.kept.dump()[0]} if simulation.kept else {}
        before = [int(p.name) for p in snapshots.places(folder) if int(p.name) < round]
        snapshots.save(folder, round, tensors, said, keep=before[-1:], files=files)
    return snapshots.at(folder, round)


@dataclass(frozen=True)
class Found:
    """A complete checkpoint, and how its run must continue: clients per chunk, and which rows are stored between rounds."""

    place: Path
    chunk: int
    rows: str


def find(folder: Path, run: Run, most: int | None = None, lost: str = "") -> Found | None:
    """The newest complete checkpoint; damaged ones are skipped, because their rounds can run again.

    Also skips those after round `most`; `lost` says what else of those rounds was lost.
    """
    damage = ""
    for place in reversed(snapshots.places(folder)):
        try:
            said = snapshots.checked(place, ADVICE)
            if most is not None and int(place.name) > most:
                raise CheckpointError(lost)
            if not _readable(said):
                raise CheckpointError(f"{place / 'manifest.json'} is damaged")
        except CheckpointError as e:
            damage = damage or str(e).removesuffix(f"; {ADVICE}")
            continue
        _claim(place, said, run)
        if damage:
            warnings.warn(f"{damage}; using the checkpoint before it, of round {int(place.name)}.", stacklevel=2)
        return Found(place, int(said["chunk"]), ROWS.get(said.get("store", Store.kind), "all"))
    if damage:
        raise CheckpointError(f"no checkpoint is intact ({damage}); delete {folder}, and resume starts from the first round.")
    return None


def claim(folder: Path, run: Run, mend: str | None = None) -> bool:
    """Refuse checkpoints of another run; `mend`: what to do then. Returns whether there are any."""
    places = snapshots.places(folder)
    for place in reversed(places):
        if said := _said(place):
            _claim(place, said, run, mend)
            break
    return bool(places)


def _claim(place: Path, said: Mapping[str, Any], run: Run, mend: str | None = None) -> None:
    if changed := run.unlike(said):
        back = f"restore {place.parents[1] / 'config.json'}, or start a new run: --config with a new --out."
        raise CheckpointError(f"{place} has another configuration ({changed}); {mend or run.mend or back}")


def _said(place: Path) -> dict[str, Any] | None:
    """A checkpoint's manifest, if it can be read."""
    try:
        return snapshots.manifest(place, ADVICE)
    except CheckpointError:
        return None


def _readable(said: Mapping[str, Any]) -> bool:
    """Whether a manifest has the fields of a checkpoint; the first manifests had no checksum, so one may be lost."""
    return isinstance(said.get("chunk"), int) and "joined" in said["tensors"]


def drop_after(folder: Path, round: int) -> None:
    """Remove the damaged checkpoints of rounds that will run again."""
    for place in snapshots.places(folder):
        if int(place.name) > round:
            shutil.rmtree(place, ignore_errors=True)


def moved(folder: Path, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Make a run's checkpoints those of the same run whose files now have other paths."""
    for place in snapshots.places(folder):
        said = _said(place)
        if said and said.get("run") != identity(now):  # already moved, if an earlier attempt was killed
            _claim(place, said, Run(was))
            snapshots.write_manifest(place, {**said, "run": identity(now), "config": now})


def identity(run: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()


def differing(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What differs between two configurations, as stored in files: "limit was 0.3, is 0.5"."""
    before, after = (json.loads(json.dumps(config)) for config in (was, now))
    for name in before | after:
        old, new = before.get(name), after.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from differing(old, new)
        elif old != new:
            yield f"{name} was {old}, is {new}"


def load(place: Path, simulation: "Simulation", run: Run) -> None:
    """Restore a simulation from a checkpoint."""
    said, tensors = snapshots.load(place, ADVICE)
    _claim(place, said, run)
    if said.get("base", simulation.model.base) != simulation.model.base:
        raise CheckpointError(
            f"{place} was made with another frozen base; use the weights file that the run started with, unchanged."
        )
    store = simulation.store
    if said.get("store", "resident") != store.kind:
        raise CheckpointError(
            f"{place} was made with clients in a {said.get('store', 'resident')} store, but this run has a {store.kind} one; "
            "resume with the memory and the chunk size that it was made with."
        )
    rows = nested("rows", tensors)
    if store.kind == Store.kind:
        rows = {k: {n: ranks.own_rows(v) for n, v in t.items()} for k, t in rows.items()}
    put_back(simulation, {
        "file": place / ROWS_FILE,
        "round": int(said["round"]), "server": nested("server", tensors), "memory": nested("aggregate", tensors), "rows": rows,
        "joined": ranks.own_rows(tensors["joined"]), "charged": said.get("charged", 0),
        "kept": (said.get("kept"), nested("kept", tensors)),
    })  # fmt: skip


def standing(simulation: "Simulation") -> dict[str, Any]:
    """A copy of the state of a simulation in one process."""
    s = simulation
    states = {"server": s.server, "memory": s.memory, "rows": s.store.dump()}
    rounds, states["kept"] = s.kept.dump() if s.kept else (None, {})
    copies = {k: {n: {m: v.cpu().clone() for m, v in t.items()} for n, t in state.items()} for k, state in states.items()}
    more = {"charged": s.budget.charged if s.budget else 0, "kept": (rounds, copies.pop("kept"))}
    return {"round": s.round, "joined": s.store.joined.clone(), **more, **copies}


def put_back(simulation: "Simulation", stands: Mapping[str, Any]) -> None:
    """Restore a simulation to that state."""
    simulation.round = stands["round"]
    simulation.server = _placed(stands["server"], simulation.device)
    simulation.memory = _placed(stands["memory"], simulation.device)
    if isinstance(simulation.store, Disk) and "file" in stands:
        with disk(stands["file"]), stands["file"].open("rb") as file:
            simulation.store.restore(file)
    else:
        simulation.store.load(stands["rows"])
    simulation.store.joined = stands["joined"]
    if simulation.budget is not None:
        simulation.budget.charged = max(simulation.budget.charged, stands["charged"])
    rounds, models = stands["kept"]
    if simulation.kept and rounds is not None:
        simulation.kept.load(rounds, models)


def _placed(state: State, device: torch.device) -> State:
    """The server's part of a checkpoint, placed for this run's device."""
    return {k: together({n: v.to(device) for n, v in t.items()}, clients=False) for k, t in state.items()}
