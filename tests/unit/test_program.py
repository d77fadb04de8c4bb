"""Recorded steps on a CPU: the same bits as the steps as written, known again, bounded in number, and no must."""

import gc
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import assert_equal, everything, rounds, simulation
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fedselect as fs
from fedselect.core.random import client_keys, permutations
from fedselect.tasks.losses import Goal
from fedselect.training import recorded, step
from fedselect.training.batches import Split
from fedselect.training.buffers import Room, copy, ordered
from fedselect.training.fitted import Fitted
from fedselect.training.recorded import Programs, Walk, _identity, nothing_let_go
from fedselect.training.settings import Training
from fedselect.training.step import Aim
from fedselect.training.work import Pass, Work

CLIENTS, N, SIZE, CLASSES = 3, 20, 4, 4
NEVER = 10**9
TASK = fs.Classification()
cross_entropy = Goal(TASK)
PLAIN = Training(batch_size=SIZE, momentum=0.5)
ALL = Training(batch_size=SIZE, momentum=0.9, weight_decay=0.01, clip=0.5)


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, CLASSES))


def cnn():
    """A convolution with live taps only, and one whose outer taps meet nothing but padding."""
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, 2, 1, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(4),
        nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(4, CLASSES),
    )  # fmt: skip


def dropping():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, CLASSES))


class Looks(torch.autograd.Function):
    """tanh, with a look at the numbers on the way, which a list of operations cannot hold."""

    @staticmethod
    def forward(x):
        return torch.tanh(x) if x.abs().max().item() < 1e9 else x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)

    @classmethod
    def vmap(cls, info, in_dims, x):
        return cls.apply(x), in_dims[0]


class LooksByNumpy(Looks):
    """The same out of torch's sight."""

    @staticmethod
    def forward(x):
        return torch.from_numpy(np.tanh(x.detach().numpy()))


