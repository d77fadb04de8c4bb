"""What a method says it carries is all it needs: the rest is forgotten between rounds, and no number changes."""

import pytest
import torch
from cases import A_FEW_METHODS, AWAY, EVERY_METHOD, SIZES, assert_equal, rounds, simulation

from fedselect.core.errors import CheckpointError
from fedselect.core.tree import State
from fedselect.simulate import Simulation, checkpoint
from fedselect.simulate.store import Store

HOW = {**AWAY, "chunk": 2}


class Forgetful(Store):
    """Numbers that are not carried become NaN, marks False."""

    def __init__(self, sim: Simulation) -> None:
        super().__init__(sim.clients, sim.device)
        self._sim = sim

    def put(self, ids: torch.Tensor, state: State) -> None:
        carried = self._sim.method.carries(self._sim.model, state)
        left: State = {}
        for k, tree in state.items():
            for n, v in tree.items():
                how = carried[k].get(n, False) if k in carried else True
                marks = state[how][n] if isinstance(how, str) else torch.tensor(how)
                gone = torch.full_like(v, torch.nan if v.is_floating_point() else 0)
                left.setdefault(k, {})[n] = torch.where(marks, v, gone)
        super().put(ids, left)


def seen(sim: Simulation, history: list[dict]) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """All but the models as local training left them."""
    tensors = {f"server/{k}/{n}": v for k, t in sim.server.items() for n, v in t.items()}
    tensors |= {f"merged/{n}": v for n, v in sim.models(range(len(SIZES)), "merged").items()}
    return tensors, history


@pytest.fixture
def plain(case, model, away):
    return seen(*away(case, model))


@EVERY_METHOD
def test_forgetting_the_rest_does_not_show(case, model, plain):
    """But in the local view, which here looks at what was forgotten."""
    sim = simulation(case, model, **HOW)
    sim.store = Forgetful(sim)
    tensors, history = seen(sim, rounds(sim, len(plain[1])))
    assert_equal(tensors, plain[0])
    same = ("accuracy_merged", "train_loss", "share", "bytes_up", "bytes_down")
    assert [[r["clients"][k] for k in same] for r in history] == [[r["clients"][k] for k in same] for r in plain[1]]


@A_FEW_METHODS  # resumed it gives them for every method
def test_compact_gives_the_same_records(case, model, plain):
    """The local view too: what clients that sit rounds out last trained was measured then."""
    sim = simulation(case, model, **HOW, rows="personal")
    tensors, history = seen(sim, rounds(sim, len(plain[1])))
    assert_equal(tensors, plain[0])
    assert history == plain[1]


@EVERY_METHOD
def test_compact_resumed_is_uninterrupted(case, model, plain, tmp_path):
    first, second, other = (simulation(case, model, **HOW, rows=rows) for rows in ("personal", "personal", "all"))
    history = rounds(first, 1)
    place = checkpoint.save(tmp_path, first, checkpoint.Run({"who": "me"}))
    checkpoint.load(place, second, checkpoint.Run({"who": "me"}))
    tensors, after = seen(second, history + rounds(second, len(plain[1]) - 1))
    assert_equal(tensors, plain[0])
    assert after == plain[1]
    with pytest.raises(CheckpointError, match="in a compact store, but this run has a resident one"):
        checkpoint.load(place, other, checkpoint.Run({"who": "me"}))
