"""--view best: each client reports the one of its models that does best on its own validation data."""

import json
import pickle
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import fedselect as fs
from fedselect.cli.program import app
from fedselect.core.errors import InputError
from fedselect.methods.choice import CHOICES, SHARES, pick
from fedselect.runs import runner
from fedselect.runs.config import Config
from fedselect.runs.rundir import core, reopen

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import view as bench

METHODS = {
    "merged": fs.FedAvg(lr=0.3),
    "local": fs.FedPer(lr=0.3),
    "fine-tuned": fs.FedAvgFT(lr=0.3, finetune=1),
    "groups": fs.FedAlike(lr=0.3, finetune=1),
}
CONFIG = {
    "data": {"name": "digits", "clients": 3, "train": 30, "val": 10, "test": 10}, "model": {"name": "mlp"},
    "method": {"name": "fedavg", "lr": 0.3}, "rounds": 4, "view": "best",
}  # fmt: skip


@pytest.fixture(scope="module")
def data():
    return fs.load("digits", clients=4, train=30, val=10, test=10, seed=1)


def untimed(history, *without):
    return [{k: v for k, v in r.items() if k not in ("seconds", *without)} for r in history]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@given(st.data())
def test_the_pick_is_that_of_a_plain_loop(draw):
    numbers = st.sampled_from([0.0, 0.25, 0.5, float("nan")])
    table = st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=4, max_size=4)
    values, losses = draw.draw(table), draw.draw(table)
    found = pick(torch.tensor(values), torch.tensor(losses)).tolist()
    for c in range(3):
        best, how = 0, (values[0][c] if values[0][c] == values[0][c] else -1.0, None)
        for m in range(1, 4):
            value, loss = values[m][c], losses[m][c] if losses[m][c] == losses[m][c] else float("inf")
            if not value > (values[0][c] if values[0][c] == values[0][c] else -1.0):
                continue  # not better than the reported one
            if value > how[0] or (value == how[0] and loss < how[1]):
                best, how = m, (value, loss)
        if how[1] != float("inf"):  # of equals without any finite loss the reported one stays
            assert found[c] == best


def scored(net, part):
    """Accuracy and loss of a plain module on raw pictures, in float64."""
    x, y = torch.as_tensor(part[0]), torch.as_tensor(part[1])
    with torch.no_grad():
        out = net(x.float() if x.dtype != torch.uint8 else x.float() / 255).double()
    return float((out.argmax(1) == y).double().mean()), float(torch.nn.functional.cross_entropy(out, y))


@pytest.mark.parametrize("name", METHODS)
def test_each_client_reports_the_model_that_a_slow_loop_would_choose(name, data):
    """Models of all views come from runs that do not choose; a plain module scores them, one client after the other."""
    method = METHODS[name]
    result = fs.run(method, model="mlp", data=data, rounds=4, view="best")
    plain = fs.Simulation(method, "mlp", data, rounds=4)
    history = [plain.step() for _ in range(4)]
    assert untimed(history)[-1]["accuracy_local"] == result.history[-1]["accuracy_local"]  # training is the same
    ids = torch.arange(4)
    views = {view: plain.models(ids, view) for view in ("local", "merged")}
    if name in ("fine-tuned", "groups"):
        bare = fs.Simulation(type(method)(**{**vars(method), "finetune": 0}) if name == "groups" else fs.FedAvg(lr=0.3), "mlp",
                             data, rounds=4)  # fmt: skip
        for _ in range(4):
            bare.step()
        views = {"local": views["local"], "merged": bare.models(ids, "merged"), "fine-tuned": views["merged"]}
    reported = {"merged": "merged", "local": "local"}.get(name, "fine-tuned")
    chosen = result.history[-1]["clients"]["chosen"]
    for i in range(4):
        own = {view: {n: v[i] for n, v in tree.items()} for view, tree in views.items()}
        for share in SHARES:
            own[f"{share:.0%} local"] = {n: v + share * (own["local"][n] - v) for n, v in own["merged"].items()}
        scores = {}
        for view, tree in own.items():
            net = plain.model.build()
            net.load_state_dict(plain.model.state_dict(tree))
            scores[view] = scored(net.eval(), data.clients[i].val)
        best = max(acc for acc, _ in scores.values())
        if best <= scores[reported][0]:
            assert chosen[i] == reported
        else:
            assert scores[chosen[i]][0] == best
            assert scores[chosen[i]][1] <= min(loss for acc, loss in scores.values() if acc == best) + 1e-5
        found, wanted = result.personal(i), own[chosen[i]]
        assert all(torch.allclose(found[n], wanted[n], atol=1e-6) for n in wanted)
    assert any(c != reported for c in chosen) or name == "local"  # or nothing is tested


