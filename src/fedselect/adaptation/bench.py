"""Bench: cross-validation on a new client's samples. Each fold is a client of a simulation, so that folds train at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedselect.core.errors import InputError
from fedselect.core.tree import Tree, expand, take
from fedselect.data import ClientData, Federation
from fedselect.methods import METHODS
from fedselect.network.shared import Shared
from fedselect.simulate import Simulation
from fedselect.simulate.samples import outputs
from fedselect.simulate.stack import Stack
from fedselect.training.step import precision
from fedselect.training.work import Pass, Work

FOLDS = 5
ONE_OUT = 10
"""Leave-one-out is used up to this many samples."""
SETTLE = 10
"""Epochs to compute the client's norm statistics, if the run shares none."""


@dataclass(frozen=True, eq=False)
class Bench:
    """Clients 0 to F - 1 each train without one fold and are tested on it; client F trains on all samples.

    Every tree has one row per client.
    """

    shared: Shared
    simulation: Simulation
    held: Sequence[Tensor]  # indices of the samples in each fold
    begin: Tree  # the shared model; with several heads, the one that fits a row's training samples best
    offer: Tensor  # which one

    @classmethod
    def of(cls, shared: Shared, data: Federation, seed: int, device: str) -> "Bench":
        client = data.clients[0]
        pairs = [p for p in (client.train, client.val) if p is not None]
        x, y = torch.cat([p[0] for p in pairs]), torch.cat([p[1] for p in pairs])
        if len(y) < 2:
            raise InputError("one sample is too few to train on and to choose by; provide at least two.")
        held = folds(y, seed)
        everything = torch.arange(len(y))
        rest = [everything[~torch.isin(everything, fold)] for fold in held]
        parts = [((x[a], y[a]), (x[b], y[b])) for a, b in zip(rest, held, strict=True)] + [((x, y), client.test)]
        clients = [ClientData(a, b, schema=client.schema, layout=client.layout) for a, b in parts]
        steady = replace(shared.training, schedule="constant", warmup=0)
        simulation = Simulation(
            METHODS["fedavg"](), shared.model, replace(data, clients=clients, pools={}), seed=seed, training=steady,
            task=shared.task, headline=shared.headline, device=device,
        )  # fmt: skip
        begin, offer = _best_offer(shared, simulation)
        return cls(shared, simulation, held, _settled(simulation, begin), offer)

    @property
    def rows(self) -> int:
        return len(self.held) + 1

    @property
    def samples(self) -> int:
        return sum(map(len, self.held))

    @property
    def targets(self) -> Tensor:
        return self.simulation.data.clients[-1].train[1].cpu()

    def work(self, ids: Tensor, round: int = 0) -> Work:
        return Stack([self.simulation]).work(ids, round)

    def said(self, models: Tree, ids: Tensor) -> list[Tensor]:
        """The outputs of these models for the samples held out from them."""
        return outputs(self.simulation, models, ids, "test")

    def pooled(self, by_fold: Sequence[Tensor]) -> Tensor:
        """Outputs for held-out samples, reordered from folds to samples."""
        whole = by_fold[0].new_empty(self.samples, *by_fold[0].shape[1:])
        whole[torch.cat(list(self.held))] = torch.cat(list(by_fold))
        return whole


def folds(y: Tensor, seed: int) -> list[Tensor]:
    """Indices of each fold: single samples if there are few, otherwise five folds stratified by class."""
    if len(y) <= ONE_OUT:
        return list(torch.arange(len(y)).unsqueeze(1))
    mixed = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    if y.ndim == 1 and not y.is_floating_point():
        mixed = mixed[y.cpu()[mixed].argsort(stable=True)]
    return [mixed[i::FOLDS].sort().values for i in range(FOLDS)]


def _best_offer(shared: Shared, s: Simulation) -> tuple[Tree, Tensor]:
    """For each row, the shared model with the lowest loss on its training samples, which none of them has seen."""
    common = {n: v.to(s.device) for n, v in shared.offers.shared.get("average", shared.offers.shared["params"]).items()}
    own = {n: v.to(s.device) for tree in shared.offers.rows.values() for n, v in tree.items() if n in common}
    count = len(next(iter(own.values()))) if own else 1
    models = {**expand(common, count), **own}
    ids = torch.arange(s.clients)
    losses = torch.zeros(count, s.clients, dtype=torch.float64)
    for k in range(count) if count > 1 else ():
        said = outputs(s, take(models, torch.full_like(ids, k).to(s.device)), ids, "train")
        for i, one in enumerate(said):
            losses[k, i] = s.task.loss(one, s.data.clients[i].train[1].cpu()).double().mean()
    best = losses.nan_to_num(torch.inf).argmin(0)
    return take(models, best.to(s.device)), best


def _settled(s: Simulation, models: Tree) -> Tree:
    """If the run does not share statistics of norm layers, compute them from the client's samples first."""
    unset = [n for n in s.model.stats if torch.equal(models[n][-1], s.initial[n])]
    if not unset or len(unset) < len(s.model.stats):
        return models
    still = [Pass(dict.fromkeys(s.model.params, True), 0.0, e) for e in range(SETTLE)]
    with precision(s.precision):
        return Stack([s]).work(torch.arange(s.clients), 0).train(models, still, key="settle", scheduled=False)
