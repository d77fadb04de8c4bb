"""Optimizers against torch.optim, entry by entry in float64; schedules against their formulas; what both refuse."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from cases import CASES, federation
from hypothesis import given, settings
from hypothesis import strategies as st

import fedselect as fs
from fedselect.cli.flags import configure
from fedselect.methods import METHODS
from fedselect.runs.config import Config, place
from fedselect.runs.rundir import core
from fedselect.simulate import Simulation, checkpoint
from fedselect.simulate.stack import stacks
from fedselect.training.settings import Training
from fedselect.training.step import _update

CLIENTS, ENTRIES = 2, 3
RATES = torch.tensor([0.1, 0.03], dtype=torch.float64)
PAIRS = {
    "sgd": (fs.SGD(momentum=0.0), lambda p, lr: torch.optim.SGD(p, lr)),
    "sgd, momentum": (fs.SGD(momentum=0.9), lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)),
    "sgd, all": (
        fs.SGD(momentum=0.7, nesterov=True, weight_decay=0.1),
        lambda p, lr: torch.optim.SGD(p, lr, momentum=0.7, nesterov=True, weight_decay=0.1),
    ),
    "adam": (fs.Adam(), lambda p, lr: torch.optim.Adam(p, lr)),
    "adam, all": (
        fs.Adam(beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.1),
        lambda p, lr: torch.optim.Adam(p, lr, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1),
    ),
    "adam without a mean": (fs.Adam(beta1=0.0), lambda p, lr: torch.optim.Adam(p, lr, betas=(0.0, 0.999))),
    "adamw": (fs.AdamW(), lambda p, lr: torch.optim.AdamW(p, lr)),
    "adamw, all": (
        fs.AdamW(beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.3),
        lambda p, lr: torch.optim.AdamW(p, lr, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.3),
    ),
}
ALWAYS = (True,) * CLIENTS * ENTRIES


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ours(optimizer, masks):
    """One step for each mask; True is no mask at all."""
    value = draw(CLIENTS, ENTRIES, seed=0)
    memory = {k: torch.zeros_like(value) for k in optimizer.memory}
    for s, mask in enumerate(masks):
        marks = True if mask is True else torch.tensor(mask).view(CLIENTS, ENTRIES)
        _update(
            [(value, memory, draw(CLIENTS, ENTRIES, seed=s + 1), marks, None)], [RATES], Training(optimizer=optimizer), None
        )
    return value


def torchs(make, masks):
    """Every entry is a parameter of its own, with an optimizer that is stepped only when the entry is marked."""
    entries = [torch.nn.Parameter(v.clone()) for v in draw(CLIENTS, ENTRIES, seed=0).flatten()]
    optimizers = [make([p], float(RATES[i // ENTRIES])) for i, p in enumerate(entries)]
    for s, mask in enumerate(masks):
        gradient = draw(CLIENTS, ENTRIES, seed=s + 1).flatten()
        for p, optimizer, g, on in zip(entries, optimizers, gradient, ALWAYS if mask is True else mask, strict=True):
            if on:
                p.grad = g.clone()
                optimizer.step()
    return torch.stack([p.detach() for p in entries]).view(CLIENTS, ENTRIES)


@pytest.mark.parametrize("pair", PAIRS)
def test_many_steps_are_those_of_torch(pair):
    optimizer, make = PAIRS[pair]
    torch.testing.assert_close(ours(optimizer, [True] * 50), torchs(make, [True] * 50), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("pair", PAIRS)
@given(masks=st.lists(st.tuples(*[st.booleans()] * CLIENTS * ENTRIES), min_size=1, max_size=8))
@settings(max_examples=15, deadline=None)
def test_an_entry_sees_only_the_steps_in_which_it_trains(pair, masks):
    optimizer, make = PAIRS[pair]
    torch.testing.assert_close(ours(optimizer, masks), torchs(make, masks), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("pair", PAIRS)
def test_clients_side_by_side_are_each_alone(pair):
    optimizer = PAIRS[pair][0]
    value, gradient = draw(CLIENTS, 4, 5, seed=0), draw(CLIENTS, 4, 5, seed=1)
    memory = {k: draw(CLIENTS, 4, 5, seed=i + 2).abs() for i, k in enumerate(optimizer.memory)}
    whole = optimizer.update(value, gradient, memory, RATES.view(-1, 1, 1))
    for c in range(CLIENTS):
        row = slice(c, c + 1)
        alone = optimizer.update(value[row], gradient[row], {k: v[row] for k, v in memory.items()}, RATES[row].view(-1, 1, 1))
        assert alone[0].equal(whole[0][row])
        assert all(v.equal(whole[1][k][row]) for k, v in alone[1].items())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_fast_way_of_sgd_is_its_update(momentum):
    optimizer = fs.SGD(momentum=momentum, weight_decay=0.1)
    value, memory = draw(CLIENTS, ENTRIES, seed=0), {"momentum": draw(CLIENTS, ENTRIES, seed=1)}
    gradient = draw(CLIENTS, ENTRIES, seed=2)
    wanted, speed = optimizer.update(value, gradient, memory, RATES.view(-1, 1))
    _update([(value, memory, gradient, True, None)], [RATES], Training(optimizer=optimizer), None)
    torch.testing.assert_close(value, wanted, rtol=1e-13, atol=0.0)
    if momentum:
        torch.testing.assert_close(memory["momentum"], speed["momentum"], rtol=1e-13, atol=0.0)


def test_adams_first_steps_are_exact_in_float32():
    """Of a constant gradient g every step is rate * g / (|g| + eps), if 1 - beta ** t has no rounding error to speak of."""
    optimizer, value = fs.Adam(), torch.zeros(1, 2)
    memory, gradient = {k: torch.zeros(1, 2) for k in optimizer.memory}, torch.tensor([[1.0, -3.0]])
    for step in range(1, 6):
        value, memory = optimizer.update(value, gradient, memory, 0.01)
        torch.testing.assert_close(value, -0.01 * step * gradient.sign(), rtol=2e-6, atol=0.0)


# ---- schedules


def factors(rounds, **given):
    return [Training(**given).factor(r, rounds) for r in range(rounds)]


def test_factors_are_those_of_the_formulas():
    assert factors(3) == [1.0, 1.0, 1.0]
    assert factors(5, schedule="step", decay=0.5, decay_every=2) == [1.0, 1.0, 0.5, 0.5, 0.25]
    assert factors(4, schedule="step", decay=0.98) == [1.0, 0.98, 0.98**2, 0.98**3]
    assert factors(4, schedule="cosine") == pytest.approx([1.0, 0.5 + math.sqrt(2) / 4, 0.5, 0.5 - math.sqrt(2) / 4])
    assert factors(4, warmup=3) == [0.25, 0.5, 0.75, 1.0]
    assert factors(5, schedule="step", decay=0.5, warmup=1) == [0.5, 1.0, 0.5, 0.25, 0.125]
    assert factors(6, schedule="cosine", warmup=2) == pytest.approx([1 / 3, 2 / 3, *factors(4, schedule="cosine")])


def test_cosine_is_torchs():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)
    wanted = []
    for _ in range(7):
        wanted.append(schedule.get_last_lr()[0])
        optimizer.step(), schedule.step()
    assert factors(7, schedule="cosine") == pytest.approx(wanted)


@dataclass(frozen=True)
class Nothing(fs.Schedule):
    needs_rounds = False

    def factor(self, round, rounds):
        return 0.0


def simulate(method, training, rounds=2, **how):
    data = federation()
    return Simulation(method, fs.models.mlp(data, hidden=4), data, seed=3, training=training, rounds=rounds, **how)


@pytest.mark.parametrize("method", METHODS)
def test_the_schedule_is_of_every_rate_of_every_method(method):
    """With a factor of 0 nothing moves; lotteryfl prunes all the same."""
    sim = simulate(CASES[method](), Training(batch_size=8, schedule=Nothing()))
    sim.step(), sim.step()
    for n, v in sim.models(range(sim.clients), "local").items():
        start = sim.initial[n].expand_as(v)
        torch.testing.assert_close(v, torch.where(v == 0, v, start) if method == "lotteryfl" else start)


def test_fine_tuning_does_not_follow_it():
    sim = simulate(CASES["fedavg+ft"](), Training(batch_size=8, schedule=Nothing()))
    sim.step()
    assert all((v != sim.initial[n]).any() for n, v in sim.models(range(sim.clients), "merged").items())


BY_SGD = ("scaffold", "apfl")
"""Methods that read gradients off the steps of SGD."""


@pytest.mark.parametrize("method", BY_SGD)
def test_methods_that_need_sgd_say_so_before_they_train(method):
    with pytest.raises(fs.InputError, match="infers gradients from the steps of SGD; use the optimizer sgd"):
        simulate(CASES[method](), Training(batch_size=8, optimizer="adam"))


@pytest.mark.parametrize("how", [{"momentum": 0.0}, {"momentum": 0.9}, {"momentum": 0.5, "nesterov": True}], ids=str)
def test_how_far_an_entry_travels_is_that_of_steps_down_a_gradient_of_one(how):
    sim = simulate(fs.FedAvg(), Training(batch_size=8, weight_decay=0.1, schedule="step", decay=0.5, **how))
    lr = torch.linspace(0.1, 0.6, sim.clients, dtype=torch.float64)
    found = sim._work(torch.arange(sim.clients), 1).travel(2, lr)  # in round 1 at half the rate
    for client, rate, distance in zip(sim.data.clients, lr, found, strict=True):
        value, memory = torch.zeros(1, dtype=torch.float64), {"momentum": torch.zeros(1, dtype=torch.float64)}
        for _ in range(2 * -(-len(client.train[1]) // 8)):
            value, memory = fs.SGD(**how).update(value, torch.ones_like(value), memory, 1.0)
        torch.testing.assert_close(distance, -0.5 * rate * value[0], rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("method", [m for m in METHODS if m not in BY_SGD])
def test_every_method_learns_with_adamw_and_cosine(method):
    training = Training(batch_size=8, optimizer="adamw", weight_decay=0.01, schedule="cosine", warmup=1)
    given = {"lr": 0.01, "personal_lr": 0.01}
    made = CASES[method]()
    made = replace(made, **{k: v for k, v in given.items() if hasattr(made, k)})
    sim = simulate(made, training, 4)
    losses = [sim.step()["train_loss"] for _ in range(4)]
    assert losses[-1] < losses[0]


def test_clients_of_many_sizes_are_scheduled_once():
    """They train in another order than they were given in, which must not count the factor twice."""
    sim = simulate(fs.FedAvg(lr=0.1), Training(batch_size=8, schedule="step", decay=0.5))
    other = simulate(fs.FedAvg(lr=0.05), Training(batch_size=8))
    results = []
    for s in (sim, other):
        work, everything = s._work(torch.arange(s.clients), 1), dict.fromkeys(s.model.params, True)
        results.append(work.train({n: v.expand(s.clients, *v.shape) for n, v in s.initial.items()}, [
            fs.Pass(everything, s.method.lr, 0)
        ]))  # fmt: skip
    assert work._longest_first() is not None
    assert all(v.equal(results[1][n]) for n, v in results[0].items())


def test_resumed_with_adam_and_a_schedule_is_uninterrupted(tmp_path):
    training = Training(batch_size=8, optimizer="adam", schedule="cosine", warmup=1)
    whole, first, second = (simulate(fs.FedSelect(lr=0.01), training, 4) for _ in range(3))
    for _ in range(4):
        whole.step()
    first.step(), first.step(), first.save(tmp_path)
    assert second.resume(tmp_path)
    second.step(), second.step()
    for view in ("local", "merged"):
        there = whole.models(range(whole.clients), view)
        assert all(v.equal(there[n]) for n, v in second.models(range(whole.clients), view).items())
    with pytest.raises(fs.CheckpointError, match="rounds was 4, is 5"):
        simulate(fs.FedSelect(lr=0.01), training, 5).resume(tmp_path)


def test_how_many_rounds_there_are_matters_only_to_a_schedule_that_asks(tmp_path):
    first = simulate(fs.FedAvg(), Training(), 2)
    first.step(), first.save(tmp_path)
    assert simulate(fs.FedAvg(), Training(), 3).resume(tmp_path)
    for schedule, alike in (("constant", True), ("cosine", False)):
        short, long = (simulate(fs.FedAvg(), Training(schedule=schedule), rounds) for rounds in (2, 3))
        assert (stacks(short) == stacks(long)) == alike


def test_an_optimizer_that_remembers_more_leaves_room_for_fewer_clients():
    sgd, adam = (simulate(fs.FedAvg(), Training(optimizer=o)).fits for o in ("sgd", "adam"))
    assert adam < sgd


# ---- names, options, and what cannot be used


def test_a_name_takes_its_options_from_training():
    assert Training(momentum=0.9, nesterov=True).the_optimizer == fs.SGD(0.9, nesterov=True)
    assert Training(optimizer="adam", beta1=0.8, eps=1e-6).the_optimizer == fs.Adam(0.8, 0.999, 1e-6)
    assert Training(optimizer="adamw").the_optimizer == fs.AdamW(weight_decay=0.0)
    assert Training(optimizer="adamw", weight_decay=0.1).the_optimizer == fs.AdamW(weight_decay=0.1)
    assert Training(optimizer=fs.AdamW()).the_optimizer.weight_decay == 0.01


@dataclass(frozen=True)
class Plain(fs.Optimizer):
    memory = ("speed",)
    wrong: str = ""

    def update(self, value, gradient, memory, rate):
        if self.wrong == "in place":
            value.sub_(rate * gradient)
        if self.wrong == "shape":
            return value.sum(), {"speed": gradient}
        return value - rate * gradient, {} if self.wrong == "memory" else {"speed": gradient}


class Loose(Plain):
    """Not a dataclass itself."""


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"optimizer": "adan"}, "there is no optimizer 'adan'; did you mean 'adam'"),
        ({"optimizer": fs.Adam}, "optimizer must be one of sgd, adam, adamw, or a fs.Optimizer, not <class"),
        ({"optimizer": "adam", "momentum": 0.9}, r"optimizer adam does not use momentum; leave it out, or use optimizer sgd"),
        ({"optimizer": "adam", "nesterov": True}, "optimizer adam does not use nesterov"),
        ({"beta1": 0.8}, r"optimizer sgd does not use beta1; .* use optimizer adam \(--optimizer adam --beta1 0.8\)"),
        ({"optimizer": fs.SGD(), "momentum": 0.9}, "optimizer SGD has its own options; leave momentum out of Training"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov needs momentum"),
        ({"optimizer": "adam", "beta2": 1.0}, r"beta2 must be in \[0, 1\), not 1.0"),
        ({"optimizer": "adam", "eps": 0.0}, "eps must be positive, not 0.0"),
        ({"optimizer": "adamw", "weight_decay": -1.0}, "weight_decay must not be negative, not -1.0"),
        ({"optimizer": Plain("in place")}, "Plain.update must not change its arguments in place"),
        ({"optimizer": Plain("memory")}, "Plain.update must return the new value and a dict of what `memory` names: speed"),
        ({"optimizer": Plain("shape")}, "Plain.update must return tensors of the shape of the value"),
        ({"optimizer": Loose()}, r"Loose must be a frozen dataclass, .* put @dataclass\(frozen=True\) before the class"),
        ({"schedule": "cosin"}, "there is no schedule 'cosin'; did you mean 'cosine'"),
        ({"schedule": 3}, "schedule must be one of constant, step, cosine, or a fs.Schedule, not 3"),
        ({"decay": 0.98}, r"does not use decay; .* use schedule step \(--schedule step --decay 0.98\)"),
        ({"schedule": "cosine", "decay_every": 2}, "schedule cosine does not use decay_every"),
        ({"schedule": "step"}, "set --decay between 0 and 1, such as 0.98, not 1.0"),
        ({"schedule": "step", "decay": 0.5, "decay_every": 0}, "decay_every must be at least 1, not 0"),
        ({"warmup": -1}, "warmup must not be negative, not -1"),
    ],
    ids=str,
)
def test_what_cannot_train_is_refused_in_a_sentence(wrong, said):
    with pytest.raises(fs.InputError, match=said):
        Training(**wrong)


def test_a_schedule_needs_rounds_that_fit():
    cosine = Training(batch_size=8, schedule="cosine")
    with pytest.raises(fs.InputError, match=r"schedule cosine depends on the number of rounds; .*rounds=30"):
        simulate(fs.FedAvg(), cosine, None)
    with pytest.raises(fs.InputError, match="warmup must be less than the number of rounds, 2, not 2"):
        simulate(fs.FedAvg(), Training(warmup=2), 2)
    sim = simulate(fs.FedAvg(), cosine, 1)
    sim.step()
    with pytest.raises(fs.InputError, match="schedule cosine ends with round 1; start again with more rounds"):
        sim.step()
    with pytest.raises(fs.InputError, match="warmup must be less than the number of rounds, 30, not 40"):
        Config(training={"warmup": 40}).complete()


def test_a_configuration_says_what_to_write_for_the_decay_that_a_method_had():
    assert "decay" not in Config(method={"name": "fedselect", "decay": 1.0}).complete().method
    said = r'no longer an option of a method; .* with schedule = "step", decay = 0.98, decay_every = 1 under \[training\]'
    with pytest.raises(fs.InputError, match=said):
        Config(method={"name": "fedselect", "decay": 0.98}).complete()
    with pytest.raises(fs.InputError, match=r"--schedule step --decay 0\.97 --decay-every 1"):
        configure({}, "fedselect", None, None, {"fedselect.decay": "0.97"})
    with pytest.raises(fs.InputError, match=r"pass --server-momentum 0\.7\."):
        configure({}, "fedselect", None, None, {"fedselect.server-momentum": "0.7"})
    made = Config(training={"schedule": "step", "decay": 0.98, "decay_every": 1}).complete()
    assert made.make_training().factor(3, 30) == 0.98**3


def test_a_flag_that_a_method_and_training_have_must_say_whose_it_is():
    assert place("warmup", ["fedavg"], {"data": "digits"}) == [("training", "warmup")]
    with pytest.raises(fs.InputError, match=r"select one: --lg-fedavg.warmup or --training.warmup\."):
        place("warmup", ["fedavg", "lg-fedavg"], {"data": "digits"})
    assert place("lg-fedavg.warmup", ["lg-fedavg"], {"data": "digits"}) == [("method:lg-fedavg", "warmup")]
    assert place("training.decay-every", ["lg-fedavg"], {"data": "digits"}) == [("training", "decay_every")]
    with pytest.raises(fs.InputError, match="there is no training option 'warm'; did you mean 'warmup'"):
        place("training.warm", ["lg-fedavg"], {"data": "digits"})


@dataclass(frozen=True)
class Slowed(fs.Mean):
    """A mean with options that have names of others'."""

    limit: float = 0.5
    momentum: float = 0.5
    server_momentum: float = 0.0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "limit",
            r"limit is an option of fedselect and of aggregate; select one: --fedselect.limit or --aggregate.limit",
        ),
        (
            "momentum",
            r"an option of training and of aggregate; select one: --training.momentum or --aggregate.momentum",
        ),
    ],
)
def test_a_flag_that_an_aggregator_has_too_must_say_whose_it_is(monkeypatch, name, said):
    monkeypatch.setitem(fs.AGGREGATORS, "slowed", Slowed)
    chosen = {"aggregate": "slowed"}
    with pytest.raises(fs.InputError, match=said):
        configure({}, "fedselect", None, None, {name: "0.1"}, **chosen)
    made = configure({}, "fedselect", None, None, {f"aggregate.{name}": "0.1"}, **chosen)
    assert made.aggregate[name] == 0.1
    assert (made.method["limit"], made.training["momentum"]) == (0.3, 0.5)
    with pytest.raises(fs.InputError, match="there is no aggregate option 'limt'; did you mean 'limit'"):
        configure({}, "fedselect", None, None, {"aggregate.limt": "0.1"}, **chosen)


