"""Private runs: without noise they are the plain ones, with it they keep their budget; what cannot be private is refused."""

import dataclasses
import pickle

import pytest
import torch
from torch import nn

import fedselect as fs
from fedselect.core.entropy import Entropy
from fedselect.private.clients import Covered
from fedselect.runs import loop, runner
from fedselect.runs.config import Config
from fedselect.runs.rundir import outcome, read_records
from fedselect.simulate import Simulation
from fedselect.training.per_sample import PerSample

FREE = "epsilon=inf,clip=1e9"  # neither noise nor clipping
HOW = fs.Training(batch_size=8)


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 10))


def simulate(digits, private, method=None, rounds=2, training=HOW, **how):
    method = method or fs.FedAvg(lr=0.1, epochs=1)
    return Simulation(method, mlp, digits, training=training, rounds=rounds, private=private, device="cpu", **how)


def steps(simulation, count=2):
    return [simulation.step() for _ in range(count)]


def params(simulation):
    return simulation.server["params"]


def assert_close(a, b, **how):
    assert a.keys() == b.keys()
    for n, v in a.items():
        torch.testing.assert_close(v, b[n], **how)


WHOLE = {  # methods whose clients all share the same entries, so that nothing personal is added as zero
    "fedavg": fs.FedAvg(lr=0.1, epochs=1),
    "fedper": fs.FedPer(lr=0.1, epochs=1),
    "fedbabu": fs.FedBABU(lr=0.1, epochs=1),
    "fedprox": fs.FedProx(lr=0.1, epochs=1),
    "ditto": fs.Ditto(lr=0.1),
    "apfl": fs.APFL(lr=0.1, epochs=1),
    "fedselect, nothing personal": fs.FedSelect(limit=0.0, epochs=1),
}


@pytest.mark.parametrize("method", WHOLE.values(), ids=WHOLE)
def test_without_noise_and_clipping_clients_average_as_ever(digits, method):
    plain, private = (simulate(digits, p, method) for p in (None, FREE))
    before, after = steps(plain), steps(private)
    assert_close(params(plain), params(private), rtol=1e-5, atol=1e-6)
    assert [r["accuracy"] for r in before] == pytest.approx([r["accuracy"] for r in after], abs=0.05)
    assert after[-1]["train_loss"] is None
    assert after[-1]["epsilon"] is None


