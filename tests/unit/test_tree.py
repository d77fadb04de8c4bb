"""Trees, masks and the mean over exactly the senders of an entry."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedselect.aggregate.masked import MaskedSum
from fedselect.core import tree as t

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
    total = MaskedSum()
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
    total = MaskedSum()
    total.add({"a": torch.tensor([[1.0], [4.0]]), "b": torch.ones(2, 1)}, {"a": True, "b": False}, torch.tensor([1, 2]))
    mean, heard = total.mean()
    assert mean["a"].tolist() == [3.0]  # (1 * 1 + 2 * 4) / 3
    assert heard["a"].tolist() == [True]
    assert "b" not in mean
    assert "b" not in heard


def test_whole_and_partly_sent_chunks_add_up():
    total = MaskedSum()
    total.add({"a": torch.tensor([[1.0, 1.0]])}, {"a": True}, torch.tensor([1]))
    total.add({"a": torch.tensor([[3.0, 9.0]])}, {"a": torch.tensor([[True, False]])}, torch.tensor([1]))
    assert total.mean()[0]["a"].tolist() == [2.0, 1.0]  # (1 + 3) / 2, and the first client's alone


def test_the_mean_keeps_the_values_type():
    total = MaskedSum()
    total.add({"a": torch.ones(1, 2, dtype=torch.float16)}, {"a": True}, torch.tensor([1]))
    assert total.mean()[0]["a"].dtype == torch.float16


# ---- trees that lie in one block

SHAPES = {"a": (2, 3), "b": (), "c": (4,), "d": (2, 1, 3)}


def laid(tree, clients=True):
    """The same values in one block."""
    lines = [v.reshape(len(v), -1) if clients else v.flatten() for v in tree.values()]
    return t.lay(torch.cat(lines, -1), tree, clients)


def random_tree(clients, seed, names="abcd", kind=torch.float32):
    g = torch.Generator().manual_seed(seed)
    lead = () if clients is None else (clients,)
    values = {n: torch.randn((*lead, *SHAPES[n]), generator=g) for n in names}
    return {n: v > 0 if kind == torch.bool else v.to(kind) for n, v in values.items()}


def same(got, want):
    assert list(got) == list(want)
    for n, v in want.items():
        assert got[n] is v if isinstance(v, bool) else (got[n].equal(v) and got[n].dtype == v.dtype), n


@pytest.mark.parametrize("clients", [1, 3, None])
def test_a_block_is_found_where_it_lies(clients):
    tree = random_tree(clients, 0)
    axis = clients is not None
    assert t.block(tree, axis) is None
    whole = torch.randn(*([clients] if axis else []), 17)
    views = t.lay(whole, tree, axis)
    assert {n: v.shape for n, v in views.items()} == {n: v.shape for n, v in tree.items()}
    found = t.block(views, axis)
    assert found.data_ptr() == whole.data_ptr()
    assert found.equal(whole)
    found.zero_()
    assert all((v == 0).all() for v in views.values())


def test_parts_of_a_block_are_blocks():
    whole = torch.randn(5, 17)
    tree = t.lay(whole, random_tree(5, 0))
    assert t.block({n: tree[n] for n in "ab"}).equal(whole[:, :7])
    assert t.block({n: tree[n] for n in "bc"}).equal(whole[:, 6:11])
    assert t.block(t.take(tree, slice(1, 4))).equal(whole[1:4])
    assert t.block(t.take(tree, torch.tensor([3, 0]))).equal(whole[[3, 0]])
    shared = t.expand(t.lay(whole[0], {n: v[0] for n, v in tree.items()}, clients=False), 3)
    assert t.block(shared).equal(whole[:1].expand(3, -1))
    assert t.block(shared).stride() == (0, 1)


def test_what_is_no_block():
    whole = torch.randn(5, 17)
    tree = t.lay(whole, random_tree(5, 0))
    assert t.block({}) is None
    assert t.block({n: tree[n] for n in "ba"}) is None  # another order
    assert t.block({n: tree[n] for n in "ac"}) is None  # a gap
    assert t.block({**tree, "a": tree["a"].clone()}) is None
    assert t.block({**tree, "a": tree["a"].transpose(1, 2)}) is None
    assert t.block({**tree, "d": tree["d"][:4]}) is None  # fewer clients
    assert t.block({**tree, "d": tree["d"].view(torch.int32)}) is None
    assert t.block({"a": torch.zeros(0, 3)}) is None
    assert t.block(tree, clients=False) is None
    memory = torch.zeros(10)
    assert t.block({"a": memory[:4].view(2, 2), "b": memory[4:8].view(2, 2)}) is None  # client after client, not side by side
    assert torch.func.vmap(lambda v: v + (t.block({"a": v}) is None))(whole).equal(whole + 1)


def test_autograd_knows_the_tensors_of_a_block_apart():
    tree = t.lay(torch.randn(2, 17), random_tree(2, 0))
    leaf = tree["a"].detach().requires_grad_()
    loss = leaf.square().sum()
    tree["c"].zero_()
    assert torch.autograd.grad(loss, leaf)[0].equal(2 * tree["a"])
    assert t.block({**tree, "a": leaf}) is None


def test_neighbours_by_chance_are_no_block():
    memory = torch.arange(6.0)
    first = torch.frombuffer(memory.numpy(), dtype=torch.float32, count=3)
    second = torch.frombuffer(memory.numpy(), dtype=torch.float32, count=3, offset=12)
    assert second.data_ptr() == first.data_ptr() + 12
    assert t.block({"a": first, "b": second}, clients=False) is None


KINDS = st.sampled_from(["true", "false", "absent", "entries"])


@given(st.fixed_dictionaries(dict.fromkeys(SHAPES, KINDS)), st.sampled_from([1, 3, None]), st.integers(0, 99), st.booleans())
def test_blocks_give_the_same_as_tensors(kinds, clients, seed, shared):
    axis = clients is not None
    own, other = random_tree(clients, seed), random_tree(clients, seed + 1)
    marks = random_tree(clients, seed + 2, [n for n in SHAPES if kinds[n] == "entries"], torch.bool)
    wholes = {n: k == "true" for n, k in kinds.items() if k in ("true", "false")}
    order = [n for n in SHAPES if n in marks or n in wholes]
    mask = {n: {**marks, **wholes}[n] for n in order}
    together = {**mask, **(laid(marks, axis) if marks else {})}
    their = laid(other, axis)
    if axis and shared:  # one model for all clients
        other = t.expand({n: v[0] for n, v in other.items()}, clients)
        their = t.expand(t.lay(torch.cat([v[0].flatten() for v in other.values()]), other), clients)
    merged = t.merge(together, laid(own, axis), their)
    same(merged, t.merge(mask, own, other))
    assert t.block(merged, axis) is not None
    same(t.merge(together, own, their), t.merge(mask, own, other))
    same(t.negate(together), t.negate(mask))
    if axis:
        assert t.entries(together, their).equal(t.entries(mask, other))
    same(t.clone(laid(own, axis)), own)


def test_merging_takes_no_more_of_its_own_than_the_mask_asks_for():
    own, other = random_tree(2, 0, "ac"), random_tree(2, 1)
    mask = random_tree(2, 2, "ac", torch.bool)
    got = t.merge(laid(mask), laid(own), laid(other))
    same(got, t.merge(mask, own, other))
    assert t.block(got) is not None
    got["b"].zero_()
    assert not (other["b"] == 0).any()


def test_rows_of_a_block_are_written_together():
    tree, values = random_tree(4, 0), random_tree(2, 1)
    block = laid(tree)
    for into, from_ in ((tree, values), (block, laid(values))):
        t.put(into, torch.tensor([3, 1]), from_)
    same(block, tree)
    assert t.block(block) is not None


def test_fresh_room_has_the_shapes_asked_for():
    got = t.fresh(random_tree(2, 0), 5, torch.device("cpu"))
    assert {n: v.shape for n, v in got.items()} == {n: (5, *shape) for n, shape in SHAPES.items()}


@given(st.integers(0, 99))
def test_means_of_sums_in_a_block_are_the_same(seed):
    values, sent = random_tree(3, seed), random_tree(3, seed + 1, kind=torch.bool)
    folded = MaskedSum()
    folded.add(values, sent, torch.tensor([1.0, 2.0, 0.5]))
    mean, heard = folded.mean()
    folded.total, folded.weight = laid(folded.total, clients=False), laid(folded.weight, clients=False)
    got, got_heard = folded.mean()
    same(got, mean)
    same(got_heard, heard)


def test_a_single_number_behind_a_tensor_of_one_row_is_no_block_of_clients():
    line = torch.arange(5.0)
    tree = t.lay(line, {"token": torch.zeros(1, 4), "scale": torch.tensor(0.0)}, clients=False)
    assert t.block(tree) is None
    assert t.block(tree, clients=False).equal(line)
    assert t.clone(tree)["scale"] == 4.0


def test_trees_of_one_client_and_of_all_may_mix_within_per_client():
    got = t.per_client(lambda p: t.clone({"z": torch.zeros(3), "p": p}))(torch.ones(2, 3))
    assert got["p"].equal(torch.ones(2, 3))


def test_a_tree_that_is_there_already_is_handed_over_as_a_dict_of_its_own():
    tree = {"a": torch.zeros(2)}
    assert t.moved(tree, torch.device("cpu")) == tree
    assert t.moved(tree, torch.device("cpu")) is not tree


def test_weights_may_lie_apart_in_memory():
    wide = torch.tensor([[1.0, 9.0], [3.0, 9.0]], dtype=torch.float64)
    folded = MaskedSum()
    folded.add({"a": torch.tensor([[0.0], [4.0]])}, {"a": True}, wide[:, 0])
    assert folded.mean()[0]["a"].tolist() == [3.0]


def test_counts_are_of_each_tensor_and_client():
    marks = random_tree(3, 0, kind=torch.bool)
    want = torch.stack([m.reshape(3, -1).sum(1) for m in marks.values()], 1)
    assert t.counts(marks).equal(want)
    assert t.counts(laid(marks)).equal(want)
