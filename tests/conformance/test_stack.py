"""Several runs as one program: each comes out bit for bit as it would alone, on a CPU."""

import weakref
from dataclasses import replace

import pytest
import torch
from cases import MODELS, TRAINING, federation
from torch import nn

import fedselect as fs
from fedselect.core.tree import block, lay
from fedselect.simulate import Simulation, measures
from fedselect.simulate.rounds import Round
from fedselect.simulate.stack import Stack, _cat, _cut, _spread, stacks
from fedselect.training.settings import Training

SETTINGS = {
    "fedselect": (fs.FedSelect, [{"rate": 0.1, "limit": 0.3}, {"rate": 0.05, "limit": 0.1}, {"lr": 0.05, "personal_lr": 0.02}]),
    "fedselect, some keep nothing": (
        fs.FedSelect, [{"limit": torch.tensor([0.0, 0.2, 0.0, 1.0, 0.1, 0.0])}, {"limit": torch.tensor([0.3, 0, 0, 0, 0, 0])}],
    ),
    "fedselect, float32 numbers": (
        fs.FedSelect,
        [{"rate": torch.full((6,), 0.1), "lr": torch.linspace(0.01, 0.06, 6)}, {"personal_lr": torch.full((6,), 0.1)}],
    ),
    "fedselect, fine-tuned": (
        fs.FedSelect,
        [{"finetune": 1, "view": "merged", "finetune_lr": r, "limit": limit} for r, limit in ((0.1, 0.3), (0.02, 0.1))],
    ),
    "fedselect, joint": (
        fs.FedSelect,
        [{"order": "joint"}, {"order": "joint", "limit": 0.1}],
    ),
    "fedselect, own answers, averaged": (
        fs.FedSelect,
        [{"finetune": 1, "view": "merged", "answers": "own", "server_average": a, "limit": 0.1} for a in (0.5, 0.8)],
    ),
    "fedalike": (fs.FedAlike, [{"finetune": 1, "lr": lr, "finetune_lr": 0.1 * lr} for lr in (0.1, 0.03)]),
    "fedpersist": (
        fs.FedPersist,
        [{"window": 2, "threshold": a, "finetune": 1} for a in (0.05, 0.8, 0.1)],
    ),
    "fedpersist, by client": (
        fs.FedPersist,
        [{"window": 2, "threshold": torch.linspace(a, 0.9, 6)} for a in (0.1, 0.3)],
    ),
    "layers": (fs.PersonalLayers, [{"layers": "*weight"}, {"layers": "*weight", "lr": 0.05}]),
    "fedavg": (fs.FedAvg, [{"lr": 0.1}, {"lr": 0.03}]),
    "fedprox": (fs.FedProx, [{"mu": 0.1}, {"mu": 0.2}]),
    "ditto": (fs.Ditto, [{"lam": 0.1}, {"lam": 0.5}]),
    "fedpac": (fs.FedPAC, [{}, {"lam": 0.3}]),
    "ditto, fine-tuned": (fs.Ditto, [{"finetune": 1, "finetune_lr": r} for r in (0.1, 0.02)]),
    "fedpac, fine-tuned": (fs.FedPAC, [{"finetune": 1, "view": "merged", "lr": r} for r in (0.1, 0.02)]),
    "lotteryfl": (fs.LotteryFL, [{}, {"rate": 0.3}]),
    "scaffold": (fs.Scaffold, [{"lr": lr, "finetune": 1, "finetune_lr": 0.1 * lr} for lr in (0.1, 0.03)]),
    "apfl": (fs.APFL, [{"alpha": 0.3, "alpha_lr": 1.0}, {"lr": 0.05, "alpha": 0.6}]),
}  # fmt: skip


TRAININGS = {
    "fedavg": Training(batch_size=8, optimizer="adam", schedule="cosine", warmup=1),
    "fedselect, joint": replace(TRAINING, nesterov=True, schedule="step", decay=0.9),
}


def runs(case, model, **how):
    """One with each setting, and one more that differs from the first in its seed alone."""
    method, settings = SETTINGS[case]
    how = {"training": TRAININGS.get(case, TRAINING), "rounds": 4, **how}
    out = []
    for setting, seed in ((settings[0], 3), *((s, 11) for s in settings)):
        data = federation()
        out.append(Simulation(method(epochs=2, **setting), MODELS[model](data), data, seed=seed, **how))
    return out


def without_time(record):
    return {k: v for k, v in record.items() if k != "seconds"}


AWAY = ("fedselect", "fedalike", "fedpersist", "fedselect, own answers, averaged", "ditto", "fedpac", "lotteryfl")
SOME_AWAY = {"fraction": 0.5, "late": (2, 3), "eval_every": 2}
HOWS = {"": {}, ", some away": SOME_AWAY}
BOTH = {"fedselect", "fedselect, own answers, averaged", "fedpac", "lotteryfl"}
"""With both models; the others, and all where some are away, with the smaller one alone but in `make test-all`."""
PAIRS = [
    pytest.param(
        case, how, model, id=f"{case}{away}-{model}",
        marks=pytest.mark.full if model != "mlp" and (how or case not in BOTH) else [],
    )
    for away, how in HOWS.items()
    for case in (AWAY if how else SETTINGS)
    for model in MODELS
]  # fmt: skip