def test_a_personal_entry_counts_as_an_update_of_zero(digits):
    """The mean is over all clients, those that keep the entry too, as one that keeps it must not show."""
    method = fs.FedSelect(rate=0.3, limit=0.6, epochs=1)
    simulation = simulate(digits, FREE, method)
    steps(simulation, 1)
    start, plain = {n: v.clone() for n, v in params(simulation).items()}, []
    add = simulation.aggregator.fold(simulation.memory, params(simulation)).__class__.add

    def watch(fold, values, sent, weight):
        plain.append({n: v.clone() for n, v in values.items()})
        assert all(m is True for m in sent.values())
        add(fold, values, sent, weight)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedselect.private.clients.PrivateFold.add", watch)
        steps(simulation, 1)
    kept = simulation.store.take(torch.arange(3), simulation.device)["kept"]
    assert any(bool(m.any()) for m in kept.values())
    for n, m in kept.items():
        assert torch.equal(plain[0][n][m], start[n].expand_as(m)[m])
    for n, v in start.items():
        mean = v + sum(u - v for u in plain[0][n]) / 3
        torch.testing.assert_close(params(simulation)[n], mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("private", ["epsilon=8,seeded=yes,quantile=0.5", "epsilon=8,unit=sample,seeded=yes"])
def test_clients_one_by_one_are_clients_stacked(digits, private, chunk):
    together, apart = (simulate(digits, private, chunk=c) for c in ("auto", chunk))
    steps(together)
    steps(apart)
    assert_close(params(together), params(apart), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("private", ["epsilon=8", "epsilon=8,unit=sample"])
def test_noise_is_never_the_same_unless_it_is_seeded(digits, private):
    first, second, third, fourth = (simulate(digits, p) for p in (private, private, *[f"{private},seeded=yes"] * 2))
    for simulation in (first, second, third, fourth):
        steps(simulation, 1)
    assert not torch.equal(params(first)["1.weight"], params(second)["1.weight"])
    assert torch.equal(params(third)["1.weight"], params(fourth)["1.weight"])


def test_a_round_that_draws_nobody_is_noise_alone(digits):
    simulation = simulate(digits, "epsilon=8", fraction=1e-6)
    before = {n: v.clone() for n, v in params(simulation).items()}
    record = simulation.step()
    assert record["bytes_up"] == 0
    assert record["accuracy"] is not None
    assert all(not torch.equal(v, params(simulation)[n]) for n, v in before.items())


def test_the_budget_is_in_every_record_and_stops_the_run(digits):
    simulation = simulate(digits, "epsilon=4", rounds=2)
    spent = [r["epsilon"] for r in steps(simulation)]
    assert 0 < spent[0] < spent[1] <= 4
    assert spent[1] > 3.9
    with pytest.raises(fs.RunError, match="the privacy budget is spent"):
        simulation.step()


# samples


def slow_round(digits, client, clip, lr, epochs, momentum):
    """One client's DP-SGD without noise on whole batches: a gradient for each sample by itself, in float64."""
    x, y = digits.clients[client].train
    model = mlp().double()
    model.load_state_dict({n: v.double() for n, v in fs.Model.wrap(mlp).init(0).items()})
    x = digits.split("train", torch.float64).rows(slice(client, client + 1)).batch(torch.arange(len(y)).unsqueeze(0))[0][0]
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    for _ in range(epochs):
        total = [torch.zeros_like(p) for p in model.parameters()]
        for xi, yi in zip(x, y, strict=True):
            grads = torch.autograd.grad(
                nn.functional.cross_entropy(model(xi.unsqueeze(0)), yi.unsqueeze(0)), list(model.parameters())
            )
            length = float(sum(g.square().sum() for g in grads).sqrt())
            for t, g in zip(total, grads, strict=True):
                t += g * min(1.0, clip / length)
        with torch.no_grad():
            for p, v, t in zip(model.parameters(), velocity, total, strict=True):
                v.mul_(momentum).add_(t / len(y))
                p -= lr * v
    return dict(model.state_dict())


def test_private_steps_are_those_of_plain_loops(digits):
    clip, whole = 0.8, fs.Training(batch_size=1000, momentum=0.5)  # every batch is all samples
    simulation = simulate(
        digits, f"epsilon=inf,unit=sample,clip={clip}", fs.FedAvg(lr=0.3, epochs=3, view="local"), training=whole
    )
    steps(simulation, 1)
    for client in range(3):
        slow = slow_round(digits, client, clip, 0.3, 3, 0.5)
        ours = simulation.models([client], "local")
        for n, v in slow.items():
            torch.testing.assert_close(ours[n][0].double(), v, rtol=1e-4, atol=1e-5)


def test_without_noise_and_clipping_a_whole_batch_is_a_plain_step(digits):
    whole = fs.Training(batch_size=1000)
    for method in (
        fs.FedAvg(lr=0.1, epochs=2),
        fs.FedProx(lr=0.1, mu=0.5),
        fs.FedSelect(rate=0.2, epochs=1),
        fs.Scaffold(lr=0.1),
    ):
        plain = simulate(digits, None, method, training=whole)
        private = simulate(digits, "epsilon=inf,unit=sample,clip=1e9", method, training=whole)
        steps(plain)
        steps(private)
        assert_close(params(plain), params(private), rtol=1e-3, atol=1e-5)


def guard_of(simulation) -> PerSample:
    assert simulation.guard is not None
    return simulation.guard


def test_batches_are_drawn_sample_by_sample(digits):
    guard, data = guard_of(simulate(digits, "epsilon=8,unit=sample")), digits.split("train", torch.float32)
    n, sizes = int(data.n[0]), []
    for _ in range(400):
        batch, inside = guard._drawn(data, 8, torch.zeros(3, dtype=torch.int64))
        assert batch.x.shape[:2] == inside.shape
        sizes.append(int(inside[0].sum()))
    assert len(set(sizes)) > 5
    assert sum(sizes) / 400 == pytest.approx(8, rel=0.1)  # on average what was asked for
    spread = torch.tensor(sizes, dtype=torch.float64).std()
    assert float(spread) == pytest.approx((8 * (1 - 8 / n)) ** 0.5, rel=0.15)  # as of independent draws


def test_no_sample_moves_a_sum_by_more_than_the_clip(digits):
    simulation = simulate(digits, "epsilon=8,unit=sample,clip=0.7")
    guard, data = guard_of(simulation), digits.split("train", torch.float32)
    tree = {n: v.expand(3, *v.shape).clone() for n, v in simulation.initial.items()}
    x, y = data.batch(torch.arange(6).expand(3, 6))
    from fedselect.tasks.losses import Goal
    from fedselect.training.step import Aim, Batch

    aim = Aim(dict.fromkeys(tree, True), 0.1, Goal(simulation.task))
    batch, inside = Batch(x * 50, y, torch.zeros(3, dtype=torch.int64)), torch.ones(3, 6, dtype=torch.bool)
    whole = guard._clipped_sums(tree, batch, inside, aim, list(tree))
    for j in range(6):
        fewer = inside.clone()
        fewer[:, j] = False
        part = guard._clipped_sums(tree, batch, fewer, aim, list(tree))
        moved = sum((whole[n] - part[n]).flatten(1).square().sum(1) for n in tree).sqrt()
        assert bool((moved <= 0.7 * (1 + 1e-6)).all())
        assert bool((moved > 0.69).any())  # gradients of such inputs are long: most are clipped, and no shorter than to that


def test_a_sample_whose_gradient_is_not_finite_counts_as_zero(digits):
    """A sum that is NaN would show with certainty that it is there."""
    simulation = simulate(digits, "epsilon=8,unit=sample,clip=0.7")
    guard, data = guard_of(simulation), digits.split("train", torch.float32)
    tree = {n: v.expand(3, *v.shape).clone() for n, v in simulation.initial.items()}
    x, y = data.batch(torch.arange(4).expand(3, 4))
    from fedselect.tasks.losses import Goal
    from fedselect.training.step import Aim, Batch

    aim, keys = Aim(dict.fromkeys(tree, True), 0.1, Goal(simulation.task)), torch.zeros(3, dtype=torch.int64)
    x[1, 2] = torch.inf
    inside, fewer = torch.ones(3, 4, dtype=torch.bool), torch.ones(3, 4, dtype=torch.bool)
    fewer[1, 2] = False
    with_it, without = (guard._clipped_sums(tree, Batch(x, y, keys), i, aim, list(tree)) for i in (inside, fewer))
    assert_close(with_it, without, rtol=0, atol=1e-12)
    assert all(bool((v != 0).any()) for v in without.values())


@pytest.mark.parametrize("seeded", ["no", "yes"])
def test_what_is_random_for_a_sample_cannot_be_known_from_the_seed(digits, seeded, monkeypatch):
    """Dropout and augmentation of a sample follow its place in the batch, so a sample less changes them for those behind it.
    That is covered only if nobody knows which numbers it would have drawn."""
    drawn = []
    real = PerSample._drawn

    def watch(self, data, size, keys):
        drawn[-1].append(keys.clone())
        return real(self, data, size, keys)

    monkeypatch.setattr(PerSample, "_drawn", watch)
    for _ in range(2):
        drawn.append([])
        steps(simulate(digits, f"epsilon=8,unit=sample,seeded={seeded}"), 1)
    first, second = (torch.cat(keys) for keys in drawn)
    assert len(first.unique()) == len(first)
    assert bool((first == second).all()) == (seeded == "yes")
    assert bool((first == second).any()) == (seeded == "yes")


def test_the_noise_of_a_step_has_the_deviation_that_was_promised(digits):
    """Of a client with no sample in the batch the step is noise alone: rate * noise * clip / expected size."""
    simulation = simulate(digits, "epsilon=8,unit=sample,clip=0.5")
    guard = dataclasses.replace(guard_of(simulation), entropy=Entropy())
    tree = {n: v.expand(3, *v.shape).clone() for n, v in simulation.initial.items()}
    before = {n: v.clone() for n, v in tree.items()}
    from fedselect.tasks.losses import Goal
    from fedselect.training.step import Aim

    batch, inside = guard._drawn(digits.split("train", torch.float32), 8, torch.zeros(3, dtype=torch.int64))
    aim, memory = (
        Aim(dict.fromkeys(tree, True), 0.1, Goal(simulation.task)),
        {"momentum": {n: torch.zeros_like(v) for n, v in tree.items()}},
    )
    std = guard._deviations(digits.split("train", torch.float32))
    guard._step(tree, memory, batch, torch.zeros_like(inside), aim, std=std, size=8)
    moved = torch.cat([(tree[n] - before[n]).flatten(1) for n in tree], 1)
    lots = simulation.budget.guarantee.lots
    assert len(lots) == 1  # all clients have as many samples
    assert float(moved.double().std()) == pytest.approx(0.1 * lots[0].noise * 0.5 / 8, rel=0.05)


# refusals


@pytest.mark.parametrize(
    ("method", "private", "said"),
    [
        (fs.FedPAC(), "epsilon=8", "which noise on updates does not protect"),
        (fs.Scaffold(), "epsilon=8", "which noise on updates does not protect"),
        (fs.FedAlike(), "epsilon=8", "which noise on updates does not protect"),
        (fs.Local(), "epsilon=8", "this method shares nothing"),
        (fs.FedAvg(weight="samples"), "epsilon=8", "use weight=uniform"),
        (fs.FedPAC(), "epsilon=8,unit=sample", "uses training or validation data outside its gradients"),
        (fs.FedAlike(), "epsilon=8,unit=sample", "uses training or validation data outside its gradients"),
        (fs.FedPersist(), "epsilon=8,unit=sample", "uses training or validation data outside its gradients"),
        (fs.FedAvg(answers="own"), "epsilon=8,unit=sample", "uses training or validation data outside its gradients"),
        (fs.FedAvgFT(), "epsilon=8,unit=sample", "fine-tuning would use training data again"),
        (fs.FedBABU(), "epsilon=8,unit=sample", "fine-tuning would use training data again"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, fs.Method) else None,
)
def test_what_noise_does_not_cover_is_refused_before_anything_is_promised(digits, method, private, said):
    with pytest.raises(fs.InputError, match=said):
        simulate(digits, private, method)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"rounds": None}, "say how many there are"),
        ({"aggregator": "clip"}, "use the aggregator mean or adam, not ClippedMean"),
        ({"aggregator": "median"}, "use the aggregator mean or adam, not Median"),
        ({"task": fs.Classification(class_weights="balanced")}, "learns from all clients' training targets"),
        ({"private": 8}, r"private must be fs.Private\(epsilon=8\), or 'epsilon=8', not 8"),
    ],
)
def test_a_run_that_cannot_be_private_is_refused(digits, how, said):
    with pytest.raises(fs.InputError, match=said):
        simulate(digits, **{"private": "epsilon=8", **how})


