"""Trackers: each gets every round of every run."""

import builtins
import json
import os
import shutil
import subprocess
import sys

import pytest
from children import FEDSELECT, call

import fedselect as fs

TINY = ("--model", "mlp", "--clients", 3, "--train", 20, "--test", 10, "-q")
COMPARE = ("compare", *TINY, "--methods", "fedselect,fedavg", "--rounds", 2)

pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's packages


def accuracies(run):
    return [json.loads(line)["accuracy"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_tensorboard(cli, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert cli(*COMPARE, "--out", tmp_path / "c", "--track", "tensorboard").code == 0
    for run in ("fedselect-seed0", "fedavg-seed0"):
        events = EventAccumulator(str(tmp_path / "c" / "track" / "tensorboard" / run)).Reload()
        found = events.Scalars("accuracy")
        assert [e.step for e in found] == [1, 2]
        assert [e.value for e in found] == pytest.approx(accuracies(tmp_path / "c" / run))
        assert {f"client/{i}/accuracy" for i in range(3)} <= set(events.Tags()["scalars"])


def test_mlflow(cli, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert cli(*COMPARE, "--out", tmp_path / "c", "--track", "mlflow").code == 0
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'c' / 'track' / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("fedselect").experiment_id])
    assert sorted(r.info.run_name for r in runs) == ["fedavg-seed0", "fedselect-seed0"]
    for run in runs:
        assert run.info.status == "FINISHED"
        assert run.data.params["data.clients"] == "3"
        found = [m.value for m in client.get_metric_history(run.info.run_id, "accuracy")]
        assert found == pytest.approx(accuracies(tmp_path / "c" / run.info.run_name))


def test_wandb_offline(cli, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert cli(*COMPARE, "--out", tmp_path / "c", "--track", "wandb").code == 0
    found = [p.read_bytes() for p in (tmp_path / "c" / "track" / "wandb").glob("offline-run-*/*.wandb")]
    for run in ("fedselect-seed0", "fedavg-seed0"):
        (raw,) = [text for text in found if run.encode() in text]
        assert b"client/2/accuracy" in raw
        for accuracy in accuracies(tmp_path / "c" / run):
            assert json.dumps(accuracy).encode() in raw


def test_wandb_without_a_login_is_said_before_anything_is_trained(tmp_path):
    pytest.importorskip("wandb")
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    args = ["run", *map(str, TINY), "--out", str(tmp_path / "a"), "--track", "wandb"]
    env |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}  # where a login would be kept
    said = call(*FEDSELECT, *args, stdin=subprocess.DEVNULL, env=env)
    assert said.returncode == 2, said
    assert said.stderr.startswith("error: wandb cannot start")
    assert "WANDB_MODE=offline" in said.stderr
    assert not (tmp_path / "a").exists()


def test_a_run_that_was_stopped_goes_on_in_its_tracker(cli, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from fedselect.simulate.engine import Simulation

    real = Simulation.asks

    def failing(self, *args, **kwargs):
        if self.round == 2:
            raise fs.TrainingError("enough")
        return real(self, *args, **kwargs)

    with monkeypatch.context() as m:
        m.setattr(Simulation, "asks", failing)
        run = ("run", *TINY, "--rounds", 4, "--out", tmp_path / "a", "--track", "tensorboard")
        assert "enough" in cli(*run).sentence()
    assert cli("resume", tmp_path / "a", "-q", "--track", "tensorboard").code == 0
    events = EventAccumulator(str(tmp_path / "a" / "track" / "tensorboard" / "fedselect-seed0")).Reload()
    assert [e.step for e in events.Scalars("accuracy")] == [1, 2, 3, 4]


def test_so_does_a_sweep_of_which_some_runs_are_done(cli, tmp_path):
    """Runs of another width do not stack, so they come one after the other."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track = ("--track", "tensorboard")
    assert cli("sweep", *TINY, "--hidden", "4,8", "--rounds", 3, "--out", tmp_path / "s", *track).code == 0
    second = tmp_path / "s" / "fedselect-hidden=8-seed0"
    (second / "summary.json").unlink()
    shutil.rmtree(second / "checkpoint")
    assert cli("resume", tmp_path / "s", "-q", *track).code == 0
    for run in ("fedselect-hidden=4-seed0", second.name):
        events = EventAccumulator(str(tmp_path / "s" / "track" / "tensorboard" / run)).Reload()
        assert [e.value for e in events.Scalars("accuracy")] == pytest.approx(accuracies(tmp_path / "s" / run))


@pytest.mark.parametrize("kind", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_package_is_one_sentence(cli, tmp_path, monkeypatch, kind):
    monkeypatch.setitem(sys.modules, kind, None)
    said = cli("run", *TINY, "--out", tmp_path / "a", "--track", kind).sentence()
    assert f"--track {kind} needs {kind}; install it with: pip install 'fedselect[track]'" in said
    assert not (tmp_path / "a").exists()


def test_an_unknown_tracker_is_named(cli, tmp_path):
    said = cli("run", *TINY, "--out", tmp_path / "a", "--track", "wanb").sentence()
    assert "there is no tracker 'wanb'; did you mean 'wandb'" in said


def test_a_history_as_a_table(digits):
    pandas = pytest.importorskip("pandas")
    result = fs.run(fs.FedSelect(lr=0.1), model=fs.models.mlp(digits), data=digits, rounds=3, eval_every=2)
    table = result.to_dataframe()
    assert isinstance(table, pandas.DataFrame)
    assert len(table) == 3 * 3
    assert table[table["round"] == 3]["accuracy"].mean() == pytest.approx(result.accuracy)
    assert table[table["round"] == 1]["accuracy"].isna().all()  # not evaluated
    assert table["bytes_up"].sum() == result.bytes_up


def test_a_table_without_pandas_is_one_sentence(digits, monkeypatch):
    result = fs.run(fs.Local(lr=0.1), model=fs.models.mlp(digits), data=digits, rounds=1)
    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", lambda name, *a: no_pandas(name) or real(name, *a))
    with pytest.raises(fs.InputError, match="to_dataframe needs pandas"):
        result.to_dataframe()


def no_pandas(name):
    if name == "pandas":
        raise ImportError(name)
