"""FedAlike: who is alike against a slow reference and by what is known of made-up pulls, and what its window promises."""

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from slow import drawn, greedy, groups_alike, partition_cost, pull_products
from torch import nn

import fedselect as fs
from fedselect.methods import grouping
from fedselect.methods.fedalike import HALVES
from fedselect.methods.grouping import differences, merged, output_of, outputs, shrunk
from fedselect.simulate import Simulation
from fedselect.training.settings import Training


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parts(group):
    """Groups as lists of clients in order; each must bear the name of its first member."""
    found = {}
    for i, g in enumerate(group.tolist()):
        found.setdefault(g, []).append(i)
    assert all(name == members[0] for name, members in found.items())
    return sorted(found.values())


PULLS = st.tuples(
    st.integers(2, 7),  # clients
    st.integers(1, 30),  # entries
    st.integers(1, 3),  # kinds of clients
    st.sampled_from([0.0, 0.5, 2.0]),  # how far kinds are apart
    st.integers(0, 10**6),
    st.booleans(),  # whether one has a single sample
).map(lambda t: (*t[:5], t[5] and t[0] > 3))  # in the middle of two others neither would be nearer


def pulls(clients, entries, kinds, apart, seed, single=False):
    """Mean pulls of either half: of a kind, noise of a loudness that entries have, and the same for all."""
    kind = draw(kinds, entries, seed=seed)[torch.arange(clients) % kinds]
    loud = draw(entries, seed=seed + 1).exp()
    halves = apart * kind + loud * draw(2, clients, entries, seed=seed + 2) + draw(entries, seed=seed + 3)
    if single:
        halves[1, 0] = halves[0, 0]
    return halves[0], halves[1]


def square(seed, m):
    """Products that are not symmetric."""
    return draw(m, 3, seed=seed) @ draw(m, 3, seed=seed).T + 0.5 * draw(m, m, seed=seed + 1)


def everywhere(first):
    """All clients are compared in all entries, as in a head whose rows are not classes: no outputs, entries of row 0."""
    return torch.ones(len(first), 0, dtype=torch.bool), torch.zeros(first.shape[1], dtype=torch.int64)


def alike(first, second, has=None, row=None):
    every = everywhere(first)
    return grouping.alike(first, second, every[0] if has is None else has, every[1] if row is None else row)


def one(has_or_products):
    """A row alone."""
    return has_or_products.unsqueeze(0)


def classes(clients, entries, seed, count=3):
    """Who has which of three classes, and whose entries are whose; those with number 3 are of all."""
    draws = torch.Generator().manual_seed(seed)
    return torch.rand(clients, count, generator=draws) < 0.6, torch.randint(0, count + 1, (entries,), generator=draws)


def counted(has, first, second):
    """With the row of all, and without whoever has equal halves."""
    return torch.cat([has, torch.ones(len(has), 1, dtype=torch.bool)], 1) & (first != second).any(1, keepdim=True)


# ---- the rule, slowly