def test_noise_of_samples_goes_with_secure_aggregation_and_that_of_clients_does_not(digits):
    plain, secret = (simulate(digits, "epsilon=8,unit=sample,seeded=yes", secret=on) for on in (False, True))
    for a, b in zip(steps(plain), steps(secret), strict=True):
        assert a["epsilon"] == b["epsilon"]
    assert_close(params(plain), params(secret), rtol=0, atol=1e-4)  # sums of whole numbers, up to rounding


def test_a_round_is_not_chosen_on_data_that_no_noise_covers():
    clients = [fs.ClientData(train=(torch.randn(8, 64), torch.arange(8) % 2), val=(torch.randn(4, 64), torch.arange(4) % 2),
                             test=(torch.randn(4, 64), torch.arange(4) % 2))] * 2  # fmt: skip
    with pytest.raises(fs.InputError, match="which differential privacy does not cover"):
        simulate(clients, "epsilon=8,unit=sample", keep="own")


def test_batch_norm_is_refused_and_what_suits_is_named(digits):
    model = fs.models.small_cnn(digits, norm="batch")
    for private, said in (("epsilon=8,unit=sample", "BatchNorm mixes the samples"), ("epsilon=8", "keep them on the client")):
        with pytest.raises(fs.InputError, match=said):
            Simulation(fs.FedAvg(), model, digits, rounds=2, private=private)
    Simulation(fs.FedPer(), model, digits, rounds=2, private="epsilon=8").step()
    grouped = fs.models.small_cnn(digits, width=8, norm="group")
    Simulation(fs.FedAvg(epochs=1), grouped, digits, rounds=2, private="epsilon=8,unit=sample").step()


