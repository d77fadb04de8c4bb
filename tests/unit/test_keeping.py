"""The round that is kept, chosen on validation data: which one it is, its models, and that a run stops when it is past."""

import copy
import json
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedselect as fs
from fedselect.runs import runner
from fedselect.runs.config import Config
from fedselect.runs.rundir import core, identity, reopen
from fedselect.simulate import keeping
from fedselect.simulate.keeping import final, stalled
from fedselect.tasks import Measure

METHODS = {"merged, fine-tuned": fs.FedAvgFT(lr=0.3, finetune=1), "local": fs.FedSelect(lr=0.3, personal_lr=0.3, limit=0.4)}
FALLING = {"rate too high": fs.FedAvgFT(lr=2.0, finetune=2), "usual": fs.FedAvgFT(lr=0.1), "slow": fs.FedAvgFT(lr=0.01)}
CONFIG = {
    "data": {"name": "digits", "clients": 3, "train": 30, "val": 10, "test": 10}, "model": {"name": "mlp"},
    "method": {"name": "fedavg+ft", "lr": 2.0}, "rounds": 12,
}  # fmt: skip


@pytest.fixture(scope="module")
def data():
    return fs.load("digits", clients=4, train=30, val=10, test=10, seed=1)


def by_hand(method, data, rounds, **how):
    """Every round's record and models, of a simulation that keeps nothing."""
    simulation = fs.Simulation(method, "mlp", data, val=True, rounds=rounds, **how)
    history, models = [], []
    for _ in range(rounds):
        history.append(simulation.step())
        models.append(fs.Result(simulation, history).models())
    return history, models


def best(scores):
    """The first of the highest, in plain words."""
    at = 0
    for i, score in enumerate(scores):
        if score > scores[at]:
            at = i
    return at


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def untimed(history, *without):
    return [{k: v for k, v in r.items() if k not in ("seconds", *without)} for r in history]


