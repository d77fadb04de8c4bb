"""docs/own-task.md: its examples run, and a task of one's own reaches every file, table, page and deployment."""

import csv
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from local import QUICK, Room
from torch import nn

import fedselect as fs
from fedselect.network import drive
from fedselect.network.assignment import Assignment
from fedselect.network.plan import Plan, Shape
from fedselect.network.server import Server
from fedselect.report import write_report
from fedselect.report.figures import write_figures
from fedselect.report.runs import gather
from fedselect.runs import loop, runner, tables
from fedselect.runs.config import Config
from fedselect.runs.rundir import headline, outcome, read_records
from fedselect.runs.trackers import numbers

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "own-task.md").read_text(), re.S)


def example():
    scope: dict = {"__name__": __name__}
    exec(BLOCKS[0], scope)
    return scope


ROBUST = example()["Robust"]


def targets(clients: int = 3, seed: int = 0) -> fs.Federation:
    g = torch.Generator().manual_seed(seed)
    made = []
    for i in range(clients):
        x = torch.randn(40, 3, generator=g)
        y = x.sum(1) + i + 0.1 * torch.randn(40, generator=g)
        made.append(fs.ClientData((x[:24], y[:24]), (x[24:], y[24:])))
    return fs.Federation(made)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))


def small() -> fs.Model:
    return fs.Model.wrap(network)


@pytest.fixture
def named(monkeypatch):
    monkeypatch.setitem(fs.TASKS, "robust", ROBUST)
    monkeypatch.setitem(fs.DATA, "targets", targets)


def config(method="fedavg+ft", **more):
    raw = {"method": {"name": method, "lr": 0.05}, "data": {"name": "targets"}, "model": {"name": "mlp"}, "rounds": 3}
    return Config.from_dict({**raw, "task": {"name": "robust"}, **more}, "here")


def test_the_example_is_short():
    lines = [line for line in BLOCKS[0].splitlines() if line.strip() and "import" not in line]
    assert len(lines) < 15


def test_the_example_learns():
    torch.manual_seed(0)
    scope = example()
    exec(BLOCKS[1], scope)
    result = scope["result"]
    assert result.headline < 0.5  # one model for all is off by 0, 1 and 1: 0.67 in the mean
    assert result.clients[0]["r2"] > 0.8
    assert [k for k in result.history[0] if k not in ("round", "seconds", "clients")] == [
        "mae", "mae_local", "mae_merged", "r2", "test_loss", "train_loss", "share", "bytes_up", "bytes_down",
    ]  # fmt: skip


def test_metrics_are_those_of_a_plain_loop():
    data = targets()
    result = fs.run(fs.FedPer(lr=0.05), model=small(), data=data, rounds=2, task=ROBUST())
    for i, client in enumerate(data.clients):
        net = network()
        net.load_state_dict(result.personal(i))
        x, y = client.test
        with torch.no_grad():
            off = (net(x).squeeze(1) - y).double()
        expected = {
            "mae": off.abs().mean(),
            "r2": 1 - (off**2).sum() / ((y - y.mean()).double() ** 2).sum(),
            "test_loss": torch.where(off.abs() < 1, off**2 / 2, off.abs() - 0.5).mean(),  # Huber
        }
        for name, value in expected.items():
            assert result.clients[i][name] == pytest.approx(float(value), abs=2e-6)


@pytest.mark.parametrize("name", ["fedselect", "ditto", "fedrep"])
def test_methods_that_need_no_classes_take_it(name):
    result = fs.run(fs.METHODS[name](lr=0.05), model=small(), data=targets(), rounds=2, task=ROBUST(), headline="r2")
    assert result.headline == pytest.approx(sum(c["r2"] for c in result.clients) / 3, abs=2e-6)


@pytest.mark.parametrize("method", [fs.FedPAC(), fs.FedAvg(answers="own")])
def test_methods_that_need_classes_say_so(method):
    with pytest.raises(fs.InputError, match="needs classes; use it with the task classification"):
        fs.run(method, model=small(), data=targets(), rounds=1, task=ROBUST())


def test_lotteryfl_says_which_metric_it_needs():
    data = targets()
    data = fs.Federation([fs.ClientData(c.train, c.test, c.test) for c in data.clients])
    with pytest.raises(fs.InputError, match=r"needs the metric accuracy, .* it has mae, r2, test_loss"):
        fs.run(fs.LotteryFL(), model=small(), data=data, rounds=1, task=ROBUST())


def test_targets_that_do_not_fit_the_task_are_refused():
    with pytest.raises(fs.InputError, match="classification needs one integer class per sample"):
        fs.run(fs.FedAvg(), model=small(), data=targets(), rounds=1, task=fs.Classification())