# runs in directories


def config(**how):
    return Config.from_dict(
        {
            "method": {"name": "fedavg", "epochs": 1}, "data": {"name": "digits", "clients": 3, "train": 10, "test": 5},
            "model": {"name": "mlp", "hidden": 6}, "rounds": 4, "private": "epsilon=8", **how,
        },
        "test",
    )  # fmt: skip


def test_a_run_says_what_it_promises_and_what_it_spent(tmp_path, capfd):
    history = runner.start(config(), tmp_path / "run")
    assert capfd.readouterr().err.startswith("Private: epsilon 8, delta 1e-05 for the whole run of 4 rounds")
    found = outcome(tmp_path / "run")["privacy"]
    assert found == {"epsilon": history[-1]["epsilon"], "budget": 8, "delta": 1e-5, "unit": "client", "charged": 4}
    assert len((tmp_path / "run" / "budget.jsonl").read_text().splitlines()) == 4


def test_rounds_that_run_twice_are_charged_twice(tmp_path, monkeypatch, capfd):
    """A process that is killed after two rounds without a checkpoint: both run again, with other noise, and two are left."""

    class Killed(BaseException):
        pass

    def kill(run, record):
        if record["round"] == 2:
            raise Killed

    out = tmp_path / "run"
    monkeypatch.setattr(loop, "OVERHEAD", -1.0)  # no checkpoint on the way
    with pytest.raises(Killed):
        runner.start(config(), out, watch=kill)
    with pytest.warns(UserWarning, match="the privacy budget is spent after round 2"):
        runner.resume(out)
    assert [r["round"] for r in read_records(out / "metrics.jsonl")] == [1, 2]
    found = outcome(out)
    assert (found["rounds"], found["privacy"]["charged"]) == (2, 4)
    assert found["privacy"]["epsilon"] == pytest.approx(8, rel=0.01)


