"""FedAlike: who is alike, against a slow reference and made-up profiles; profiles of data; what a run promises."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from slow import class_means, groups_alike, row_products
from torch import nn

import fedselect as fs
from fedselect.methods import grouping
from fedselect.methods.grouping import alike, merged, products, profile, profiles, votes
from fedselect.simulate import Simulation
from fedselect.simulate.stack import Stack
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


MADE = st.tuples(
    st.integers(1, 6),  # clients
    st.integers(1, 5),  # rows
    st.integers(1, 8),  # features
    st.integers(1, 3),  # kinds of clients
    st.sampled_from([0.0, 0.3, 2.0]),  # noise
    st.sampled_from([0.0, 0.4]),  # the share of rows that clients lack
    st.integers(0, 10**6),
)


def made(clients, rows, features, kinds=1, noise=1.0, lacking=0.0, seed=0):
    """Profiles of either half: rows of a kind, a shift of each client's own, noise of a loudness that features have."""
    true = draw(kinds, rows, features, seed=seed)[torch.arange(clients) % kinds] + 3 * draw(clients, 1, features, seed=seed + 1)
    loud = draw(features, seed=seed + 2).exp()
    first, second = (true + noise * loud * draw(clients, rows, features, seed=seed + s) for s in (3, 4))
    has = torch.rand(clients, rows, generator=torch.Generator().manual_seed(seed + 5)) >= lacking
    return first * has.unsqueeze(-1), second * has.unsqueeze(-1), has


# ---- the rule, slowly


