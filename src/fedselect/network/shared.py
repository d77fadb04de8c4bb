"""Shared: what a finished run offers to new clients, and its file format.

The file holds the initial values, what the server shares now, and what these are for: method, network, task, training, and the
shape of the data. It holds no data, and nothing of any single client.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedselect.core import tensors
from fedselect.core.errors import InputError, RunError
from fedselect.core.files import read_json, write_bytes
from fedselect.core.options import build
from fedselect.core.tree import Tree, flat, nested
from fedselect.methods import METHODS
from fedselect.methods.method import Down, Method, for_clients
from fedselect.models import Model
from fedselect.models.adapters import Adapters
from fedselect.models.networks import rebuilt, recipe
from fedselect.network.plan import Plan, Shape, need_plugins
from fedselect.network.vault import Vault
from fedselect.runs import rundir
from fedselect.runs.config import Config
from fedselect.simulate import Simulation
from fedselect.simulate.inputs import make_model
from fedselect.tasks import TASKS, Task
from fedselect.training.settings import Training

FORMAT = 1
NAME = "shared.safetensors"
"""The name of the file in a folder that `result.save` wrote."""
Code = nn.Module | Model | Callable[[], nn.Module] | None
ADVICE = "create it again with: fedselect share RUN --out FILE."


@dataclass(frozen=True)
class Look:
    """What a run's inputs look like and how they become numbers; in a deployment each client knows that itself."""

    kind: str | None = None  # dtype of the inputs
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augment: str = "none"


@dataclass(frozen=True, eq=False)
class Shared:
    """What a new client starts from: a model with the initial values, and what the server offers."""

    method: Method
    model: Model
    training: Training
    task: Task  # with what it learned from the clients of the run
    data: Shape
    offers: Down  # what all clients share, and rows to choose from
    _: KW_ONLY
    look: Look = field(default_factory=Look)
    headline: str | None = None
    about: dict[str, Any] = field(default_factory=dict)  # run, round, and the tables of a configuration

    @property
    def initial(self) -> Tree:
        return self.model.init(0)

    def check(self) -> "Shared":
        """Refuse a file without a trained model."""
        initial, now = self.initial, self.offers.shared["params"]
        if all(torch.equal(now[n].cpu(), v) for n, v in initial.items()):
            raise InputError(
                f"this run of {self.about['method']['name']} shared nothing: the server's values are the initial ones, so "
                "there is no model to adapt; use a run of another method, such as fedavg+ft."
            )
        return self

    def write(self, path: Path) -> Path:
        """Write one safetensors file; no pickle."""
        if not path.parent.is_dir():
            raise InputError(f"{path.parent} is not a directory; create it first, or choose another --out.")
        said = {
            **self.about, "format": FORMAT, "shape": self.data.to_json(), "look": vars(self.look), "headline": self.headline,
            "head": self.model.head, "output": self.model.output, "model_name": self.model.name,
            **({"adapters": self.model.adapters.to_json()} if self.model.adapters else {}),
        }  # fmt: skip
        state = {"initial": self.initial, "constants": self.model.constants}
        whole = {**flat("values", state), **flat("shared", self.offers.shared), **flat("rows", self.offers.rows)}
        write_bytes(path, tensors.to_bytes({n: v.clone() for n, v in whole.items()}, {"fedselect": json.dumps(said)}))
        return path

    @classmethod
    def read(cls, path: Path, model: Code = None) -> "Shared":
        """`model`: the network, if it is not a built-in one."""
        try:
            found, notes = tensors.read_all(path, ADVICE)
            said = json.loads(notes["fedselect"])
        except (KeyError, ValueError):
            raise RunError(f"{path} is not a file of `fedselect share`, or is damaged; {ADVICE}") from None
        if said.get("format") != FORMAT:
            raise RunError(f"{path} has format {said.get('format')}, but this version reads {FORMAT}; {ADVICE}")
        values = nested("values", found)
        shape, look = Shape.from_json(said["shape"]), said["look"]
        task = _built("task", said["task"], TASKS)
        net = _network(said, model, shape, task)
        adapters = Adapters.from_json(said["adapters"]) if "adapters" in said else None
        made = Model(net, head=said["head"], name=said["model_name"], output=said["output"], adapters=adapters)
        return cls(
            _built("method", said["method"], METHODS),
            _holding(made, values),
            Training.of(said["training"]),
            task,
            shape,
            Down(nested("shared", found), nested("rows", found)),
            look=Look(look["kind"], tuple(look["mean"]), tuple(look["std"]), look["augment"]),
            headline=said["headline"],
            about={k: said[k] for k in ("run", "round", "method", "task", "training", "recipe", "config")},
        )


