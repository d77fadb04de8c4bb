"""What a simulation measures on request: models on other clients' data, personal shares and persistence."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedselect.core.errors import InputError
from fedselect.core.tree import State, Tree, entries, expand
from fedselect.simulate import ranks
from fedselect.simulate.store import Store
from fedselect.training.work import score

if TYPE_CHECKING:
    from fedselect.simulate.engine import Simulation


def cross(run: "Simulation") -> Tensor:
    """See `Simulation.cross`."""
    if not run.data.has("test"):
        raise InputError("no client has test data to evaluate models on; give fs.ClientData(test=...).")
    out = torch.full((run.clients, run.clients), torch.nan, dtype=torch.float64)
    mine = ranks.own(torch.arange(run.clients))
    for ids in run._chunks(mine[run._joined(mine)]):
        models, test = run.models(ids), run._split["test"]
        for j in range(run.clients):
            theirs = test.rows(torch.full_like(ids, j))
            out[ids, j] = score(run._programs, models, theirs, run.metrics[:1])[run.metrics[0].name].cpu()
    found = ranks.everywhere(out)
    for r, theirs in enumerate(found):
        out[r :: len(found)] = theirs[r :: len(found)]
    return out


def personal_share(run: "Simulation", state: State) -> Tensor:
    """The personal share of each client's parameters."""
    return entries(run.method.mask(run.model, state), run.method.local(state)).double() / run.model.size


def live_share(run: "Simulation") -> float | None:
    """See `Simulation.live_share`."""
    mine = run.store.joined.nonzero().flatten()
    if ranks.world() > 1 or not len(mine):
        return None
    total = 0.0
    for ids in run._chunks(mine):
        marks = _live(run, run.method.mask(run.model, run._open(ids)[0]))
        params = _live(run, expand({n: run.initial[n] for n in run.model.params}, len(ids)))
        total += float(entries(marks, params).sum()) / sum(v[0].numel() for v in params.values())
    return total / len(mine)


def persistence(run: "Simulation") -> Tree:
    """See `Simulation.persistence`."""
    mine = run.store.joined.nonzero().flatten()
    if ranks.world() > 1 or not len(mine):
        return {}
    if isinstance(run.store, Store):  # all rows are at hand
        found = {n: v[mine.to(v.device)] for n, v in run.method.persistence(run.store.rows).items()}
        parts = [(mine, found)]
    else:
        parts = [(ids, run.method.persistence(run._open(ids)[0])) for ids in run._chunks(mine)]
    names = list(parts[0][1])
    out = torch.full((len(names), run.clients), torch.nan, dtype=torch.float64)
    for ids, found in parts if names else []:
        out[:, ids] = torch.stack([v.double() for v in found.values()]).cpu()
    return dict(zip(names, out, strict=True))


def _live(run: "Simulation", tree: Mapping[str, Any]) -> dict[str, Any]:
    """Without the taps of kernels that only ever meet padding."""
    taps = run.fitted.taps
    return {n: taps[n].of(v) if n in taps and isinstance(v, Tensor) else v for n, v in tree.items()}
