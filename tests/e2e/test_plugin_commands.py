"""A user's own method, data and model from a plugin, with the commands: where it is named, where it is not, and installed."""

import json
import sys

import pytest
from children import FEDSELECT, call, env

SCRIPT = "import os, sys; sys.path.remove(os.getcwd()); from fedselect.cli import main; main()"  # as the console script
PLUGIN = """
from torch import nn

import fedselect as fs
from beside import classes

def mine(lr: float = 0.1) -> fs.Method:
    '''Averages, as FedAvg does.'''
    return fs.FedAvg(epochs=1, lr=lr)

def few(clients: int = 3, seed: int = 0) -> fs.Federation:
    '''A few of the digits.'''
    return fs.load("digits", clients=clients, classes_per_client=classes, train=20, test=10, seed=seed)

def tiny(data: fs.Federation, width: int = 4) -> fs.Model:
    '''One hidden layer.'''
    return fs.Model.wrap(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, data.classes)))

fs.METHODS["mine"], fs.DATA["few"], fs.MODELS["tiny"] = mine, few, tiny
"""
MADE = ("--data", "few", "--model", "tiny", "--width", "5", "-q")
NEEDS = "this run needs the plugin 'own', which is not loaded here; install it, or add --plugin own."


@pytest.fixture
def folder(tmp_path):
    """A folder with a plugin in it, and beside that a module it imports."""
    (tmp_path / "own.py").write_text(PLUGIN)
    (tmp_path / "beside.py").write_text("classes = 3\n")
    return tmp_path


@pytest.fixture
def fed(fork, folder):
    """The commands in that folder: what one printed, or with `fails` the sentence it ended with."""

    def call(*args, fails=False):
        process = fork(SCRIPT, *args, cwd=folder)
        out, err = process.communicate()
        assert process.returncode == (2 if fails else 0), err
        assert "Traceback" not in err
        return err if fails else out

    return call


def interrupted(run):
    """A run as a kill before its end leaves it."""
    (run / "summary.json").unlink()
    return run


def test_a_run_with_rows_of_a_plugin_goes_on_with_it_alone(fed, folder):
    fed("run", "--plugin", "own", "--method", "mine", *MADE, "--rounds", 2, "--out", "a")
    assert json.loads((folder / "a" / "config.json").read_text())["plugins"] == ["own"]
    assert "mine" in fed("resume", "a")  # it is finished: a table of what is there
    interrupted(folder / "a")
    assert fed("resume", "a", fails=True) == f"error: a/config.json: {NEEDS}\n"
    assert fed("export", "a", "--client", 0, fails=True) == f"error: a/config.json: {NEEDS}\n"
    assert "mine" in fed("resume", "a", "--plugin=own.py")
    assert (folder / "a" / "summary.json").exists()
    assert "tiny(data, width=5)" in fed("export", "a", "--client", 0, "--plugin", "own")
    assert fed("run", "--config", "a/config.json", "--out", "b", fails=True) == f"error: a/config.json: {NEEDS}\n"


def test_a_report_of_finished_runs_needs_no_plugin(fed, folder):
    fed("--plugin", "own", "compare", "--methods", "mine,local", *MADE, "--rounds", 1, "--out", "c")
    assert "wrote c/report.html" in fed("report", "c")
    page = (folder / "c" / "report.html").read_text()
    assert '"method":"mine"' in page
    assert json.loads((folder / "c" / "compare.json").read_text())["local-seed0"]["plugins"] == ["own"]  # for its data


def test_lists_have_the_rows_of_a_plugin_while_it_is_named(fed):
    for what, row in (("methods", "Averages, as FedAvg does."), ("models", "One hidden layer.")):
        assert row in fed(what, "--plugin", "own")
        assert row not in fed(what)
    assert "A few of the digits." in fed("data", "list", "--plugin", "own")
    assert "--lr" in fed("methods", "mine", "--plugin", "own")


def test_the_environment_names_plugins_for_every_command(folder, monkeypatch, fed):
    monkeypatch.setenv("FEDSELECT_PLUGINS", str(folder / "own.py"))
    assert "Averages, as FedAvg does." in fed("methods", "mine")


def test_a_plugin_that_fails_ends_every_command_in_a_sentence(fed, folder):
    (folder / "beside.py").unlink()
    said = fed("methods", "--plugin", "own", fails=True)
    assert said.startswith("error: the plugin 'own' cannot be imported (ModuleNotFoundError: No module named 'beside', ")
    assert said.count("\n") == 1


def test_an_installed_package_is_loaded_by_its_entry_point(folder):
    place = folder / "own_plugin-1.0.dist-info"
    place.mkdir()
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: own-plugin\nVersion: 1.0\n")
    (place / "entry_points.txt").write_text("[fedselect.plugins]\nanything = own\n")
    there = env(PYTHONPATH=":".join([str(folder), *sys.path]))
    done = call(*FEDSELECT, "run", "--method", "mine", *MADE, "--rounds", 1, "--out", folder / "a", env=there)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "a" / "config.json").read_text())["plugins"] == ["own"]


def test_two_processes_share_a_run_with_a_plugin(folder):
    many = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "fedselect")
    done = call(*many, "run", "--plugin", "own", "--method", "mine", *MADE, "--rounds", 1, "--out", "a", cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (folder / "a" / "summary.json").exists()
