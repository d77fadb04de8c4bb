"""The parts of differential privacy against slow, obvious ones: noise, accountant, clipping, budget."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest, norm

import fedselect as fs
from fedselect.core import entropy as entropies
from fedselect.core.entropy import Entropy
from fedselect.private import accountant, guarantee
from fedselect.private.budget import Budget
from fedselect.private.clients import PrivateMean, drawn, private_mean
from fedselect.private.guarantee import client_guarantee, of_clients, of_samples, split
from fedselect.private.settings import DELTA, Private
from fedselect.private.words import LOUD, statement


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("unit=sample", "private needs a budget: epsilon=8."),
        ("8", "'8' has no value; write epsilon=8, or with more options epsilon=8,unit=sample."),
        ("epsilon=0", "epsilon must be positive, not 0.0."),
        ("epsilon=1e6", "an epsilon of 1e+06 promises nothing; use at most 100, or inf for no noise."),
        ("epsilon=8,delta=2", "delta must be a probability between 0 and 1, not 2.0."),
        ("epsilon=8,clip=inf", "clip must be positive and finite, not inf."),
        ("epsilon=8,quantile=1", "quantile must be between 0 and 1, not 1.0."),
        ("epsilon=8,unit=sample,quantile=0.5", "quantile is for updates of clients; leave it out with unit=sample."),
        ("epsilon=8,unit=person", "unit is client or sample, not 'person'."),
        ("epsilon=8,colluding=-1", "colluding must be a number of clients, 0 or more, not -1."),
        ("epsilon=8,clips=1", "there is no option of --private 'clips'; did you mean 'clip'?"),
    ],
)
def test_what_cannot_be_promised_is_refused(text, said):
    with pytest.raises(fs.InputError) as e:
        Private.read(text)
    assert str(e.value) == said


@pytest.mark.parametrize("text", ["epsilon=8", "epsilon=inf,clip=0.5", "epsilon=2,unit=sample,delta=1e-06,seeded=yes"])
def test_a_promise_reads_as_it_is_written(text):
    assert str(Private.read(text)) == text
    assert Private.read(str(Private.read(text))) == Private.read(text)


def test_delta_is_small_beside_one_over_n():
    assert Private(8).delta_for(10) == DELTA
    assert Private(8).delta_for(10**6) == pytest.approx(10**-6.6)
    assert Private(8, delta=0.01).delta_for(10**6) == 0.01


# the second accountant: a grid of privacy losses, made by quadrature and added up by a Fourier transform


STEP, CELLS = 1e-3, 1 << 17


def losses(noise: float, share: float, sums: int, removed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Log ratios of the densities with and without one client, added up over all sums, and their probabilities."""
    x = np.linspace(-12 * noise - 1, 12 * noise + 2, 100_001)
    without = norm.pdf(x, 0, noise)
    with_ = (1 - share) * without + share * norm.pdf(x, 1, noise)
    p, q = (with_, without) if removed else (without, with_)
    keep = (p > 0) & (q > 0)
    one = np.zeros(CELLS)
    np.add.at(one, np.round(np.log(p[keep] / q[keep]) / STEP).astype(int) % CELLS, p[keep] * (x[1] - x[0]))
    at = np.arange(CELLS)
    return np.where(at < CELLS // 2, at, at - CELLS) * STEP, np.fft.irfft(np.fft.rfft(one) ** sums, CELLS)


def slow_epsilon(noise: float, share: float, sums: int, delta: float) -> float:
    """Where the larger delta of both directions is the one that was asked for."""
    both = [losses(noise, share, sums, removed) for removed in (True, False)]
    low, high = 0.0, 60.0
    while high - low > 1e-3:
        e = (low + high) / 2
        found = max(float((mass[loss > e] * -np.expm1(e - loss[loss > e])).sum()) for loss, mass in both)
        low, high = (low, e) if found <= delta else (e, high)
    return high


def renyi_epsilon(noise: float, share: float, sums: int, delta: float) -> float:
    """The bound by Renyi divergences of whole orders (Mironov, Talwar and Zhang 2019, section 3.3); never below the truth."""
    best = math.inf
    for order in range(2, 100):
        terms = [
            math.lgamma(order + 1) - math.lgamma(k + 1) - math.lgamma(order - k + 1)
            + (k * math.log(share) if k else 0.0) + ((order - k) * math.log1p(-share) if order > k else 0.0)
            + (k * k - k) / (2 * noise**2)
            for k in range(order + 1)
            if share < 1 or k == order
        ]  # fmt: skip
        divergence = np.logaddexp.reduce(terms) / (order - 1)
        best = min(best, sums * divergence + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1))
    return best


