"""A store that streams gives back what was put."""

import pytest
import torch

from fedselect.simulate.store import Compact

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
GPU = torch.device("cuda")


def test_streamed_is_put():
    """Rounds over chunks, each asked for while the one before it is worked on and overwritten after it was put."""
    clients, chunk, size = 12, 4, 300_000

    def carried(state):
        return {"w": {"": "kept"}, "kept": {"": "mask"}}

    g = torch.Generator(GPU).manual_seed(0)
    mask = torch.rand(clients, size, device=GPU, generator=g) < torch.linspace(0.05, 0.6, clients, device=GPU).unsqueeze(1)
    state = {"w": {"": torch.where(mask, 1.0, 0.0)}, "mask": {"": mask}, "kept": {"": mask.clone()}}
    compact = Compact(clients, GPU, carried, state, metrics=2)
    chunks = torch.arange(clients).split(chunk)
    for ids in chunks:
        compact.put(ids, {k: {n: v[ids.to(GPU)] for n, v in t.items()} for k, t in state.items()})
    rounds = 5
    for _ in range(rounds):
        for i, ids in enumerate(chunks):
            now = compact.take(ids, GPU)
            if i + 1 < len(chunks):
                compact.prefetch(chunks[i + 1])
            more = now["mask"][""] | (torch.rand(chunk, size, device=GPU, generator=g) < 0.05)
            torch.cuda._sleep(2_000_000)
            new = {"w": {"": now["w"][""] + 1.0}, "mask": {"": more}, "kept": {"": now["mask"][""]}}
            compact.put(ids, new)
            for tree in new.values():
                tree[""].zero_()  # what was put is the store's already
    back = compact.take(torch.arange(clients), GPU)
    assert torch.equal(back["w"][""][mask], torch.full_like(back["w"][""][mask], rounds + 1))
    assert bool((back["kept"][""] | ~mask).all())
    assert bool((back["mask"][""] | ~back["kept"][""]).all())
    assert not bool(back["w"][""][~back["kept"][""]].any())
