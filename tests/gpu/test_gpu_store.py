"""The kernels that pack clients' rows equal their plain twins, and a store that streams gives back what was put."""

import pytest
import torch

from fedselect import kernels
from fedselect.simulate import ragged
from fedselect.simulate.store import Compact

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
GPU = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.float16, torch.int64])
@pytest.mark.parametrize("size", [1, 7, 4096, 4097, 100_001])
def test_kernels_are_their_twins(dtype, size, monkeypatch):
    g = torch.Generator().manual_seed(size)
    clients = 5
    share = torch.tensor([0.0, 0.01, 0.3, 0.9, 1.0]).unsqueeze(1)  # none, few, many, all
    marks = torch.rand(clients, size, generator=g) < share
    values = torch.randint(-1000, 1000, (clients, size), generator=g).to(dtype)
    made = {}
    for device, served in (("cpu", False), ("cuda", True)):
        monkeypatch.setattr(kernels, "serve", lambda x, served=served: served)
        v, m = values.to(device), marks.to(device)
        found = ragged.found(m)
        count = found.sum(1).cpu()
        tight = ragged.tighten(v, m, found)
        start = torch.arange(clients) * 8 * (size + 3)
        out = torch.zeros(clients * 8 * (size + 3), dtype=torch.uint8, device=device)
        ragged.lay(tight, count, out, start)
        back = ragged.spread(ragged.lift(out, count, start, size, dtype), m, found)
        made[device] = count, out.cpu(), back.cpu()
    for a, b in zip(made["cpu"], made["cuda"], strict=True):
        assert torch.equal(a, b)
    assert torch.equal(made["cuda"][2], torch.where(marks, values, torch.zeros_like(values)))


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
