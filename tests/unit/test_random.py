"""Keyed randomness: every number follows from (seed, client, round, purpose) and nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedselect.core.random import bits, choose, client_keys, fold, permutations, uniform

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=6)
ids_lists = st.lists(st.integers(0, 10_000), min_size=1, max_size=20, unique=True)


def keys(*, seed=0, ids=(0, 1, 2), round=0, purpose="train"):
    return client_keys(seed, torch.tensor(ids), round, purpose)


@pytest.mark.parametrize("other", [{"seed": 1}, {"round": 1}, {"purpose": "finetune"}, {"ids": (3, 4, 5)}], ids=str)
def test_any_part_of_a_key_changes_it(other):
    assert not (keys() == keys(**other)).any()


def test_clients_rounds_seeds_and_purposes_never_share_a_key():
    grid = [keys(seed=s, ids=range(50), round=r, purpose=p) for s in range(5) for r in range(5) for p in ("train", "select")]
    assert torch.cat(grid).unique().numel() == 50 * 5 * 5 * 2


def test_seed_and_client_are_not_interchangeable():
    assert keys(seed=1, ids=[2]) != keys(seed=2, ids=[1])


@given(ids_lists)
def test_a_clients_key_does_not_depend_on_its_neighbours(ids):
    together = keys(ids=ids)
    alone = torch.cat([keys(ids=[i]) for i in ids])
    assert together.equal(alone)


def test_fold_takes_numbers_names_and_one_number_per_client():
    base = keys()
    assert fold(base, 7).equal(fold(base, torch.full((3,), 7)))
    assert fold(base, "a", "b").equal(fold(fold(base, "a"), "b"))
    assert not (fold(base, "a", "b") == fold(base, "b", "a")).any()


@given(sizes, st.integers(0, 2**31))
def test_permutations_are_permutations_of_each_clients_own_range(n, seed):
    got = permutations(keys(seed=seed, ids=range(len(n))), torch.tensor(n), max(n))
    for row, k in zip(got.tolist(), n, strict=True):
        assert sorted(row[:k]) == list(range(k))


@given(sizes, st.integers(0, 40))
def test_a_permutation_depends_neither_on_neighbours_nor_on_the_longest(n, more):
    k = keys(ids=range(len(n)))
    together = permutations(k, torch.tensor(n), max(n) + more)
    for i, size in enumerate(n):
        assert together[i, :size].equal(permutations(k[i : i + 1], torch.tensor([size]), size)[0])


def test_every_order_of_three_comes_up_equally_often():
    got = permutations(keys(ids=range(6000)), torch.full((6000,), 3), 3)
    counts = (got @ torch.tensor([9, 3, 1])).unique(return_counts=True)[1]
    # 6000 draws of 6 orders: 1000 each, standard deviation sqrt(6000 * 1/6 * 5/6) = 28.9; five of them is 144
    assert len(counts) == 6
    assert ((counts - 1000).abs() < 145).all()


def test_uniform_lies_in_zero_to_one_and_is_evenly_spread():
    u = uniform(keys(ids=range(10)), 10_000)
    assert u.dtype == torch.float32
    assert u.min() >= 0.0
    assert u.max() < 1.0
    # mean of 1e5 draws: 1/2 with standard deviation sqrt(1/12 / 1e5) = 0.0009; variance 1/12 likewise
    assert abs(u.double().mean() - 0.5) < 0.005
    assert abs(u.double().var() - 1 / 12) < 0.002


def test_neighbouring_streams_are_not_correlated():
    u = uniform(keys(ids=(0, 1)), 10_000).double()
    # the correlation of n independent pairs has standard deviation 1/sqrt(n) = 0.01
    assert abs(torch.corrcoef(u)[0, 1]) < 0.05
    assert abs(torch.corrcoef(torch.stack([u[0, 1:], u[0, :-1]]))[0, 1]) < 0.05


def test_a_longer_draw_begins_with_the_shorter_one():
    assert bits(keys(), 20)[:, :5].equal(bits(keys(), 5))


@given(ids_lists, st.data())
def test_choose_depends_on_ids_not_on_their_order(ids, data):
    shuffled = data.draw(st.permutations(ids))
    count = data.draw(st.integers(1, len(ids)))
    got = choose(3, torch.tensor(ids), count, 1, "cohort")
    assert got.equal(choose(3, torch.tensor(shuffled), count, 1, "cohort"))
    assert got.tolist() == sorted(set(got.tolist()) & set(ids))
    assert len(got) == count


def test_choose_draws_everybody_about_equally_often():
    drawn = torch.cat([choose(0, torch.arange(10), 3, r, "cohort") for r in range(1000)])
    # each of ten clients in 3 of 10 places: 300 times, standard deviation sqrt(1000 * .3 * .7) = 14.5
    assert ((drawn.bincount(minlength=10) - 300).abs() < 75).all()


def test_drawing_leaves_torchs_own_generator_alone():
    before = torch.get_rng_state()
    uniform(keys(), 10)
    permutations(keys(), torch.tensor([3, 4, 5]), 5)
    choose(0, torch.arange(5), 2, 0, "cohort")
    assert torch.get_rng_state().equal(before)