@dataclass(frozen=True)
class Eager(fs.Classification):
    rate: float = 0.5


def test_a_flag_that_a_task_has_too_must_say_whose_it_is(monkeypatch):
    monkeypatch.setitem(fs.TASKS, "eager", Eager)
    with pytest.raises(fs.InputError, match=r"select one: --fedselect.rate or --task.rate\."):
        configure({}, "fedselect", None, None, {"rate": "0.1"}, task="eager")
    assert configure({}, "fedselect", None, None, {"task.rate": "0.1"}, task="eager").task["rate"] == 0.1


@dataclass(frozen=True)
class Needy(fs.Schedule):
    needs_rounds = False
    end: float

    def factor(self, round, rounds):
        return self.end


@dataclass(frozen=True)
class Ending(Plain):
    end: float = 0.5


def test_an_own_option_is_a_setting_of_training(monkeypatch):
    monkeypatch.setitem(fs.OPTIMIZERS, "ending", Ending)
    monkeypatch.setitem(fs.SCHEDULES, "needy", Needy)
    made = Config(training={"optimizer": "ending", "end": 0.2}).complete()
    assert made.training["end"] == 0.2
    assert made.make_training().the_optimizer == Ending(end=0.2)
    assert "end" not in Config().complete().training
    with pytest.raises(fs.InputError, match="end is required: give --end"):
        Config(training={"schedule": "needy"}).complete()
    with pytest.raises(fs.InputError, match="end is required: give --end"):
        Training(schedule="needy")
    with pytest.raises(fs.InputError, match="the optimizer and the schedule both have an option end; rename one"):
        Config(training={"optimizer": "ending", "schedule": "needy", "end": 0.2}).complete()
    with pytest.raises(fs.InputError, match="optimizer ending does not use momentum"):
        Config(training={"optimizer": "ending", "end": 0.2, "momentum": 0.9}).complete()
    with pytest.raises(
        fs.InputError, match="there is no option 'end' in this run; optimizer ending has it: add --optimizer ending"
    ):
        configure({}, None, None, None, {"end": "0.2"})
    with pytest.raises(fs.InputError, match=r"'end' is an option of optimizer ending and belongs under \[training\]"):
        configure({"end": 0.2}, None, None, None, {})


@pytest.mark.parametrize("kind", ["optimizer", "schedule"])
def test_a_name_that_is_not_there_may_be_a_plugins(kind):
    with pytest.raises(
        fs.InputError, match=rf"there is no {kind} 'lino'; .*If a plugin provides it, add --plugin, or in Python import it\."
    ):
        Config(training={kind: "lino"}).complete()


def test_runs_of_before_keep_their_identity():
    """Written down as the first version did: four settings of training, and a decay of 1."""
    written = core(Config().complete().to_json())
    assert set(written["training"]) == {"batch_size", "momentum", "weight_decay", "clip"}
    assert written["method"]["decay"] == 1.0
    saved = checkpoint.owner(simulate(fs.FedSelect(), Training())).config
    assert set(saved["training"]) == {"kind", "batch_size", "momentum", "weight_decay", "clip"}
    assert saved["method"]["decay"] == 1.0
    assert "rounds" not in saved
    other = checkpoint.owner(simulate(fs.FedSelect(), Training(optimizer=fs.Adam(beta1=0.5), schedule="cosine"))).config
    assert (other["training"]["optimizer"]["beta1"], other["training"]["schedule"], other["rounds"]) == (0.5, "cosine", 2)
