"""Who gets which samples."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import fedselect as fs
from fedselect.data.partition import Pool, Sizes, by_class, by_dirichlet, by_domain, by_index, by_share, deal_classes
from fedselect.data.partition import deal as deal_by

CLASSES, EACH = 6, 60
HOW = {"classes_per_client": 2, "concentration": 1.0}
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(CLASSES), EACH))


def deal(clients=4, classes_per_client=3, train=10, test=7, val=0, seed=0, labels=LABELS):
    return by_class(Pool(labels), clients, classes_per_client, Sizes(train, test, val), seed)


@st.composite
def settings(draw):
    """Anything the 60 samples of a class surely suffice for."""
    how = {
        "clients": draw(st.integers(1, 5)),
        "classes_per_client": draw(st.integers(1, CLASSES)),
        "train": draw(st.integers(2, 8)),
        "test": draw(st.integers(1, 4)),
        "seed": draw(st.integers(0, 100)),
    }
    return {**how, "val": draw(st.integers(0, how["train"] - 1))}


@given(settings())
def test_every_client_gets_what_was_asked_for(how):
    parts = deal(**how)
    assert len(parts) == how["clients"]
    for p in parts:
        assert (len(p.train), len(p.test), len(p.val)) == (how["train"] - how["val"], how["test"], how["val"])


@given(settings())
def test_no_sample_is_given_twice(how):
    dealt = np.concatenate([part for p in deal(**how) for part in (p.train, p.test, p.val)])
    assert len(set(dealt.tolist())) == len(dealt)


@given(settings())
def test_a_client_has_its_own_classes_alone(how):
    hands = deal_classes(how["clients"], CLASSES, how["classes_per_client"], how["seed"])
    for p, hand in zip(deal(**how), hands, strict=True):
        assert set(LABELS[np.concatenate([p.train, p.val, p.test])]) <= set(hand)


def test_a_clients_classes_are_as_even_as_can_be_in_training_and_test():
    for p in deal(train=10, test=7):
        # ten over three classes: 4, 3, 3; seven: 3, 2, 2
        assert sorted(Counter(LABELS[p.train]).values()) == [3, 3, 4]
        assert sorted(Counter(LABELS[p.test]).values()) == [2, 2, 3]


@given(settings(), st.integers(1, 20))
def test_test_sets_stay_when_only_the_training_size_changes(how, more):
    assume(how["clients"] * (how["train"] + more + how["test"] + 2) <= EACH)
    for small, large in zip(deal(**how), deal(**{**how, "train": how["train"] + more}), strict=True):
        assert small.test.tolist() == large.test.tolist()


@given(settings(), st.integers(1, 20))
def test_larger_training_sets_contain_the_smaller_ones(how, more):
    assume(how["clients"] * (how["train"] + more + how["test"] + 2) <= EACH)
    how["val"] = 0
    for small, large in zip(deal(**how), deal(**{**how, "train": how["train"] + more}), strict=True):
        assert set(small.train) < set(large.train)


def test_validation_is_held_out_of_training():
    for without, with_ in zip(deal(train=10), deal(train=10, val=4), strict=True):
        assert set(without.train) == set(with_.train) | set(with_.val)
        assert without.test.tolist() == with_.test.tolist()


def test_training_samples_are_not_sorted_by_class():
    labels = [LABELS[p.train].tolist() for p in deal(train=12)]
    assert any(run != sorted(run) for run in labels)


@given(st.integers(1, 30), st.integers(1, 10), st.integers(0, 1000), st.data())
def test_every_class_has_as_many_holders_as_any_other_give_or_take_one(clients, classes, seed, data):
    each = data.draw(st.integers(1, classes))
    hands = deal_classes(clients, classes, each, seed)
    assert all(len(set(hand)) == each and hand == sorted(hand) for hand in hands)
    holders = [sum(c in hand for hand in hands) for c in range(classes)]
    assert max(holders) - min(holders) <= 1


def test_the_seed_decides():
    def flat(seed):
        return [p.train.tolist() for p in deal(seed=seed)]

    assert flat(0) == flat(0)
    assert flat(0) != flat(1)
    assert deal_classes(5, 10, 3, 0) != deal_classes(5, 10, 3, 1)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"clients": 0}, "at least one client, not 0"),
        ({"clients": -1}, "at least one client, not -1"),
        ({"classes_per_client": 7}, r"classes_per_client must lie in 1 to 6 \(the classes there are\), not 7"),
        ({"classes_per_client": 0}, "classes_per_client must lie in 1 to 6"),
        ({"train": 0}, "train must be at least 1 sample per client, not 0"),
        ({"test": 0}, "test must be at least 1 sample per client, not 0"),
        ({"val": 10}, "val is held out of train and must lie in 0 to 9, not 10"),
        ({"val": -1}, "val is held out of train and must lie in 0 to 9, not -1"),
    ],
)
def test_what_cannot_be_dealt_is_refused(how, said):
    with pytest.raises(fs.InputError, match=said):
        deal(**how)


def test_a_class_with_too_few_samples_says_how_many_it_has():
    labels = np.array([0] * 50 + [1] * 5)
    # two clients hold both classes: (4 + 2) samples each of either, where class 1 has five
    with pytest.raises(
        fs.DataError, match="class 1 has 1 of its 5 samples to train on, but its 2 clients ask for 8; lower train"
    ):
        deal(clients=2, classes_per_client=2, train=8, test=4, labels=labels)


def test_a_class_that_has_exactly_enough_is_dealt_to_the_last_sample():
    labels = np.array([0] * 12 + [1] * 12)
    parts = deal(clients=2, classes_per_client=2, train=8, test=4, labels=labels)
    assert sorted(np.concatenate([a for p in parts for a in (p.train, p.test)]).tolist()) == list(range(24))


def test_digits_are_dealt_as_asked(digits):
    assert (digits.name, digits.classes, digits.shape, len(digits.clients)) == ("digits", 10, (1, 8, 8), 3)
    x, y = digits.clients[0].train
    assert len(x) == len(y) == 20
    assert 0.0 <= x.min() < x.max() <= 1.0
    assert digits.clients[0].val is None
    assert len(digits.labels(0)) == 3


# ---- other partitions


def rows(parts, part="train"):
    return [getattr(p, part).tolist() for p in parts]


def assert_disjoint(parts):
    dealt = [i for part in ("train", "test", "val") for mine in rows(parts, part) for i in mine]
    assert len(set(dealt)) == len(dealt)


def with_official_test():
    return Pool(LABELS, np.arange(len(LABELS)) % 3 == 0)


@pytest.mark.parametrize("pool", [Pool(LABELS), with_official_test()], ids=["one pool", "official test set"])
@pytest.mark.parametrize(
    "way",
    [
        lambda pool, train: by_class(pool, 4, 3, Sizes(train, 6), 1),
        lambda pool, train: by_class(pool, 4, 3, Sizes(train, 6, 3), 1),
        lambda pool, train: by_dirichlet(pool, 4, 0.7, Sizes(train, 6), 1),
        lambda pool, train: by_share(pool, [1, 1, 1, 1], Sizes(train, 6), 1),
        lambda pool, train: by_share(pool, [4, 3, 2, 1], Sizes(train, 6), 1),
    ],
    ids=["classes", "classes, some held out", "dirichlet", "iid", "quantity"],
)
def test_every_partition_keeps_its_test_sets_and_grows_its_training_sets(pool, way):
    few, many = way(pool, 8), way(pool, 20)
    assert rows(few, "test") == rows(many, "test")
    assert rows(few, "val") == rows(many, "val")
    assert all(set(a) < set(b) for a, b in zip(rows(few), rows(many), strict=True))
    for parts in (few, many):
        assert_disjoint(parts)
        if pool.test is not None:
            assert all(pool.test[p.test].all() and not pool.test[p.train].any() for p in parts)


def test_everything_is_dealt_when_no_size_is_given():
    pool = with_official_test()
    parts = by_class(pool, 4, 3, Sizes(None, None), 0)
    # 4 clients x 3 of 6 classes: every class has two holders, who halve it; one sample a class may be left over
    assert 240 - 6 <= sum(len(p.train) for p in parts) <= 240
    assert 120 - 6 <= sum(len(p.test) for p in parts) <= 120


@pytest.mark.parametrize("split", ["classes", "dirichlet", "iid", "quantity", "domain"])
def test_without_a_test_set_about_a_tenth_is_set_aside_or_what_is_asked_for(split):
    pool = Pool(np.arange(400) % 4, domain=np.arange(400) // 100, domain_names=tuple("abcd"))
    tenth, asked = (deal_by(pool, split, 4, Sizes(None, test), 0, **HOW) for test in (None, 20))
    assert 36 <= sum(len(p.test) for p in tenth) <= 40
    assert_disjoint(tenth)
    if split not in ("dirichlet", "quantity"):
        assert [len(p.test) for p in asked] == [20] * 4


@pytest.mark.parametrize("train", [None, 3])
def test_where_a_tenth_is_too_little_every_holder_of_a_class_still_has_one_to_test_on(train):
    labels = np.repeat([0, 1], [50, 400])  # ten clients hold both: a tenth of class 0 is five, of class 1 forty
    parts = by_class(Pool(labels), 10, 2, Sizes(train, None), 0)
    for p in parts:
        assert Counter(labels[p.test].tolist()) == {0: 1, 1: 4}
        assert set(labels[p.train].tolist()) == {0, 1}
    assert_disjoint(parts)
    if train is None:
        assert {len(p.train) for p in parts} == {4 + 36}


def test_a_tenth_that_is_enough_stays_a_tenth():
    parts = by_class(Pool(np.repeat([0, 1], 105)), 3, 2, Sizes(None, None), 0)
    assert [(len(p.train), len(p.test)) for p in parts] == [(2 * 31, 2 * 3)] * 3  # of 95 and of 10


def test_a_class_too_small_for_its_holders_is_named_with_what_to_do():
    labels = np.repeat([0, 1], [400, 8])
    pool = Pool(labels, class_names=("cat", "dog"))
    said = "class dog has 3 of its 8 samples to train on, too few for its 5 clients; give test, take fewer clients or lower"
    with pytest.raises(fs.DataError, match=said):
        by_class(pool, 5, 2, Sizes(None, None), 0)
    with pytest.raises(fs.DataError, match="class 1 has 3 of its 8 samples"):  # a pool may have no names
        by_class(Pool(labels), 5, 2, Sizes(None, None), 0)
    with pytest.raises(fs.DataError, match=r"class dog has 3 .* to train on, too few for its 5 clients; lower test, take"):
        by_class(pool, 5, 2, Sizes(None, 2), 0)
    assert [Counter(labels[p.test].tolist()) for p in by_class(pool, 4, 2, Sizes(None, None), 0)] == [{0: 10, 1: 1}] * 4
    assert [Counter(labels[p.train].tolist())[1] for p in by_class(pool, 5, 2, Sizes(None, 1), 0)] == [
        1
    ] * 5  # none of it to test


@pytest.mark.parametrize("sizes", [Sizes(None, None), Sizes(4, 2), Sizes(1, 2)])
def test_a_class_without_anything_to_train_on_is_named(sizes):
    labels = np.concatenate([np.repeat([0, 1, 2], 40), np.repeat([0, 1, 2, 3], 10)])
    pool = Pool(labels, np.arange(len(labels)) >= 120, class_names=("cat", "cow", "dog", "emu"))
    with pytest.raises(fs.DataError, match="class emu has no samples to train on; give it some, or leave its test samples out"):
        by_class(pool, 4, 2, sizes, 0)
    few = Pool(labels[:-10], np.arange(len(labels) - 10) >= 120)
    assert all(set(labels[p.test]) <= set(range(3)) for p in by_class(few, 4, 2, sizes, 0))


def test_a_class_with_less_to_train_on_than_holders_is_named():
    labels = np.concatenate([np.repeat([0, 1], [40, 2]), np.repeat([0, 1], 10)])
    pool = Pool(labels, np.arange(len(labels)) >= 42)
    with pytest.raises(
        fs.DataError, match="class 1 has 2 of its 12 samples to train on, too few for its 3 clients; take fewer clients or"
    ):
        by_class(pool, 3, 2, Sizes(None, None), 0)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("split", ["dirichlet", "quantity"])
def test_concentration_is_a_positive_number(split, value):
    with pytest.raises(fs.InputError, match=f"concentration must be positive and finite, not {value}"):
        deal_by(Pool(LABELS), split, 4, Sizes(None, None), 0, **{**HOW, "concentration": value})


def test_a_dirichlet_client_is_tested_on_the_classes_it_trains_on():
    parts = by_dirichlet(with_official_test(), 5, 0.3, Sizes(None, None), 2)
    for p in parts:
        train, test = Counter(LABELS[p.train].tolist()), Counter(LABELS[p.test].tolist())
        assert all(train[c] >= test[c] for c in test)  # twice as many to train on, by the same proportions, rounded down
    sizes = [len(p.train) for p in parts]
    assert max(sizes) > min(sizes)


def test_dirichlet_says_when_it_cannot():
    with pytest.raises(
        fs.DataError, match=r"Dirichlet\(0.001\) left a client of 40 without data in each of 100 draws; raise concentration"
    ):
        by_dirichlet(Pool(LABELS), 40, 0.001, Sizes(None, None), 0)


def test_shares_are_kept_and_nobody_is_left_out():
    parts = by_share(with_official_test(), [10, 5, 5, 0.001], Sizes(None, None), 0)
    sizes = [len(p.train) for p in parts]
    assert sizes[0] == pytest.approx(2 * sizes[1], abs=2)
    assert sizes[3] == 1


DOMAINS = Pool(LABELS, None, np.arange(len(LABELS)) % 4, ("art", "clipart", "product", "real"))


def test_one_client_a_domain():
    parts = by_domain(DOMAINS, 4, Sizes(None, None), 0, tests=(5, 6, 7, 8))
    assert [set((p.train % 4).tolist()) for p in parts] == [{0}, {1}, {2}, {3}]
    assert [len(p.test) for p in parts] == [5, 6, 7, 8]
    assert [len(p.train) for p in parts] == [85, 84, 83, 82]
    assert_disjoint(parts)


def test_two_clients_cannot_have_one_domain():
    with pytest.raises(
        fs.InputError, match=r"4 domains \(art, clipart, product, real\) and one client takes one, .* must be 4, not 5"
    ):
        by_domain(DOMAINS, 5, Sizes(None, None), 0)
    with pytest.raises(fs.InputError, match="this data has no domains"):
        by_domain(Pool(LABELS), 4, Sizes(None, None), 0)
    with pytest.raises(fs.DataError, match="domain art has 81 samples to train on, not 500"):
        by_domain(DOMAINS, 4, Sizes(500, None), 0)


def test_explicit_lists():
    parts = by_index([[0, 1], [2]], [[3], [4, 5]])
    assert rows(parts) == [[0, 1], [2]]
    assert rows(parts, "test") == [[3], [4, 5]]
    with pytest.raises(fs.InputError, match="2 training lists but 1 test lists"):
        by_index([[0], [1]], [[2]])