@pytest.mark.parametrize(("case", "how", "model"), PAIRS)
def test_a_run_in_a_stack_is_the_run_alone(case, how, model):
    stacked, alone = runs(case, model, **how), runs(case, model, **how)
    assert stacks(stacked[0]) is not None
    assert len({stacks(run) for run in stacked}) == 1
    stack = Stack(stacked)
    for _ in range(4 if how else 3):
        for got, run in zip(stack.step(), alone, strict=True):
            assert without_time(got) == without_time(run.step())
    everybody = range(alone[0].clients)
    for one, other in zip(stacked, alone, strict=True):
        for view in ("local", "merged"):
            ours, theirs = one.models(everybody, view), other.models(everybody, view)
            assert all(torch.equal(v, theirs[n]) for n, v in ours.items())


@pytest.mark.parametrize(
    "other",
    [
        lambda d: Simulation(fs.FedSelect(epochs=4), MODELS["mlp"](d), d, training=TRAINING),
        lambda d: Simulation(fs.FedAvg(), MODELS["mlp"](d), d, training=TRAINING),
        lambda d: Simulation(fs.FedSelect(), MODELS["cnn-batchnorm"](d), d, training=TRAINING),
        lambda d: Simulation(fs.FedSelect(), MODELS["mlp"](d), d, training=fs.Training(batch_size=5)),
        lambda d: Simulation(fs.FedSelect(), MODELS["mlp"](d), d, training=TRAINING, eval_every=2),
        lambda d: Simulation(fs.FedSelect(select=fs.Reading(scope="tensor")), MODELS["mlp"](d), d, training=TRAINING),
        lambda d: Simulation(fs.FedSelect(limit=0.0), MODELS["mlp"](d), d, training=TRAINING),
        lambda d: Simulation(fs.FedSelect(), MODELS["mlp"](d), d, training=TRAINING, rows="personal"),
        lambda d: Simulation(fs.FedSelect(), MODELS["mlp"](d), d, training=TRAINING, fraction=0.5),
    ],
    ids=["epochs", "method", "model", "batch", "evaluation", "scope", "nothing personal", "rows", "some sit out"],
)
def test_runs_that_differ_in_more_than_numbers_do_not_stack(other):
    data = federation()
    one = Simulation(fs.FedSelect(), MODELS["mlp"](data), data, training=TRAINING)
    assert stacks(one) is not None
    assert stacks(one) != stacks(other(data))


def test_a_run_that_diverges_leaves_the_others_alone():
    data = federation()

    def made():
        return [Simulation(fs.FedAvg(lr=lr), MODELS["mlp"](data), data, training=TRAINING) for lr in (0.05, 1e30, 0.02)]

    stack, (first, _, last) = Stack(made()), made()
    outcomes = stack.step()
    assert isinstance(outcomes[1], fs.TrainingError)
    assert "is no longer finite" in str(outcomes[1])
    first.step(), last.step()
    for got, run in zip(stack.step(), (first, last), strict=True):
        assert without_time(got) == without_time(run.step())


def test_a_share_that_is_the_floor_is_so_in_a_stack_too():
    """592 of 740 weights are 0.8, which no float is: alone, among others and by client the comparison is the same."""
    data = fs.load("digits", clients=4, classes_per_client=3, train=30, test=10, val=8, seed=0)

    def run(floor):
        model = fs.Model.wrap(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.ReLU(), nn.Linear(10, 10)))
        return Simulation(fs.LotteryFL(floor=floor, above=0.0, lr=0.05, epochs=1), model, data)

    runs = [run(0.8), run(torch.full((4,), 0.8, dtype=torch.float64)), run(0.8), run(0.7)]
    stack = Stack(runs[2:])
    for _ in range(4):
        runs[0].step(), runs[1].step(), stack.step()
    kept = [torch.stack([m.flatten(1).sum(1) for m in r.store.rows["kept"].values()]).sum(0) for r in runs]
    assert kept[0].min() == 592
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept[0], kept[2])
    assert kept[3].min() < 592


def without_room(monkeypatch, run, full):
    """Let the GPU's memory be too small for jobs of this run of which `full` says so."""
    do = Stack._do

    def tight(self, who, jobs):
        if self.runs == [run] and full(jobs[0]):
            raise torch.cuda.OutOfMemoryError("no room")
        return do(self, who, jobs)

    monkeypatch.setattr(Stack, "_do", tight)


@pytest.mark.parametrize("tight_for", [("client", "personal", "score"), ("join",)])
def test_a_full_gpu_halves_the_chunk_and_nothing_else_changes(monkeypatch, tight_for):
    data = federation()
    sims = [Simulation(fs.FedSelect(), MODELS["mlp"](data), data, training=TRAINING, chunk=c) for c in (2, 6)]
    without_room(monkeypatch, sims[1], lambda job: job.what in tight_for and len(job.ids) > 2)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with pytest.warns(UserWarning, match="memory is full; continuing with"):
        got = sims[1].step()
    assert sims[1].chunk <= 2
    assert without_time(got) == without_time(sims[0].step())
    assert without_time(sims[1].step()) == without_time(sims[0].step())