def test_alone_stacked_in_chunks_pickled_and_resumed_choose_alike(data, tmp_path):
    how = {"model": "mlp", "data": data, "view": "best"}
    alone = fs.run(METHODS["fine-tuned"], rounds=4, seed=1, **how)
    found = fs.compare({"a": METHODS["fine-tuned"], "b": fs.FedAvgFT(lr=0.1, finetune=1)}, rounds=4, seeds=[0, 1], **how)
    chunks = fs.run(METHODS["fine-tuned"], rounds=4, seed=1, chunk=3, **how)
    for other in (found["a", 1], chunks):
        assert untimed(other.history) == untimed(alone.history)
        assert all(map(same, other.models(), alone.models()))
    first = fs.Simulation(METHODS["fine-tuned"], "mlp", data, seed=1, rounds=4, view="best")
    first.step()
    first.step()
    first.save(tmp_path)
    resumed = fs.Simulation(METHODS["fine-tuned"], "mlp", data, seed=1, rounds=4, view="best")
    assert resumed.resume(tmp_path)
    for again in (pickle.loads(pickle.dumps(first)), resumed):
        records = [again.step(), again.step()]
        assert untimed(records) == untimed(alone.history[2:])
        assert same(again.personal(2), alone.personal(2))


@pytest.mark.parametrize("keep", ["best", "own"])
def test_with_kept_rounds_the_choice_is_that_of_the_kept_round(keep, data):
    falling = fs.FedAvgFT(lr=2.0, finetune=2)
    result = fs.run(falling, model="mlp", data=data, rounds=6, view="best", keep=keep)
    plain = fs.Simulation(falling, "mlp", data, rounds=6, view="best")
    history, models = [], []
    for _ in range(6):
        history.append(plain.step())
        models.append([plain.personal(i) for i in range(4)])
    kept = result.history[-1]["kept"]
    kept = kept if keep == "own" else [kept] * 4
    assert min(kept) < 6
    for i, r in enumerate(kept):
        assert result.clients[i]["chosen"] == history[r - 1]["clients"]["chosen"][i]
        assert same(result.personal(i), models[r - 1][i])


def test_a_client_without_validation_data_keeps_what_the_method_reports(data):
    clients = [fs.ClientData(c.train, c.test, c.val if i else None) for i, c in enumerate(data.clients)]
    result = fs.run(METHODS["merged"], model="mlp", data=clients, rounds=3, view="best")
    assert result.history[-1]["clients"]["chosen"][0] == "merged"
    assert result.clients[0]["accuracy"] == result.clients[0]["accuracy_merged"]
    assert "chosen" in repr(result)


def test_a_run_directory_says_what_was_chosen_and_its_models_are_those(tmp_path):
    config = Config.from_dict(CONFIG, "here")
    history = runner.start(config, tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    chosen = history[-1]["clients"]["chosen"]
    assert {c for r in history for c in r["clients"]["chosen"]} <= set(CHOICES)
    said = [{"model": m, "round": 4, "validation": 10} for m in chosen]
    assert summary["chosen"] == said
    _, simulation = reopen(tmp_path / "run")
    assert all(same(simulation.personal(i), fs.load_result(tmp_path / "run").personal(i)) for i in range(3))
    saved = fs.load_result(tmp_path / "run").save(tmp_path / "saved")
    assert fs.load_result(saved).clients[0]["chosen"] == chosen[0]
    assert "view" not in core(Config.from_dict({**CONFIG, "view": None}, "here").to_json())  # older runs keep their names


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"view": "merged"}, "view must be best or left out"),
        ({"view": "best", "rows": "personal"}, "rows=all"),
        ({"view": "best", "private": "epsilon=8"}, "view=best chooses a model on validation data"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(wrong, said, data):
    with pytest.raises(InputError, match=said):
        fs.run(METHODS["merged"], model="mlp", data=data, rounds=2, **wrong)


def test_without_validation_data_it_says_how_to_hold_some_out():
    with pytest.raises(InputError, match=r"view=best chooses on validation data.*--val 20"):
        fs.run("fedavg", model="mlp", data=fs.load("digits", clients=3, val=0, test=10), rounds=1, view="best")


def test_the_flag_is_the_run_s_and_other_views_stay_the_method_s(tmp_path):
    run = ["run", "--method", "fedavg", "--clients", "3", "--val", "5", "--test", "10", "--model", "mlp", "--rounds", "1", "-q"]
    for view, message in (("best", ""), ("local", ""), ("bst", "--view must be local, merged or best, not 'bst'")):
        done = CliRunner().invoke(app, [*run, "--view", view, "--out", str(tmp_path / view)])
        assert message in (str(done.exception) if message else "")
    assert Config.from_dict({**CONFIG, "view": None, "method": {"name": "fedavg", "view": "local"}}, "here").view is None


def test_the_page_is_what_the_results_say():
    made = json.loads(bench.RESULTS.read_text(encoding="utf-8"))
    assert bench.page(text := bench.PAGE.read_text(encoding="utf-8"), made) == text
    cells = {(r["shift"], r["seed"], r["held_out"], r["method"]) for r in made["rows"]}
    assert len(cells) == len(made["rows"]) == 7 * 5 * 5 * len(made["seeds"])
    own = [r for r in made["rows"] if r["method"] == "fedavg" and r["held_out"] == 20]
    gain = sum(sum(r["best"]) - sum(r["reported"]) for r in own) / sum(len(r["best"]) for r in own)
    line = next(li for li in bench.table(made["rows"]).splitlines() if li.startswith("| `fedavg` |"))
    assert line.split("|")[4].strip().startswith(f"{gain:+.1f} ± ")
