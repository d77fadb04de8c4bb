"""Result: the outcome of a run, in memory or saved."""

from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from fedselect.core.errors import InputError
from fedselect.core.names import client_number
from fedselect.core.tree import Tree
from fedselect.methods.groups import members
from fedselect.network.shared import Shared
from fedselect.results import folder, showing
from fedselect.results.source import Live, Source
from fedselect.simulate import Simulation
from fedselect.simulate.keeping import final
from fedselect.simulate.records import ID, Record, validated
from fedselect.tasks import Spread
from fedselect.tasks.metrics import LOSS, known

PARTS = ("train", "val", "test")


class Result:
    """The outcome of a run: its history, and every client's model, scores and predictions.

    `fs.run` returns one, and `fs.load_result` reads one from a folder. `fs.Result(simulation, history)` makes one from a
    simulation that you stepped yourself. Models are merged and fine-tuned once, and then cached.

    Examples:
        >>> import fedselect as fs
        >>> data = fs.load("digits", clients=3, seed=0)
        >>> result = fs.run(fs.FedAvg(lr=0.1), model="mlp", data=data, rounds=2)
        >>> result.predict(0, data.clients[0].test[0][:2]).shape
        (2,)
    """

    def __init__(self, simulation: Simulation | Source, history: list[Record]) -> None:
        self._source: Source = Live(simulation) if isinstance(simulation, Simulation) else simulation
        self.history = history
        self._kept: tuple[int, dict[int, Tree]] = (-1, {})  # final models of a round, by client

    def __repr__(self) -> str:
        return showing.text(self._table())

    def _repr_html_(self) -> str:
        return showing.html(self._table())

    @property
    def simulation(self) -> Simulation:
        """The simulation behind a result in memory."""
        if not isinstance(self._source, Live):
            raise InputError(
                "this result was loaded from a folder, which has models and metrics but no simulation; use fs.run to get one."
            )
        return self._source.simulation

    @property
    def headline(self) -> float:
        """Mean of the headline metric over clients, each model on its own client's test data, at the last evaluation."""
        return float(self._last()[self._source.metrics[0].name])

    @property
    def accuracy(self) -> float:
        """Mean accuracy over clients, if the task has an accuracy."""
        if "accuracy" not in (last := self._last()):
            there = ", ".join(m.name for m in self._source.metrics)
            raise InputError(f"this task has no accuracy; it has {there}, and result.headline is the first.")
        return float(last["accuracy"])

    @property
    def clients(self) -> list[Record]:
        """One record per client, from the last evaluation."""
        lists = self._last()["clients"]
        return [{k: v[i] for k, v in lists.items()} for i in range(len(self._source.names))]

    def scores(self, part: str = "test") -> list[Record]:
        """Every metric of every client's model on its own data, one row per client, ready for pandas.DataFrame(...).

        Args:
            part: test (at the last evaluation), val or train.

        Returns:
            One dict per client. An undefined metric is None.
        """
        if part not in PARTS:
            raise InputError(f"part must be {' or '.join(PARTS)}, not {part!r}.")
        measured = [m.name for m in self._source.metrics]
        columns = {name: validated(name) if part == "val" else name for name in measured}
        last = final(self.history, measured[0])
        if part != "train" and last is not None and all(c in last["clients"] for c in columns.values()):
            found = {name: last["clients"][column] for name, column in columns.items()}
        else:
            values = self._source.scored(part, self._trees(range(len(self._source.names))))
            found = {name: [known(v) for v in values[name]] for name in measured}
        said = {name: f"{part}_loss" if name == LOSS else name for name in measured}
        return [
            {"client": who, **{said[name]: found[name][i] for name in measured}} for i, who in enumerate(self._source.names)
        ]

    def over_clients(self, metric: str | None = None) -> Spread:
        """A metric over clients, by default the headline: mean, worst tenth, and the mean weighted by test samples."""
        measured = {m.name: m for m in self._source.metrics}
        name = metric or next(iter(measured))
        if name not in measured:
            raise InputError(f"this run did not measure {name!r}, only {', '.join(measured)}; run it with metrics=[{name!r}].")
        return Spread.of(measured[name], self._last()["clients"][name], self._source.tested)

    @property
    def bytes_up(self) -> int:
        """Bytes uploaded by all clients in the whole run."""
        return sum(r["bytes_up"] for r in self.history)

    @property
    def bytes_down(self) -> int:
        """Bytes downloaded by all clients in the whole run."""
        return sum(r["bytes_down"] for r in self.history)

    @property
    def masks(self) -> Tree:
        """Which parameters are personal: {name: bool (clients, ...)}."""
        return self._source.masks()

    @property
    def persistence(self) -> Tree:
        """Persistence of each client's disagreement: {name: (clients,)}, NaN for a client that was not tested."""
        if not (found := self._source.persistence()):
            raise InputError(f"{self._method} does not measure persistence; use fs.FedPersist() or fs.diagnose(data).")
        return found

    @property
    def groups(self) -> list[list[int]]:
        """The clients of each group that shares a head, ordered by first member; clients without a group are left out."""
        if (found := self._source.groups()) is None:
            raise InputError(f"{self._method} does not form groups; use fs.FedAlike() or fs.diagnose(data).")
        return members(found)

    def cross(self) -> Tensor:
        """The headline metric of client i's model on client j's test data: (i, j)."""
        return self.simulation.cross()

    def to_dataframe(self) -> Any:
        """The history as a pandas DataFrame, one row per round and client that the round lists."""
        try:
            import pandas
        except ImportError:
            raise InputError("to_dataframe needs pandas; install it with: pip install pandas") from None
        names = self._source.names
        return pandas.DataFrame([
            {"round": r["round"], "client": i, "name": names[i], **{k: v[row] for k, v in r["clients"].items() if k != ID}}
            for r in self.history
            for row, i in enumerate(r["clients"].get(ID, range(len(names))))
        ])  # fmt: skip

    def personal(self, client: int | str) -> Tree:
        """One client's model, by its number or name, as a state_dict for the plain module."""
        i = self._number(client)
        return self._source.state_dict(self._trees([i])[i])

    def models(self) -> list[Tree]:
        """Every client's model, as state_dicts in the order of clients."""
        trees = self._trees(range(len(self._source.names)))
        return [self._source.state_dict(trees[i]) for i in sorted(trees)]

    def predict(self, client: int | str, x: Any) -> NDArray[Any]:
        """Predict with a client's model from raw inputs.

        Args:
            client: Number or name of the client.
            x: An array or tensor with one row per sample; images as uint8 if the model was trained on uint8. For a table,
                also a DataFrame or a dict of columns. For several inputs, a dict or tuple of arrays as in the data.

        Returns:
            One row per sample: classes (by name if they have names), or numbers in the units of the targets.
        """
        i = self._number(client)
        return self._source.predictor.predict(self.personal(i), i, x)

    def predict_proba(self, client: int | str, x: Any) -> NDArray[Any]:
        """Class probabilities from a client's model: one row per sample, one column per class."""
        i = self._number(client)
        return self._source.predictor.probabilities(self.personal(i), i, x)

    def save(self, directory: str | Path, overwrite: bool = False) -> Path:
        """Write history, scores, masks and every client's model to a new folder, as JSON and safetensors.

        Read it with `fs.load_result`, or draw it with `fedselect report`.

        Args:
            directory: The folder to create.
            overwrite: Replace an earlier saved result.
        """
        every = range(len(self._source.names))
        return folder.save(self._source, self.history, lambda: self._trees(every), Path(directory).expanduser(), overwrite)

    def shared(self) -> Shared:
        """What the run shares with new clients; `fs.adapt` starts from it."""
        return self._source.shared()

    def report(self, path: str | Path = "report.html") -> Path:
        """Write the report, one HTML page, and return its path. Needs plotly."""
        self._last()
        return folder.report(self._source, self.history, Path(path).expanduser())

    def _trees(self, ids: Any) -> dict[int, Tree]:
        """Clients' final models, cached until the simulation runs another round."""
        if self._kept[0] != self._source.round:
            self._kept = (self._source.round, {})
        kept = self._kept[1]
        if new := [i for i in ids if i not in kept]:
            kept |= self._source.trees(new)
        return {i: kept[i] for i in ids}

    def _number(self, client: int | str) -> int:
        return client_number(client, self._source.names)

    @property
    def _method(self) -> str:
        return self._source.method.partition("(")[0]

    def _table(self) -> showing.Table:
        return showing.table(self._source, self.history)

    def _last(self) -> Record:
        return showing.last(self._source, self.history)
