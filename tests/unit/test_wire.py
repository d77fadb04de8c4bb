"""The codec: what is packed comes back, damaged packets do not, and the simulation counts what would be sent."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedselect as fs
from fedselect.aggregate.codec import down_size, pack, pack_bits, size, unpack, unpack_bits, up_size

LIKE = {"w": torch.zeros(2, 3), "b": torch.zeros(5), "s": torch.zeros(())}


@st.composite
def messages(draw):
    """A client's tree and a mask in which every tensor is sent whole, partly or not at all."""
    tree, sent = {}, {}
    for n, v in LIKE.items():
        numbers = st.floats(-1e6, 1e6, width=32)
        tree[n] = torch.tensor(draw(st.lists(numbers, min_size=v.numel(), max_size=v.numel()))).view_as(v)
        marks = st.lists(st.booleans(), min_size=v.numel(), max_size=v.numel())
        sent[n] = draw(st.booleans() | marks.map(lambda m, v=v: torch.tensor(m).view_as(v)))
    return tree, sent


@given(messages())
def test_what_was_sent_comes_back_and_nothing_else(message):
    tree, sent = message
    got, mask = unpack(pack(tree, sent), LIKE)
    for n, v in tree.items():
        marks = torch.as_tensor(sent[n]).expand_as(v)
        assert got[n].equal(torch.where(marks, v, 0.0))
        assert torch.as_tensor(mask[n]).expand_as(v).equal(marks)


@given(messages())
def test_what_is_not_sent_is_not_in_the_packet(message):
    tree, sent = message
    poisoned = {n: torch.where(torch.as_tensor(sent[n]), v, torch.nan) for n, v in tree.items()}
    assert torch.isfinite(pack(poisoned, sent).values).all()


def stacked(messages):
    """The same kind of mask for every client, as in a cohort: tensors entry by entry, bools shared."""
    return {n: torch.stack([m[n] for m in messages]) for n in LIKE}


@given(st.lists(messages(), min_size=1, max_size=3))
def test_the_size_counted_is_the_size_packed(clients):
    kinds = clients[0][1]  # whole, partly or not: known to everybody, so the first client decides

    def mask(sent, n):
        return torch.as_tensor(sent[n]).expand_as(LIKE[n]) if isinstance(kinds[n], torch.Tensor) else kinds[n]

    one = [{n: mask(sent, n) for n in LIKE} for _, sent in clients]
    together = {n: torch.stack([o[n] for o in one]) if isinstance(kinds[n], torch.Tensor) else kinds[n] for n in LIKE}
    counted = size(stacked([tree for tree, _ in clients]), together, mask_travels=True)
    assert counted.tolist() == [pack(tree, sent).nbytes for (tree, _), sent in zip(clients, one, strict=True)]


def test_sizes_by_hand():
    tree = {"w": torch.zeros(2, 3, 3), "b": torch.zeros(2, 4, dtype=torch.float64)}
    marks = torch.zeros(2, 3, 3, dtype=torch.bool)
    marks[0, 0] = True
    # client 0: 3 of w at 4 bytes, b whole: 4 at 8 bytes, 9 bits of mask: 2 bytes; client 1: no entry of w
    assert size(tree, {"w": marks, "b": True}, mask_travels=True).tolist() == [12 + 32 + 2, 0 + 32 + 2]
    assert size(tree, {"w": marks, "b": True}, mask_travels=False).tolist() == [12 + 32, 32]
    assert size(tree, {}, mask_travels=True).tolist() == [0, 0]


def test_a_value_keeps_its_own_width_beside_others():
    tree = {"w": torch.ones(1, 3), "b": torch.ones(1, 4, dtype=torch.float64)}
    sent = {"w": True, "b": True}
    one = {n: v[0] for n, v in tree.items()}
    assert pack(one, sent).nbytes == size(tree, sent, mask_travels=True).item() == 3 * 4 + 4 * 8
    got, _ = unpack(pack(one, sent), one)
    assert {n: v.dtype for n, v in got.items()} == {"w": torch.float32, "b": torch.float64}


def test_an_upload_counts_side_statistics_too():
    up = fs.Up({"b": torch.zeros(2, 5)}, {"b": True}, torch.ones(2), {"stats": {"mean": torch.zeros(2, 3)}})
    assert up_size(up).tolist() == [5 * 4 + 3 * 4] * 2


def test_a_download_counts_what_is_wanted_and_no_mask():
    down = fs.Down({"params": {"b": torch.zeros(5)}, "other": {"c": torch.zeros(2)}}, {"own": {"p": torch.zeros(3, 4)}})
    wants = {"b": torch.tensor([[True] * 5, [False] * 5, [True] + [False] * 4])}
    # entries of b at 4 bytes, then the other tree (8) and one row of four (16) for everybody
    assert down_size(down, wants, 3).tolist() == [20 + 24, 0 + 24, 4 + 24]


SENT = {"w": torch.tensor([[True, False, True], [False, False, True]]), "b": True}
PACKET = pack({n: torch.rand(v.shape) for n, v in LIKE.items()}, SENT)  # 3 + 5 values of 4 bytes, 6 bits


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"values": PACKET.values[:-1]}, "has 31 bytes of values, but its mask marks 32"),
        ({"values": torch.cat([PACKET.values, PACKET.values])}, "has 64 bytes of values, but its mask marks 32"),
        ({"bits": PACKET.bits[:0]}, "has 0 bytes of mask instead of 1"),
        ({"bits": torch.cat([PACKET.bits, PACKET.bits])}, "has 2 bytes of mask instead of 1"),
        ({"bits": pack_bits(torch.ones(6, dtype=torch.bool))}, "has 32 bytes of values, but its mask marks 44"),
        ({"whole": ("b", "fc.weight")}, "contains 'fc.weight', which the model does not have"),
        ({"partly": ("v",)}, "contains 'v', which the model does not have"),
        ({"whole": ()}, "has 32 bytes of values, but its mask marks 12"),
    ],
    ids=lambda d: next(iter(d)) if isinstance(d, dict) else "",
)
def test_a_damaged_packet_is_refused(damage, said):
    with pytest.raises(fs.DataError, match=said):
        unpack(dataclasses.replace(PACKET, **damage), LIKE)


@given(st.lists(st.booleans(), max_size=40))
def test_bits_come_back_eight_a_byte(marks):
    packed = pack_bits(torch.tensor(marks, dtype=torch.bool))
    assert packed.dtype == torch.uint8
    assert packed.numel() == -(-len(marks) // 8)
    assert unpack_bits(packed, len(marks)).tolist() == marks


def test_the_first_bit_is_the_lowest():
    assert pack_bits(torch.tensor([True, False, False, True, False, False, False, False, True])).tolist() == [1 + 8, 1]