def of_simulation(s: Simulation, tables: Mapping[str, Any], run: str = "", config: Mapping[str, Any] | None = None) -> Shared:
    """`tables`: method, task (with what it learned) and training as stored in files."""
    if s.round == 0:
        raise RunError("the run has not started, so nothing is shared yet; run a round first.")
    first = s.data.clients[0].train[0].dtype
    return Shared(
        for_clients(s.method, torch.zeros(1, dtype=torch.int64)),
        _holding(s.model, {"initial": s.initial, "constants": s.model.constants}),
        s.training,
        s.task,
        Shape.of(s.data),
        s.method.offers(s.server, s.clients),
        look=Look(str(first).removeprefix("torch."), tuple(s.data.mean), tuple(s.data.std), s.data.augment),
        headline=s.metrics[0].name,
        about={"run": run, "round": s.round, **tables, "recipe": recipe(s.model), "config": config},
    )  # fmt: skip


def of_run(out: Path) -> Shared:
    """What a finished run directory shares, of a simulation or of the server in a deployment."""
    if out.is_dir() and not rundir.finished(out) and (out / "config.json").exists() and not rundir.saved(out):
        how = "fedselect deploy run SITE --resume --name NAME" if rundir.deployed(out) else f"fedselect resume {out}"
        raise RunError(f"{out} is not finished; finish it first with: {how}")
    if rundir.deployed(out):
        return _of_server(out)
    config, simulation = rundir.reopen(out)
    return of_simulation(simulation, _tables(config, simulation.task), out.name, config.to_json())


def _of_server(out: Path) -> Shared:
    flat_plan = read_json(out / "plan.json", "it should hold the plan of a deployed run.")
    need_plugins(flat_plan, "command")
    plan = Plan.from_flat(flat_plan, out.name)
    vault = Vault(out / "checkpoint")
    if not (rounds := vault.rounds()):
        raise RunError(f"{out} has no checkpoint, so it shares nothing; resume or repeat the run.")
    found = vault.load(rounds[-1])
    assigned = plan.assignment("cpu").told(found.notes.get("task", {}))
    config, s = plan.config, nested("server", found.tensors)
    return Shared(
        assigned.of(0),
        _holding(assigned.model, {"initial": assigned.initial, "constants": assigned.model.constants}),
        assigned.training,
        assigned.task,
        plan.data,
        assigned.method.offers(s, plan.clients),
        headline=assigned.metrics[0].name,
        about={
            "run": out.name, "round": rounds[-1], **_tables(config, assigned.task), "recipe": recipe(assigned.model),
            "config": config.to_json(),
        },
    )  # fmt: skip


def _tables(config: Config, task: Task) -> dict[str, Any]:
    learned = {k: getattr(task, k, v) for k, v in config.task.items() if k != "name"}
    return {"method": config.method, "task": {**config.task, **learned}, "training": config.training}


def _holding(model: Model, values: Mapping[str, Tree]) -> Model:
    """The model with these initial values, regardless of the seed."""
    module = model.assemble()
    full = {**model.constants, **values.get("constants", {}), **{n: v.cpu() for n, v in values["initial"].items()}}
    try:
        module.load_state_dict({n: full[model.tied.get(n, n)] for n in model.module.state_dict()})
    except (KeyError, RuntimeError):
        raise InputError("the network is not the one that was trained; pass that one as model=...") from None
    return model.holding(module)


def _network(said: Mapping[str, Any], model: Code, shape: Shape, task: Task) -> Callable[[], nn.Module]:
    if isinstance(model, nn.Module):
        return Model.wrap(model).build
    if model is not None:
        return model.build if isinstance(model, Model) else model
    if said["recipe"] is not None:
        return rebuilt(said["recipe"])
    config = said["config"]
    if config is None:
        raise InputError(f"the network {said['model_name']} is not a built-in one; pass a function that makes it: model=...")
    table = {k: v for k, v in config["model"].items() if k not in ("name", "weights")}
    return make_model(config["model"]["name"], table, shape, task).build  # type: ignore[arg-type]


def _built(kind: str, said: Mapping[str, Any], table: Any) -> Any:
    name = said["name"]
    if name not in table:
        raise InputError(f"the {kind} {name} is unknown; load the plugin that adds it: --plugin MODULE.")
    return build(kind, name, table, {k: v for k, v in said.items() if k != "name"})