@given(PULLS, st.integers(0, 10**6))
def test_products_and_noise_are_those_of_the_slow_reference(how, seed):
    first, second = pulls(*how)
    has, row = classes(*first.shape, seed)
    has = counted(has, first, second)
    products, noise = pull_products(first.tolist(), second.tolist(), has.tolist(), row.tolist())
    got = differences(first, second, has, row)
    want = torch.tensor(drawn(products, has.tolist()), dtype=torch.float64)
    torch.testing.assert_close(got[0], want, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(got[1], torch.tensor(noise, dtype=torch.float64), rtol=1e-8, atol=1e-8)


@given(st.integers(2, 7), st.integers(0, 10**6))
def test_drawn_products_are_those_of_the_slow_reference(m, seed):
    has = classes(m, 1, seed)[0]
    both = has.T.unsqueeze(1) & has.T.unsqueeze(2) & (has.sum(0) > 1).view(-1, 1, 1)  # less its own mean one client is 0
    products = torch.stack([square(seed + k, m) for k in range(3)]) * both
    want = torch.tensor(drawn(products.tolist(), has.tolist()), dtype=torch.float64)
    torch.testing.assert_close(shrunk(products, has), want, rtol=1e-9, atol=1e-9)


@given(st.integers(2, 6), st.integers(0, 10**6), st.sampled_from([0.1, 1.0, 3.0]))
def test_merging_is_the_greedy_that_tries_every_merge(m, seed, level):
    """Also of products that no vectors have, as estimates may be."""
    has = classes(m, 1, seed)[0]
    products = torch.stack([square(seed + k, m) for k in range(3)])
    products = (products + products.mT) / 2 * (has.T.unsqueeze(1) & has.T.unsqueeze(2))
    noise = level * draw(3, m, seed=seed + 2).abs() * has.T
    found = parts(merged(products, noise, has))
    products, noise, has = products.tolist(), noise.tolist(), has.tolist()
    assert found == greedy(products, noise, has)
    alone = [[i] for i in range(m)]
    assert partition_cost(found, products, noise, has) <= partition_cost(alone, products, noise, has) + 1e-12


@given(PULLS, st.integers(0, 10**6))
def test_who_is_alike_is_what_the_slow_reference_finds(how, seed):
    first, second = pulls(*how)
    has, row = classes(*first.shape, seed)
    every = torch.cat([has, torch.ones(len(has), 1, dtype=torch.bool)], 1).tolist()
    assert parts(alike(first, second, has, row)) == groups_alike(first.tolist(), second.tolist(), every, row.tolist())


@given(st.integers(2, 3), st.integers(0, 10**6), st.sampled_from([0.1, 1.0, 3.0]))
def test_of_up_to_three_clients_the_groups_cost_least_of_all(m, seed, level):
    """Over all pairs, gains of merging two add up to m / 2 times that of merging all: where all gain, some two do."""
    products, noise = square(seed, m), level * draw(m, seed=seed + 2).abs()
    products = (products + products.T) / 2
    has = torch.ones(m, 1, dtype=torch.bool)
    found = parts(merged(one(products), one(noise), has))
    how = one(products).tolist(), one(noise).tolist(), has.tolist()
    every = [[[i] for i in range(m)], [list(range(m))]]
    every += [[list(two), [i for i in range(m) if i not in two]] for two in combinations(range(m), 2) if m == 3]
    costs = [partition_cost(groups, *how) for groups in every]
    assert partition_cost(found, *how) == pytest.approx(min(costs), abs=1e-9)


def test_a_merge_is_weighed_by_hand():
    """At 0, 2 and 10 on a line. 0 and 2 cost 1 + 1 in one group, which saves one noise of two: worth it above 2."""
    at = torch.tensor([[0.0], [2.0], [10.0]], dtype=torch.float64)
    products, has = one(at @ at.T), torch.ones(3, 1, dtype=torch.bool)
    assert merged(products, torch.full((1, 3), 1.99), has).tolist() == [0, 1, 2]
    assert merged(products, torch.full((1, 3), 2.01), has).tolist() == [0, 0, 2]
    # all three: the mean is 4, so 16 + 4 + 36 = 56, against 2 for 0 and 2 alone: 54 for one noise
    assert merged(products, torch.full((1, 3), 53.9), has).tolist() == [0, 0, 2]
    assert merged(products, torch.full((1, 3), 54.1), has).tolist() == [0, 0, 0]


def test_noise_counts_for_less_than_difference():
    """Two clients, one entry, halves at x -+ u: differences are 2u and -2u about a mean of 0, the entry's mean square 4u^2.

    With u = 1 for one and -1 for the other, and x = +-d: products +-(d^2 - 1), noise 4 / 4 * 2 / 1 = 2 in the same unit.
    Merging costs 2 (d^2 - 1), and saves 0.7 * 2.
    """
    for d2, together in ((1.69, True), (1.71, False)):
        d = math.sqrt(d2)
        first, second = torch.tensor([[d - 1], [-d + 1]]), torch.tensor([[d + 1], [-d - 1]])
        assert (len(set(alike(first, second).tolist())) == 1) is together


@pytest.mark.parametrize("clients", [0, 1])
def test_nobody_and_one_are_what_they_are(clients):
    assert alike(torch.ones(clients, 3), torch.zeros(clients, 3)).tolist() == list(range(clients))


# ---- what does not matter


@given(PULLS, st.randoms(use_true_random=False))
def test_another_order_of_clients_gives_the_same_groups(how, random):
    first, second = pulls(*how[:5])  # whoever has one sample fits anywhere as well
    order = list(range(len(first)))
    random.shuffle(order)
    moved = parts(alike(first[order], second[order]))
    assert sorted(sorted(order[i] for i in group) for group in moved) == parts(alike(first, second))


@given(PULLS, st.sampled_from([1e-6, 0.3, 7.0, 1e5]))
def test_the_scale_of_pulls_does_not_matter(how, scale):
    first, second = pulls(*how)
    assert torch.equal(alike(scale * first, scale * second), alike(first, second))


@given(PULLS, st.integers(0, 99))
def test_what_everybody_pulls_does_not_matter(how, seed):
    first, second = pulls(*how)
    same = 5 * draw(first.shape[1], seed=seed)
    assert torch.equal(alike(first + same, second + same), alike(first, second))


@given(PULLS, st.integers(0, 99))
def test_what_a_client_with_one_sample_pulls_does_not_matter(how, seed):
    first, second = pulls(*how[:5])
    found = []
    for scale in (0.0, 100.0):
        first[0] = second[0] = scale * draw(first.shape[1], seed=seed)
        found.append(alike(first, second))
    assert torch.equal(*found)


# ---- what is known of made-up pulls


def unweighed(monkeypatch, first, second):
    """Products and noise in the units of the pulls: beside the mean of all the noise of single entries is nothing."""
    monkeypatch.setattr(grouping, "PRIOR", 1e9)
    away = (first - first.mean(0)) - (second - second.mean(0))
    unit = 1e9 / (len(first) - 1) * float(away.square().mean())
    products, noise = differences(first, second, torch.ones(len(first), 1, dtype=torch.bool), everywhere(first)[1])
    return products[0] * unit, noise[0] * unit


def assert_mean(values, expected):
    assert abs(float(values.mean()) - expected) < 4 * float(values.std()) / math.sqrt(len(values))


def test_noise_differs_by_nothing_in_the_mean(monkeypatch):
    """Halves share no noise, so neither do their products; drawing them towards equal ones keeps their sum."""
    found = [unweighed(monkeypatch, *draw(2, 5, 20, seed=s))[0].diagonal().mean() for s in range(600)]
    assert_mean(torch.stack(found), 0.0)


def test_noise_and_differences_are_those_that_were_put_in(monkeypatch):
    """With variance 1, 4, 9, .. in halves of 20 entries the mean of both has 20 / 2 times that; distances are from the mean."""
    level, true = torch.arange(1.0, 6.0, dtype=torch.float64).unsqueeze(1), 2 * draw(5, 20, seed=9)
    away = float((true - true.mean(0)).square().sum())
    found = [unweighed(monkeypatch, *(true + level * draw(2, 5, 20, seed=s))) for s in range(600)]
    assert_mean(torch.stack([p.trace() for p, _ in found]), away)
    assert_mean(torch.stack([n.sum() for _, n in found]), 10.0 * (1 + 4 + 9 + 16 + 25))
    one = torch.stack([unweighed(monkeypatch, *draw(2, 5, 20, seed=s))[1] for s in range(600)])
    for i in range(5):
        assert_mean(one[:, i], 10.0)


def test_products_of_noise_alone_are_drawn_to_equal_ones():
    """Beside the diagonal 60 * 59 / 2 sums and as many differences: squares of either known to sqrt(2 / 1770); four times."""
    products = draw(60, 60)
    even, target = (products + products.T) / 2, (torch.eye(60) - 1 / 60) * products.trace() / 59
    left = (shrunk(one(products), torch.ones(60, 1, dtype=torch.bool))[0] - target).norm() / (even - target).norm()
    assert float(left) < 4 * math.sqrt(2 * 2 / 1770)


def test_products_without_noise_are_left_as_they_are():
    at = draw(6, 3)
    found = shrunk(one(at @ at.T), torch.ones(6, 1, dtype=torch.bool))
    torch.testing.assert_close(found[0], at @ at.T, rtol=0, atol=1e-12)


def test_clients_that_do_not_differ_share_one_head():
    """Of 1000 such draws 995 were one group: 3 of 40 that are not have a chance of 0.1%."""
    assert sum(parts(alike(*draw(2, 10, 200, seed=s))) == [list(range(10))] for s in range(40)) >= 38


def test_clients_that_all_differ_are_alone():
    """Squared distances of 9 times a half's variance beside 0.7 times half of it."""
    for s in range(20):
        first, second = 3 * draw(10, 50, seed=100 + s) + draw(2, 10, 50, seed=s)
        assert alike(first, second).tolist() == list(range(10))


@pytest.mark.parametrize("kinds", [2, 3])
def test_groups_are_found_exactly(kinds):
    """Kinds lie as far apart as two halves do by noise; in 600 entries both are known to 1 / sqrt(300)."""
    for s in range(20):
        of = torch.arange(9) % kinds
        first, second = draw(kinds, 600, seed=100 + s)[of] + draw(2, 9, 600, seed=s)
        assert alike(first, second).tolist() == of.tolist()


def test_a_difference_in_quiet_entries_is_found_among_loud_ones(monkeypatch):
    """500 entries with noise 1, in which clients differ by 3, and 500 with noise 10.

    Two groups in one cost 4 * 4 / 8 * 9 * 500 = 9000 and save a noise of 500 * 101 / 2 = 25250, times 0.7: as entries are, it
    pays. In units of noise (and 4 / 7 of 50.5) it costs 9000 / 30 = 300 and saves 500 / 30 / 2 + 500 * 100 / 129 / 2 = 202.
    """
    loud = torch.tensor([1.0, 10.0], dtype=torch.float64).repeat_interleave(500)
    apart = torch.tensor([3.0, 0.0], dtype=torch.float64).repeat_interleave(500)
    of = torch.arange(8) % 2
    first, second = apart * of.unsqueeze(1) + loud * draw(2, 8, 1000)
    assert alike(first, second).tolist() == of.tolist()
    monkeypatch.setattr(grouping, "PRIOR", 1e9)
    assert alike(first, second).tolist() != of.tolist()


def test_a_client_with_one_sample_is_not_alone_for_it():
    """With nobody who has halves, or one, there is nothing to tell anybody apart by."""
    for s in range(30):
        first, second = draw(2, 8, 300, seed=s)
        first[3] = second[3] = 50.0
        found = alike(first, second).tolist()
        assert found.count(found[3]) > 1
    for halved in (0, 1):
        first, second = draw(2, 4, 30)
        second[halved:] = first[halved:]
        assert alike(first, second).tolist() == [0] * 4


# ---- classes


def test_clients_are_compared_in_the_classes_that_both_have():
    """Two kinds of clients pull the row of class 0 apart. Whoever has class 1 alone contradicts nobody, and is not alone."""
    row = torch.tensor([0, 1]).repeat_interleave(200)
    for s in range(20):
        kind = torch.tensor([0.0, 2.0, 0.0, 2.0, 2.0, 0.0, 0.0])
        first, second = draw(2, 7, 400, seed=s)
        for half in (first, second):
            half[:, :200] += kind.unsqueeze(1) * draw(200, seed=100 + s)
        has = torch.tensor([[True, False]] * 5 + [[False, True]] * 2)
        found = alike(first, second, has, row).tolist()
        assert not {found[0], found[2]} & {found[1], found[3], found[4]}
        assert all(found.count(found[i]) > 1 for i in (5, 6))


def test_a_class_that_one_has_and_another_has_not_is_no_difference():
    """What the others pull in rows that they do not have is the same, and far from what those who have the class do."""
    row = torch.tensor([0, 1]).repeat_interleave(200)
    has = torch.tensor([[True, True], [True, False]] * 3)
    for s in range(20):
        first, second = draw(2, 6, 400, seed=s)
        for half in (first, second):
            half[1::2, 200:] -= 3.0
        assert parts(alike(first, second, has, row)) == [[0, 1, 2, 3, 4, 5]]
        assert len(parts(alike(first, second))) > 1  # if every row counted


def test_entries_of_a_linear_head_belong_to_its_outputs():
    plain = fs.Model.wrap(nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    assert outputs(plain) == 2
    head = {n: v.expand(5, *v.shape) for n, v in plain.init(0).items() if plain.is_head(n)}
    assert output_of(head, 2).tolist() == [0, 0, 0, 1, 1, 1, 0, 1]  # weight (2, 3), bias (2,)


def test_of_a_deep_head_the_last_layer_has_rows_of_outputs():
    deep = fs.Model.wrap(Deep(), head="head")
    assert outputs(deep) == 2
    head = {n: v.expand(5, *v.shape) for n, v in deep.init(0).items() if deep.is_head(n)}
    assert output_of(head, 2).tolist() == [2] * (2 * 4 + 2) + [0, 0, 1, 1, 0, 1]


def test_a_head_that_ends_in_no_linear_has_no_rows_of_outputs():
    deep = fs.Model.wrap(Deep(nn.PReLU()), head="head")
    assert outputs(deep) == 0
    head = {n: v.expand(5, *v.shape) for n, v in deep.init(0).items() if deep.is_head(n)}
    assert set(output_of(head, 0).tolist()) == {0}


class Deep(nn.Module):
    def __init__(self, *last):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
        self.head = nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 2), *last)

    def forward(self, x):
        return self.head(self.body(x))


