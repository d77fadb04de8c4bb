"""Source: where a result gets its models from, a simulation in memory or a folder."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from fedselect.core.errors import InputError
from fedselect.core.tree import Tree
from fedselect.methods.groups import Groups
from fedselect.network.shared import Shared
from fedselect.serve.predictor import Inputs, Meaning, Predictor
from fedselect.simulate import Simulation
from fedselect.simulate.jobs import Job
from fedselect.simulate.stack import Stack
from fedselect.tasks import Measure


class Source(Protocol):
    """What a result needs. Clients are given by number."""

    @property
    def method(self) -> str: ...
    @property
    def metrics(self) -> Sequence[Measure]: ...
    @property
    def names(self) -> list[str]: ...
    @property
    def tested(self) -> list[int | None]: ...
    @property
    def round(self) -> int: ...
    @property
    def predictor(self) -> Predictor: ...

    def trees(self, ids: Sequence[int]) -> dict[int, Tree]:
        """The final models of these clients, on the CPU."""

    def state_dict(self, tree: Tree) -> Tree:
        """A model as a state_dict of the plain module."""

    def scored(self, part: str, trees: Mapping[int, Tree]) -> dict[str, list[float]]:
        """Every metric of these models on one part of their clients' data; NaN if undefined."""

    def masks(self) -> Tree: ...
    def persistence(self) -> Tree: ...
    def groups(self) -> Groups | None: ...
    def shared(self) -> Shared: ...


class Live:
    """A simulation in memory."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation

    @property
    def method(self) -> str:
        return repr(self.simulation.method)

    @property
    def metrics(self) -> Sequence[Measure]:
        return self.simulation.metrics

    @property
    def names(self) -> list[str]:
        return self.simulation.data.names

    @property
    def tested(self) -> list[int | None]:
        return self.simulation.data.samples("test")

    @property
    def round(self) -> int:
        return self.simulation.round

    @property
    def predictor(self) -> Predictor:
        s = self.simulation
        meaning = Meaning(s.task, s.data.target_shape, tuple(s.data.class_names))
        return Predictor(s.model.build, s.model.output, Inputs.of(s), meaning, s.data.schemas)

    def trees(self, ids: Sequence[int]) -> dict[int, Tree]:
        found: dict[int, Tree] = {}
        for some in torch.split(torch.tensor(list(ids), dtype=torch.int64), self.simulation.chunk):
            stacked = self.simulation.models(some)
            found |= {int(i): {n: v[row].cpu().clone() for n, v in stacked.items()} for row, i in enumerate(some)}
        return found

    def state_dict(self, tree: Tree) -> Tree:
        return self.simulation.model.state_dict(tree)

    def scored(self, part: str, trees: Mapping[int, Tree]) -> dict[str, list[float]]:
        s = self.simulation
        if not s.data.has(part):
            what = {"val": "validation", "test": "test"}[part]
            raise InputError(f"no client has {what} data; pass fs.ClientData({part}=...).")
        found: dict[str, list[float]] = {m.name: [] for m in s.metrics}
        for ids in torch.split(torch.arange(s.clients), s.chunk):
            stacked = {n: torch.stack([trees[int(i)][n] for i in ids]).to(s.device) for n in s.initial}
            job = Job("score", ids, s.round - 1, {"model": stacked}, part=part)  # type: ignore[arg-type]
            for name, values in Stack([s]).do(job).items():
                found[name] += values.tolist()
        return found

    def masks(self) -> Tree:
        return self.simulation.masks()

    def persistence(self) -> Tree:
        return self.simulation.persistence()

    def groups(self) -> Groups | None:
        return self.simulation.groups()

    def shared(self) -> Shared:
        from fedselect.results.folder import shared_by

        return shared_by(self.simulation)
