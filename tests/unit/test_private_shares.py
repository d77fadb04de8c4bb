"""Noise that clients add in shares: its distribution and what it costs against slow, exact ones; the sum in a simulation."""

import math

import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

import fedselect as fs
from fedselect.core.entropy import Entropy
from fedselect.private import accountant
from fedselect.private.guarantee import shared_guarantee
from fedselect.private.settings import Private
from fedselect.private.shares import FINE, Shares, are_enough, check_cohort
from fedselect.private.words import statement
from fedselect.secret.mean import coded
from fedselect.secret.protocol import Cohort
from fedselect.secret.ring import CLIENTS, IS_NEAR, OVER, Ring
from fedselect.simulate import Simulation


def discrete(std: float, reach: int) -> np.ndarray:
    """Probabilities of -reach to reach."""
    weight = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * std**2))
    return weight / weight.sum()


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("std", [0.6, 1.0, 5.7])
def test_whole_noise_is_the_discrete_gaussian(seeded, std):
    reach = math.ceil(3 * std) - 1  # so that hundreds are expected beyond it: with less than one, the test would be wrong
    found = Entropy(seeded).whole(std, torch.arange(4), 10_000).flatten().numpy()
    assert np.array_equal(found, np.round(found))
    counts = np.array([(found == k).sum() for k in range(-reach, reach + 1)])
    inside = discrete(std, 12 * reach)[11 * reach : 13 * reach + 1]
    counts, wanted = np.append(counts, len(found) - counts.sum()), np.append(inside, 1 - inside.sum()) * len(found)
    assert chisquare(counts, wanted).pvalue > 1e-4


def test_whole_noise_follows_from_keys_however_clients_are_stacked():
    """And is as wide as it should be where steps are fine."""
    keys = torch.arange(3)
    stacked = Entropy(True).whole(1e5, keys, 4000)
    assert torch.equal(stacked[1:2], Entropy(True).whole(1e5, keys[1:2], 4000))
    assert float(stacked.std()) == pytest.approx(1e5, rel=0.05)
    assert not torch.equal(Entropy().whole(9.0, keys, 50), Entropy().whole(9.0, keys, 50))
    assert bool((Entropy().whole(0.0, keys, 50) == 0).all())


def summed(std: float, clients: int) -> np.ndarray:
    """Probabilities of the sum of so many shares."""
    one = discrete(std, math.ceil(30 * std))
    found = one
    for _ in range(clients - 1):
        found = np.convolve(found, one)
    return found


def wobble(std: float, clients: int) -> float:
    """How far a sum of shares is from a discrete Gaussian: the largest log ratio of the two over the smallest, at most.

    Let p_k be the sum of k shares, and p_k(x) = h_k(x) exp(-x²/(2 k s²)). One share more:
      h_k+1(x) = c sum over y of h_k(y) exp(-(y - kx/(k+1))² / (2 v)), with v = s² k/(k+1), by completing the square.
    By Poisson summation the sum over y of that exponential is a constant times 1 + 2 sum over j > 0 of
    cos(2 pi j kx/(k+1)) exp(-2 pi² j² v), so it lies within 1 - r and 1 + r for r = 2 sum over j of exp(-2 pi² j² v).
    Hence max h_k+1 / min h_k+1 is at most (1 + r)/(1 - r) times max h_k / min h_k, and h_1 is constant.

    With T the sum of these logarithms, h (in proportion to its mean) lies within e^-T and e^T. The Rényi divergence of
    order a of the sum from the sum moved by z, in whole numbers, is that of the discrete Gaussian, at most a z²/(2 k s²)
    (its normalising sum is largest where it is not shifted, again by Poisson), plus at most T (2a - 1)/(a - 1) for each
    entry. Kairouz, Liu and Steinke have a finer bound near a = 1, with tau = 10 sum of exp(-2 pi² v), about 2.5 T.
    """
    total = 0.0
    for k in range(1, clients):
        r = 2 * sum(math.exp(-2 * math.pi**2 * j**2 * std**2 * k / (k + 1)) for j in range(1, 5))
        total += math.log1p(r) - math.log1p(-r)
    return total