@pytest.mark.parametrize(("noise", "share", "sums"), [(1.0, 0.1, 30), (5.0, 1.0, 30), (0.8, 0.05, 200), (2.0, 0.5, 10)])
def test_the_accountant_agrees_with_another(noise, share, sums):
    ours = accountant.epsilon(noise, share, sums, 1e-5)
    assert ours == pytest.approx(slow_epsilon(noise, share, sums, 1e-5), rel=0.01, abs=0.01)
    assert ours <= renyi_epsilon(noise, share, sums, 1e-5)


@pytest.mark.parametrize(("noise", "sums"), [(1.0, 1), (3.0, 10), (20.0, 100)])
def test_without_sampling_epsilon_is_that_of_the_gaussian_mechanism(noise, sums):
    """Balle and Wang 2018, theorem 8: delta = Phi(mu/2 - eps/mu) - exp(eps) Phi(-mu/2 - eps/mu), mu = sqrt(sums) / noise."""
    epsilon, mu = accountant.epsilon(noise, 1.0, sums, 1e-5), math.sqrt(sums) / noise
    exact = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert exact == pytest.approx(1e-5, rel=0.02)


@pytest.mark.parametrize(("epsilon", "share", "sums"), [(8.0, 1.0, 30), (1.0, 0.1, 100), (20.0, 1.0, 1)])
def test_the_noise_is_the_least_that_keeps_the_budget(epsilon, share, sums):
    noise = accountant.least_noise(epsilon, 1e-5, share, sums)
    assert accountant.epsilon(noise, share, sums, 1e-5) <= epsilon
    assert accountant.epsilon(0.99 * noise, share, sums, 1e-5) > epsilon


def test_nothing_costs_nothing_and_no_noise_promises_nothing():
    assert accountant.epsilon(1.0, 1.0, 0, 1e-5) == 0
    assert accountant.epsilon(0.0, 1.0, 1, 1e-5) == math.inf
    assert accountant.least_noise(math.inf, 1e-5, 1.0, 30) == 0


def test_a_missing_library_is_named(monkeypatch):
    import sys

    accountant._one.cache_clear()
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    with pytest.raises(fs.RunError, match=r"pip install 'fedselect\[private\]'"):
        accountant.epsilon(1.5, 1.0, 1, 1e-5)


def test_each_client_has_noise_for_its_own_samples():
    few, many = (of_samples(Private(8, unit="sample"), n, batch_size=32, passes=2, rounds=10) for n in (50, 500))
    assert few.noise > many.noise
    assert (few.share, few.sums, many.share, many.sums) == (32 / 50, 4, 32 / 500, 32)
    assert max(few.epsilon(10), many.epsilon(10)) <= 8
    alone = of_samples(Private(8, unit="sample"), 5, batch_size=32, passes=2, rounds=10)
    assert (alone.share, alone.sums, alone.many) == (1.0, 2, 5)


@pytest.mark.parametrize(("noise", "many"), [(1.0, 1000), (5.0, 10), (0.5, 100)])
def test_the_count_has_its_share_of_the_budget(noise, many):
    """Two Gaussian releases at once are one of the mechanism whose inverse square noise is the sum of theirs."""
    update, count = split(noise, many)
    assert update**-2 + (2 * count) ** -2 == pytest.approx(noise**-2)
    assert (2 * count) ** -2 <= guarantee.COUNT_SHARE * noise**-2 * (1 + 1e-9)
    assert count >= many / 20
    assert split(0.0, many) == (0.0, 0.0)