def looking(function=Looks):
    class Looking(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden, self.fc = nn.Linear(64, 6), nn.Linear(6, CLASSES)

        def forward(self, x):
            return self.fc(function.apply(self.hidden(x.flatten(1))))

    return Looking()


def setting(build=mlp, training=PLAIN, augment="none", clients=CLIENTS):
    g = torch.Generator().manual_seed(0)
    model = fs.Model.wrap(build)
    tree = {n: torch.stack([model.init(s)[n] for s in range(clients)]) for n in model.names}
    x = torch.randint(0, 256, (clients * N, 1, 8, 8), generator=g, dtype=torch.uint8)
    start, n = torch.arange(clients) * N, torch.full((clients,), N)
    y = torch.randint(0, CLASSES, (clients * N,), generator=g)
    data = Split(x, y, start, n, torch.full((1, 1, 1), 1 / 64), torch.full((1, 1, 1), -2.0), augment=augment)
    fitted = Fitted(model)
    fitted.check(data.batch(torch.zeros(clients, 2, dtype=torch.int64))[0][0], TASK, SimpleNamespace(classes=CLASSES))
    return Programs(fitted, training, TASK), tree, data


def train(programs, tree, data, *, only=None, lr=0.1, ctx=None, objective=cross_entropy, size=SIZE, times=2):
    """`times` passes over a copy of the tree: the values, the optimizer's memory, and the losses of each pass."""
    tree = {n: v.clone() for n, v in tree.items()}
    memory = programs.rest({n: tree[n] for n in programs.model.params})
    only = dict.fromkeys(programs.model.params, True) if only is None else only
    losses = {}
    for epoch in range(times):
        shuffle = client_keys(0, torch.arange(len(data.n)), epoch, "train")
        order = permutations(shuffle, data.n, data.longest)
        aim, walk = Aim(only, lr, objective, ctx or {}), Walk(order, shuffle, size)
        losses[f"loss {epoch}"] = programs.train(tree, memory, aim, data, [walk], first=0, last=-(-N // size))
    return {**tree, **{f"{k} {n}": v for k, t in memory.items() for n, v in t.items()}, **losses}


@pytest.fixture
def made(monkeypatch):
    """Steps are recorded after two of a kind; here is how often that was tried."""
    tried = []

    class Counted(recorded.Traced):
        def __init__(self, *args):
            tried.append(1)
            super().__init__(*args)

    monkeypatch.setattr(recorded, "Traced", Counted)
    monkeypatch.setitem(recorded.RECORD_AFTER, "cpu", 2)
    return tried


@pytest.fixture
def as_written(monkeypatch):
    """The same training without any recording."""

    def call(programs, *args, **how):
        with monkeypatch.context() as m:
            m.setitem(recorded.RECORD_AFTER, "cpu", NEVER)
            return train(Programs(programs.fitted, programs.training, TASK), *args, **how)

    return call


def halves(tree, model):
    """Half of the entries, others for each client; one tensor not at all, one whole."""
    g = torch.Generator().manual_seed(1)
    masks = {n: torch.rand(tree[n].shape, generator=g) < 0.5 for n in model.params}
    return {**masks, model.params[1]: False, model.params[-1]: True}


def by_entry(tree, model):
    """Rates by name: for all, for each client, for each entry."""
    first, second, *rest = model.params
    g = torch.Generator().manual_seed(2)
    return {first: torch.rand(tree[first].shape, generator=g) / 5, second: torch.tensor([0.1, 0.0, 0.3]),
            **dict.fromkeys(rest, 0.05)}  # fmt: skip


def by_every_entry(tree, model):
    g = torch.Generator().manual_seed(2)
    return {n: torch.rand(tree[n].shape, generator=g) / 5 for n in model.params}


def far(out, y, params, ctx):
    return cross_entropy(out, y, params, ctx) + sum(((params[n] - v) ** 2).sum() for n, v in ctx["points"].items())


def points(tree, model):
    return {"points": {model.params[0]: tree[model.params[0]] * 0.5}}


def pulled(tree, model):
    return {"anchor": {n: tree[n] * 0.5 for n in model.params}, "pull": {"mu": torch.tensor([0.3, 0.0, 1.5])}}


CASES = {
    "mlp": {},
    "momentum, decay, clip": {"training": ALL},
    "no momentum": {"training": Training(batch_size=SIZE, momentum=0.0)},
    "masks": {"training": ALL, "only": halves},
    "a rate for each client": {"lr": lambda tree, model: torch.tensor([0.1, 0.0, 0.3])},
    "rates by entry": {"lr": by_entry, "only": halves},
    "context": {"objective": far, "ctx": points},
    "pulled": {"ctx": pulled, "only": halves},
    "pulled and clipped": {"ctx": pulled, "training": ALL},
    "pulled, dead taps": {"build": cnn, "ctx": pulled},
    "batch norm, dead taps": {"build": cnn},
    "batch norm, dead taps, masks": {"build": cnn, "only": halves, "augment": "crop-flip"},
    "dropout": {"build": dropping},
    "rates by entry, dead taps": {"build": cnn, "lr": by_every_entry, "only": halves},
    "nesterov": {"training": Training(batch_size=SIZE, momentum=0.9, nesterov=True, clip=0.5), "only": halves},
    "adam, pulled": {"training": Training(batch_size=SIZE, optimizer="adam"), "ctx": pulled, "only": halves},
    "adamw": {"training": Training(batch_size=SIZE, optimizer="adamw", weight_decay=0.1), "lr": by_entry, "only": halves},
}


@pytest.mark.parametrize("case", CASES)
def test_a_recorded_pass_has_the_bits_of_one_as_written(case, made, as_written):
    how = {**CASES[case]}
    programs, tree, data = setting(**{k: how.pop(k) for k in ("build", "training", "augment") if k in how})
    how = {k: v(tree, programs.model) if k in ("only", "lr", "ctx") else v for k, v in how.items()}
    got = train(programs, tree, data, **how)
    assert len(made) == 1  # two steps as written, then one recording for the rest of both passes
    assert_equal(as_written(programs, tree, data, **how), got)
    assert len(made) == 1
    assert any(not got[n].equal(tree[n]) for n in tree)


class Pads(TorchDispatchMode):
    """The shapes of what is filled up with zeros, without clients."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.constant_pad_nd.default:
            self.shapes.append(out.shape[1:])
        return out


def test_dead_taps_are_left_out_of_the_recording(made, as_written):
    programs, tree, data = setting(cnn)
    got = train(programs, tree, data)
    with Pads() as pads:
        assert_equal(train(programs, tree, data), got)
    assert tree["4.weight"].shape[1:] not in pads.shapes  # no gradient is filled up
    with Pads() as pads:
        as_written(programs, tree, data)
    assert tree["4.weight"].shape[1:] in pads.shapes
    edge = torch.ones(3, 3, dtype=torch.bool)
    edge[1, 1] = False
    assert got["4.weight"][..., edge].equal(tree["4.weight"][..., edge])
    assert (got["4.weight"][..., 1, 1] != tree["4.weight"][..., 1, 1]).any()


def test_dead_taps_do_not_move_with_adam_either(made, as_written):
    programs, tree, data = setting(cnn, Training(batch_size=SIZE, optimizer="adam"))
    got, want = train(programs, tree, data), as_written(programs, tree, data)
    assert len(made) == 1
    counted = [r.pop("steps 4.weight") for r in (got, want)]  # steps of taps that are left out are not counted
    assert_equal(want, got)
    assert [c[0, 0, 0, 1, 1] for c in counted] == [counted[0].max()] * 2
    assert counted[0].min() < counted[1].min()


@pytest.mark.parametrize("case", ["fedselect", "fedpac"])
def test_a_recorded_simulation_has_the_bits_of_one_as_written(case, made, monkeypatch):
    """Clients of many sizes: steps of several shapes, each recorded the second time it comes."""
    sims = []
    for after in (NEVER, 1):
        monkeypatch.setitem(recorded.RECORD_AFTER, "cpu", after)
        sims.append(simulation(case, "mlp"))
        records = rounds(sims[-1], 2)
        sims[-1].records = records
    assert made
    assert sims[0].records == sims[1].records
    assert_equal(everything(sims[0]), everything(sims[1]))


def test_one_recording_serves_all_passes_and_values(made, as_written):
    programs, tree, data = setting()
    train(programs, tree, data)
    other = {n: v + 0.1 for n, v in tree.items()}
    got = train(programs, other, data, lr=0.02)
    assert len(made) == 1
    assert_equal(as_written(programs, other, data, lr=0.02), got)


def test_other_clients_of_the_same_pool_are_served_too(made, as_written):
    programs, tree, data = setting(clients=4)
    train(programs, {n: v[:3] for n, v in tree.items()}, data.rows(slice(0, 3)))
    there = torch.tensor([3, 1, 0])
    mine = {n: v[there] for n, v in tree.items()}
    got = train(programs, mine, data.rows(there))
    assert len(made) == 1
    assert_equal(as_written(programs, mine, data.rows(there)), got)


OTHERS = {
    "clients": lambda tree, data: ({n: v[:2] for n, v in tree.items()}, data.rows(slice(0, 2)), {}),
    "batch size": lambda tree, data: (tree, data, {"size": SIZE + 1}),
    "mask by tensor": lambda tree, data: (tree, data, {"only": {"3.weight": True}}),
    "mask by entry": lambda tree, data: (tree, data, {"only": {"3.weight": tree["3.weight"] > 0}}),
    "objective": lambda tree, data: (tree, data, {"objective": lambda o, y, p, c: cross_entropy(o, y, p, c) * 2}),
    "rates by name": lambda tree, data: (tree, data, {"lr": dict.fromkeys(tree, 0.1)}),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_kind_of_step_gets_a_recording_of_its_own(other, made, as_written):
    programs, tree, data = setting()
    train(programs, tree, data, times=1)
    tree, data, how = OTHERS[other](tree, data)
    got = train(programs, tree, data, **how, times=1)
    assert len(made) == 2
    assert_equal(as_written(programs, tree, data, **how, times=1), got)


def test_an_objective_made_anew_each_round_is_known_again(made):
    programs, tree, data = setting()
    for _ in range(3):
        train(programs, tree, data, objective=lambda o, y, p, c: cross_entropy(o, y, p, c) * 2, times=1)
    assert len(made) == 1


def test_functions_that_may_do_otherwise_are_not_taken_for_the_same():
    def closure(mu):
        return lambda: mu

    def default(mu):
        return lambda m=mu: m

    def keyword(mu):
        return lambda *, m=mu: m

    for make in (closure, default, keyword):
        one, two = make(1), make(2)
        assert _identity(one) == _identity(one)
        assert _identity(one) != _identity(two)
    alike = [lambda: 1 for _ in range(2)]
    assert alike[0] is not alike[1]
    assert _identity(alike[0]) == _identity(alike[1])


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def loss(self, out, y, params, ctx):
        return cross_entropy(out, y, params, ctx) * self.factor


def test_methods_of_two_objects_are_two_objectives(made, as_written):
    programs, tree, data = setting()
    for factor in (1.0, 3.0):
        got = train(programs, tree, data, objective=Scaled(factor).loss, times=1)
        assert_equal(as_written(programs, tree, data, objective=Scaled(factor).loss, times=1), got)


def test_an_objective_may_be_any_callable(made, as_written):
    class Unhashable(Scaled):
        __call__ = Scaled.loss
        __hash__ = None

    programs, tree, data = setting()
    got = train(programs, tree, data, objective=Unhashable(2.0), times=1)
    assert_equal(as_written(programs, tree, data, objective=Unhashable(2.0), times=1), got)


def test_no_more_recordings_are_kept_than_agreed(made, as_written, monkeypatch):
    monkeypatch.setitem(recorded.KEPT, "cpu", 2)
    programs, tree, data = setting()
    for size in (3, 4, 5, 5, 4, 3):  # 3 comes back when its recording is gone
        train(programs, tree, data, size=size, times=1)
        assert len(programs._recorded) <= 2
    assert len(made) == 4
    assert_equal(as_written(programs, tree, data, size=3), train(programs, tree, data, size=3))


def test_what_is_cleared_is_made_anew(made):
    programs, tree, data = setting()
    before = train(programs, tree, data)
    programs.clear()
    assert_equal(before, train(programs, tree, data))
    assert len(made) == 2


def test_few_steps_are_not_recorded(made, monkeypatch):
    monkeypatch.setitem(recorded.RECORD_AFTER, "cpu", 2 * -(-N // SIZE))
    programs, tree, data = setting()
    train(programs, tree, data)
    assert not made
    train(programs, tree, data, times=1)
    assert len(made) == 1


@pytest.mark.parametrize(("rounds", "recordings"), [(None, 0), (9, 0), (10, 1)])
def test_a_run_with_many_steps_to_come_is_recorded_sooner(rounds, recordings, made, monkeypatch):
    """Two steps a round: of ten rounds as many are to come as twice the ten that are waited for; of nine, 18."""
    monkeypatch.setitem(recorded.RECORD_AFTER, "cpu", 10)
    monkeypatch.setattr(recorded, "SOON", 1)
    part = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
    data = fs.Federation([fs.ClientData(part, part)] * 2, 2)
    simulation = fs.Simulation(
        fs.FedAvg(epochs=1), fs.models.mlp(data), data, training=fs.Training(batch_size=4), device="cpu", rounds=rounds
    )
    simulation.step(evaluate=False)
    assert len(made) == recordings


def test_the_larger_the_pictures_the_fewer_clients_run_at_once():
    """Stacked clients stay in a CPU's caches; the shares of a cohort are even, so that steps of few kinds are recorded."""
    fits = []
    for side in (8, 16, 32, 64):
        part = torch.zeros(16, 3, side, side), torch.zeros(16, dtype=torch.int64)
        data = fs.Federation([fs.ClientData(part, part)] * 50, 2)
        simulation = fs.Simulation(fs.FedAvg(), fs.models.small_cnn(data), data, device="cpu")
        assert not step.one_by_one(simulation.fitted, torch.device("cpu"))
        fits.append(simulation.fits)
        chunks = [len(ids) for ids in simulation._chunks(torch.arange(50))]
        assert sum(chunks) == 50
        assert max(chunks) <= min(50, simulation.fits)
        assert max(chunks) - chunks[-1] < len(chunks)
        assert not list(simulation._chunks(torch.arange(0)))
    assert fits == sorted(fits, reverse=True)
    assert fits[0] > 20
    assert fits[-1] == 1


def test_clients_that_cannot_be_stacked_are_not_recorded(made):
    programs, tree, data = setting(clients=1)
    programs.fitted.stackable = False
    train(programs, tree, data)
    assert not made


@pytest.mark.parametrize(
    "case", ["mlp", "momentum, decay, clip", "batch norm, dead taps, masks", "dropout", "pulled, dead taps"]
)
def test_a_large_client_is_recorded_too(case, made, as_written, monkeypatch):
    monkeypatch.setattr(step, "HEAVY", 0)
    how = {**CASES[case]}
    programs, tree, data = setting(**{k: how.pop(k) for k in ("build", "training", "augment") if k in how}, clients=1)
    how = {k: v(tree, programs.model) if k in ("only", "lr", "ctx") else v for k, v in how.items()}
    how["ctx"] = {k: {n: v[:1] for n, v in t.items()} for k, t in how.get("ctx", {}).items()}
    got = train(programs, tree, data, **how)
    assert len(made) == 1
    assert_equal(as_written(programs, tree, data, **how), got)


def test_a_recording_follows_what_is_prepared_of_frozen_kernels(made, as_written, monkeypatch):
    """Frozen taps are copied once per round: a recording must use those of the client at hand."""
    monkeypatch.setattr(step, "HEAVY", 0)
    programs, tree, data = setting(cnn, clients=1)
    only = {n: n != "4.weight" for n in programs.model.params}
    first = train(programs, tree, data, only=only)
    assert len(made) == 1
    other = {**tree, "4.weight": tree["4.weight"] * 0.5}
    got = train(programs, other, data, only=only)
    assert len(made) == 1
    assert_equal(as_written(programs, other, data, only=only), got)
    assert not got["0.weight"].equal(first["0.weight"])


def test_a_model_that_cannot_be_recorded_runs_and_says_so_once(made, as_written):
    programs, tree, data = setting(looking)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got = train(programs, tree, data, times=3)
    assert len(said) == 1
    assert str(said[0].message).startswith("looking cannot be recorded and runs on the slow path (")
    assert len(made) == 1
    assert_equal(as_written(programs, tree, data, times=3), got)


def test_the_user_reads_it_once_whatever_kinds_of_steps_there_are(made):
    programs, tree, data = setting(looking)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for size in (3, 4, 5):
            train(programs, tree, data, size=size)
    assert len(made) == 3
    assert len(said) == 1


def test_numbers_made_out_of_torchs_sight_are_not_frozen(made, as_written):
    programs, tree, data = setting(lambda: looking(LooksByNumpy))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = train(programs, tree, data)
    assert_equal(as_written(programs, tree, data), got)


# ---- prediction, and the places of trees


@pytest.mark.parametrize("build", [cnn, dropping])
def test_predictions_are_each_clients_own(build):
    programs, tree, data = setting(build)
    short = Split(data.x, data.y, data.start, torch.tensor([N, 3, N - 1]), data.scale, data.shift)
    logits, features, y, inside = programs.predict(tree, short, 2, 6)
    for c, n in enumerate(short.n.tolist()):
        rows = [i for i in range(2, 8) if i < n]
        module = build().eval()
        module.load_state_dict({k: v[c] for k, v in tree.items()}, strict=False)
        x = short.x[short.start[c] + torch.tensor(rows)] / 64 - 2.0
        assert inside[c].tolist() == [i < n for i in range(2, 8)]
        torch.testing.assert_close(logits[c, inside[c]], module(x).detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(features[c, inside[c]], module[:-1](x).detach(), rtol=1e-5, atol=1e-6)
        assert y[c, inside[c]].tolist() == short.y[short.start[c] + torch.tensor(rows)].tolist()


def test_on_a_cpu_trees_stay_where_they_are():
    programs, tree, _ = setting(cnn)
    assert programs.place("values", tree) is tree
    (rest,) = programs.rest(tree).values()
    assert all((v == 0).all() and v.shape == tree[n].shape for n, v in rest.items())
    assert not {v.data_ptr() for v in rest.values()} & {v.data_ptr() for v in tree.values()}


def test_ordered_is_a_copy_in_the_usual_order():
    kernel = torch.randn(2, 3, 5, 4, 4).permute(0, 1, 4, 2, 3)
    got = ordered({"a": kernel, "b": torch.ones(1, 3).expand(2, 3)})
    assert all(v.is_contiguous() for v in got.values())
    assert got["a"].equal(kernel)
    got["b"][0] = 2.0
    assert (got["b"][1] == 1.0).all()


def test_copy_writes_values_whatever_their_order():
    into = {"a": torch.full((2, 3, 4, 4, 5), torch.nan).permute(0, 1, 4, 2, 3), "b": torch.full((2, 3), torch.nan)}
    tree = {"a": torch.randn(2, 3, 5, 4, 4), "b": torch.randn(3, 2).T}
    places = {n: v.data_ptr() for n, v in into.items()}
    copy(into, tree)
    assert all(into[n].equal(v) and into[n].data_ptr() == places[n] for n, v in tree.items())


def test_a_room_stays_where_it_is():
    shapes = {"kernel": (4, 3, 2, 5), "bias": (4,), "one": ()}
    tree = {n: torch.randn(3, *s) for n, s in shapes.items()}
    room = Room({n: torch.empty(5, *s) for n, s in shapes.items()}, frozenset({"kernel", "bias"}))
    for values in (tree, {n: -v for n, v in tree.items()}):
        placed = room.write(values)
        assert placed["kernel"].permute(0, 1, 3, 4, 2).is_contiguous()
        for n, v in values.items():
            assert placed[n].equal(v)
            assert placed[n].data_ptr() == room.tensors[n].data_ptr()
        got = room.read(3)
        assert all(got[n].equal(v) and got[n].is_contiguous() for n, v in values.items())
        version = placed["kernel"]._version
        placed["bias"].add_(1.0)
        assert placed["kernel"]._version == version  # one is not the other to autograd
        room.memory.zero_()
        assert all((v == 0).all() for v in placed.values())
        assert all(got[n].equal(v) for n, v in values.items())
    turned = {n: tree[n] for n in reversed(tree)}
    assert all(v.equal(tree[n]) for n, v in room.write(turned).items())


# ---- work: passes over recordings


def test_training_leaves_its_tree_alone_and_returns_a_new_one(made):
    programs, tree, data = setting(cnn)
    before = {n: v.clone() for n, v in tree.items()}
    work = Work(programs, data, data, ids=torch.arange(CLIENTS), round=0, seed=0, initial=dict)
    out = work.train(tree, [Pass(dict.fromkeys(programs.model.params, True), 0.1, e) for e in range(2)])
    assert len(made) == 1
    for n, v in tree.items():
        assert v.equal(before[n])
        assert not out[n].equal(v)
    assert torch.isfinite(work.loss).all()


def test_a_stacked_round_is_that_of_each_client_alone(made):
    programs, tree, data = setting(training=ALL)
    data = Split(data.x, data.y, data.start, torch.tensor([3, N, 11]), data.scale, data.shift)  # the longest first is 1, 2, 0
    passes = [Pass(dict.fromkeys(programs.model.params, True), 0.1, e) for e in range(2)]
    work = Work(programs, data, data, ids=torch.tensor([4, 2, 9]), round=1, seed=3, initial=dict)
    together = work.train(tree, passes)
    assert made
    for c in range(CLIENTS):
        row = slice(c, c + 1)
        alone = work.rows(row)
        got = alone.train({n: v[row] for n, v in tree.items()}, passes)
        assert_equal({n: v[row] for n, v in together.items()}, got)
        assert alone.loss.equal(work.loss[row])


@pytest.mark.parametrize("sizes", [[N, 11, 3], [3, N, 11]], ids=str)
@pytest.mark.parametrize("heavy", [False, True], ids=["stacked", "one by one"])
def test_a_client_that_sits_everything_out_keeps_its_loss(sizes, heavy, monkeypatch):
    programs, tree, data = setting()
    if heavy:
        monkeypatch.setattr(step, "HEAVY", 0)
    data = Split(data.x, data.y, data.start, torch.tensor(sizes), data.scale, data.shift)
    work = Work(programs, data, data, ids=torch.arange(CLIENTS), round=0, seed=0, initial=dict)
    work.train(tree, [Pass(dict.fromkeys(programs.model.params, True), 0.1, 0)])
    before, name = work.loss.clone(), programs.model.params[0]
    some = torch.zeros_like(tree[name], dtype=torch.bool)
    some[1] = True
    work.train(tree, [Pass({name: some}, 0.1, 1)])
    assert (work.loss == before).tolist() == [True, False, True]
    assert torch.isfinite(work.loss).all()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_clients_that_are_still_running_lie_side_by_side_in_any_federation(sizes):
    """So they are trained in place, and what is recorded for so many of them is known again."""
    n = torch.tensor(sizes)
    data = Split(torch.zeros(1, 1, 8, 8), torch.zeros(1, dtype=torch.int64), torch.zeros_like(n), n)
    work = Work(
        Programs(Fitted(fs.Model(mlp)), PLAIN, TASK), data, data, ids=torch.arange(len(n)), round=0, seed=0, initial=dict
    )
    order = work._longest_first()
    there = work if order is None else work.rows(order)
    assert there._longest_first() is None
    cuts = list(there._stretches([True] * len(n)))
    assert all(isinstance(rows, slice) for rows, *_ in cuts)
    done = torch.zeros_like(n)
    for rows, first, last, size in cuts:
        done[rows] += (last - first) * size
    taken = n if order is None else n[order]
    assert (done >= taken).all()
    assert (done - taken < PLAIN.batch_size).all()


def test_nothing_is_let_go_in_the_middle_of_a_capture():
    class Held:
        def __init__(self):
            self.itself = self  # only the garbage collector finds it

        def __del__(self):
            gone.append(1)

    gone = []
    with nothing_let_go():
        Held()
        junk = [[] for _ in range(10_000)]  # enough to set a collection off
        assert (gone, gc.isenabled()) == ([], False)
    del junk
    assert gc.isenabled()
    gc.collect()
    assert gone == [1]
