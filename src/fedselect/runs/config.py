"""Config: the complete, reproducible configuration of a run. Flags, files and the API use the same names."""

import dataclasses
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedselect.aggregate import AGGREGATORS
from fedselect.aggregate.aggregator import Aggregator
from fedselect.core import plugins, sums
from fedselect.core.errors import InputError, unknown
from fedselect.core.options import Option, build, find, named, options, resolve
from fedselect.data import DATA, Federation
from fedselect.data.sets import IMAGE_SETS
from fedselect.methods import METHODS
from fedselect.methods.method import Method
from fedselect.models import ADAPTERS, MODELS, Model, with_weights
from fedselect.private import Private
from fedselect.runs import meant, presets
from fedselect.runs.fields import Fields
from fedselect.secret.mean import check_secret
from fedselect.simulate import Simulation
from fedselect.simulate.checkpoint import GONE
from fedselect.simulate.inputs import RANGES, check_late, check_ranges, make_model
from fedselect.simulate.keeping import keeps
from fedselect.simulate.ready import Ready
from fedselect.tasks import TASKS, Task, suited
from fedselect.tasks.metrics import Metric
from fedselect.training.settings import SEAMS, Training, training_options

DEFAULT_MODEL = {
    **dict.fromkeys(("digits", "mnist", "emnist", "femnist", "audiomnist"), "small_cnn"),
    "har": "conv1d",
    "heart": "mlp",
    "table": "mlp",
}
CLASSIFIED = {*IMAGE_SETS, "digits", "femnist", "audiomnist", "har", "heart"}
"""Data sets known to be for classification. For others, the task is inferred from the data."""
TABLES: dict[str, tuple[str, dict[str, Any]]] = {
    "method": ("method", METHODS),
    "data": ("data", DATA),
    "model": ("model", MODELS),
    "adapt": ("adaptation", ADAPTERS),
    "task": ("task", TASKS),
    "aggregate": ("aggregator", AGGREGATORS),
}


@dataclass
class Dealt:
    """What runs of the same data and model share if they are made together."""

    data: Federation
    model: Model
    ready: Ready | None = None