# noise


@pytest.mark.parametrize("seeded", [False, True])
def test_noise_is_normal(seeded):
    drawn = Entropy(seeded).normal(torch.arange(4), 25_000)
    assert drawn.shape == (4, 25_000)
    for row in drawn:
        assert kstest(row.numpy(), "norm").pvalue > 1e-4
    assert abs(float((drawn[0] * drawn[1]).mean())) < 0.03
    assert abs(float((drawn[:, :12_500] * drawn[:, 12_500:]).mean())) < 0.03  # both halves of Box and Muller's pairs


def test_noise_comes_from_the_system_and_is_never_the_same(monkeypatch):
    asked = []
    urandom = entropies.os.urandom
    monkeypatch.setattr(entropies.os, "urandom", lambda n: asked.append(n) or urandom(n))
    keys = torch.zeros(1, dtype=torch.int64)
    assert not torch.equal(Entropy().normal(keys, 100), Entropy().normal(keys, 100))
    assert asked == [800, 800]
    torch.manual_seed(0)
    first = Entropy().uniform(keys, 5)
    torch.manual_seed(0)
    assert not torch.equal(first, Entropy().uniform(keys, 5))
    assert torch.equal(Entropy(True).normal(keys, 100), Entropy(True).normal(keys, 100))
    assert len(asked) == 4


def test_noisy_numbers_lie_on_a_grid():
    values = torch.rand(2, 1000, dtype=torch.float64)
    noisy = Entropy().noised(values, torch.tensor([0.3, 0.0]), torch.arange(2))
    grid = 2.0 ** (math.floor(math.log2(0.3)) - entropies.GRID)
    assert torch.equal(noisy[0], (noisy[0] / grid).round() * grid)
    assert torch.equal(noisy[1], values[1])
    assert float((noisy[0] - values[0]).std()) == pytest.approx(0.3, rel=0.1)


# the sum


NAMES = ("w", "b")
PARAMS = {"w": torch.linspace(-1, 1, 6).view(2, 3), "b": torch.zeros(2), "kept": torch.ones(3)}


def aggregator(clip=1.0, noise=0.0, expected=3.0, then=None, **how):
    return PrivateMean(then or fs.Mean(), NAMES, clip, noise, expected, **how)


def folded(how, uploads, state=None):
    fold = how.fold(how.start(PARAMS) if state is None else state, PARAMS)
    for update in uploads:
        values = {n: (PARAMS[n] + update[n]).unsqueeze(0) for n in PARAMS}
        fold.add(values, dict.fromkeys(NAMES, True), torch.ones(1))
    return fold.finish()


def updates(count, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [{n: size * torch.randn(v.shape, generator=generator) for n, v in PARAMS.items()} for _ in range(count)]


def test_the_sum_is_that_of_plain_loops():
    """Clip each update over all its tensors, add, divide by what is expected; what is not shared does not come back."""
    sent = updates(5, 1.0)
    mean, heard, memory = folded(aggregator(clip=0.7, expected=8.0), sent)
    assert set(mean) == set(NAMES)
    assert set(heard) == set(NAMES)
    total = {n: np.zeros(PARAMS[n].shape) for n in NAMES}
    for update in sent:
        length = math.sqrt(sum(float((update[n].double() ** 2).sum()) for n in NAMES))
        for n in NAMES:
            total[n] += update[n].double().numpy() * min(1.0, 0.7 / length)
    for n in NAMES:
        np.testing.assert_allclose(mean[n].numpy(), PARAMS[n].numpy() + total[n] / 8.0, rtol=1e-5, atol=1e-6)
    assert int(memory["private"]["round"]) == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 5), st.integers(0, 2**31), st.floats(1e-3, 1e3), st.floats(0.01, 10.0))
