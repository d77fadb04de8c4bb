"""Letters: what is sealed comes back, and what was damaged or made up on the way does not."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedselect as fs
from fedselect.aggregate.codec import pack
from fedselect.core.tree import flat, nested
from fedselect.network.letters import DTYPES, Letter, put_packet, take_packet, unseal

LETTER = Letter(
    {"kind": "update", "round": 3}, {"values": torch.arange(6.0).view(2, 3), "bits": torch.tensor([5], dtype=torch.uint8)}
)
TEXT, BODY = LETTER.seal()


@given(
    st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 3), max_size=3)), max_size=4),
    st.dictionaries(st.text(max_size=5), st.integers() | st.floats(allow_nan=False) | st.none() | st.booleans(), max_size=4),
)
def test_what_is_sealed_comes_back(kinds, head):
    parts = {f"p/{i}": torch.ones(shape).to(DTYPES[dtype]) for i, (dtype, shape) in enumerate(kinds)}
    letter = unseal(*Letter(head, parts).seal())
    assert letter.head == head
    assert list(letter.parts) == list(parts)
    for n, v in parts.items():
        assert letter.parts[n].dtype == v.dtype
        assert letter.parts[n].equal(v)


def test_a_letter_is_text_and_one_flat_array():
    assert BODY.dtype == torch.uint8
    assert BODY.shape == (6 * 4 + 1,)
    assert LETTER.nbytes == 25


def layout(*rows):
    return json.dumps({**json.loads(TEXT), "layout": list(rows)})


@pytest.mark.parametrize(
    ("text", "body", "said"),
    [
        ("{", BODY, "cannot be read"),
        ("[]", BODY, "cannot be read"),
        (json.dumps({"format": 1, "head": {}}), BODY, "cannot be read"),
        (TEXT.replace('"format": 1', '"format": 2'), BODY, "has format 2, this version reads 1"),
        (json.dumps({**json.loads(TEXT), "head": []}), BODY, "has no head"),
        (TEXT, BODY[:-1], "has 24 bytes, but its layout needs 25"),
        (TEXT, torch.cat([BODY, BODY]), "has 50 bytes, but its layout needs 25"),
        (TEXT, BODY.float(), "has 25 bytes, but its layout needs 25"),
        (layout(["values", "object", [25]]), BODY, "has values as object; allowed: uint8"),
        (layout(["values", "uint8", [-25]]), BODY, r"gives values the invalid shape \[-25\]"),
        (layout(["values", "uint8", [25] + [1] * 8]), BODY, "gives values the invalid shape"),
        (layout(["../x", "uint8", [25]]), BODY, r"has a tensor with the invalid name '\.\./x'"),
        (layout(["a", "uint8", [20]], ["a", "uint8", [5]]), BODY, "names a tensor twice"),
        (layout(["a", "uint8", ["x"]]), BODY, "cannot be read"),
        (layout(["a", "uint8", [float("inf")]]), BODY, "cannot be read"),
        (layout(["a", "uint8", [0, 1 << 63]]), BODY[:0], "gives a the invalid shape"),
        ("[" * 200_000, BODY, "cannot be read"),
        (json.dumps({"format": 1, "head": {"x": [[]] * (1 << 20)}, "layout": []}), BODY[:0], "at most 4194304 are allowed"),
    ],
)
def test_a_damaged_letter_is_refused(text, body, said):
    with pytest.raises(fs.DataError, match=said):
        unseal(text, body)


def test_a_packet_passes_through_a_letter():
    tree = {"w": torch.rand(3, 3), "b": torch.rand(3)}
    packet = pack(tree, {"w": torch.eye(3, dtype=torch.bool), "b": True})
    head, parts = put_packet(packet)
    got = take_packet(unseal(*Letter(head, parts).seal()))
    assert (got.whole, got.partly) == (("b",), ("w",))
    assert got.values.equal(packet.values)
    assert got.bits.equal(packet.bits)


@pytest.mark.parametrize("head", [{}, {"whole": ["w"]}, {"whole": "w", "partly": []}, {"whole": [1], "partly": []}])
def test_a_letter_that_does_not_say_what_it_holds_is_refused(head):
    with pytest.raises(fs.DataError, match="does not say which tensors"):
        take_packet(Letter(head))


def test_values_in_another_form_are_refused():
    with pytest.raises(fs.DataError, match="does not hold its values as flat bytes"):
        take_packet(Letter({"whole": ["w"], "partly": []}, {"values": torch.zeros(3)}))


def test_states_become_paths_and_come_back():
    state = {"params": {"a.weight": torch.zeros(2)}, "kept": {"a.weight": torch.ones(1)}}
    assert list(flat("s", state)) == ["s/params/a.weight", "s/kept/a.weight"]
    assert nested("s", {**flat("s", state), "other/x/y": torch.zeros(1)}) == state