@given(MADE)
def test_products_are_those_of_the_slow_reference(how):
    first, second, has = made(*how)
    between, own = row_products(first.tolist(), second.tolist(), has.tolist())
    if bool((first == second).all()):
        return  # without noise there is no unit to count in
    got = products(first, second, has)
    torch.testing.assert_close(got[0], torch.tensor(between, dtype=torch.float64), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(got[1], torch.tensor(own, dtype=torch.float64), rtol=1e-8, atol=1e-8)


@given(MADE.filter(lambda how: how[4] > 0))
def test_who_is_alike_is_what_the_slow_reference_finds(how):
    first, second, has = made(*how)
    assert parts(alike(first, second, has)) == groups_alike(first.tolist(), second.tolist(), has.tolist())


def test_votes_are_counted_by_hand():
    """0 and 1 like each other by 3, both dislike 2, but 0 less than 1: -1 and -4. 3 does not care about anybody."""
    between = torch.tensor([[0.0, 3, -1, 0], [3, 0, -4, 0], [-1, -4, 0, 0], [0, 0, 0, 0]])
    assert merged(between).tolist() == [0, 0, 2, 0]  # of groups that 3 could join that of 0 and 1 is the largest
    between[0, 2] = between[2, 0] = 5.0  # 2 joins 0 first; 1 then has 3 - 4 votes
    assert merged(between).tolist() == [0, 1, 0, 0]
    between[1, 2] = between[2, 1] = -2.0
    assert merged(between).tolist() == [0, 0, 0, 0]


def test_half_of_what_rows_differ_in_is_where_clients_part():
    """Two rows at +-1 in one client and at +-c in the other: |x|^2 is 2 and 2 c^2, their product 2 c.

    So the vote is 2 c - (2 + 2 c^2) / 4, which is 0 at c = 2 - sqrt(3) = 0.268 and positive from there to 3.73.
    """
    for c, together in ((0.26, False), (0.28, True), (1.0, True), (3.7, True), (3.8, False), (-1.0, False)):
        rows = torch.tensor([[[1.0], [-1.0]], [[c], [-c]]])
        noise = 1e-6 * torch.tensor([[[1.0], [0.0]], [[0.0], [0.0]]])  # the unit, whatever it is
        has = torch.ones(2, 2, dtype=torch.bool)
        assert (len(parts(alike(rows + noise, rows - noise, has))) == 1) is together, c


@pytest.mark.parametrize("clients", [0, 1])
def test_nobody_and_one_are_what_they_are(clients):
    rows = torch.ones(clients, 3, 2)
    assert alike(rows, rows, torch.ones(clients, 3, dtype=torch.bool)).tolist() == list(range(clients))


# ---- what does not matter


@given(MADE.filter(lambda how: how[4] > 0 and how[5] == 0), st.randoms(use_true_random=False))
def test_another_order_of_clients_gives_the_same_groups(how, random):
    first, second, has = made(*how)
    order = list(range(len(first)))
    random.shuffle(order)
    moved = parts(alike(first[order], second[order], has[order]))
    assert sorted(sorted(order[i] for i in group) for group in moved) == parts(alike(first, second, has))


@given(MADE.filter(lambda how: how[4] > 0), st.sampled_from([1e-6, 0.3, 1e5]))
def test_the_scale_of_features_does_not_matter(how, scale):
    first, second, has = made(*how)
    assert torch.equal(alike(scale * first, scale * second, has), alike(first, second, has))


@given(MADE.filter(lambda how: how[4] > 0), st.integers(0, 99))
def test_what_shifts_all_rows_of_a_client_does_not_matter(how, seed):
    first, second, has = made(*how)
    away = 5 * draw(len(first), 1, first.shape[2], seed=seed) * has.unsqueeze(-1)
    torch.testing.assert_close(votes(first + away, second + away, has), votes(first, second, has), rtol=1e-6, atol=1e-6)


@given(MADE.filter(lambda how: how[4] > 0), st.integers(0, 99))
def test_what_a_client_says_of_rows_it_lacks_does_not_matter(how, seed):
    first, second, has = made(*how)
    other = torch.where(has.unsqueeze(-1), 0.0, draw(*first.shape, seed=seed))
    assert torch.equal(votes(first + other, second + other, has), votes(first, second, has))


# ---- what is known of made-up profiles


def test_noise_has_no_part_in_products_in_the_mean(monkeypatch):
    """Over 500 draws the mean is within four standard errors of what it is without noise, also of i with itself.

    With all features in one unit: else a draw in which halves agree by chance counts a little more.
    """
    monkeypatch.setattr(grouping, "LEAST", 1e12)
    has, true = torch.ones(4, 5, dtype=torch.bool), draw(4, 5, 6, seed=9999)
    for part in (0, 1):
        found = torch.stack([_in_unit(true + draw(2, 4, 5, 6, seed=s), has)[part] for s in range(500)])
        centred = true - true.mean(1, keepdim=True)
        want = torch.einsum("ird,jrd->ij", centred, centred)
        want = want if part == 0 else want.diagonal().unsqueeze(1).expand(4, 4)
        off = ~torch.eye(4, dtype=torch.bool) if part == 0 else torch.ones(4, 4, dtype=torch.bool)
        error = found.std(0) / 500**0.5
        assert bool(((found.mean(0) - want).abs() < 4 * error)[off].all())


def _in_unit(halves, has):
    """Products as features are, not divided by their noise."""
    away = (halves[0] - halves[1]).square().sum((0, 1))
    return [v * (away + grouping.LEAST * away.mean()).mean() for v in products(halves[0], halves[1], has)]


@pytest.mark.parametrize("kinds", [1, 2, 3, 9])
@pytest.mark.parametrize("lacking", [0.0, 0.3])
def test_groups_are_found_exactly(kinds, lacking):
    """Nine clients, 16 rows of 60 features; noise is as large as what rows differ in."""
    for s in range(10):
        found = alike(*made(9, 16, 60, kinds, 1.0, lacking, seed=100 * s))
        assert found.tolist() == (torch.arange(9) % kinds).tolist()


def test_clients_without_two_rows_in_common_join_the_largest_group():
    first, second, has = made(5, 4, 60, 2, 0.5, seed=7)  # 0, 2, 4 and 1, 3
    has[4] = torch.tensor([True, False, False, False])
    assert alike(first, second, has)[4] == 0
    has[:] = torch.eye(5, 4, dtype=torch.bool)
    assert alike(first, second, has).tolist() == [0] * 5


def test_a_difference_in_quiet_features_is_found_among_loud_ones():
    """Of 40 features 20 tell two kinds apart, with noise 0.5; the others have noise 5 and nothing to say."""
    kind = torch.arange(8) % 2
    for s in range(10):
        true = torch.zeros(8, 6, 40, dtype=torch.float64)
        true[:, :, :20] = draw(2, 6, 20, seed=s)[kind]
        loud = torch.tensor([0.5] * 20 + [5.0] * 20)
        first, second = (true + loud * draw(8, 6, 40, seed=100 + 2 * s + half) for half in (0, 1))
        assert alike(first, second, torch.ones(8, 6, dtype=torch.bool)).tolist() == kind.tolist()


# ---- profiles

SIZES = (9, 1, 6, 3, 12)
NAMES = ("3.weight", "3.bias")


def federation(sizes=SIZES):
    full = fs.load("digits", clients=len(sizes), classes_per_client=3, train=20, test=6, seed=5)
    made = [fs.ClientData((c.train[0][:n], c.train[1][:n]), c.test) for c, n in zip(full.clients, sizes, strict=True)]
    return fs.Federation(made, 10)


def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Tanh(), nn.Linear(3, 10))