def test_one_client_moves_the_sum_by_at_most_the_clip(others, seed, size, clip):
    """With it or without it, whatever it sends: that is what the noise is a multiple of."""
    sent = updates(others + 1, size, seed)
    expected = 4.0
    with_, without = (folded(aggregator(clip, expected=expected), s)[0] for s in (sent, sent[1:]))
    moved = math.sqrt(sum(float((with_[n].double() - without[n].double()).square().sum()) for n in NAMES)) * expected
    rounding = 1e-6 * (2 + size)  # shared values are float32
    assert moved <= clip + rounding * expected


def test_the_noise_of_the_sum_has_the_deviation_that_was_promised():
    how = aggregator(clip=0.5, noise=3.0, expected=4.0)
    drawn = torch.stack([torch.cat([folded(how, [])[0][n].flatten() - PARAMS[n].flatten() for n in NAMES]) for _ in range(400)])
    assert float(drawn.double().std()) * 4.0 == pytest.approx(1.5, rel=0.05)
    assert kstest((drawn.flatten() * 4.0 / 1.5).numpy(), "norm").pvalue > 1e-4
    cross = torch.corrcoef(drawn.double().T) - torch.eye(8)
    assert float(cross.abs().max()) < 0.25  # each entry has noise of its own


def test_the_noise_of_the_count_that_moves_the_clip_has_the_deviation_that_was_promised():
    """Of five updates all are within the clip: clip exp(-0.2 (5/2 + noise) / 4) at a quantile of one half."""
    how = aggregator(clip=9.0, expected=4.0, quantile=0.5, count_noise=3.0)
    sent = updates(5, 1e-3)
    clips = torch.stack([folded(how, sent)[2]["private"]["clip"] for _ in range(1000)])
    noise = (clips / 9.0).log() * 4.0 / -0.2 - 2.5
    assert kstest((noise / 3.0).numpy(), "norm").pvalue > 1e-4


def test_a_private_mean_has_the_noise_of_its_guarantee():
    """The sum and the count together cost what the guarantee says; with a fixed clip there is no count."""
    fixed, moving = Private(8), Private(8, quantile=0.5)
    for private in (fixed, moving):
        promised = client_guarantee(private, 100, 0.5, 10, entries=8)
        how = private_mean(promised, fs.Mean(), NAMES, seed=0)
        found = how.noise**-2 + ((2 * how.count_noise) ** -2 if how.count_noise else 0.0)
        assert found == pytest.approx(promised.lots[0].noise ** -2)
        assert (how.count_noise > 0) is (private is moving)
        assert (how.expected, how.seed) == (50.0, None)


def test_what_the_server_does_with_the_mean_comes_after_the_noise():
    sent = updates(3, 0.1)
    how = aggregator(clip=10.0, then=fs.Mean(server_momentum=0.5))
    mean, _, state = folded(how, sent)
    again, _, _ = folded(how, sent, state)
    for n in NAMES:  # the second step is the first and half of it once more
        torch.testing.assert_close(again[n] - PARAMS[n], 1.5 * (mean[n] - PARAMS[n]), rtol=1e-4, atol=1e-6)


def test_an_adaptive_clip_goes_to_the_quantile():
    """Andrew et al. 2021: it grows while fewer than the quantile are within it, else it falls."""
    sent = [
        {n: torch.full(v.shape, float(k) / math.sqrt(8)) for n, v in PARAMS.items()} for k in range(1, 10)
    ]  # lengths 1 to 9
    how = aggregator(clip=0.1, expected=9.0, quantile=0.5)
    state, seen = None, []
    for _ in range(120):
        _, _, state = folded(how, sent, state)
        seen.append(float(state["private"]["clip"]))
    assert seen[0] == pytest.approx(0.1 * math.exp(0.2 * 0.5))  # nobody is within it
    assert seen[0] < seen[20] < seen[-1]
    assert 4.0 <= seen[-1] <= 5.1
    assert float(folded(how, sent, {"private": {**state["private"], "clip": torch.tensor(90.0)}})[2]["private"]["clip"]) < 90