@pytest.mark.parametrize("std", [0.6, 0.8, 1.0, 2.0, FINE])
@pytest.mark.parametrize("clients", [2, 3, 8])
def test_a_sum_of_shares_is_a_discrete_gaussian_but_for_what_is_left_out(std, clients):
    p = summed(std, clients)
    x = np.arange(len(p)) - len(p) // 2
    near = np.abs(x) < 8 * std * math.sqrt(clients)
    ratio = np.log(p[near]) + x[near] ** 2 / (2 * clients * std**2)
    assert ratio.max() - ratio.min() <= wobble(std, clients) + 1e-12
    if clients == 2:  # it is attained: there are no other phases than 0 and 1/2
        assert ratio.max() - ratio.min() == pytest.approx(wobble(std, 2), rel=1e-4, abs=1e-12)


def test_what_is_left_out_is_too_little_to_count():
    """Over a billion entries, a million rounds and 10,000 clients; the first term, of two clients, is nearly all of it."""
    assert wobble(FINE, 10_000) <= 4.1 * math.exp(-((math.pi * FINE) ** 2)) * 1.01
    assert 1e9 * 1e6 * 4.1 * math.exp(-((math.pi * FINE) ** 2)) < 1e-50


@pytest.mark.parametrize(("std", "clients", "shift"), [(0.6, 3, 1), (1.0, 3, 1), (2.0, 2, 5), (FINE, 4, 7), (5.5, 8, 2)])
def test_a_sum_of_shares_diverges_no_more_than_a_gaussian(std, clients, shift):
    """Its Rényi divergence of order a, moved by s, is at most a (s / (sqrt(m) std) + tau)² / 2 in one entry (Kairouz, Liu and
    Steinke 2021, theorem 1); the module leaves out tau for a deviation of FINE or more."""
    p = summed(std, clients)
    tau = 10 * sum(math.exp(-2 * math.pi**2 * std**2 * k / (k + 1)) for k in range(1, clients))
    q = np.roll(p, shift)
    for order in (1.1, 2, 8, 32):
        keep = (p > 1e-250) & (q > 1e-250)
        logs = order * np.log(p[keep]) + (1 - order) * np.log(q[keep])
        divergence = np.logaddexp.reduce(logs) / (order - 1)
        bound = order / 2 * (shift / (math.sqrt(clients) * std) + tau) ** 2
        assert divergence <= bound * (1 + 1e-9)
        if std >= FINE:
            assert tau < 1e-30
            assert divergence == pytest.approx(order * shift**2 / (2 * clients * std**2), rel=1e-6)  # and no less: it is tight


@pytest.mark.parametrize(("std", "clients", "shift"), [(FINE, 4, 7), (5.5, 3, 9)])
def test_epsilon_of_a_sum_of_shares_is_between_its_exact_delta_and_ours(std, clients, shift):
    """delta = sum of max(0, p - e^epsilon q), over the exact sum; dp-accounting has it for one discrete Gaussian."""
    p = summed(std, clients)
    other = privacy_loss_distribution.from_discrete_gaussian_mechanism(
        std * math.sqrt(clients), sensitivity=shift, value_discretization_interval=1e-4
    )
    for epsilon in (0.1, 1.0, 2.0):
        delta = float(np.maximum(p - math.exp(epsilon) * np.roll(p, shift), 0.0).sum())
        assert delta == pytest.approx(other.get_delta_for_epsilon(epsilon), rel=1e-3)  # which rounds losses up
        assert epsilon < accountant.epsilon(math.sqrt(clients) * std / shift, 1.0, 1, delta, whole=True) < epsilon + 0.6


def test_rounding_adds_half_a_step_in_each_entry_and_no_more():
    """The worst update: as much in each entry, so little above a half that all are rounded up. Rounding to the nearest draws
    nothing, so no update is longer by chance, as it may be where rounding is stochastic."""
    silent, entries = made(10, 0.0), 4000
    ups = torch.full((1, entries), 1 + 1e-7, dtype=torch.float64) * silent.step / 2
    code = silent.code({"w": ups}, {"w": torch.zeros(entries)}, torch.arange(1), 3)["w"]
    assert bool((code == 1).all())
    added = float(code.norm() - ups.norm() / silent.step)
    assert added == pytest.approx(math.sqrt(entries) / 2, rel=1e-6)
    assert added <= silent.sensitivity(entries) - silent.private.clip / silent.step + 1e-9


