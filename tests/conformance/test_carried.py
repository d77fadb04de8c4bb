"""What a method says it carries is all it needs: the rest is forgotten between rounds, and only the local view changes."""

import pytest
import torch
from cases import CASES, MODELS, ROUNDS, SIZES, assert_equal, rounds, simulation

from fedselect.errors import CheckpointError
from fedselect.simulate import Simulation, checkpoint
from fedselect.simulate.store import Compact, Store
from fedselect.tree import State, expand

pytestmark = [pytest.mark.parametrize("case", CASES), pytest.mark.parametrize("model", MODELS)]
HOW = {"fraction": 0.7, "late": (2, 2), "chunk": 4}  # some sit rounds out, some come later


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


def compact(sim: Simulation) -> Compact:
    one = torch.zeros(1, dtype=torch.int64)
    like = sim.method.join(sim._work(one, 0), expand(sim.initial, 1))
    return Compact(sim.clients, sim.device, lambda state: sim.method.carries(sim.model, state), like)


def seen(sim: Simulation, history: list[dict]) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """All that does not look at models as local training left them."""
    tensors = {f"server/{k}/{n}": v for k, t in sim.server.items() for n, v in t.items()}
    tensors |= {f"merged/{n}": v for n, v in sim.models(range(len(SIZES)), "merged").items()}
    same = ("accuracy_merged", "train_loss", "share", "bytes_up", "bytes_down")
    return tensors, [{k: r["clients"][k] for k in same} for r in history]


@pytest.fixture(scope="module")
def plain():
    made: dict = {}

    def get(case: str, model: str):
        if (case, model) not in made:
            sim = simulation(case, model, **HOW)
            made[case, model] = seen(sim, rounds(sim))
        return made[case, model]

    return get


@pytest.mark.parametrize("kind", [Forgetful, compact])
def test_forgetting_the_rest_does_not_show(case, model, kind, plain):
    sim = simulation(case, model, **HOW)
    sim.store = kind(sim)
    tensors, history = seen(sim, rounds(sim))
    assert_equal(tensors, plain(case, model)[0])
    assert history == plain(case, model)[1]


def test_compact_resumed_is_uninterrupted(case, model, plain, tmp_path):
    first, second, other = (simulation(case, model, **HOW) for _ in range(3))
    first.store, second.store = compact(first), compact(second)
    history = rounds(first, 1)
    place = checkpoint.save(tmp_path, first, "me")
    checkpoint.load(place, second, "me")
    tensors, after = seen(second, history + rounds(second, ROUNDS - 1))
    assert_equal(tensors, plain(case, model)[0])
    assert after == plain(case, model)[1]
    with pytest.raises(CheckpointError, match="in a compact store, and this run has a resident one"):
        checkpoint.load(place, other, "me")