# ---- what is refused


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"window": -1}, "window must not be negative, not -1"), ({"epochs": 0}, "epochs must be at least 1, not 0"),
        ({"finetune": -1}, "finetune must not be negative"), ({"lr": 0.0}, "lr must be positive"),
        ({"heads": "a b"}, "heads is find, or a number for each client as in '0 0 1 1', not 'a b'"),
        ({"heads": "0 -1"}, "heads is find, or a number for each client as in '0 0 1 1'"),
        ({"norm_stats": "mine"}, "norm_stats is local or shared"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(given, words):
    with pytest.raises(fs.InputError, match=words):
        fs.FedAlike(**given)


@pytest.mark.parametrize(("heads", "count"), [("0 0 1", 3), ("0 1 2 3 4 5", 6), ("", 0)])
def test_heads_for_another_number_of_clients_are_refused(heads, count):
    with pytest.raises(fs.InputError, match=f"heads has {count} numbers for 5 clients; give one for each"):
        simulation(fs.FedAlike(heads=heads))


def test_a_model_without_a_head_is_refused():
    model = fs.Model.wrap(nn.Sequential(nn.Conv2d(1, 10, 8), nn.Flatten()))
    with pytest.raises(fs.InputError, match="FedAlike needs to know the model's head"):
        Simulation(fs.FedAlike(), model, federation())


# ---- a window in a run

SIZES = (9, 1, 6, 3, 12)
NAMES = ("3.weight", "3.bias")


def federation(sizes=SIZES):
    full = fs.load("digits", clients=len(sizes), classes_per_client=3, train=20, test=6, seed=5)
    made = [fs.ClientData((c.train[0][:n], c.train[1][:n]), c.test) for c, n in zip(full.clients, sizes, strict=True)]
    return fs.Federation(made, 10)


def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Tanh(), nn.Linear(3, 10))