def test_a_cohort_is_drawn_client_by_client():
    ids = torch.arange(2000)
    counts = [len(drawn(ids, 0.3, Entropy(), 0, r)) for r in range(20)]
    assert len(set(counts)) > 1
    assert sum(counts) / 20 == pytest.approx(600, rel=0.05)
    assert torch.equal(drawn(ids.flip(0), 1.0, Entropy(), 0, 0), ids)
    first = drawn(ids, 0.3, Entropy(True), 5, 1)
    assert torch.equal(drawn(ids, 0.3, Entropy(True), 5, 1), first)
    assert not torch.equal(drawn(ids, 0.3, Entropy(True), 5, 2), first)


# what is said and kept


def test_the_statement_warns_where_it_is_hopeless():
    ten = client_guarantee(Private(8), 10, 1.0, 100, entries=11_000_000)
    assert 1900 < ten.ratio < 2200  # the noise of a mean over ten clients beside an update of ResNet18
    assert "WARNING: this noise drowns" in statement(ten)
    assert "WARNING: this noise will cost" in statement(client_guarantee(Private(8), 10, 1.0, 100, entries=1000))
    said = statement(client_guarantee(Private(8), 10_000, 1.0, 100, entries=1000))
    assert "WARNING" not in said
    for word in (
        "epsilon 8",
        "delta 1e-05",
        "all data of one client",
        "clipped to length 1",
        "must be trusted",
        "test scores",
    ):
        assert word in said
    assert client_guarantee(Private(8), 10_000, 1.0, 100, entries=1000).ratio < LOUD
    secret = "They must not learn which clients train in which round."  # from which follows that less noise will do
    assert secret in statement(client_guarantee(Private(8), 10_000, 0.1, 100, entries=1000))
    assert secret not in said
    assert "NOT private" in statement(client_guarantee(Private(8, seeded=True), 10, 1.0, 3, entries=10))


def test_a_budget_is_charged_first_and_never_given_back(tmp_path):
    promised, place = client_guarantee(Private(8), 10, 1.0, 3, entries=10), tmp_path / "budget.jsonl"
    budget = Budget(promised, place)
    assert (budget.spent, budget.spent_so_far) == (False, 0.0)
    budget.charge(1)
    budget.charge(2)
    again = Budget(promised, place)  # after a crash: round 2 runs again
    assert again.charged == 2
    again.charge(2)
    assert again.spent
    assert again.spent_so_far == pytest.approx(8, rel=0.01)
    with pytest.raises(fs.RunError, match="the privacy budget is spent: 3 rounds were charged"):
        again.charge(3)
    with place.open("a") as file:
        file.write('{"rou')  # cut off by a crash
    assert Budget(promised, place).charged == 4


@pytest.mark.parametrize("jump", [0, 40])
def test_a_flipped_bit_in_a_budget_frees_nothing_and_is_not_believed(tmp_path, jump):
    """Whatever bit flips, what was charged stays charged, and at most one round more. `jump`: as after a lost vault."""
    place = tmp_path / "budget.jsonl"
    budget = Budget(client_guarantee(Private(8), 10, 1.0, 100, entries=10), place)
    for round in range(1, 4):
        budget.charge(round, before=jump)
    whole = place.read_bytes()
    for at in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[at // 8] ^= 1 << at % 8
        place.write_bytes(flipped)
        assert jump + 3 <= Budget(budget.guarantee, place).charged <= jump + 4, flipped


def test_a_line_after_one_that_was_cut_off_counts_for_itself(tmp_path):
    promised, place = client_guarantee(Private(8), 10, 1.0, 5, entries=10), tmp_path / "budget.jsonl"
    Budget(promised, place).charge(1)
    with place.open("a") as file:
        file.write('{"round": 2, "cha')
    Budget(promised, place).charge(2)
    assert Budget(promised, place).charged == 3
    assert len(place.read_text().splitlines()) == 3


def test_epsilon_grows_round_by_round_to_the_budget():
    lot = of_clients(Private(4), 100, 0.2, 10)
    spent = [lot.epsilon(r) for r in range(11)]
    assert spent == sorted(spent)
    assert spent[0] == 0
    assert 3.9 < spent[-1] <= 4