def test_stacked_runs_and_packed_rows_give_the_same():
    how = {"model": small(), "data": targets(), "rounds": 2, "task": ROBUST()}
    alone = fs.run(fs.FedSelect(lr=0.05), **how)
    stacked = fs.compare({"a": fs.FedSelect(lr=0.05), "b": fs.FedSelect(lr=0.02)}, **how)
    packed = fs.run(fs.FedSelect(lr=0.05), **how, rows="personal")
    for other in (stacked["a", 0], packed):
        assert [r["clients"] for r in other.history] == [r["clients"] for r in alone.history]


def test_over_messages_it_is_the_simulation(tmp_path):
    data, method = targets(), fs.FedSelect(lr=0.05)
    sim = fs.Simulation(method, small(), data, task=ROBUST())
    assigned = Assignment(method, small(), fs.Training(), ROBUST(), data, seed=0, clients=3)
    server, room = Server(assigned, QUICK, tmp_path / "masks"), Room(assigned, data, tmp_path)
    for _ in range(2):
        record = sim.step()
        server.step(room)
    measured = server.close(room).measured
    for name in ("mae", "mae_local", "mae_merged", "r2", "test_loss", "share"):
        assert [measured[i][name] for i in range(3)] == pytest.approx(record["clients"][name], abs=1e-6)


def test_a_metric_that_is_undefined_is_blank_and_left_out_of_the_mean():
    """r2 of targets that are all the same has no meaning: 0 / 0."""
    data = targets()
    x, y = data.clients[1].test
    data = fs.Federation([c if i != 1 else fs.ClientData(c.train, (x, torch.ones_like(y))) for i, c in enumerate(data.clients)])
    result = fs.run(fs.FedAvg(lr=0.05), model=small(), data=data, rounds=1, task=ROBUST(), headline="r2")
    values = [c["r2"] for c in result.clients]
    assert values[1] is None
    assert result.headline == pytest.approx((values[0] + values[2]) / 2, abs=2e-6)


class Infinite(ROBUST):
    """A metric that is infinite on the targets of the last client, which are about 2."""

    @staticmethod
    def some(outputs, targets):
        return torch.where(targets.mean() > 1.5, -torch.inf, (outputs.squeeze(-1) - targets).abs().mean())

    metrics = (fs.Metric("x", of=some),)


def test_an_infinite_metric_is_blank_in_every_file(named, tmp_path, monkeypatch):
    monkeypatch.setitem(fs.TASKS, "robust", Infinite)
    runner.start(config("local", cross=True), tmp_path / "run")
    text = "".join((tmp_path / "run" / name).read_text() for name in ("metrics.jsonl", "summary.json"))
    assert "Infinity" not in text
    found = outcome(tmp_path / "run")
    assert found["clients"][2] is None
    assert found["x"] == pytest.approx((found["clients"][0] + found["clients"][1]) / 2, abs=2e-6)
    assert [row[2] for row in found["cross"]] == [None] * 3


class Likelihood(ROBUST):
    """A loss that may be negative."""

    def loss(self, outputs, targets):
        return super().loss(outputs, targets) - 100.0


class Share(ROBUST):
    metrics = (fs.Metric("x", low=0.0, high=1.0, of=lambda outputs, targets: torch.tensor(1.5)),)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Likelihood, r'test_loss -\d+\.\d+, which is outside 0 to inf; .* set lowest_loss = float\("-inf"\) in the task'),
        (Share, "x 1.5, which is outside 0 to 1; correct the metric, or low and high of its fs.Metric"),
    ],
)
def test_what_a_server_would_turn_away_is_said_in_simulation(task, said, tmp_path):
    data, method = targets(), fs.FedAvg(lr=0.05)
    with pytest.raises(fs.InputError, match=f"client 0, round 1: it measured {said}"):
        fs.run(method, model=small(), data=data, rounds=1, task=task())
    assigned = Assignment(method, small(), fs.Training(), task(), data, seed=0, clients=3)
    server, room = Server(assigned, QUICK, tmp_path / "masks"), Room(assigned, data, tmp_path)
    server.step(room)
    assert re.search(f"it measured {said}", server.close(room).rejected["client 0"])


def test_a_loss_that_says_it_may_be_negative_is_taken(tmp_path):
    class Low(Likelihood):
        lowest_loss = float("-inf")

    data, method = targets(), fs.FedAvg(lr=0.05)
    assert fs.run(method, model=small(), data=data, rounds=1, task=Low(), headline="test_loss").headline < 0
    assigned = Assignment(method, small(), fs.Training(), Low(), data, seed=0, clients=3)
    server, room = Server(assigned, QUICK, tmp_path / "masks"), Room(assigned, data, tmp_path)
    server.step(room)
    assert server.close(room).rejected == {}