def simulation(method=None, data=None, **how):
    method = method or fs.FedAlike(3, epochs=2, lr=0.2, finetune=1)
    training = Training(batch_size=4, momentum=0.0)
    return Simulation(method, fs.Model.wrap(build), data or federation(), seed=4, training=training, **how)


def steps(sim, count):
    return [{k: v for k, v in sim.step().items() if k != "seconds"} for _ in range(count)]


def groups(sim):
    return sim.method.groups(sim.server).tolist()


def away(**how):
    return simulation(fraction=0.6, late=(2, 3), **how)


@pytest.mark.parametrize(("make", "rounds"), [(simulation, 5), (away, 16)])
def test_a_client_is_tested_after_a_window_of_its_own_pulls(make, rounds):
    """It has a pull in each round in which another takes part who is in the window too. Then what they sent is forgotten."""
    sim, counts, single = make(), [0] * len(SIZES), 0
    for _ in range(rounds):
        sent = steps(sim, 1)[0]["clients"]["bytes_up"]
        inside = [i for i, size in enumerate(sent) if size is not None and counts[i] < 3]
        single += len(inside) == 1
        for i in inside if len(inside) > 1 else ():
            counts[i] += 1
        assert sim.server["who"]["pulls"].tolist() == counts
        assert [g >= 0 for g in groups(sim)] == [c == 3 for c in counts]
        assert (sim.server.keys() & set(HALVES) == set(HALVES)) == (min(counts) < 3)
    assert (min(counts) == 3) == (not single)  # all are done, or the last waits for another


