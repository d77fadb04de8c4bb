"""Clients' states packed and unpacked: what is carried comes back to the bit, in little memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedselect as fs
from fedselect.core.errors import InputError
from fedselect.models import Model
from fedselect.simulate import flat, pages
from fedselect.simulate.disk import Disk
from fedselect.simulate.pages import Pages
from fedselect.simulate.store import Compact, Store

CPU = torch.device("cpu")
SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=4)


def carried_under_kept(state):
    """As FedSelect does: of w what kept marks, of kept what mask marks; statistics whole, "gone" not at all."""
    kept = dict.fromkeys(state["kept"], "kept")
    return {"w": {**kept, "stats": True}, "kept": dict.fromkeys(kept, "mask"), "gone": {}}


def make(shapes, clients, share, seed):
    """A state of every kind of tensor; clients differ in how many entries their masks mark, from none to all."""
    g = torch.Generator().manual_seed(seed)
    sizes = {f"p{i}": (clients, *s) for i, s in enumerate(shapes)}
    each = torch.linspace(0, share, clients)
    mask = {n: torch.rand(s, generator=g) < each.view(-1, *[1] * (len(s) - 1)) for n, s in sizes.items()}
    kept = {n: m & (torch.rand(m.shape, generator=g) < 0.7) for n, m in mask.items()}
    w = {n: torch.randn(s, generator=g) for n, s in sizes.items()}
    return {
        "w": {**w, "stats": torch.randn(clients, 3, generator=g)},
        "mask": mask,
        "kept": kept,
        "restart": {"": torch.rand(clients, generator=g) < 0.5},
        "half": {"": torch.randn(clients, 5, generator=g).half(), "long": torch.randint(-9, 2**40, (clients, 2), generator=g)},
        "gone": {"": torch.randn(clients, 2, generator=g)},
    }


def expected(state):
    w = {n: torch.where(state["kept"][n], v, 0.0) if n in state["kept"] else v for n, v in state["w"].items()}
    return {**state, "w": w, "gone": {"": torch.zeros_like(state["gone"][""])}}


def rows_of(state, ids):
    return {k: {n: v[ids] for n, v in t.items()} for k, t in state.items()}


def assert_same(a, b):
    assert [(k, list(t)) for k, t in a.items()] == [(k, list(t)) for k, t in b.items()]  # order too
    for k, tree in a.items():
        for n, v in tree.items():
            assert v.dtype == b[k][n].dtype
            assert v.is_contiguous()
            assert torch.equal(v, b[k][n]), (k, n)


@given(SHAPES, st.integers(1, 4), st.sampled_from([0.0, 0.3, 2.0]), st.integers(0, 99))
def test_there_and_back(shapes, clients, share, seed):
    state = make(shapes, clients, share, seed)
    plan = flat.layout(state, carried_under_kept(state))
    packed, counts = flat.pack(plan, state)
    assert_same(flat.unpack(plan, packed, counts), expected(state))
    assert len(packed) == int(plan.nbytes(counts).sum())


@pytest.mark.parametrize("kind", [Compact, Disk])
@given(
    cohorts=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_a_packed_store_is_the_store_whatever_is_put_and_taken(kind, cohorts, seed):
    """Cohorts in any order, rows that grow and shrink; asked ahead or not, and ahead of a put that makes it stale."""
    like = make([(4, 3), ()], 5, 1.0, seed)
    store, compact = Store(5, CPU), kind(5, CPU, carried_under_kept, like, metrics=2)
    scores = torch.full((5, 2), torch.nan, dtype=torch.float64)
    for i, ids in enumerate(map(torch.tensor, cohorts)):
        state = make([(4, 3), ()], len(ids), (0.1, 2.0)[i % 2], seed + i)
        if i % 3:
            compact.prefetch(ids)
        scores[ids] = torch.rand(len(ids), 2, dtype=torch.float64)
        compact.put(ids, state, scores[ids])
        store.put(ids, expected(state))
        if i % 2:
            compact.prefetch(ids)
        assert_same(compact.take(ids, CPU), expected(state))
    everybody = torch.arange(5)
    assert_same(compact.take(everybody, CPU), store.take(everybody, CPU))  # who never came is zero
    assert torch.equal(compact.joined, store.joined)
    again = kind(5, CPU, carried_under_kept, like, metrics=2)
    again.put(torch.tensor([0, 3]), make([(4, 3), ()], 2, 0.4, seed))  # is replaced
    again.prefetch(everybody)
    again.load(compact.dump())
    again.joined = compact.joined
    assert_same(again.take(everybody, CPU), store.take(everybody, CPU))
    for one in (compact, again):
        assert torch.equal(one.scored(everybody).nan_to_num(-1), scores.nan_to_num(-1))


def test_rows_longer_than_a_page(monkeypatch):
    """Rows of one and of many pages, more of them than are made at a time; what one row gives up another uses."""
    monkeypatch.setattr(pages, "PAGE", 64)
    monkeypatch.setattr(pages, "TOGETHER", 4)
    compact = Compact(6, CPU, carried_under_kept, make([(400,)], 1, 1.0, 0), metrics=2)
    held = []
    for turn, share in enumerate((2.0, 0.1, 2.0)):
        state = make([(400,)], 6, share, turn)
        ids = torch.tensor([5, 2, 0, 1, 4, 3])
        for part in ids.split(2):
            compact.put(part, rows_of(state, part))
        assert_same(compact.take(ids, CPU), rows_of(expected(state), ids))
        held.append(compact.nbytes)
    assert held[0] == held[1] == held[2]


def test_pages_are_few_views_and_never_shared():
    held = Pages(2)
    held.resize(0, 3 * pages.PAGE + 1)
    held.resize(1, 10)
    assert [len(p) for p in held.parts(0)] == [3 * pages.PAGE + 1]
    held.resize(0, 5 * pages.PAGE)  # page 4 is row 1's
    assert [len(p) for p in held.parts(0)] == [4 * pages.PAGE, pages.PAGE]
    for row in (0, 1):
        for part in held.parts(row):
            part.fill_(row)
    assert all(bool((p == row).all()) for row in (0, 1) for p in held.parts(row))
    held.resize(0, 0)
    assert list(held.parts(0)) == []


@pytest.mark.parametrize(("longest", "most"), [(1, 512), (3_000, 3_584), (2**20, 2**20 + 2**16), (2**30, 2**30)])
def test_short_rows_have_short_pages(longest, most):
    held, size = Pages(1, longest=longest), min(longest, 2**20)
    held.resize(0, size)
    assert sum(len(p) for p in held.parts(0)) == size
    assert len(held._rows[0]) * held._page <= most
    assert held.nbytes == 2**22


@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.5])
def test_memory_of_a_fedselect_client(alpha):
    """At most (1.1 alpha + 0.05) * 4 d bytes: values, a bit of mask for each entry, and one for each marked."""
    model, clients = Model.wrap(nn.Linear(2000, 1000)), 40
    d = sum(p.numel() for p in model.module.parameters())

    def state(ids):
        g = torch.Generator().manual_seed(len(ids))
        shapes = {n: (len(ids), *p.shape) for n, p in model.module.named_parameters()}
        mask = {n: torch.rand(s, generator=g) < alpha for n, s in shapes.items()}
        return {"params": {n: torch.randn(s, generator=g) for n, s in shapes.items()}, "mask": mask, "kept": mask}

    method = fs.FedSelect(limit=alpha)
    compact = Compact(clients, CPU, lambda s: method.carries(model, s), state([0]), metrics=2)
    for ids in torch.arange(clients).split(4):
        compact.put(ids, state(ids))
    assert bool(compact.joined.all())
    assert compact.nbytes <= clients * (1.1 * alpha + 0.05) * 4 * d
    assert compact.nbytes >= clients * alpha * 0.99 * 4 * d  # it holds the values at all


def test_a_mask_that_would_come_back_another_is_refused():
    state = make([(8,)], 2, 0.0, 0)
    compact = Compact(2, CPU, carried_under_kept, state, metrics=2)
    state["kept"]["p0"][1, 3] = True  # mask marks nothing
    with pytest.raises(InputError, match=r"'kept' marks entries that 'mask' does not"):
        compact.put(torch.arange(2), state)


@pytest.mark.parametrize("kind", [Compact, Disk])
def test_another_state_is_refused(kind):
    compact = kind(2, CPU, carried_under_kept, make([(8,)], 2, 0.5, 0), metrics=2)
    with pytest.raises(InputError, match="tensors that it did not have before"):
        compact.put(torch.arange(2), make([(9,)], 2, 0.5, 0))


def without(state, *keys):
    return {k: t for k, t in state.items() if k not in keys}


@pytest.mark.parametrize("kind", ["resident", "compact", "disk"])
def test_a_tree_that_a_client_drops_is_zeros_and_takes_no_room(kind):
    """It is let go for good when the last of those who joined has dropped it, and comes back with whoever brings it."""
    state = make([(40, 3), ()], 4, 1.0, 0)
    packed = {"compact": Compact, "disk": Disk}
    store = packed[kind](4, CPU, carried_under_kept, state, metrics=1) if kind in packed else Store(4, CPU)

    def room():
        if kind == "disk":
            return sum(store._size(store._read_head(i)) for i in store.joined.nonzero().flatten().tolist())
        return store.nbytes if kind == "resident" else sum(store._pages.sizes)

    def put(ids, *dropped):
        store.put(torch.tensor(ids), without(rows_of(state, ids), *dropped))

    def held(ids):
        taken = store.take(torch.tensor(ids), CPU)
        assert torch.equal(taken["restart"][""], state["restart"][""][ids])
        return [bool(v.any()) for v in taken["half"][""]] if "half" in taken else None

    put([2, 0, 1])  # client 3 has not joined
    assert held([0, 1, 2]) == [True, True, True]
    put([1, 0], "half")
    assert held([0, 1, 2]) == [False, False, True]
    before = room()
    put([2], "half")
    assert held([0, 1, 2]) == (None if kind == "resident" else [False, False, False])
    assert room() < before
    put([3])
    assert held([0, 1, 2, 3]) == [False, False, False, True]
    put([3], "half")
    assert held([0, 3]) == (None if kind == "resident" else [False, False])
