"""Selectors: growth of masks against a slow reference, and when and from where DeltaSelect counts."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedselect as fs
from fedselect.core.tree import block, lay
from fedselect.methods.select import body, everything, grow_mask, head, layers, norms, nothing, top
from fedselect.simulate import Simulation
from fedselect.training.batches import Split
from fedselect.training.fitted import Fitted
from fedselect.training.recorded import Programs
from fedselect.training.settings import Training
from fedselect.training.work import Work

shares = st.integers(0, 20).map(lambda k: k / 20)


@st.composite
def situations(draw):
    """Masks and scores of a few clients over a matrix and a vector; few different scores, so that ties are common."""
    clients, rows = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    shapes = {"w": (clients, rows, 3), "v": (clients, draw(st.integers(1, 5)))}
    mask, score = {}, {}
    for n, shape in shapes.items():
        size = math.prod(shape)
        mask[n] = torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size))).view(shape)
        score[n] = torch.tensor(draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))).view(shape).float()
    return mask, score


def slow(mask, score, rate, limit, scope="global", share="shared", strict=True, skip=(), dead=None):
    """One client after another, entry by entry, with whole-number arithmetic: twentieths are exact as fractions."""
    rate, limit = Fraction(round(rate * 20), 20), Fraction(round(limit * 20), 20)
    out = {n: m.clone() for n, m in mask.items()}
    for c in range(len(mask["w"])):
        entries = [(n, i) for n in mask for i in range(mask[n][c].numel()) if not (dead and n in dead and dead[n][i])]
        mine = {(n, i) for n, i in entries if mask[n][c].flatten()[i]}
        for group in [["w"], ["v"]] if scope == "tensor" else [["w", "v"]]:
            open_ = [(n, i) for n, i in entries if n in group and n not in skip]
            shared = [e for e in open_ if e not in mine]
            wanted = math.ceil(rate * len(shared if share == "shared" else open_))
            whole, held = (entries, mine) if scope == "global" else (open_, mine & set(open_))
            if strict:
                wanted = min(wanted, max(0, math.floor(limit * len(whole)) - len(held)))
            elif len(mine) >= limit * len(entries):
                wanted = 0
            best = sorted(shared, key=lambda e: -float(score[e[0]][c].flatten()[e[1]]))  # stable: the earlier wins
            for n, i in best[:wanted]:
                out[n][c].view(-1)[i] = True
    return out


def same(a, b):
    return a.keys() == b.keys() and all(a[n].equal(b[n]) for n in a)


OPTIONS = [
    {"scope": scope, "share": share, "strict": strict, "skip": skip}
    for scope in ("global", "tensor")
    for share in ("shared", "all")
    for strict in (True, False)
    for skip in (frozenset(), frozenset({"v"}))
]


@pytest.mark.parametrize("how", OPTIONS, ids=lambda h: "-".join(str(v) for v in h.values()))
@given(situations(), shares, shares)
def test_growth_is_that_of_the_slow_reference(how, situation, rate, limit):
    assert same(grow_mask(*situation, rate, limit, **how), slow(*situation, rate, limit, **how))


@pytest.mark.parametrize("how", OPTIONS, ids=lambda h: "-".join(str(v) for v in h.values()))
@given(situations(), shares, shares)
def test_growth_in_a_block_is_that_of_tensors(how, situation, rate, limit):
    blocks = [lay(torch.cat([v.flatten(1) for v in tree.values()], 1), tree) for tree in situation]
    grown = grow_mask(*blocks, rate, limit, **how)
    assert same(grown, grow_mask(*situation, rate, limit, **how))
    assert (block(grown) is not None) == (how["scope"] == "global" and not how["skip"])


@pytest.mark.parametrize("how", OPTIONS, ids=lambda h: "-".join(str(v) for v in h.values()))
@given(situations(), shares, shares)
def test_masks_only_grow(how, situation, rate, limit):
    mask, score = situation
    grown = grow_mask(mask, score, rate, limit, **how)
    assert all((mask[n] <= grown[n]).all() for n in mask)


@pytest.mark.parametrize("how", OPTIONS, ids=lambda h: "-".join(str(v) for v in h.values()))
@given(situations(), shares, shares, st.data())
def test_dead_entries_are_never_added_and_no_share_counts_them(how, situation, rate, limit, data):
    mask, score = situation
    dead = torch.tensor(data.draw(st.lists(st.booleans(), min_size=mask["w"][0].numel(), max_size=mask["w"][0].numel())))
    mask = {**mask, "w": mask["w"] & ~dead.view_as(mask["w"][0])}
    grown = grow_mask(mask, score, rate, limit, **how, dead={"w": dead})
    assert same(grown, slow(mask, score, rate, limit, **how, dead={"w": dead}))


def held(mask):
    return sum(m.flatten(1).sum(1) for m in mask.values())


def size(mask):
    return sum(m[0].numel() for m in mask.values())


@given(situations(), shares, shares, st.integers(1, 4))
def test_a_strict_limit_is_never_passed(situation, rate, limit, rounds):
    mask, score = {n: torch.zeros_like(m) for n, m in situation[0].items()}, situation[1]
    for _ in range(rounds):
        mask = grow_mask(mask, score, rate, limit)
        assert (held(mask) <= math.floor(limit * size(mask) + 1e-9)).all()


@given(situations(), shares)
def test_with_room_exactly_the_rates_share_of_the_shared_entries_joins(situation, rate):
    mask, score = situation
    shared = size(mask) - held(mask)
    added = held(grow_mask(mask, score, rate, 1.0)) - held(mask)
    assert added.tolist() == [math.ceil(Fraction(round(rate * 20), 20) * k) for k in shared.tolist()]


def test_float_rounding_adds_no_entry():
    mask = {"w": torch.zeros(1, 1, 100, dtype=torch.bool)}
    score = {"w": torch.arange(100.0).view(1, 1, 100)}
    assert 0.07 * 100 > 7  # 7.000000000000001: a bare ceil would give 8
    assert held(grow_mask(mask, score, 0.07, 1.0)).tolist() == [7]
    assert 0.29 * 100 < 29  # 28.999999999999996: a bare floor would give 28
    assert held(grow_mask(mask, score, 1.0, 0.29)).tolist() == [29]


def test_of_equal_scores_the_earlier_entry_wins():
    mask = {"a": torch.zeros(1, 3, dtype=torch.bool), "b": torch.zeros(1, 3, dtype=torch.bool)}
    grown = grow_mask(mask, {"a": torch.ones(1, 3), "b": torch.ones(1, 3)}, 4 / 6, 1.0)
    assert grown["a"].tolist() == [[True] * 3]
    assert grown["b"].tolist() == [[True, False, False]]


def test_not_strict_may_pass_the_limit_once_and_then_stops():
    mask = {"w": torch.zeros(1, 10, dtype=torch.bool)}
    score = {"w": torch.arange(10.0).view(1, 10)}
    once = grow_mask(mask, score, 0.5, 0.1, strict=False)
    assert held(once).tolist() == [5]  # 0 < 1, so half of ten joins, past the limit of one
    assert same(grow_mask(once, score, 0.5, 0.1, strict=False), once)


def test_rates_and_limits_may_differ_by_client():
    mask = {"w": torch.zeros(3, 10, dtype=torch.bool)}
    score = {"w": torch.rand(3, 10, generator=torch.Generator().manual_seed(0))}
    got = grow_mask(mask, score, torch.tensor([0.5, 0.5, 0.1]), torch.tensor([1.0, 0.2, 1.0]))
    assert held(got).tolist() == [5, 2, 1]  # half of ten; limit 2; a tenth


@given(st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=4), st.data())
def test_top_marks_the_largest_of_each_row(rows, data):
    counts = [data.draw(st.integers(0, 6)) for _ in rows]
    got = top(torch.tensor(rows, dtype=torch.float32), torch.tensor(counts))
    for row, k, marks in zip(rows, counts, got.tolist(), strict=True):
        assert [i for i, m in enumerate(marks) if m] == sorted(sorted(range(6), key=lambda i: -row[i])[:k])


# ---- DeltaSelect

MODEL = fs.Model.wrap(torch.nn.Linear(2, 2))
START = {"weight": torch.zeros(1, 2, 2), "bias": torch.zeros(1, 2)}


def programs():
    return Programs(Fitted(MODEL), Training(), fs.Classification())


def work(round):
    part = Split(torch.zeros(2, 2), torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([2]))
    values = {n: v[0] for n, v in START.items()}
    return Work(
        programs(),
        part,
        part,
        ids=torch.tensor([0]),
        round=round,
        seed=0,
        initial=lambda: values,
    )


def tree(*numbers):
    return {"weight": torch.tensor(numbers[:4]).view(1, 2, 2), "bias": torch.tensor(numbers[4:]).view(1, 2)}


def marks(memory):
    return torch.cat([memory["mask"]["weight"].flatten(), memory["mask"]["bias"].flatten()]).int().tolist()


def walk(select, steps):
    """The mask after each round; a step is (before, after)."""
    memory, seen = select.start(work(0), START), []
    for r, (before, after) in enumerate(steps):
        _, memory = select.grow(work(r), memory, before, lambda _, after=after: after)
        seen.append(marks(memory))
    return seen


STEP = (tree(0.0, 0.0, 0.0, 0.0, 0.0, 0.0), tree(0.1, -0.6, 0.2, 0.3, 0.5, -0.4))


def test_those_that_moved_most_either_way_become_personal():
    assert walk(fs.DeltaSelect(rate=0.5, limit=1.0), [STEP]) == [[0, 1, 0, 0, 1, 1]]  # |move| .6 .5 .4


def test_least_turns_the_choice_round():
    assert walk(fs.DeltaSelect(rate=0.5, limit=1.0, by="least"), [STEP]) == [[1, 0, 1, 1, 0, 0]]


def test_weights_only_leaves_vectors_shared():
    assert walk(fs.DeltaSelect(rate=1.0, limit=1.0, weights_only=True), [STEP]) == [[1, 1, 1, 1, 0, 0]]


def test_movement_may_count_by_the_mean_movement_of_its_tensor():
    # weights moved .1 .6 .2 .3 (root mean square .354), biases .5 .4 (.453): relative 1.7, 1.1 and .88 lead
    assert walk(fs.DeltaSelect(rate=0.5, limit=1.0, relative="tensor"), [STEP]) == [[0, 1, 0, 0, 1, 1]]
    assert walk(fs.DeltaSelect(rate=0.3, limit=1.0, relative="tensor"), [STEP]) == [[0, 1, 0, 0, 1, 0]]


def test_of_its_tensor_the_movement_of_shared_entries_counts():
    # after round 1 the second weight is personal; in round 2 it moves by 100, the others by .1 0 .2 .3 (rms of .1 .2 .3: .216)
    # and biases by .5 .4 (.453): relative .46 .93 1.39 and 1.1 .88; with the personal one among them, biases would lead
    far = (STEP[0], tree(0.1, 100.0, 0.2, 0.3, 0.5, 0.4))
    grown = walk(fs.DeltaSelect(rate=0.15, limit=1.0, relative="tensor"), [STEP, far])
    assert grown == [[0, 1, 0, 0, 0, 0], [0, 1, 0, 1, 0, 0]]


def test_a_tensor_of_zeros_is_not_infinitely_small():
    before, after = tree(10.0, 10.0, 10.0, 10.0, 0.0, 0.0), tree(12.0, 10.0, 10.0, 10.0, 0.1, 0.0)  # relative .2; .1 as it is
    assert walk(fs.DeltaSelect(rate=0.15, limit=1.0, relative="weights"), [(before, after)]) == [[1, 0, 0, 0, 0, 0]]


def test_movement_may_count_by_the_size_of_its_tensors_weights():
    before = tree(10.0, 10.0, 10.0, 10.0, 0.1, 0.1)
    after = tree(11.0, 12.0, 10.0, 10.0, 0.11, 0.14)  # relative .1 .2 0 0 .1 .4
    assert walk(fs.DeltaSelect(rate=0.3, limit=1.0, relative="weights"), [(before, after)]) == [[0, 1, 0, 0, 0, 1]]


@pytest.mark.parametrize(
    ("start_with", "personal"),
    [
        ("nothing", set()), ("head", {"3.weight", "3.bias"}), ("norms", {"1.weight", "1.bias"}),
        ("head+norms", {"1.weight", "1.bias", "3.weight", "3.bias"}),
    ],
)  # fmt: skip
def test_a_mask_may_start_with_the_head_or_the_norm_layers(start_with, personal):
    part = (torch.zeros(4, 1, 3, 3), torch.tensor([0, 1, 2, 0]))
    data = fs.Federation([fs.ClientData(part, part)] * 2, 3)
    sim = Simulation(fs.FedSelect(limit=0.0, select=fs.Reading(start_with=start_with)), NET, data)
    masks = sim.step() and fs.Result(sim, []).masks
    assert {n for n, m in masks.items() if m.all()} == personal
    assert {n for n, m in masks.items() if m.any()} == personal


def test_every_and_first_say_in_which_rounds_the_mask_grows():
    grown = walk(fs.DeltaSelect(rate=0.1, limit=1.0, every=3, first=1), [STEP] * 8)
    # ceil(.1 * 6) = 1 entry at a time, in rounds 1, 4, 7
    assert [sum(m) for m in grown] == [0, 1, 1, 1, 2, 2, 2, 3]


@pytest.mark.parametrize(("since", "chosen"), [("round", [0, 1, 0, 0, 0, 0]), ("update", [1, 0, 0, 0, 0, 0])])
def test_movement_counts_from_this_round_or_from_the_last_growth(since, chosen):
    a, b, c = tree(0.0, 0, 0, 0, 0, 0), tree(0.5, 0.1, 0, 0, 0, 0), tree(0.6, 0.4, 0, 0, 0, 0)
    # round 1: entry 1 moved most (.3 against .1); since round 0's start entry 0 did (.6 against .4)
    grown = walk(fs.DeltaSelect(rate=0.1, limit=1.0, every=2, first=1, since=since), [(a, b), (b, c)])
    assert grown == [[0] * 6, chosen]


def test_after_a_growth_movement_counts_from_the_next_rounds_start():
    a, b, c = tree(0.0, 0, 0, 0, 0, 0), tree(0.9, 0.8, 0, 0, 0, 0), tree(0.9, 0.8, 0.1, 0, 0, 0)
    # round 0 takes entry 0; entry 1's .8 lies before that growth, so round 1 takes entry 2
    grown = walk(fs.DeltaSelect(rate=0.1, limit=1.0, since="update"), [(a, b), (b, c)])
    assert grown == [[1, 0, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0]]


def test_random_select_draws_differently_for_each_client_and_round():
    def grow(round, ids):
        part = Split(torch.zeros(2, 2), torch.tensor([0, 1]), torch.zeros_like(ids), torch.full_like(ids, 2))
        w = Work(programs(), part, part, ids=ids, round=round, seed=0, initial=dict)
        wide = {"w": torch.zeros(len(ids), 100)}
        empty = {"mask": {n: v.bool() for n, v in wide.items()}}
        _, memory = fs.RandomSelect(rate=0.1).grow(w, empty, wide, lambda _: wide)
        return memory["mask"]["w"]

    both = grow(0, torch.tensor([4, 7]))
    assert both.sum(1).tolist() == [10, 10]
    assert not both[0].equal(both[1])
    assert not both.equal(grow(1, torch.tensor([4, 7])))
    assert both[1:].equal(grow(0, torch.tensor([7])))


@pytest.mark.parametrize("select", [fs.DeltaSelect, fs.RandomSelect])
@pytest.mark.parametrize("bad", [{"rate": -0.1}, {"rate": 1.1}, {"limit": 2.0}, {"limit": float("nan")}], ids=str)
def test_a_share_outside_zero_to_one_is_refused(select, bad):
    with pytest.raises(fs.InputError, match=rf"{next(iter(bad))} is a share and must be in \[0, 1\]"):
        select(**bad)


@pytest.mark.parametrize(
    ("option", "known"), [("by", "most or least or random"), ("scope", "global or tensor"), ("since", "round or update")]
)
def test_an_unknown_choice_is_refused(option, known):
    with pytest.raises(fs.InputError, match=f"{option} is {known}, not 'sideways'"):
        fs.DeltaSelect(**{option: "sideways"})


# ---- Fixed

NET = fs.Model.wrap(
    torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Flatten(), torch.nn.Linear(2, 3)), head="3"
)


@pytest.mark.parametrize(
    ("which", "personal"),
    [
        (nothing, set()),
        (everything, {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"}),
        (head, {"3.weight", "3.bias"}),
        (body, {"0.weight", "0.bias", "1.weight", "1.bias"}),
        (norms, {"1.weight", "1.bias"}),
        (layers("0"), {"0.weight", "0.bias"}),
        (layers("*.bias"), {"0.bias", "1.bias", "3.bias"}),
        (layers("0.weight", "3.*"), {"0.weight", "3.weight", "3.bias"}),
    ],
)
def test_fixed_masks_are_whole_tensors(which, personal):
    assert {n for n, m in fs.Fixed(which).mask(NET, {}).items() if m} == personal


def test_a_layer_name_does_not_match_half_a_name():
    with pytest.raises(fs.InputError, match=r"no parameter of Sequential matches '3\.wei'; .*--layers\), such as 3\.weight"):
        fs.Fixed(layers("3.wei")).mask(NET, {})


def test_a_pattern_that_matches_nothing_is_an_error_even_beside_one_that_does():
    with pytest.raises(fs.InputError, match=r"no parameter of Sequential matches 'layer4\.\*'"):
        fs.Fixed(layers("*", "layer4.*")).mask(NET, {})


def test_head_of_a_model_without_one_is_an_error():
    headless = fs.Model.wrap(torch.nn.Conv2d(1, 2, 3))
    with pytest.raises(fs.InputError, match="needs the model's head, and Conv2d has no Linear"):
        fs.Fixed(head).mask(headless, {})