def simulation(method=None, data=None, **how):
    method = method or fs.FedAlike(epochs=2, lr=0.2, finetune=1)
    training = Training(batch_size=4, momentum=0.0)
    return Simulation(method, fs.Model.wrap(build), data or federation(), seed=4, training=training, **how)


def work_of(sim):
    return Stack([sim]).work(torch.arange(sim.clients), 0)


def test_a_profile_of_classes_is_the_mean_of_their_features():
    sim = simulation()
    work = work_of(sim)
    found, body = profile(work, work.initial), sim.model.module[:-1]
    body.load_state_dict({n: v for n, v in sim.initial.items() if not n.startswith("3")})
    for i, client in enumerate(sim.data.clients):
        x, y = client.train
        want = class_means(body, x.float(), y)
        assert found["has"][i].nonzero().flatten().tolist() == sorted(want)
        for k in range(10):
            torch.testing.assert_close(found["rows"][i, k], torch.tensor(want.get(k, [0.0] * 3)), rtol=1e-4, atol=1e-5)


def test_a_client_with_one_sample_has_no_profile():
    found = profiles(work_of(simulation()))
    assert [bool(h) for h in found["has"].any(1)][:3] == [True, False, True]  # of three samples no class may be in both halves
    assert not bool(found["first"][1].any())


@pytest.mark.parametrize("several", [False, True])
def test_a_profile_of_numbers_is_half_the_slope_of_features_up_and_down(several):
    """Targets 0 and 1 have the means of two classes, less the mean of both."""
    x = draw(60, 5).float()
    y = torch.stack([(x[:, 0] > 0).float(), x[:, 1] * 2 + 3], 1) if several else (x[:, 0] > 0).float()
    data = fs.Federation([fs.ClientData((x[:40], y[:40]), (x[40:], y[40:]))])
    model = fs.Model.wrap(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2 if several else 1)))
    sim = Simulation(fs.FedAlike(), model, data, task=fs.Regression())
    work = work_of(sim)
    found = profile(work, work.initial)
    with torch.no_grad():
        layer = nn.Linear(5, 4)
        layer.load_state_dict({n.removeprefix("0."): v for n, v in sim.initial.items() if n.startswith("0.")})
        f, t = layer(x[:40]).double(), y[:40].double().view(40, -1)
    high, low = (f[t[:, 0] == v].mean(0) for v in (1.0, 0.0))
    half = (high - low) / 2
    torch.testing.assert_close(found["rows"][0, 0].double(), half, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["rows"][0, 2 if several else 1].double(), -half, rtol=1e-4, atol=1e-5)
    if several:
        slope = ((f - f.mean(0)) * (t[:, 1:] - t[:, 1:].mean(0))).sum(0) / (t[:, 1] - t[:, 1].mean()).square().sum()
        torch.testing.assert_close(found["rows"][0, 1].double(), slope / 2, rtol=1e-4, atol=1e-5)
    assert bool(found["has"].all())


