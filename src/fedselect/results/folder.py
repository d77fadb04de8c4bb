"""A result as a folder: the files that `fedselect report` reads, and every client's model as safetensors.

result.json describes the models' inputs and outputs. There is no pickle, so loading a result never runs its code.
"""

import copy
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedselect.aggregate import AGGREGATORS
from fedselect.core import sums, tensors
from fedselect.core.errors import InputError, RunError
from fedselect.core.files import is_unused, read_json, replace, write_bytes, write_json
from fedselect.core.shown import made
from fedselect.core.tree import Tree
from fedselect.methods import METHODS
from fedselect.methods.groups import Groups
from fedselect.models import Model
from fedselect.models.adapters import Adapters
from fedselect.network.shared import NAME as SHARED
from fedselect.network.shared import Shared, of_simulation
from fedselect.report import check_page, gather, page, write_report
from fedselect.results.source import Live, Source
from fedselect.runs import grouped, persistence, rundir, schemas
from fedselect.runs.environment import environment
from fedselect.runs.masks import MaskLog, federation
from fedselect.runs.summary import summary
from fedselect.serve.about import About, about, entry, inputs_of, meaning_of, network_of, plain
from fedselect.serve.predictor import Inputs, Meaning, Predictor
from fedselect.simulate import Simulation
from fedselect.simulate.records import Record
from fedselect.tasks import TASKS, Measure, Task
from fedselect.tasks.task import learned

if TYPE_CHECKING:
    from fedselect.results.result import Result

FORMAT = 1
ADVICE = "save the result again."


def save(source: Source, history: Sequence[Record], trees: Callable[[], dict[int, Tree]], out: Path, overwrite: bool) -> Path:
    """Write a result with all models to a new folder, completely or not at all."""
    if (out.exists() or out.is_symlink()) and not is_unused(out):
        if not overwrite:
            raise InputError(f"{out} already exists; choose another folder, or pass overwrite=True to replace a saved result.")
        if not rundir.saved(out) or not rundir.is_run(out):
            raise InputError(f"{out} contains files that are not part of a saved result; choose another folder.")
    if not out.parent.is_dir():
        raise InputError(f"{out.parent} is not a directory; create it first, or choose another folder.")
    if isinstance(source, Saved):
        before = source.place

        def write(fresh: Path) -> None:
            shutil.copytree(before, fresh)

        replace(out, write)
    elif isinstance(source, Live):
        simulation = source.simulation
        models = _stacked(trees(), simulation)
        masks = {n: _short(m) for n, m in simulation.masks().items()}

        def write_all(fresh: Path) -> None:
            fresh.mkdir()
            _write_run(fresh, simulation, history)
            write_json(fresh / "result.json", _about(simulation))
            for name, values in (("models", models), ("masks", masks)):
                (fresh / f"{name}.safetensors").write_bytes(tensors.to_bytes(values))
            shared_by(simulation).write(fresh / SHARED)

        replace(out, write_all)
    return out


def shared_by(s: Simulation) -> Shared:
    """What the run shares with new clients."""
    return of_simulation(s, {**{k: _config(s)[k] for k in ("method", "training")}, "task": entry(s.task, TASKS)})


def report(source: Source, history: Sequence[Record], out: Path) -> Path:
    """Write the report of a result."""
    check_page(out)
    if isinstance(source, Saved):
        return write_report([source.place], out)
    assert isinstance(source, Live)
    with tempfile.TemporaryDirectory() as place:
        _write_run(Path(place), source.simulation, history)
        data = gather([Path(place)])
    for run in data["runs"]:
        run["path"] = "in memory"
    write_bytes(out, page(data).encode())
    return out


def load_result(
    directory: str | Path, model: nn.Module | Model | Callable[[], nn.Module] | None = None, task: Task | None = None
) -> "Result":
    """Load a result from a folder that `result.save` wrote, or from a run directory of the command line.

    The data of a run directory is loaded again.

    Args:
        directory: The folder.
        model: Your network, or a function that creates it, needed to predict; networks of `fs.models` are known.
        task: Your own task, if the run used one.

    Returns:
        The same object as `fs.run` returns.
    """
    from fedselect.results.result import Result

    place = Path(directory).expanduser()
    if rundir.saved(place):
        return Result(Saved(place, model, task), rundir.read_records(place / "metrics.jsonl"))
    if not (place / "config.json").exists() and not (place / "compare.json").exists():
        raise RunError(f"{place} is neither a saved result nor a run directory; pass a folder that result.save wrote.")
    _, simulation = rundir.reopen(place)
    records = rundir.read_records(place / "metrics.jsonl", growing=not rundir.finished(place))
    return Result(simulation, records[: simulation.round])