@pytest.mark.parametrize("private", ["epsilon=8,seeded=yes,quantile=0.5", "epsilon=8,unit=sample,seeded=yes"])
def test_a_resumed_simulation_goes_on_with_its_budget(digits, tmp_path, private):
    whole, first = (simulate(digits, private, rounds=3) for _ in range(2))
    records = steps(whole, 3)
    steps(first, 2)
    first.save(tmp_path)
    copied = pickle.loads(pickle.dumps(first))
    second = simulate(digits, private, rounds=3)
    assert second.resume(tmp_path)
    for simulation in (second, copied):
        record = simulation.step()
        assert record["epsilon"] == records[-1]["epsilon"]
        assert_close(params(whole), params(simulation), rtol=0, atol=0)
        with pytest.raises(fs.RunError, match="budget is spent"):
            simulation.step()
    with pytest.raises(fs.CheckpointError, match="private was"):
        simulate(digits, "epsilon=4,seeded=yes", rounds=3).resume(tmp_path)


def test_a_configuration_without_privacy_has_the_identity_that_it_had():
    from fedselect.simulate.checkpoint import as_first_written

    assert "private" not in as_first_written(config(private=None).to_json())
    assert as_first_written(config().to_json())["private"] == "epsilon=8"
    assert config(private="clip=1, epsilon=8.0").private == "epsilon=8"


def test_a_covered_method_is_shown_as_what_it_covers():
    assert repr(Covered(fs.FedAvg(lr=0.5))) == repr(fs.FedAvg(lr=0.5))
