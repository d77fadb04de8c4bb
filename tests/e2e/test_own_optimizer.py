"""docs/own-optimizer.md: its examples run, stacked, in chunks and over messages."""

import json
import re
import shutil
from pathlib import Path

import cases
import pytest
import torch

import fedselect as fs
from fedselect.network.plan import Plan, Shape
from fedselect.runs.config import Config

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "own-optimizer.md").read_text(), re.S)


@pytest.fixture
def scope():
    found: dict = {"__name__": __name__}
    exec(BLOCKS[0] + BLOCKS[1], found)
    return found


def test_the_example_is_short():
    lines = [line for line in BLOCKS[0].splitlines() if line.strip() and "import" not in line]
    assert len(lines) <= 10


def test_it_learns(scope):
    exec(BLOCKS[2], scope)
    losses = [r["train_loss"] for r in scope["result"].history]
    assert losses[-1] < 0.5 * losses[0]


def test_a_step_is_that_of_the_paper(scope):
    """Chen et al. 2023, Algorithm 2, written out for two steps of one entry."""
    optimizer, value, memory = scope["Lion"](), torch.ones(1, 1), {"mean": torch.zeros(1, 1)}
    value, memory = optimizer.update(value, torch.full((1, 1), 2.0), memory, 0.1)
    torch.testing.assert_close((value, memory["mean"]), (torch.full((1, 1), 0.9), torch.full((1, 1), 0.02)))
    value, memory = optimizer.update(value, torch.full((1, 1), -0.1), memory, 0.1)  # 0.9 * 0.02 - 0.1 * 0.1 > 0
    torch.testing.assert_close((value, memory["mean"]), (torch.full((1, 1), 0.8), torch.full((1, 1), 0.0188)))


@pytest.mark.parametrize("model", cases.MODELS)
def test_it_runs_stacked_in_chunks_and_over_messages(scope, model, tmp_path, monkeypatch):
    training = fs.Training(batch_size=8, clip=1.0, optimizer=scope["Lion"](), schedule=scope["Linear"](), warmup=1)
    monkeypatch.setitem(cases.CASES, "lion", lambda: fs.FedSelect(lr=0.01, personal_lr=0.02))
    monkeypatch.setitem(cases.TRAININGS, "lion", training)
    whole, chunked = cases.simulation("lion", model), cases.simulation("lion", model, chunk=2)
    cases.rounds(whole), cases.rounds(chunked)
    cases.assert_equal(cases.everything(chunked), cases.everything(whole))
    server, room = cases.deployed("lion", model, tmp_path)
    for _ in range(cases.ROUNDS):
        server.step(room)
    server.close(room)
    for view in ("local", "merged"):
        cases.assert_equal(cases.kept(room, view), cases.models_of(whole, view))


def test_the_command_line_takes_it_by_name(scope, fork, tmp_path):
    (tmp_path / "lion.py").write_text(BLOCKS[0] + BLOCKS[1])
    (tmp_path / "fed.py").write_text(
        "import fedselect as fs\nfrom fedselect.cli import main\nfrom lion import Linear, Lion\n"
        'fs.OPTIMIZERS["lion"], fs.SCHEDULES["linear"] = Lion, Linear\nmain()\n'
    )
    process = fork(
        "import runpy; runpy.run_path('fed.py', run_name='__main__')", "run", "--method", "fedavg", "--lr", "0.003",
        "--clients", "3", "--rounds", "2", "--slow", "0.95", "--optimizer", "lion", "--schedule", "linear", "-q",
        "--out", "runs/a", cwd=tmp_path,
    )  # fmt: skip
    _, err = process.communicate()
    assert process.returncode == 0, err
    found = json.loads((tmp_path / "runs" / "a" / "config.json").read_text())["training"]
    assert (found["optimizer"], found["fast"], found["slow"], found["end"]) == ("lion", 0.9, 0.95, 0.1)


@pytest.fixture
def named(scope, monkeypatch):
    monkeypatch.setitem(fs.OPTIMIZERS, "lion", scope["Lion"])
    monkeypatch.setitem(fs.SCHEDULES, "linear", scope["Linear"])
    return ("--method", "fedavg", "--lr", "0.003", "--clients", 3, "--rounds", 2, "-q")


def rounds(run):
    return [json.loads(line)["clients"]["train_loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_its_options_are_those_of_a_run(named, cli, tmp_path):
    own = ("--optimizer", "lion", "--slow", 0.5, "--schedule", "linear", "--end", 0.5)
    for out, flags in (("a", own), ("b", own[:2] + own[4:])):
        assert cli("run", *named, *flags, "--out", tmp_path / out).code == 0
    assert rounds(tmp_path / "a") != rounds(tmp_path / "b")
    before = rounds(tmp_path / "a")
    (tmp_path / "a" / "summary.json").unlink()
    shutil.rmtree(tmp_path / "a" / "checkpoint")
    assert cli("resume", tmp_path / "a", "-q").code == 0
    again = ("run", "--config", tmp_path / "a" / "config.json", "-q", "--out")
    assert cli(*again, tmp_path / "c").code == 0
    assert before == rounds(tmp_path / "a") == rounds(tmp_path / "c")
    assert cli(*again, tmp_path / "d", "--optimizer", "sgd", "--training.schedule", "constant").code == 0
    found = json.loads((tmp_path / "d" / "config.json").read_text())["training"]
    assert not {"slow", "end"} & found.keys()


def test_a_sweep_over_its_options_is_a_table(named, cli, tmp_path):
    said = cli("sweep", *named, "--optimizer", "lion", "--slow", "0.5,0.95", "--out", tmp_path / "s")
    assert said.code == 0
    assert "slow=0.5" in said.out
    assert len(list((tmp_path / "s").glob("*/summary.json"))) == 2


def test_a_plan_carries_its_options(named):
    config = Config(training={"optimizer": "lion", "slow": 0.5}).complete()
    plan = Plan(config, "f", "r", 3, Shape((1, 8, 8), tuple("0123456789")))
    assert Plan.from_flat(plan.to_flat(), "r").config.make_training() == config.make_training()
