"""Copies between memory orders change no number."""

import pytest
import torch
from kernel_cases import DEVICE, LARGE, MARKS, randn

from fedselect.core.tree import block, lay
from fedselect.training.buffers import Room, copy

pytestmark = MARKS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 1), (2, 3, 5, 3, 3), (3, 4, 16, 1, 1), (2, 5, 130, 3, 3), (2, 3, 64, 7, 7), (2, 2, 3, 2, 5)], ids=str
)
def test_relay(shape, dtype):
    from fedselect.kernels.layout import fits, relay

    def last(t):
        return t.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)

    value = (randn(*shape).float() if dtype == torch.float32 else randn(*shape) > 0).to(DEVICE)
    poison = torch.nan if dtype == torch.float32 else True
    for src in (value, last(value)):
        for into in (torch.full_like(value, poison), last(torch.full_like(value, poison))):
            assert fits(into, src)
            relay(into, src)
            assert into.equal(value)


def test_relay_of_some_clients():
    from fedselect.kernels.layout import fits, relay

    value = randn(5, 3, 6, 3, 3).float().to(DEVICE)
    room = torch.full((7, 3, 3, 3, 6), torch.nan, device=DEVICE).permute(0, 1, 4, 2, 3)
    into, src = room[2:5], value[1:4]
    assert fits(into, src)
    relay(into, src)
    assert into.equal(src)
    assert room[[0, 1, 5, 6]].isnan().all()
    shared = value[:1].expand(3, -1, -1, -1, -1)  # one client's values for all
    assert fits(into, shared)
    relay(into, shared)
    assert into.equal(shared)


def test_what_relay_cannot_read_goes_by_torch():
    from fedselect.kernels.layout import fits

    value = randn(2, 3, 6, 3, 3).float().to(DEVICE)
    last = torch.full((2, 3, 3, 3, 6), torch.nan, device=DEVICE).permute(0, 1, 4, 2, 3)
    turned = value.transpose(3, 4)
    assert not fits(last, turned)
    assert not fits(last, value.double())
    tree = {"turned": turned, "plain": value, "bias": value[:, :, 0, 0, 0]}
    into = {"turned": last.clone(), "plain": last.clone(), "bias": torch.full((2, 3), torch.nan, device=DEVICE)}
    copy(into, tree)
    assert all(into[n].equal(v) for n, v in tree.items())


KERNELS = {
    "stem": (6, 3, 7, 7),
    "bias": (6,),
    "deep": (5, 300, 3, 3),
    "point": (40, 70, 1, 1),
    "line": (2, 9, 1, 3),
    "head": (10, 513),
    "one": (),
}


@pytest.mark.parametrize("lying", ["block", "part of a block", "one for all", "tensors"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
def test_a_room_holds_what_is_placed_in_it(dtype, lying):
    """All tensors in one launch for each number of taps; the twin is the copy tensor by tensor."""
    clients = 3
    tree = {n: randn(clients, *s).float() for n, s in KERNELS.items()}
    tree = {n: (v if dtype == torch.float32 else v > 0).to(DEVICE) for n, v in tree.items()}
    whole = torch.cat([v.reshape(clients, -1) for v in tree.values()], 1)
    if lying == "part of a block":
        whole = torch.cat([whole[:, :5], whole, whole[:, :2]], 1)[:, 5:-2]
    if lying == "one for all":
        whole = whole[:1].expand(clients, -1)
    if lying != "tensors":
        tree = lay(whole, tree)
    assert (block(tree) is None) == (lying == "tensors")
    room = Room({n: torch.empty(clients + 1, *s, dtype=dtype, device=DEVICE) for n, s in KERNELS.items()}, frozenset(KERNELS))
    room.memory.fill_(255 if dtype == torch.float32 else 1)  # NaN, or True
    placed = room.write(tree)
    assert list(placed) == list(tree)
    for n, v in tree.items():
        assert placed[n].equal(v), n
        assert placed[n].data_ptr() == room.tensors[n].data_ptr()
        assert v.ndim != 5 or placed[n].permute(0, 1, 3, 4, 2).is_contiguous()
        left = room.tensors[n][clients:]
        assert (left.isnan() if dtype == torch.float32 else left).all()  # nobody's
    back = room.read(clients)
    assert all(back[n].equal(v) and back[n][0].is_contiguous() for n, v in tree.items())
    assert not {v.data_ptr() for v in back.values()} & {v.data_ptr() for v in placed.values()}


@LARGE
def test_kernels_of_more_clients_than_an_axis_of_a_grid_holds():
    """140 clients with 512 outputs each: 71,680 rows, and 65,535 fit on all axes but the first."""
    usual = randn(140, 512, 4, 1, 3).float().to(DEVICE)
    last = torch.empty(140, 512, 1, 3, 4, device=DEVICE).permute(0, 1, 4, 2, 3)
    copy({"w": last}, {"w": usual})
    assert last.equal(usual)
    back = torch.empty_like(usual)
    copy({"w": back}, {"w": last})
    assert back.equal(usual)