def test_a_profile_of_sequences_counts_positions_that_have_a_class():
    """A body that looks at each position alone: of features 0, 1, 2 at classes 1, 0, 1 class 1 has the mean 1."""

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(1, 1, bias=False), nn.Linear(1, 3)
            nn.init.ones_(self.body.weight)

        def forward(self, x):
            return self.head(self.body(x.unsqueeze(-1)))

    x = torch.tensor([[0.0, 1.0, 2.0, 50.0]] * 4)
    y = torch.tensor([[1, 0, 1, -100]] * 4)
    data = fs.Federation([fs.ClientData((x, y), (x, y))], 3)
    sim = Simulation(fs.FedAlike(), fs.Model.wrap(Positions, head="head"), data, task=fs.Sequences())
    work = work_of(sim)
    found = profile(work, work.initial)
    assert found["has"][0].tolist() == [True, True, False]
    assert found["rows"][0].flatten().tolist() == [1.0, 1.0, 0.0]


# ---- what is refused


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"epochs": 0}, "epochs must be at least 1, not 0"), ({"finetune": -1}, "finetune must not be negative"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"heads": "a b"}, "heads must be 'find' or one group number per client, such as '0 0 1 1', not 'a b'"),
        ({"heads": "0 -1"}, "heads must be 'find' or one group number per client, such as '0 0 1 1'"),
        ({"norm_stats": "mine"}, "norm_stats is local or shared"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(given, words):
    with pytest.raises(fs.InputError, match=words):
        fs.FedAlike(**given)


@pytest.mark.parametrize(("heads", "count"), [("0 0 1", 3), ("0 1 2 3 4 5", 6), ("", 0)])
def test_heads_for_another_number_of_clients_are_refused(heads, count):
    with pytest.raises(fs.InputError, match=f"heads has {count} numbers for 5 clients; give one number per client"):
        simulation(fs.FedAlike(heads=heads))


def test_a_model_without_a_head_is_refused():
    model = fs.Model.wrap(nn.Sequential(nn.Conv2d(1, 10, 8), nn.Flatten()))
    with pytest.raises(fs.InputError, match="FedAlike needs the model's head"):
        Simulation(fs.FedAlike(), model, federation())


# ---- in a run


def steps(sim, count):
    return [{k: v for k, v in sim.step().items() if k != "seconds"} for _ in range(count)]


def groups(sim):
    return sim.method.groups(sim.server).tolist()


def test_a_client_is_known_after_its_first_round_and_its_profile_is_forgotten_when_all_are():
    sim, seen = simulation(fraction=0.4, late=(2, 3)), set()
    for _ in range(16):
        sent = steps(sim, 1)[0]["clients"]["bytes_up"]
        seen |= {i for i, size in enumerate(sent) if size is not None}
        assert {i for i, g in enumerate(groups(sim)) if g >= 0} == seen
        assert ("profiles" in sim.server) == (len(seen) < len(SIZES))
    assert len(seen) == len(SIZES)


def test_whoever_has_not_taken_part_begins_with_the_mean_of_all_heads():
    sim = simulation(late=(1, 3))
    steps(sim, 2)
    models = sim.models(range(4), "local")
    for n in NAMES:
        torch.testing.assert_close(sim.server["heads"][n][4], models[n].double().mean(0).float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("late", [None, (2, 2)])
def test_groups_that_are_told_are_those_that_share_a_head(late):
    sim = simulation(fs.FedAlike(epochs=1, lr=0.2, heads="5 0 5 10 0"), late=late)
    for _ in range(4):
        assert groups(sim) == [0, 1, 0, 3, 1]
        steps(sim, 1)
    heads = torch.cat([sim.server["heads"][n].flatten(1) for n in NAMES], 1)
    alike = [[torch.equal(a, b) for b in heads] for a in heads]
    assert alike == [[a == b for b in (0, 1, 0, 3, 1)] for a in (0, 1, 0, 3, 1)]


@pytest.mark.parametrize(("heads", "apart"), [("0 0 0 0 0", False), ("0 0 0 0 1", True), ("0 1 2 3 4", True)])
def test_the_mask_is_the_head_of_whoever_shares_it_with_some_alone(heads, apart):
    sim = simulation(fs.FedAlike(epochs=1, lr=0.2, heads=heads))
    steps(sim, 2)
    mask = sim.method.mask(sim.model, sim.store.rows)
    assert {n for n, m in mask.items() if m is not False} == set(NAMES)
    marks = [{bool(v) for n in NAMES for v in mask[n][i].flatten()} for i in range(len(SIZES))]
    assert marks == [{apart}] * len(SIZES)


@pytest.mark.parametrize("seed", [1, 5])
def test_a_client_with_one_sample_shares_its_head_with_clients_that_do_not_differ(seed):
    full = fs.load("digits", clients=6, train=60, test=10, shift="none", seed=0)
    made = [
        fs.ClientData((c.train[0][:n], c.train[1][:n]), c.test) for c, n in zip(full.clients, (60,) * 5 + (1,), strict=True)
    ]
    data = fs.Federation(made, 10)
    sim = Simulation(fs.FedAlike(epochs=1), fs.models.mlp(data, hidden=16), data, seed=seed)
    steps(sim, 1)
    assert groups(sim) == [0] * 6


KINDS = {
    "none": {"shift": "none"}, "five classes": {"shift": "labels", "classes_per_client": 5},
    "uneven classes": {"shift": "labels", "split": "dirichlet", "concentration": 0.5}, "groups": {"shift": "groups"},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [3, 4])
def test_real_clients_are_told_apart_where_they_contradict_each_other_alone(kind, seed):
    data = fs.load("digits", clients=6, train=80, test=10, val=0, seed=seed, **KINDS[kind])
    sim = Simulation(fs.FedAlike(epochs=1), fs.models.mlp(data), data, seed=seed, training=Training(batch_size=20))
    steps(sim, 1)
    assert groups(sim) == ([0, 0, 0, 3, 3, 3] if kind == "groups" else [0] * 6)
    for v in sim.server["heads"].values():
        assert torch.equal(v[:3], v[:1].expand_as(v[:3]))
        assert torch.equal(v[3:], v[3:4].expand_as(v[3:]))
        assert torch.equal(v[0], v[3]) == (kind != "groups")


def test_a_profile_is_sent_once():
    """What is sent later is zeros, so a server that does not ask again learns nothing more."""
    sent = []

    class Spied(fs.FedAlike):
        def server(self, server, got):
            sent.append({n: v.clone() for n, v in got.extra["profile"].items()})
            return super().server(server, got)

    sim = simulation(Spied(epochs=1, finetune=1))
    steps(sim, 3)
    assert bool(sent[0]["first"].any())
    assert not any(bool(v.any()) for later in sent[1:] for v in later.values())


@pytest.mark.parametrize("how", [{}, {"fraction": 0.6, "late": (2, 3)}, {"rows": "personal"}])
@pytest.mark.parametrize("at", [1, 4])
def test_resumed_is_uninterrupted(how, at, tmp_path):
    method = fs.FedAlike(epochs=1, lr=0.2, finetune=1)
    whole, first, second = (simulation(method, **how) for _ in range(3))
    history = steps(whole, 7)
    steps(first, at)
    first.save(tmp_path)
    assert second.resume(tmp_path)
    assert steps(second, 7 - at) == history[at:]
    assert groups(second) == groups(whole)
    assert max(groups(whole)) >= 0
    ours, theirs = (sim.models(range(len(SIZES)), "merged") for sim in (second, whole))
    assert all(torch.equal(v, theirs[n]) for n, v in ours.items())
