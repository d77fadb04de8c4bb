"""Tasks and metrics through the commands: tables, files, the report, trackers, exported models; docs/tasks.md runs."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

import fedselect as fs
from fedselect.core.files import read_json
from fedselect.report.runs import gather
from fedselect.runs import metric_tables, runner, tables
from fedselect.runs.config import Config
from fedselect.runs.rundir import outcome, read_records
from fedselect.runs.trackers import numbers

PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
TINY = ("--data", "digits", "--model", "mlp", "--clients", 4, "--rounds", 2, "--train", 20, "--test", 12, "-q")
DIGITS = {"name": "digits", "clients": 4, "train": 20, "test": 12}


def rent(seed: int = 0) -> fs.Federation:
    """Two cities, the rent of a flat by its size and its floor."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for level in (800.0, 1200.0):
        x = torch.randn(40, 2, generator=g)
        y = level + 300 * x[:, 0] - 50 * x[:, 1]
        made.append(fs.ClientData((x[:30], y[:30]), (x[30:], y[30:])))
    return fs.Federation(made)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Two methods, two seeds."""
    out = tmp_path_factory.mktemp("compared")
    asked = {"data": DIGITS, "model": {"name": "mlp"}, "rounds": 2, "metrics": ["auroc", "f1"]}
    configs = {
        f"{method}-seed{seed}": Config.from_dict({**asked, "method": {"name": method}, "seed": seed}, "test")
        for method in ("fedavg", "local")
        for seed in (0, 1)
    }
    runner.start_comparison(runner.Comparison(configs), out)
    return out


def test_every_metric_is_in_tables_and_files(compared, cli):
    out, said = compared, cli("resume", compared, "-q")
    places = [out / f"{method}-seed{seed}" for method in ("fedavg", "local") for seed in (0, 1)]
    found = metric_tables.rows(places)
    assert "every metric over clients, each on its own test data, ± standard deviation over seeds" in " ".join(said.out.split())
    assert [row.measure.name for row in found[:4]] == ["accuracy", "f1", "auroc", "test_loss"]
    assert [row.method for row in found[::4]] == [line.method for line in tables.rows(places)]  # best first in both
    last = read_records(places[0] / "metrics.jsonl")[-1]
    tested = [c["test"] for c in read_json(places[0] / "federation.json", "")["clients"]]
    over = outcome(places[0])["over_clients"]["auroc"]
    there = [(v, n) for v, n in zip(last["clients"]["auroc"], tested, strict=True) if v is not None]
    assert (over["defined"], over["clients"]) == (len(there), 4)
    assert over["mean"] == pytest.approx(last["auroc"])
    assert over["worst_tenth"] == min(v for v, _ in there)
    assert over["weighted"] == pytest.approx(sum(v * n for v, n in there) / sum(n for _, n in there), abs=1e-6)
    head, first, *_ = csv.reader(metric_tables.as_csv(found).splitlines())
    assert head == ["method", "metric", "seeds", "mean", "std", "worst_tenth", "weighted", "defined", "clients"]
    assert first[1:3] == ["accuracy", "2"]
    assert float(first[3]) == pytest.approx(tables.rows(places)[0].mean, abs=1e-6)


def test_every_metric_is_in_the_report_and_trackers(compared):
    data = gather([compared])
    assert [m["name"] for m in data["metrics"]] == ["accuracy", "f1", "auroc", "test_loss"]
    run = data["runs"][0]
    record = read_records(Path(run["path"]) / "metrics.jsonl")[-1]
    assert run["metrics"]["auroc"]["values"] == record["clients"]["auroc"]
    assert run["metrics"]["accuracy"]["worst_tenth"] == min(record["clients"]["accuracy"])
    logged = numbers(record, fs.Classification().measured(asked=["auroc", "f1"]))
    assert logged["worst_tenth/accuracy"] == min(record["clients"]["accuracy"])
    assert logged["client/1/f1"] == record["clients"]["f1"][1]
    assert "auroc" in logged


def test_a_run_of_before_has_its_headline_over_clients(compared, tmp_path):
    place = Path(shutil.copytree(compared / "local-seed0", tmp_path / "a"))
    said = read_json(place / "summary.json", "")
    kept = said.pop("over_clients")
    (place / "summary.json").write_text(json.dumps(said))
    ((measure, spread),) = metric_tables.spreads(place)
    assert (measure.name, spread.worst_tenth, spread.weighted) == ("accuracy", kept["accuracy"]["worst_tenth"], None)
    (place / "summary.json").write_text(json.dumps({**said, "over_clients": {"accuracy": {}}}))
    with pytest.raises(fs.RunError, match=r"summary.json is damaged .*; delete it, then: fedselect resume"):
        metric_tables.spreads(place)


def test_a_run_with_one_metric_says_what_it_said(cli, tmp_path):
    said = cli("run", "--method", "fedavg", *TINY, "--out", tmp_path / "a")
    assert "every metric" not in said.out
    said = cli("run", "--method", "fedavg", *TINY, "--headline", "auroc", "--out", tmp_path / "b")
    assert said.out.startswith("auroc ")
    assert "every metric over clients" in said.out


def test_regression_from_the_data_to_an_exported_model(cli, tmp_path, monkeypatch):
    monkeypatch.setitem(fs.DATA, "rent", rent)
    out = tmp_path / "a"
    said = cli(
        "run", "--method", "fedavg+ft", "--data", "rent", "--model", "mlp", "--lr", 0.1, "--rounds", 5, "--out", out, "-q"
    )
    assert said.code == 0, said
    assert read_json(out / "config.json", "")["task"]["name"] == "regression"
    told = read_json(out / "task.json", "")["learned"]
    assert float(told["target_mean"]) == pytest.approx(float(torch.cat([c.train[1] for c in rent().clients]).mean()))
    x, y = rent().clients[1].test
    for form in ("safetensors", "pt2"):
        said = cli("export", out, "--client", 1, "--format", form)
        assert said.code == 0, said
        scope = {"x": x}
        exec(said.out.split("\n", 2)[2], scope)
        error = float((scope["predicted"].detach().squeeze(1) - y).abs().mean())
        assert error == pytest.approx(outcome(out)["clients"][1], rel=1e-4)
        assert f"mae {error:.4f}"[:8] in said.out


def test_the_page_runs():
    scope: dict = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        exec(block, scope)
    assert scope["texts"].accuracy > 0.5


def test_the_page_names_every_task_and_metric_and_no_other():
    tasks = set(re.findall(r"^\| `(\w+)` \|", PAGE.split("## Metrics")[0], re.M))
    assert tasks == set(fs.TASKS)
    metrics = set(re.findall(r"^\| `(\w+)` \|", PAGE.split("## Metrics")[1], re.M))
    assert metrics == {m.name for task in fs.TASKS.values() for m in (*task().metrics, *task().more)} | {"test_loss"}
