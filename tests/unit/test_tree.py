"""Trees, masks and the mean over exactly the senders of an entry."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedselect import tree as t

OWN = {"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b": torch.tensor([[5.0], [6.0]])}
OTHER = {n: -v for n, v in OWN.items()}
MASK = {"a": torch.tensor([[True, False], [False, True]]), "b": True}


def test_merge_takes_own_where_the_mask_is_true():
    got = t.merge(MASK, OWN, OTHER)
    assert got["a"].tolist() == [[1.0, -2.0], [-3.0, 4.0]]
    assert got["b"].tolist() == [[5.0], [6.0]]


def test_a_name_the_mask_lacks_counts_as_false():
    assert t.merge({}, OWN, OTHER)["a"].equal(OTHER["a"])
    assert t.entries({}, OWN).tolist() == [0, 0]


def test_merge_does_not_let_nan_of_the_other_side_through():
    poisoned = {"a": torch.where(MASK["a"], torch.nan, OTHER["a"]), "b": OTHER["b"] * torch.nan}
    got = t.merge(MASK, OWN, poisoned)
    assert all(torch.isfinite(v).all() for v in got.values())


def test_negate_turns_merge_round():
    got = t.merge(t.negate(MASK), OTHER, OWN)
    assert all(got[n].equal(v) for n, v in t.merge(MASK, OWN, OTHER).items())


def test_entries_counts_whole_tensors_and_single_entries():
    # client 0: one entry of a, b whole (1); client 1 likewise
    assert t.entries(MASK, OWN).tolist() == [2, 2]
    assert t.entries({"a": False, "b": True}, OWN).tolist() == [1, 1]
    assert t.entries({"a": True}, OWN).tolist() == [2, 2]


def test_entries_of_a_parameter_that_is_one_number():
    tree = {"a": torch.zeros(3, 2, 2), "b": torch.zeros(3)}  # b: a single number for each of three clients
    got = t.entries({"a": True, "b": torch.tensor([True, False, True])}, tree)
    assert got.tolist() == [5, 4, 5]
    assert got.dtype == torch.int64
    assert t.entries({"a": True, "b": True}, tree).tolist() == [5, 5, 5]
    assert t.entries({"c": True}, tree).tolist() == [0, 0, 0]


@st.composite
def masks(draw):
    """Any mix of whole, partly marked, unmarked and unnamed tensors."""
    tree = {n: torch.zeros(3, *shape) for n, shape in {"a": (2, 2), "b": (3,), "c": ()}.items()}
    kinds = {n: draw(st.sampled_from(["true", "false", "absent", "entries"])) for n in tree}
    g = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    mask = {n: k == "true" if k != "entries" else torch.rand(tree[n].shape, generator=g) < 0.5
            for n, k in kinds.items() if k != "absent"}  # fmt: skip
    return mask, tree


@given(masks())
def test_entries_are_those_of_a_plain_loop(given):
    mask, tree = given
    marked = {n: torch.as_tensor(m).expand_as(tree[n]) for n, m in mask.items()}
    want = [sum(int(m[c].sum()) for m in marked.values()) for c in range(3)]
    got = t.entries(mask, tree)
    assert got.tolist() == want
    assert got.dtype == torch.int64


@pytest.mark.parametrize("rows", [slice(1, 2), torch.tensor([1])], ids=["slice", "index"])
def test_take_then_put_writes_those_rows_alone(rows):
    tree = t.clone(OWN)
    taken = t.take(tree, rows)
    assert taken["a"].tolist() == [[3.0, 4.0]]
    t.put(tree, rows, {n: v * 10 for n, v in taken.items()})
    assert tree["a"].tolist() == [[1.0, 2.0], [30.0, 40.0]]
    assert tree["b"].tolist() == [[5.0], [60.0]]


def test_a_slice_is_a_view_and_an_index_a_copy():
    tree = t.clone(OWN)
    t.take(tree, slice(0, 1))["b"].zero_()
    t.take(tree, torch.tensor([1]))["b"].zero_()
    assert tree["b"].tolist() == [[0.0], [6.0]]


def test_everybody_is_the_tree_itself():
    tree = t.clone(OWN)
    assert t.take(tree, slice(None)) is tree
    assert t.take_mask(MASK, slice(None)) is MASK
    assert t.take(tree, slice(0, 2))["a"].equal(tree["a"])


def test_rows_are_each_clients_entries_in_a_line():
    assert t.rows(torch.arange(12).view(2, 3, 2)).tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert t.rows(torch.tensor([1.0, 2.0])).tolist() == [[1.0], [2.0]]


def test_take_mask_keeps_bools():
    got = t.take_mask(MASK, torch.tensor([1]))
    assert got["b"] is True
    assert got["a"].tolist() == [[False, True]]


def test_expand_gives_views_and_clone_does_not():
    one = {"a": torch.tensor([1.0, 2.0])}
    assert t.expand(one, 3)["a"].tolist() == [[1.0, 2.0]] * 3
    assert t.expand(one, 3)["a"].data_ptr() == one["a"].data_ptr()
    assert t.clone(one)["a"].data_ptr() != one["a"].data_ptr()


def test_along_multiplies_client_by_client():
    assert (OWN["a"] * t.along(torch.tensor([1.0, 10.0]), OWN["a"])).tolist() == [[1.0, 2.0], [30.0, 40.0]]
    assert t.along(0.5, OWN["a"]) == 0.5


def test_per_client_lifts_a_function_of_one_client():
    assert t.per_client(torch.sum)(OWN["a"]).tolist() == [3.0, 7.0]


# ---- MaskedSum

ENTRIES = 4


@st.composite
def uploads(draw):
    """Values of like size (multiples of 2^-10 below 2^10), whole weights, and a mask for each client."""
    clients = draw(st.integers(1, 6))
    numbers = st.integers(-(2**20), 2**20)
    values = draw(st.lists(st.lists(numbers, min_size=ENTRIES, max_size=ENTRIES), min_size=clients, max_size=clients))
    sent = draw(st.lists(st.lists(st.booleans(), min_size=ENTRIES, max_size=ENTRIES), min_size=clients, max_size=clients))
    weight = draw(st.lists(st.integers(1, 50), min_size=clients, max_size=clients))
    return torch.tensor(values, dtype=torch.float32) / 2**10, torch.tensor(sent), torch.tensor(weight)


def folded(values, sent, weight, chunks=1):
    total = t.MaskedSum()
    for part in torch.arange(len(values)).chunk(chunks):
        total.add({"a": values[part]}, {"a": sent[part]}, weight[part])
    mean, heard = total.mean()
    return mean["a"], heard["a"]


@given(uploads())
def test_the_mean_is_that_of_a_plain_loop(upload):
    values, sent, weight = upload
    mean, heard = folded(*upload)
    for e in range(ENTRIES):
        senders = [c for c in range(len(values)) if sent[c, e]]
        assert bool(heard[e]) == bool(senders)
        if senders:
            expected = sum(float(values[c, e]) * int(weight[c]) for c in senders) / sum(int(weight[c]) for c in senders)
            assert mean[e] == torch.tensor(expected, dtype=torch.float64).float()


@given(uploads(), st.data())
def test_neither_order_nor_chunks_show(upload, data):
    mean, heard = folded(*upload)
    order = torch.tensor(data.draw(st.permutations(range(len(upload[0])))))
    again, heard_again = folded(*(part[order] for part in upload), chunks=data.draw(st.integers(1, len(order))))
    assert mean.equal(again)
    assert heard.equal(heard_again)


@given(uploads())
def test_nan_in_what_was_not_sent_does_not_leak(upload):
    values, sent, weight = upload
    mean, _ = folded(*upload)
    assert folded(torch.where(sent, values, torch.nan), sent, weight)[0].equal(mean)


def test_a_tensor_sent_whole_is_averaged_by_weight():
    total = t.MaskedSum()
    total.add({"a": torch.tensor([[1.0], [4.0]]), "b": torch.ones(2, 1)}, {"a": True, "b": False}, torch.tensor([1, 2]))
    mean, heard = total.mean()
    assert mean["a"].tolist() == [3.0]  # (1 * 1 + 2 * 4) / 3
    assert heard["a"].tolist() == [True]
    assert "b" not in mean
    assert "b" not in heard


def test_whole_and_partly_sent_chunks_add_up():
    total = t.MaskedSum()
    total.add({"a": torch.tensor([[1.0, 1.0]])}, {"a": True}, torch.tensor([1]))
    total.add({"a": torch.tensor([[3.0, 9.0]])}, {"a": torch.tensor([[True, False]])}, torch.tensor([1]))
    assert total.mean()[0]["a"].tolist() == [2.0, 1.0]  # (1 + 3) / 2, and the first client's alone


def test_the_mean_keeps_the_values_type():
    total = t.MaskedSum()
    total.add({"a": torch.ones(1, 2, dtype=torch.float16)}, {"a": True}, torch.tensor([1]))
    assert total.mean()[0]["a"].dtype == torch.float16