@pytest.mark.parametrize("how", [{}, {"fraction": 0.5}, {"chunk": 3}], ids=["all", "cohort", "chunks"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_kept_models_and_scores_are_those_of_the_best_round(method, data, how):
    history, models = by_hand(method, data, 8, **how)
    result = fs.run(method, model="mlp", data=data, rounds=8, keep="best", **how)
    at = best([r["val_accuracy"] for r in history])
    assert untimed(result.history, "kept") == untimed(history)  # keeping changes nothing else
    assert result.history[-1]["kept"] == at + 1
    assert result.accuracy == history[at]["accuracy"]
    assert all(map(same, result.models(), models[at]))
    assert result.scores("val")[0]["accuracy"] == history[at]["clients"]["val_accuracy"][0]


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_each_client_keeps_its_own_best_round(method, data):
    history, models = by_hand(method, data, 8)
    result = fs.run(method, model="mlp", data=data, rounds=8, keep="own")
    at = [best([r["clients"]["val_accuracy"][i] for r in history]) for i in range(4)]
    assert len(set(at)) > 1  # or this would not differ from one round for all
    assert result.history[-1]["kept"] == [a + 1 for a in at]
    for i, a in enumerate(at):
        assert same(result.personal(i), models[a][i])
        assert result.clients[i]["accuracy"] == history[a]["clients"]["accuracy"][i]
    assert result.accuracy == pytest.approx(sum(c["accuracy"] for c in result.clients) / 4, abs=1e-6)
    assert "each client's best round on validation data" in repr(result)


def test_of_a_loss_less_is_better(data):
    result = fs.run(fs.FedAvgFT(lr=2.0), model="mlp", data=data, rounds=6, keep="best", headline="test_loss")
    losses = [r["val_loss"] for r in result.history]
    assert result.history[-1]["kept"] == losses.index(min(losses)) + 1


def test_a_client_without_validation_data_keeps_its_last_round(data):
    clients = [fs.ClientData(c.train, c.test, None if i == 2 else c.val) for i, c in enumerate(data.clients)]
    held = fs.Federation(clients, classes=10)
    result = fs.run(fs.FedAvgFT(lr=0.3), model="mlp", data=held, rounds=4, keep="own")
    assert result.history[-1]["kept"][2] is None
    assert result.clients[2]["accuracy"] == result.history[-1]["clients"]["accuracy"][2]
    assert same(result.personal(2), by_hand(fs.FedAvgFT(lr=0.3), held, 4)[1][-1][2])


def test_no_round_is_everybodys_best_before_everybody_is_there(data):
    result = fs.run(fs.FedAvgFT(lr=0.3), model="mlp", data=data, rounds=5, keep="best", late=(1, 3))
    assert [r["kept"] for r in result.history[:2]] == [None, None]
    assert result.history[-1]["kept"] >= 3
    assert len(result.models()) == 4


def test_a_run_stops_when_its_best_round_is_past(data):
    result = fs.run(fs.FedAvgFT(lr=2.0, finetune=2), model="mlp", data=data, rounds=60, patience=3)
    scores = [r["val_accuracy"] for r in result.history]
    assert len(result.history) < 60
    assert result.history[-1]["stopped"]
    assert best(scores) == len(scores) - 4  # three evaluations later


def test_stopping_counts_evaluations_not_rounds(data):
    result = fs.run(fs.FedAvgFT(lr=2.0, finetune=2), model="mlp", data=data, rounds=60, patience=2, eval_every=3)
    kept = result.history[-1]["kept"]
    assert (len(result.history), kept % 3) == (kept + 6, 0)


def test_in_a_stack_a_run_that_stops_leaves_the_others_as_they_would_be_alone(data):
    how = {"model": "mlp", "data": data, "rounds": 14, "patience": 3, "keep": "own"}
    together = fs.compare(FALLING, **how)
    lengths = []
    for name, method in FALLING.items():
        alone, found = fs.run(method, **how), together[name, 0]
        assert untimed(found.history) == untimed(alone.history)
        assert all(map(same, found.models(), alone.models()))
        lengths.append(len(alone.history))
    assert len(set(lengths)) > 1


def test_a_simulation_that_is_saved_copied_or_pickled_goes_on_with_what_it_kept(data, tmp_path):
    def fresh():
        return fs.Simulation(fs.FedAvgFT(lr=2.0), "mlp", data, keep="own", rounds=6)

    whole, broken = fresh(), fresh()
    for _ in range(6):
        whole.step()
    for _ in range(3):
        broken.step()
    broken.save(tmp_path)
    resumed = fresh()
    assert resumed.resume(tmp_path)
    for other in (broken, resumed, copy.deepcopy(broken), pickle.loads(pickle.dumps(broken))):
        for _ in range(3):
            other.step()
        assert (other.kept.rounds, other.kept.scores) == (whole.kept.rounds, whole.kept.scores)
        assert all(same(other.personal(i), whole.personal(i)) for i in range(4))


def test_a_saved_state_of_a_run_that_keeps_otherwise_is_refused(data, tmp_path):
    fs.Simulation(fs.FedAvg(), "mlp", data, keep="best").save(tmp_path)
    with pytest.raises(fs.CheckpointError, match="keep was best, is None"):
        fs.Simulation(fs.FedAvg(), "mlp", data).resume(tmp_path)


def test_a_run_directory_has_the_kept_round_in_its_summary_and_its_models(tmp_path):
    config = Config.from_dict({**CONFIG, "patience": 3}, "here")
    history = runner.start(config, tmp_path / "a")
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    kept = history[-1]["kept"]
    assert config.keep == "best"
    assert summary["kept"] == kept
    assert summary["kept_by"] == "accuracy on validation data"
    assert summary["stopped"] is True
    assert summary["rounds"] == len(history) == kept + 3
    assert summary["accuracy"] == history[kept - 1]["accuracy"]
    _, simulation = reopen(tmp_path / "a")
    stopped = Config.from_dict({**CONFIG, "rounds": kept}, "here").simulation()
    for _ in range(kept):
        stopped.step()
    assert same(simulation.personal(1), stopped.personal(1))


def test_a_run_killed_before_its_summary_was_written_is_over_when_resumed(tmp_path):
    runner.start(Config.from_dict({**CONFIG, "patience": 2}, "here"), tmp_path / "a")
    lines, summary = (tmp_path / "a" / "metrics.jsonl").read_bytes(), tmp_path / "a" / "summary.json"
    said = json.loads(summary.read_text())
    summary.unlink()
    runner.resume(tmp_path / "a")
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes() == lines
    assert json.loads(summary.read_text()) == said


def test_runs_from_before_have_the_identity_that_they_had():
    config = Config.from_dict(CONFIG, "here")
    assert identity(config) == identity(Config.from_dict({**CONFIG, "keep": "last"}, "here"))
    assert identity(config) != identity(Config.from_dict({**CONFIG, "keep": "own"}, "here"))
    old = {k: v for k, v in config.to_json().items() if k not in ("keep", "patience")}
    assert identity(Config.from_dict(old, "an older file")) == identity(config)
    assert not {"keep", "patience"} & core(config.to_json()).keys()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"keep": "best"}, r"keep=best and patience choose on validation data, and no client has any; .* --val 20"),
        ({"patience": 2}, "choose on validation data"),
        ({"keep": "first"}, "keep must be last, best or own, not 'first'"),
        ({"patience": 0}, "patience must be a number of evaluations, at least 1, not 0"),
        ({"patience": 2, "keep": "last"}, "use keep=best or own"),
    ],
)
def test_what_cannot_be_kept_is_refused_in_a_sentence(digits, given, said):
    with pytest.raises(fs.InputError, match=said):
        fs.run("fedavg", model="mlp", data=digits, rounds=1, **given)


def test_packed_rows_have_no_models_to_keep(data):
    with pytest.raises(fs.InputError, match="rows=all"):
        fs.Simulation(fs.FedAvg(), "mlp", data, keep="best", rows="personal")


@given(
    st.lists(st.lists(st.sampled_from([None, 0.0, 0.25, 0.5, 0.75]), min_size=3, max_size=3), min_size=1, max_size=12),
    st.booleans(),
)
def test_rounds_by_a_plain_loop(scores, more):
    kept = keeping.Kept("own", 3, Measure("m", more_is_better=more), torch.device("cpu"))
    sign = 1 if more else -1
    for r, row in enumerate(scores, start=1):
        said = kept.settle(r, row, complete=True)
        for i in range(3):
            seen = [(sign * s[i], -n) for n, s in enumerate(scores[:r], start=1) if s[i] is not None]
            assert said[i] == (-max(seen)[1] if seen else None)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=15), st.integers(1, 4))
def test_stalled_by_a_plain_loop(scores, patience):
    history, top, at, stops = [], -1, 0, None
    for r, score in enumerate(scores, start=1):
        if score > top:
            top, at = score, r
        history.append({"round": r, "kept": at})
        if stops is None and r - at >= patience:
            stops = r
    first = next((n for n in range(1, len(history) + 1) if stalled(history[:n], patience)), None)
    assert first == stops


def test_without_an_evaluation_there_is_no_end():
    assert final([{"round": 1, "accuracy": None}], "accuracy") is None
