"""Gradient checkpointing by block: the same training with less kept, the same keys included."""

from functools import partial

import pytest
import torch

import fedselect as fs
from fedselect.models.vit import build_vit

VIT = (1, [2, 2], 4, [16, 3, 2], 4)  # channels, grid, patch, sizes (width, depth, heads), classes


def pictures():
    g = torch.Generator().manual_seed(0)

    def part(n):
        return torch.rand(n, 1, 8, 8, generator=g), torch.arange(n) % 4

    return fs.Federation([fs.ClientData(part(n), part(5)) for n in (9, 20, 13)], 4)


def trained(build, *, stackable=True, **how):
    model = fs.Model.wrap(partial(build_vit, *VIT, [0.1, 0.1]), head="head")
    run = fs.Simulation(fs.FedSelect(lr=0.1), build(model), pictures(), training=fs.Training(batch_size=8), **how)
    run.fitted.stackable = stackable
    return [run.step()["train_loss"] for _ in range(2)], run.models(range(3))


@pytest.mark.parametrize("stackable", [True, False])
@pytest.mark.parametrize("build", [lambda m: m, partial(fs.lora, rank=2, targets="*.qkv,*.fc1")], ids=["whole", "lora"])
def test_a_model_trains_the_same_when_blocks_are_computed_again(build, stackable, recwarn):
    """Its dropout and stochastic depth too, which are drawn twice."""
    (kept, values), (again, others) = (trained(build, stackable=stackable, recompute=r) for r in (False, True))
    assert kept == pytest.approx(again, abs=1e-6)
    for n, v in values.items():
        torch.testing.assert_close(v, others[n], rtol=1e-4, atol=1e-6)
    assert not [w for w in recwarn if "one by one" in str(w.message) or "slow path" in str(w.message)]


@pytest.fixture
def kept(monkeypatch):
    """How many numbers autograd keeps of a step's forward pass, beside the parameters."""

    def count(recompute):
        seen, found = {}, []
        grad = torch.autograd.grad

        def stop(*args, **how):
            found.append(sum(seen.values()))
            return grad(*args, **how)

        def note(v):
            seen[v.untyped_storage().data_ptr()] = v.untyped_storage().nbytes()
            return v

        run = fs.Simulation(
            fs.FedAvg(), fs.Model.wrap(partial(build_vit, *VIT, [0.0, 0.0]), head="head"), pictures(), recompute=recompute
        )
        monkeypatch.setattr(torch.autograd, "grad", stop)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda v: v):
            run.step()
        monkeypatch.undo()
        return found[0]

    return count


def test_less_is_kept(kept):
    assert kept(True) < 0.5 * kept(False)


def test_a_model_without_blocks_says_so():
    data = pictures()
    with pytest.raises(fs.InputError, match=r"small_cnn has no list of equal blocks .* leave recompute \(--recompute\) out"):
        fs.Simulation(fs.FedAvg(), fs.models.small_cnn(data), data, recompute=True)