@given(st.integers(3, 200), st.integers(0, 99))
def test_a_sum_that_wraps_around_shows_no_more_than_the_sum_itself(clients, seed):
    """Lines in the ring add up to a function of the sum of whole numbers, so noise in that protects it, however large it is."""
    ring, draw = Ring(clients), torch.Generator().manual_seed(seed)
    codes = torch.randint(-(2**46), 2**46, (3, 6), generator=draw).double()
    total = np.add.reduce([ring.pack({"w": c}, {"w": True}) for c in codes], dtype=ring.dtype)
    half, whole = 1 << (ring.field - 1), codes.sum(0).numpy().astype(np.int64)
    wrapped, _ = ring.unpack(total, {"w": torch.Size([6])})
    assert np.array_equal(wrapped["w"].numpy(), (whole + half) % (2 * half) - half)


@pytest.mark.parametrize(("noise", "sums"), [(1.0, 1), (3.0, 30), (25.0, 100)])
def test_whole_noise_costs_between_the_continuous_kind_and_a_simple_bound(noise, sums):
    """Bun and Steinke 2016: rho-zCDP is (rho + 2 sqrt(rho ln(1/delta)), delta)."""
    found, rho = accountant.epsilon(noise, 1.0, sums, 1e-5, whole=True), sums / (2 * noise**2)
    assert accountant.epsilon(noise, 1.0, sums, 1e-5) < found < rho + 2 * math.sqrt(rho * math.log(1e5))


def made(clients=10, noise=2.0, clip=1.0, counted=True, **how):
    return Shares(Private(8.0, clip=clip, **how), noise, Ring(clients, counted))


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 200), st.floats(0.1, 1e3), st.floats(1e-6, 1e9), st.floats(-9, 9), st.booleans())
def test_no_update_is_longer_than_the_noise_is_for(clients, noise, clip, size, counted):
    silent, loud = (made(clients, n, clip, counted) for n in (0.0, noise))
    generator = torch.Generator().manual_seed(clients)
    update = torch.randn(2, 40, generator=generator, dtype=torch.float64) * clip * 10**size
    code = silent.code({"w": update}, {"w": torch.zeros(40)}, torch.arange(2), 3)["w"]
    assert torch.equal(code, code.round())
    assert bool((code.square().sum(1).sqrt() <= silent.sensitivity(40)).all())
    sums = clients * clip / loud.step + 10 * math.sqrt(clients) * loud.deviation(clients, 40)
    assert sums < 1.01 * 2 ** (loud.ring.field - 1)  # all of them alike and much noise: the sum does not wrap around


def test_in_a_large_cohort_too_few_collude_to_cut_a_sum_in_two():
    """Eight at each of two gaps; in a cohort of 65 all are neighbors, and there is nothing to cut."""
    check_cohort(Private(8.0, colluding=15), 66)
    check_cohort(Private(8.0, colluding=16), 65)
    assert not are_enough(Private(8.0, colluding=16), 66)
    with pytest.raises(fs.InputError, match="in a round of more than 65 clients at most 15 may work with the server, not 16"):
        check_cohort(Private(8.0, colluding=16), 66)


@pytest.mark.parametrize("clients", [3, 4, 10, 127, 1000])
@pytest.mark.parametrize("colluding", [0, 1])
def test_the_smallest_sum_that_is_opened_has_the_noise_that_was_promised(clients, colluding):
    shares = made(1000, 2.0, colluding=colluding)
    least = Cohort({}, dict.fromkeys(range(clients), "")).least
    std = shares.deviation(clients, 5000)
    assert (least - colluding) * std**2 == pytest.approx((2.0 * shares.sensitivity(5000)) ** 2)
    assert 3 * least > 2 * clients


def test_a_smaller_round_has_larger_shares_and_too_small_a_one_is_refused():
    """A client takes the number from the list that it adds up with, whatever the plan says."""
    shares = made(10)
    assert shares.deviation(4, 100) > shares.deviation(10, 100)
    with pytest.raises(fs.InputError, match="a round of 2 clients is too small"):
        shares.deviation(2, 100)


def test_what_was_cut_stays_a_secret():
    up = fs.methods.method.Up({"w": torch.full((2, 3), 1e6)}, {"w": True}, torch.ones(2))
    found = coded(Ring(4), made(4), up, {"w": torch.zeros(3)}, {"w": torch.ones(())}, torch.arange(2), clients=4)
    assert found[CLIENTS].tolist() == [[1.0], [1.0]]
    assert not found[OVER].any()
    assert not found[IS_NEAR].any()