class Undefined(ROBUST):
    metrics = (fs.Metric("x", of=lambda outputs, targets: torch.tensor(torch.nan)), *ROBUST.metrics)


SAID = (
    r"round 1: x is not a finite number for any client; choose another with headline=... \(--headline\): mae or r2 or test_loss"
)


def test_a_headline_that_nobody_has_is_refused_in_the_first_evaluation(named, tmp_path, monkeypatch):
    monkeypatch.setitem(fs.TASKS, "robust", Undefined)
    rounds = []
    with pytest.raises(fs.InputError, match=SAID):
        runner.start(config(rounds=50), tmp_path / "run", watch=lambda config, record: rounds.append(record))
    assert rounds == []
    runner.start(config(headline="mae"), tmp_path / "run")  # nothing is in the way
    both = runner.Comparison({name: config(name) for name in ("local", "fedavg+ft")})
    with pytest.raises(fs.InputError, match=SAID):
        runner.start_comparison(both, tmp_path / "both")
    assert [p.name for p in (tmp_path / "both").iterdir()] == [".lock"]


def test_rounds_that_are_kept_are_not_removed_by_a_refusal(named, tmp_path, monkeypatch):
    monkeypatch.setitem(fs.TASKS, "robust", Undefined)
    monkeypatch.setattr(loop, "OVERHEAD", 1e9)  # a checkpoint after every round
    with pytest.raises(fs.InputError, match=r"round 2: x is not .* To start over, add --overwrite\."):
        runner.start(config(eval_every=2), tmp_path / "run")
    runner.start(config(headline="mae"), tmp_path / "run", overwrite=True)


def test_a_headline_that_nobody_has_ends_a_deployment_too(named, tmp_path, monkeypatch):
    monkeypatch.setitem(fs.TASKS, "robust", Undefined)
    data, out = targets(), tmp_path / "run"
    plan = Plan(config(rounds=50), "federation", "run", 3, Shape.of(data), QUICK)
    drive.prepare(out, plan)
    room = Room(plan.assignment("cpu"), data, tmp_path)
    with pytest.raises(fs.InputError, match=SAID):
        drive.serve(out, room, None, lambda config, record: None)
    assert not (out / "metrics.jsonl").exists()  # no round is complete: the first was measured as the second began


def wrong_metric(**how):
    return type("Wrong", (ROBUST,), {"metrics": (fs.Metric("x", **how),)})()


class Mean(ROBUST):
    def loss(self, outputs, targets):
        return super().loss(outputs, targets).mean()


class Wide(ROBUST):
    def loss(self, outputs, targets):
        return (outputs - targets) ** 2


class Comma(ROBUST):
    metrics = fs.Metric("x", of=torch.mean)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (wrong_metric(of=lambda o, t: o[:, 0] - t), r"the metric x returns \(2,\) for 2 samples; .* by_sample=True"),
        (
            wrong_metric(of=lambda o, t: o.mean(), by_sample=True),
            r"the metric x returns \(\) for 2 samples; return \(2,\), one number per sample, or remove by_sample",
        ),
        (wrong_metric(of=lambda o, t: o @ t), r"the metric x fails on outputs of shape \(2, 1\) and targets of shape \(2,\)"),
        (Mean(), r"Mean.loss returns \(\) for 2 samples; return \(2,\), one number per sample, not their mean"),
        (Wide(), r"Wide.loss returns \(2, 2\) for 2 samples; return \(2,\)"),
        (Comma(), r"Comma.metrics must be a tuple of metrics, .* metrics = \(fs.Metric\(...\),\)"),
    ],
)
def test_a_task_is_tried_before_anything_trains(task, said):
    with pytest.raises(fs.InputError, match=said):
        fs.Simulation(fs.FedAvg(), small(), targets(), task=task)
    with pytest.raises(fs.InputError, match=said):
        Assignment(fs.FedAvg(), small(), fs.Training(), task, targets(), seed=0, clients=3)


@dataclass
class Loose(fs.Task):
    """Not frozen."""

    k: float = 1.0

    def loss(self, outputs, targets):
        return (outputs.squeeze(-1) - targets) ** 2


def test_a_task_that_could_change_is_refused():
    with pytest.raises(fs.InputError, match=r"Loose must be a frozen dataclass .* put @dataclass\(frozen=True\) before"):
        fs.compare({"a": fs.FedAvg()}, model=small(), data=targets(), rounds=1, task=Loose())