def test_whoever_meets_nobody_in_the_window_is_never_tested():
    sim = simulation(late=(1, 4))  # the others are done after three rounds
    steps(sim, 10)
    assert [g >= 0 for g in groups(sim)] == [True] * 4 + [False]
    assert sim.server["who"]["pulls"].tolist() == [3, 3, 3, 3, 0]
    assert set(HALVES) <= sim.server.keys()


def test_two_late_joiners_are_tested_together_with_all():
    sim = simulation(fs.FedAlike(2, epochs=2, lr=0.2, heads="7 8 7 8 7"), late=(2, 4))
    steps(sim, 4)
    assert groups(sim) == [0, 1, 0, -1, -1]
    steps(sim, 1)
    assert groups(sim) == [0, 1, 0, 1, 0]
    assert not sim.server.keys() & set(HALVES)


@pytest.mark.parametrize("window", [0, 1, 2])
def test_groups_that_are_told_are_those_that_share_a_head(window):
    sim = simulation(fs.FedAlike(window, epochs=1, lr=0.2, heads="5 0 5 10 0"))
    for r in range(3):
        assert groups(sim) == ([0, 1, 0, 3, 1] if r >= window else [-1] * 5)
        steps(sim, 1)
    heads = torch.cat([sim.server["heads"][n].flatten(1) for n in NAMES], 1)
    alike = [[torch.equal(a, b) for b in heads] for a in heads]
    assert alike == [[a == b for b in (0, 1, 0, 3, 1)] for a in (0, 1, 0, 3, 1)]