class Saved:
    """A folder written by `save`. Parameters are read on demand."""

    def __init__(self, place: Path, model: Any = None, task: Task | None = None) -> None:
        self.place, self._model, self._task = place, model, task
        self._about = read_json(place / "result.json", ADVICE)
        if self._about.get("format") != FORMAT:
            raise RunError(f"{place} has format {self._about.get('format')}, but this version reads {FORMAT}; {ADVICE}")
        try:
            clients = read_json(place / "federation.json", ADVICE)["clients"]
            self.names: list[str] = [c["name"] for c in clients]
            self.tested: list[int | None] = [c["test"] for c in clients]
            self.method, self.round = str(self._about["method"]), int(self._about["round"])
        except (KeyError, TypeError) as e:
            raise RunError(f"{place} is damaged: {e} is missing; {ADVICE}") from None

    @cached_property
    def metrics(self) -> Sequence[Measure]:
        return rundir.measures(self.place)

    @cached_property
    def _values(self) -> dict[str, Tree]:
        """Clients' parameters, stacked, and the constants that all share."""
        found: dict[str, Tree] = {"clients": {}, "constants": {}}
        for key, v in self._read("models.safetensors").items():
            kind, _, name = key.partition("/")
            found[kind][name] = v
        return found

    @property
    def predictor(self) -> Predictor:
        meaning = meaning_of(self._about, self._task, f"fs.load_result({str(self.place)!r}, task=...)")
        own = schemas.read(self.place, len(self.names))
        return Predictor(self._network(), self._about["output"], inputs_of(self._about), meaning, own)

    def _network(self) -> Callable[[], nn.Module]:
        model = self._model
        if model is None:
            return network_of(self._about, self.place, f"fs.load_result({str(self.place)!r}, model=...)")
        if isinstance(model, nn.Module):
            return partial(copy.deepcopy, model)
        return model.build if isinstance(model, Model) else model

    def trees(self, ids: Sequence[int]) -> dict[int, Tree]:
        return {i: {n: v[i] for n, v in self._values["clients"].items()} for i in ids}

    def state_dict(self, tree: Tree) -> Tree:
        full = {**self._values["constants"], **tree}
        full = {n: full[self._about["tied"].get(n, n)] for n in self._about["order"]}
        if said := self._about.get("adapters"):
            full = Adapters.from_json(said).merged(full, self._about["pairs"])
        return {n: v.clone() for n, v in full.items()}

    def scored(self, part: str, trees: Mapping[int, Tree]) -> dict[str, list[float]]:
        raise InputError(
            f"{self.place} has no data to evaluate models on, and no scores on {part} data; "
            + ("score it in the run: fs.run(..., val=True)." if part == "val" else "score them before saving.")
        )

    def masks(self) -> Tree:
        shapes = self._values["clients"]
        return {n: m.expand(shapes[n].shape).clone() for n, m in self._read("masks.safetensors").items()}

    def persistence(self) -> Tree:
        found = persistence.read(self.place)
        if found is None:
            return {}
        columns = found["persistence"].items()
        return {n: torch.tensor([float("nan") if x is None else x for x in v], dtype=torch.float64) for n, v in columns}

    def groups(self) -> Groups | None:
        found: Groups | None = self._about["groups"]
        return found

    def shared(self) -> Shared:
        if not (file := self.place / SHARED).exists():
            raise RunError(
                f"{self.place} was saved by a version that did not store what the run shares; run it again and save it, or "
                "adapt from a run directory of the command line."
            )
        return Shared.read(file, self._model)

    def _read(self, name: str) -> Tree:
        return tensors.read(self.place / name, ADVICE)


def _stacked(trees: Mapping[int, Tree], s: Simulation) -> Tree:
    """Every client's model, stacked, and the constants that all share."""
    found = {f"clients/{n}": torch.stack([trees[i][n] for i in range(s.clients)]) for n in s.initial}
    return {**found, **{f"constants/{n}": v.contiguous() for n, v in s.model.constants.items()}}


def _short(mask: Tensor) -> Tensor:
    """A single boolean if all are the same."""
    whole = mask.cpu()
    return torch.tensor(bool(whole.all())) if bool(whole.all()) or not bool(whole.any()) else whole.contiguous()


def _about(s: Simulation) -> About:
    """The description of the models' inputs and outputs."""
    return {
        **about(s.model, Inputs.of(s), Meaning(s.task, s.data.target_shape, tuple(s.data.class_names))),
        "format": FORMAT,
        "round": s.round,
        "method": repr(s.method),
        "order": list(s.model.module.state_dict()),
        "tied": s.model.tied,
        **({"adapters": s.model.adapters.to_json(), "pairs": s.model.pairs} if s.model.adapters else {}),
        "groups": s.groups(),
    }


def _config(s: Simulation) -> dict[str, Any]:
    """The configuration, as in run directories."""
    return {
        "method": entry(s._bare[0], METHODS),
        "data": {"name": s.data.name},
        "model": {"name": s.model.name},
        "training": {n: plain(v) for n, v in made(s.training).options.items()},
        "task": entry(s.asked, TASKS),
        "aggregate": entry(s._bare[1], AGGREGATORS),
        "rounds": s.round,
        "seed": s.seed,
        "fraction": s.fraction,
        **({"secret": True, "mean": s.secret.mean} if s.secret else {}),
        **({} if s.keep == "last" else {"keep": s.keep}),
        **({"view": s.view} if s.view == "best" else {}),
    }


def _write_run(out: Path, s: Simulation, history: Sequence[Record]) -> None:
    """Write the files that the report reads."""
    config = _config(s)
    write_json(out / "config.json", config)
    rundir.write_measures(out, s.metrics, learned(s.asked, s.task))
    write_json(out / "federation.json", federation(s))
    schemas.keep(out, s.data)
    write_bytes(out / "metrics.jsonl", "".join(map(sums.to_line, history)).encode())
    if s.store.kind == "resident":
        MaskLog(out, s.round, s).add()
        if found := persistence.find(s):
            write_json(out / persistence.NAME, found)
    if found := grouped.find(s.groups()):
        write_json(out / grouped.NAME, found)
    if any(r[s.metrics[0].name] is not None for r in history):
        names = {n: config[n]["name"] for n in ("method", "data", "model")}
        about = {**names, "seed": s.seed, "score": "test", "view": s.view}
        tested, validation = s.data.samples("test"), s.data.samples("val")
        write_json(
            out / "summary.json",
            summary(about, s.metrics, history, tested, environment(s.device.type, s.precision), validation),
        )