def test_files_tables_and_trackers_show_the_headline(named, tmp_path):
    for method in ("fedavg+ft", "local"):
        runner.start(config(method), tmp_path / method)
    places = [tmp_path / "local", tmp_path / "fedavg+ft"]
    summaries = [outcome(p) for p in places]
    found = tables.rows(places)
    assert [r.mean for r in found] == sorted(s["mae"] for s in summaries)  # less is better, so the least comes first
    said = str(tables.render(found).columns[1].header)
    assert said == "mae"
    assert f"{found[0].mean:.4f}" in list(tables.render(found).columns[1].cells)
    head, first, _ = csv.reader(io.StringIO(tables.as_csv(found)))
    assert head[3:7] == ["mae", "std", "mae_local", "mae_merged"]
    assert float(first[3]) == pytest.approx(found[0].mean, abs=1e-6)
    assert rf"\boldmath${found[0].mean:.4f}$" in tables.as_latex(found)
    record = read_records(places[0] / "metrics.jsonl")[-1]
    logged = numbers(record, config().measured())
    assert logged["client/2/mae"] == record["clients"]["mae"][2]
    assert {"mae", "r2", "test_loss", "train_loss"} <= logged.keys()


def test_what_is_on_disk_can_be_read_without_the_task(named, tmp_path, monkeypatch):
    runner.start(config(headline="r2"), tmp_path / "run")
    monkeypatch.delitem(fs.TASKS, "robust")
    assert headline(tmp_path / "run").name == "r2"
    assert json.loads((tmp_path / "run" / "task.json").read_text())["metrics"][1]["name"] == "mae"
    data = gather([tmp_path / "run"])
    assert data["headline"] == {"name": "r2", "more_is_better": True, "low": None, "high": 1.0, "percent": False}
    assert write_report([tmp_path / "run"]).exists()
    assert tables.rows([tmp_path / "run"])[0].headline.name == "r2"


def test_figures_are_drawn_in_the_metrics_own_units(named, tmp_path):
    for method in ("fedavg+ft", "local"):
        runner.start(config(method, cross=True), tmp_path / method)
    made = write_figures([tmp_path / "local", tmp_path / "fedavg+ft"], tmp_path / "figures")
    assert {p.name for p in made} >= {"convergence.pdf", "clients.pdf", "cross-local.pdf", "clients.csv"}
    head = (tmp_path / "figures" / "clients.csv").read_text().splitlines()[0]
    assert head == "method,seed,client,name,classes,mae,mae_local,mae_merged,share,r2,test_loss"
    assert re.search(r"^local,r2,1,-?\d+\.\d+,,", (tmp_path / "figures" / "metrics.csv").read_text(), re.M)


def test_runs_with_different_headlines_are_not_put_in_one_table(named, tmp_path):
    runner.start(config(), tmp_path / "a")
    runner.start(config(headline="r2"), tmp_path / "b")
    for show in (tables.rows, gather):
        with pytest.raises(fs.RunError, match=r"has the headline mae, but .* has r2; pass runs with the same headline"):
            show([tmp_path / "a", tmp_path / "b"])


def test_a_resumed_run_goes_on_to_the_bit(named, tmp_path):
    whole, half = tmp_path / "whole", tmp_path / "half"
    runner.start(config(), whole)
    sim = config().simulation()
    sim.step()
    sim.save(half)
    other = config().simulation()
    assert other.resume(half)
    rest = [other.step()["clients"] for _ in range(2)]
    assert rest == [r["clients"] for r in read_records(whole / "metrics.jsonl")[1:]]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"headline": "mse"}, "this task has no metric 'mse'; choose from mae, r2, test_loss"),
        ({"task": {"name": "robst"}}, "robust"),
        ({"task": "robust"}, "task must be a table"),
    ],
)
def test_wrong_names_are_refused(named, wrong, said):
    with pytest.raises(fs.InputError, match=said):
        config(**wrong)


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ((fs.Metric("share", of=torch.mean),), "two columns would be named share"),
        ((fs.Metric("test_loss", of=torch.mean),), "two columns would be named test_loss"),
        ((fs.Metric("mae_local", of=torch.mean),), "two columns would be named mae_local"),
    ],
)
def test_metrics_that_would_hide_a_column_are_refused(metrics, said):
    class Own(ROBUST):
        pass

    Own.metrics = metrics
    with pytest.raises(fs.InputError, match=said):
        Own().measured()


def test_metrics_need_a_name_and_a_function():
    with pytest.raises(fs.InputError, match=r"needs a function .*of="):
        fs.Metric("mae")
    with pytest.raises(fs.InputError, match="letters, digits and _"):
        fs.Metric("mean error", of=torch.mean)