def test_what_is_promised_is_said_with_what_it_rests_on():
    found = shared_guarantee(Private(8.0, colluding=3), 100, 100, 30, 1210)
    said = statement(found)
    assert (
        "so the server need not be trusted, even if 3 other clients tell it theirs. This still holds if fewer than a third"
        in said
    )
    assert found.epsilon(30) <= 8 < found.epsilon(31)
    assert f"sum is {found.lots[0].noise * math.sqrt(100 / 64):.3g} times that" in said  # 67 send, 3 of them tell


def mlp():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 6), torch.nn.ReLU(), torch.nn.Linear(6, 10))


def simulate(digits, private, method=None, **how):
    how = {"training": fs.Training(batch_size=8), "rounds": 2, "device": "cpu", **how}
    return Simulation(method or fs.FedSelect(rate=0.3, limit=0.6, epochs=1), mlp, digits, private=private, **how)


@pytest.mark.parametrize("mean", ["senders", "cohort"])
def test_without_noise_shares_are_the_servers_sum(digits, mean):
    runs = [simulate(digits, "epsilon=inf,clip=0.7"), simulate(digits, "epsilon=inf,clip=0.7", secret=True, mean=mean)]
    for run in runs:
        run.step(), run.step()
    for n, v in runs[0].server["params"].items():
        torch.testing.assert_close(v, runs[1].server["params"][n], rtol=1e-5, atol=1e-6)


def test_the_sum_has_the_noise_of_all_shares(digits):
    """A round of a run that learns nothing: what moves is noise, over three clients."""
    run = simulate(digits, "epsilon=8,clip=2", fs.FedAvg(lr=1e-30, epochs=1), secret=True)
    run.step()
    moved = torch.cat([(v - run.initial[n]).flatten() for n, v in run.server["params"].items()])
    lot = run.budget.guarantee.lots[0]
    assert float(moved.std()) == pytest.approx(2 * lot.noise * lot.more / 3, rel=0.15)
    assert lot.more == math.sqrt(3 / 2)


def test_who_is_in_a_round_is_drawn_as_ever_and_saves_nothing(digits):
    part, whole = (
        simulate(fs.load("digits", clients=8, train=16, test=8, val=4), "epsilon=8", secret=True, fraction=f) for f in (0.5, 1)
    )
    assert part.budget.guarantee.lots[0].noise == whole.budget.guarantee.lots[0].noise
    assert len(part._cohort(torch.arange(8))) == 4
    assert part.step()["epsilon"] == whole.step()["epsilon"]


def test_chunks_and_a_resumed_run_change_nothing_but_noise(digits, tmp_path):
    seeded = "epsilon=8,seeded=yes"
    runs = [simulate(digits, seeded, secret=True, chunk=c) for c in (3, 1)]
    for run in runs:
        run.step()
    runs[0].save(tmp_path)
    runs.append(simulate(digits, seeded, secret=True))
    assert runs[2].resume(tmp_path)
    assert runs[2].budget.charged == 1
    for run in runs:
        run.step()
        for n, v in runs[0].server["params"].items():
            assert torch.equal(v, run.server["params"][n])


@pytest.mark.parametrize(
    ("private", "how", "said"),
    [
        ("epsilon=8,quantile=0.5", {"secret": True}, "the clip cannot follow a quantile; set clip= instead"),
        ("epsilon=8,colluding=3", {"secret": True}, "a round of 3 clients is too small if the server may know the noise of 3"),
        ("epsilon=8,colluding=0", {}, r"use it with secret \(--secret\) and unit=client"),
        ("epsilon=8,unit=sample,colluding=0", {"secret": True}, r"use it with secret \(--secret\) and unit=client"),
        ("epsilon=8", {"secret": True, "method": fs.Scaffold()}, "which noise on updates does not protect"),
        ("epsilon=8", {"secret": True, "aggregator": "median"}, "looks at the values of single clients"),
    ],
)
def test_what_shares_cannot_protect_is_refused(digits, private, how, said):
    with pytest.raises(fs.InputError, match=said):
        simulate(digits, private, **how)