@dataclass(frozen=True)
class Config(Fields):
    """One run, checked and filled in."""

    def complete(self) -> "Config":
        """Check every name and value and fill in the defaults."""
        plugins.need(self.plugins)
        data = _entry("data", {"name": "digits", **at_path(self.data)})
        model = _entry("model", {"name": DEFAULT_MODEL.get(data["name"], "resnet18"), **with_weights(self.model)})
        method, given = self._present(canonical("method", self.method)), _seams(self.training)
        find("method", str(method.get("name")), METHODS)
        names = (str(method["name"]), str(data["name"]))
        said = presets.suited(*names) if self.preset is None else presets.preset(self.preset, *names)
        method, given = {**said.get("method", {}), **method}, {**said.get("training", {}), **given}
        known = training_options(given)
        for name in given:
            if name not in known:
                raise unknown("training option", name, known)
        training = {n: o.value(given) for n, o in known.items()}
        keep = keeps(self.keep, self.patience)
        check_ranges(**{name: getattr(self, name) for name in RANGES if name not in ("late", "keep", "view")})
        check_late(parse_late(self.late), self.rounds)
        tables: dict[str, Any] = {table: _entry(table, {"name": DEFAULTS[table], **getattr(self, table)}) for table in FLAGGED}
        tables |= {"method": _entry("method", method), "data": data, "model": model, "training": training}
        private = None if self.private is None else str(Private.read(self.private))
        done = dataclasses.replace(self, **tables, keep=keep, plugins=plugins.used(_rows(tables)), private=private)
        done.make_method()
        check_secret(self.secret, self.mean, done.make_aggregator())
        done.make_training().check_rounds(self.rounds)
        done.measured()
        return done

    @staticmethod
    def _present(method: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a method without removed ones that had no effect. A removed option that had one is an error."""
        gone = GONE.get(str(method.get("name")), {})
        for k, v in method.items():
            if k in gone and v != gone[k]:
                raise InputError(_instead(k, v))
        return {k: v for k, v in method.items() if k not in gone}

    @cached_property
    def _method(self) -> Method:
        return build("method", self.method["name"], METHODS, _rest(self.method))

    def make_method(self) -> Method:
        """The method. It is frozen and stateless, so it is built only once."""
        return self._method

    def make_aggregator(self) -> Aggregator:
        return build("aggregator", self.aggregate["name"], AGGREGATORS, _rest(self.aggregate))

    def make_training(self) -> Training:
        return Training.of(self.training)

    def make_task(self) -> Task:
        return build("task", self.task["name"], TASKS, _rest(self.task))

    def measured(self) -> tuple[Metric, ...]:
        """The metrics of the run, headline first."""
        return self.make_task().measured(self.headline, self.metrics)

    def make_data(self) -> Federation:
        data = build("data", self.data["name"], DATA, {**_rest(self.data), "seed": self.seed})
        for i, client in enumerate(data.clients):
            if client.test is None:
                raise InputError(
                    f"client {client.name or i} has no test data, which a run in a directory needs; add some, or "
                    "use fs.run in Python."
                )
        return data.on_validation() if self.score == "val" else data

    def make_model(self, data: Federation) -> Model:
        model = make_model(self.model["name"], _rest(self.model), data, self.make_task())
        return build("adaptation", self.adapt["name"], ADAPTERS, _rest(self.adapt), model=model)

    def simulation(
        self, chunk: int | None = None, rows: str | None = None, dealt: "dict[str, Dealt] | None" = None
    ) -> Simulation:
        """Build the simulation. `dealt`: what it shares with other configurations of the same data and model."""
        same = json.dumps([self.data, self.seed, self.score, self.model, self.adapt, self.task], sort_keys=True)
        shared = None if dealt is None else dealt.get(same)
        if shared is None:
            data = self.make_data()
            shared = Dealt(data, self.make_model(data))
        how: Any = chunk or self.chunk
        simulation = Simulation(
            self.make_method(),
            shared.model,
            shared.data,
            seed=self.seed,
            training=self.make_training(),
            task=self.make_task(),
            headline=self.headline,
            metrics=self.metrics,
            fraction=self.fraction,
            late=parse_late(self.late),
            chunk=how,
            rows=rows or self.rows,
            device=self.device,
            precision=self.precision,
            recompute=self.recompute,
            deterministic=self.deterministic,
            eval_every=self.eval_every,
            eval_fraction=self.eval_fraction,
            keep=keeps(self.keep, self.patience),
            view=self.view,
            aggregator=self.make_aggregator(),
            secret=self.secret,
            mean=self.mean,
            rounds=self.rounds,
            private=self.private,
            like=shared.ready,
        )
        if dealt is not None:
            dealt[same] = shared
            if simulation.device.type == "cpu":  # on a GPU no run could use it, and it would hold memory there
                shared.ready = simulation.ready
        if self.cross:
            simulation.need(simulation.view)
        return simulation

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str) -> "Config":
        known = {f.name: f for f in dataclasses.fields(cls)}
        for name in raw:
            if name not in known:
                raise InputError(f"{where}: {_misplaced(name) or unknown('field', name, known)}")
        try:
            return cls(**{n: _plain(n, v) for n, v in raw.items()}).complete()
        except InputError as e:
            raise InputError(f"{where}: {e}") from None


def _rows(tables: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """The table rows (method, data set, model, ...) that a run with these settings uses."""
    yield from ((table, str(tables[table]["name"])) for table in TABLES)
    yield from ((kind, str(tables["training"][kind])) for kind in SEAMS)


def load_plugins(named: Iterable[str] = ()) -> None:
    """Load these plugins, the installed ones and those named in the environment."""
    plugins.load(named, _tables())


def _tables() -> dict[str, dict[str, Any]]:
    """Every table that plugins can extend."""
    return {**{name: rows for name, (_, rows) in TABLES.items()}, **{kind: rows for kind, (rows, _, _) in SEAMS.items()}}


DEFAULTS = {"method": "fedselect", "data": "digits"}
"""Default names; the default model depends on the data."""
FLAGGED = tuple(f.name for f in dataclasses.fields(Config) if f.name in TABLES and "help" in f.metadata)
"""Tables whose name is an option of every run."""
DEFAULTS |= {f.name: f.metadata["default"] for f in dataclasses.fields(Config) if f.name in FLAGGED}


def read(path: Path) -> dict[str, Any]:
    """Read a TOML or JSON configuration file."""
    try:
        text = path.read_text()
    except OSError as e:
        raise InputError(f"{path} cannot be read: {e.strerror}; give a TOML file, or the config.json of a run.") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a text file.") from None
    try:
        raw = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as e:
        raise InputError(f"{path} is not valid {'TOML' if path.suffix == '.toml' else 'JSON'}: {e}.") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path} must contain a table of fields.")
    try:
        return sums.opened(raw)
    except ValueError as e:
        raise InputError(f"{path} cannot be used: {e}.") from None


def task_of(data: Mapping[str, Any]) -> str:
    """The name of the task that suits the data, if none is given."""
    table = _entry("data", at_path(data))
    if table["name"] in CLASSIFIED:
        return "classification"
    made = build("data", table["name"], DATA, {**_rest(table), "seed": 0})
    if (found := suited(made)) is None:
        raise InputError(f"the task of {made} cannot be inferred; pass --task {' or '.join(TASKS)}.")
    return found


def canonical(table: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """A table with its name in our spelling: fedavg for FedAvg, cifar10 for CIFAR-10."""
    return {**given, "name": named(str(given["name"]), TABLES[table][1])} if "name" in given else dict(given)


def _seams(training: Mapping[str, Any]) -> dict[str, Any]:
    """Training settings with the optimizer and schedule in our spelling."""
    return {k: named(v, SEAMS[k][0]) if k in SEAMS and isinstance(v, str) else v for k, v in training.items()}


def place(name: str, methods: list[str], chosen: Mapping[str, str | None], value: str = "VALUE") -> list[tuple[str, str]]:
    """Find the tables that a flag belongs to, as [(table, option)], given what was chosen from each table.

    `name` may select one table: fedselect.limit, aggregate.limit. `value`: its value, for errors.
    """
    head, _, option = name.rpartition(".")
    option, homes = option.replace("-", "_"), _homes(methods, chosen)
    if head:
        return [(_home(head, option, methods, homes), option)]
    found = [home for home, known in homes.items() if option in known]
    if len({home.partition(":")[0] for home in found}) > 1:
        own = [home.removeprefix("method:") for home in found]
        flags = " or ".join(f"--{home}.{option.replace('_', '-')}" for home in own)
        raise InputError(f"{option} is an option of {' and of '.join(own)}; select one: {flags}.")
    if not found:
        if other := meant.option(name, value):
            raise other
        if elsewhere := _owner(option):
            table, first, *_ = elsewhere.split()
            raise InputError(f"there is no option {option!r} in this run; {elsewhere} has it: add --{table} {first}.")
        run = {f.name for f in dataclasses.fields(Config)} - {"plugins"} | {"plugin"}
        if option in run:  # a field that this command sets with another flag
            run = run - {option} | {"seeds", "methods"}
        raise unknown("option", name, [known.replace("_", "-") for known in run.union(*homes.values())])
    return [(home, option) for home in found]


def _homes(methods: list[str], chosen: Mapping[str, str | None]) -> dict[str, dict[str, Option]]:
    """The options of what was chosen, by table. Methods are listed as method:NAME."""
    found = {f"method:{m}": options(find("method", m, METHODS)) for m in methods}
    data = str(chosen["data"])
    found["data"] = options(find("data", data, DATA))
    model = chosen.get("model") or DEFAULT_MODEL.get(data, "resnet18")
    found["model"] = options(find("model", str(with_weights({"name": model})["name"]), MODELS))
    found["training"] = training_options(chosen)
    for table in FLAGGED:
        kind, rows = TABLES[table]
        found[table] = options(find(kind, chosen.get(table) or DEFAULTS[table], rows))
    return found


def _home(head: str, option: str, methods: list[str], homes: Mapping[str, Mapping[str, Option]]) -> str:
    """The table that a flag selects. It must have the option."""
    home = f"method:{head}" if head in methods else head
    if home not in homes:
        raise unknown("method or table in this command", head, [h.removeprefix("method:") for h in homes])
    if option not in homes[home] and option not in GONE.get(head, {}):  # `complete` reports removed options
        whose = f"option of method {head}:" if head in methods else f"{head} option"
        raise unknown(whose, option, homes[home])
    return home


_INSTEAD = {
    "decay": 'learning-rate schedules are options of training: replace decay = {0} under [method] with schedule = "step", '
    "decay = {0}, decay_every = 1 under [training] (--schedule step --decay {0} --decay-every 1).",
    "server_momentum": "it is an option of the aggregator: write it under [aggregate], or pass --server-momentum {0}.",
}


def _instead(option: str, value: Any) -> str:
    """The error for a removed option of a method, with its replacement."""
    return f"{option} is no longer an option of a method; {_INSTEAD[option].format(value)}"


def _misplaced(field: str) -> str | None:
    """The error for a field that belongs elsewhere, or None."""
    if field in ("methods", "seeds"):
        return f"{field!r} is a field of a comparison; use this file with: fedselect compare --config"
    owner = _owner(field)
    table = owner.partition(" ")[0]
    return (
        f"{field!r} is an option of {owner} and belongs under [{'training' if table in SEAMS else table}]." if owner else None
    )


def _owner(option: str) -> str:
    """The owners of an option, such as "method fedselect or layers", or an empty string."""
    for kind, table in {"training": {"": Training}, **_tables()}.items():
        names = [n for n, factory in table.items() if option in options(factory)]
        if names:
            return " ".join(filter(None, (kind, " or ".join(names))))
    return ""


def at_path(data: Mapping[str, Any]) -> dict[str, Any]:
    """folder:PATH stands for {"name": "folder", "path": PATH}."""
    name, colon, path = str(data.get("name", "")).partition(":")
    if not colon and name:
        meant.check_no_path(name)
    return canonical("data", {**data, "name": name, "path": path} if colon else data)


def parse_late(late: str | None) -> tuple[int, int] | None:
    if late is None:
        return None
    count, _, at = late.partition("@")
    if not (count.isdecimal() and at.isdecimal() and int(at) > 0):
        raise InputError(f"--late must be COUNT@ROUND, such as 2@10, not {late!r}.")
    return int(count), int(at)


def _entry(table: str, given: Mapping[str, Any]) -> dict[str, Any]:
    kind, entries = TABLES[table]
    if "name" not in given:
        raise InputError(f"{table} needs a name.")
    name = named(str(given["name"]), entries)
    return {"name": name, **resolve(kind, name, entries, _rest(given))}


def _rest(given: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in given.items() if k != "name"}


def _plain(name: str, value: Any) -> Any:
    """Check a field of the run and convert it to its type. Values from flags are strings."""
    if name in TABLES or name == "training":
        if not isinstance(value, Mapping):
            raise InputError(f"{name} must be a table.")
        return dict(value)
    if name == "metrics" and isinstance(value, str):  # from a flag
        value = list(dict.fromkeys(n.strip() for n in value.split(",") if n.strip()))
    if name in ("plugins", "metrics"):
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise InputError(f"{name} must be a list of names, not {value!r}.")
        return value
    if name == "seed" and isinstance(value, str) and "," in value:
        raise InputError(f"a run has one seed; for several: fedselect compare --methods NAME --seeds {value}.")
    return options(Config, skip=frozenset())[name].parse(value)