@pytest.mark.parametrize(
    ("heads", "late", "apart"),
    [
        ("0 0 0 0 0", None, False), ("0 0 0 0 1", None, True), ("0 1 2 3 4", None, True), ("find", None, True),
        ("0 0 0 0 0", (1, 4), True),  # who comes last is in no group, so that of the others is not everybody
    ],
)  # fmt: skip
def test_the_mask_is_the_head_of_whoever_shares_it_with_some_alone(heads, late, apart):
    sim = simulation(fs.FedAlike(2, epochs=1, lr=0.2, heads=heads), late=late)
    for _ in range(5):
        before = groups(sim)
        present = [size is not None for size in steps(sim, 1)[0]["clients"]["bytes_up"]]
        mask = sim.method.mask(sim.model, sim.store.rows)
        assert {n for n, m in mask.items() if m is not False} == set(NAMES)
        marks = [{bool(v) for n in NAMES for v in mask[n][i].flatten()} for i in range(len(SIZES))]
        for i in range(len(SIZES)):
            assert marks[i] == {before.count(before[i]) < len(SIZES)} or not present[i]
    assert marks == [{apart}] * len(SIZES)


def test_a_client_with_one_sample_has_no_pull():
    """What it trained is the same in both halves, and the mean of all is not: less either it would have no noise."""
    sim = simulation()
    steps(sim, 2)
    for half in HALVES:
        size = sum(sim.server[half][n].flatten(1).abs().sum(1) for n in NAMES)
        assert [bool(v == 0) for v in size] == [n == 1 for n in SIZES]


@pytest.mark.parametrize("seed", [1, 5])
def test_a_client_with_one_sample_shares_its_head_with_clients_that_do_not_differ(seed):
    full = fs.load("digits", clients=6, train=60, test=10, shift="none", seed=0)
    made = [
        fs.ClientData((c.train[0][:n], c.train[1][:n]), c.test) for c, n in zip(full.clients, (60,) * 5 + (1,), strict=True)
    ]
    data = fs.Federation(made, 10)
    how = {"seed": seed, "training": Training(batch_size=20)}
    sim = Simulation(fs.FedAlike(3, epochs=1, lr=0.1), fs.models.mlp(data, hidden=8), data, **how)
    steps(sim, 3)
    assert groups(sim).count(groups(sim)[5]) > 1


def test_two_groups_of_real_clients_are_found_and_share_their_heads_alone():
    data = fs.load("digits", clients=6, shift="groups", train=120, test=10, seed=4)
    how = {"seed": 4, "training": Training(batch_size=20)}
    sim = Simulation(fs.FedAlike(4, epochs=2, lr=0.1), fs.models.mlp(data, hidden=32), data, **how)
    for r in range(6):
        heads = [v for n, v in sim.server["heads"].items()]
        assert all(torch.equal(v, v[:1].expand_as(v)) == (r < 4) for v in heads)
        assert groups(sim) == ([-1] * 6 if r < 4 else [0, 0, 0, 3, 3, 3])
        for v in heads:
            assert torch.equal(v[:3], v[:1].expand_as(v[:3]))
            assert torch.equal(v[3:], v[3:4].expand_as(v[3:]))
        steps(sim, 1)


@pytest.mark.parametrize("how", [{}, {"fraction": 0.6, "late": (2, 3)}, {"rows": "personal"}])
@pytest.mark.parametrize("at", [2, 5])
def test_resumed_within_the_window_and_after_it_is_uninterrupted(how, at, tmp_path):
    method = fs.FedAlike(4, epochs=1, lr=0.2, finetune=1)
    whole, first, second = (simulation(method, **how) for _ in range(3))
    history = steps(whole, 8)
    steps(first, at)
    first.save(tmp_path)
    assert second.resume(tmp_path)
    assert steps(second, 8 - at) == history[at:]
    assert groups(second) == groups(whole)
    assert max(groups(whole)) >= 0
    ours, theirs = (sim.models(range(len(SIZES)), "merged") for sim in (second, whole))
    assert all(torch.equal(v, theirs[n]) for n, v in ours.items())