def test_a_full_gpu_cuts_a_stack_once_and_for_all(monkeypatch):
    stack, alone = Stack(runs("fedselect", "mlp")), runs("fedselect", "mlp")
    tried = []

    def tight(who, jobs):
        tried.append(len(who))
        if len(who) > 2:
            raise torch.cuda.OutOfMemoryError("no room")
        return do(who, jobs)

    do = stack._do
    monkeypatch.setattr(stack, "_do", tight)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with pytest.warns(UserWarning, match="memory is full; continuing with 2 runs at a time"):
        first = stack.step()
    for records in (first, stack.step()):
        for got, run in zip(records, alone, strict=True):
            assert without_time(got) == without_time(run.step())
    assert tried[0] == 4
    assert set(tried[1:]) == {2}


def test_what_did_not_fit_is_let_go_before_half_of_it_is_tried(monkeypatch):
    data = federation()
    sim = Simulation(fs.FedSelect(), MODELS["mlp"](data), data, training=TRAINING, chunk=6)
    sim.step()
    held = []

    def tight(job):
        full = job.what == "client" and len(job.ids) > 3
        held.extend([weakref.ref(job)] if full else [])
        return full

    without_room(monkeypatch, sim, tight)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: held.append(held[0]()))
    with pytest.warns(UserWarning, match="memory is full"):
        sim.step()
    assert held[1:] == [None]


def test_one_client_that_does_not_fit_ends_the_run_in_words(monkeypatch):
    data = federation()
    sim = Simulation(fs.FedAvg(), MODELS["mlp"](data), data, training=TRAINING, chunk=1)

    without_room(monkeypatch, sim, lambda job: job.what == "client")
    with pytest.raises(fs.RunError, match="not even one client fits"):
        sim.step()


def test_a_model_too_large_for_one_step_is_not_taken_for_one_that_cannot_stack(monkeypatch):
    def full(*given):
        raise torch.cuda.OutOfMemoryError("no room")

    data = federation()
    monkeypatch.setattr("fedselect.training.step.step", full)
    with pytest.raises(fs.RunError, match="not even one client fits"):
        Simulation(fs.FedAvg(), MODELS["mlp"](data), data)


def test_what_was_cut_from_one_block_is_put_together_without_a_copy():
    like = {"a": torch.empty(6, 2, 3), "b": torch.empty(6)}
    whole = torch.randn(6, 7)
    tree = lay(whole, like)
    parts = [_cut(tree, rows) for rows in (slice(0, 2), slice(2, 5), slice(5, 6))]
    assert _cat(parts[:2])["a"].data_ptr() == whole.data_ptr()
    assert block(_cat(parts[:2])).equal(whole[:5])
    for some in ([parts[1], parts[0]], [parts[0], parts[2]], parts, [tree, tree]):
        got = _cat(some)
        assert all(v.equal(torch.cat([p[n] for p in some])) for n, v in got.items())
    apart = [{n: v.clone() for n, v in p.items()} for p in parts]
    assert block(_cat([parts[0], apart[1]])) is None
    assert all(v.equal(tree[n]) for n, v in _cat([parts[0], apart[1], parts[2]]).items())


def test_what_servers_say_is_given_to_each_of_their_clients():
    like = {"a": torch.empty(2, 3), "b": torch.empty(())}
    trees = [lay(torch.randn(7), like, clients=False) for _ in range(3)]
    apart = [{n: v.clone() for n, v in t.items()} for t in trees]
    whole, by_tensor = _spread(trees, [2, 1, 3]), _spread(apart, [2, 1, 3])
    turned = [
        trees[0],
        *(lay(torch.cat([t["b"].view(1), t["a"].flatten()]), dict(reversed(like.items())), False) for t in trees[1:]),
    ]
    assert all(v.equal(whole[n]) for n, v in _spread(turned, [2, 1, 3]).items())  # by name, not by place
    assert block(whole) is not None
    for n in like:
        rows = torch.stack([t[n] for t, c in zip(trees, (2, 1, 3), strict=True) for _ in range(c)])
        assert whole[n].equal(rows)
        assert by_tensor[n].equal(rows)


def test_no_run_reads_its_outcome_before_all_have_sent_their_work(monkeypatch):
    """Reading waits for a GPU, which then has nothing to do while the other runs are still on the host."""
    seen = []
    share, record = measures.personal_share, Round._record  # the last thing sent, and what reads
    monkeypatch.setattr(measures, "personal_share", lambda *a: seen.append("send") or share(*a))
    monkeypatch.setattr(Round, "_record", lambda *a: seen.append("read") or record(*a))
    stack = Stack(runs("fedavg", "mlp"))
    stack.step()
    assert seen == ["send"] * 3 + ["read"] * 3
