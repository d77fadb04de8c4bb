"""What is not a run of ours stays as it is, whatever a command is told or a file says."""

import json
import os
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedselect as fs
from fedselect.core.files import check_folder_name, read_json
from fedselect.runs import loop, runner
from fedselect.runs.config import Config

TINY = ("--model", "mlp", "--hidden", 8, "--clients", 3, "--classes-per-client", 3, "--train", 20, "--test", 10, "-q")
COMPARE = ("compare", *TINY, "--methods", "local,fedavg", "--rounds", 1)


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def content(folder):
    """Every file below a folder, and every empty folder; links as what they point to. Locks come and go."""
    return {
        str(p.relative_to(folder)): os.readlink(p) if p.is_symlink() else p.read_bytes() if p.is_file() else None
        for p in folder.rglob("*")
        if p.name != ".lock" and (p.is_symlink() or p.is_file() or not any(p.iterdir()))
    }


@pytest.fixture
def documents(tmp_path):
    """A folder of somebody's, with names in it that runs use too."""
    folder = tmp_path / "documents"
    write(
        folder,
        {
            "thesis.tex": "years of work",
            "config.json": '{"app": 1}',
            "checkpoint/000001/photo.jpg": "a wedding",
            "checkpoint/model.pt": "weeks on a GPU",
            "202401/photo.jpg": "a holiday",
            ".thesis.part": "half a download",
        },
    )
    before = content(folder)
    yield folder
    assert content(folder) == before


@pytest.fixture(scope="module")
def one_of_two(tmp_path_factory):
    out = tmp_path_factory.mktemp("begun") / "c"
    small = {
        "model": {"name": "mlp", "hidden": 2},
        "rounds": 1,
        "data": {"name": "digits", "clients": 2, "train": 4, "test": 2, "val": 0},
    }
    runs = {f"{m}-seed0": Config.from_dict({**small, "method": {"name": m}}, "here") for m in ("local", "fedavg")}
    runner.start_comparison(runner.Comparison(runs), out)
    shutil.rmtree(out / "fedavg-seed0")
    return out


@pytest.fixture
def begun(one_of_two, tmp_path):
    """A comparison of which one run is finished and the other has not begun."""
    return shutil.copytree(one_of_two, tmp_path / "c")


def rename(out, old, new):
    asked = read_json(out / "compare.json", "")
    (out / "compare.json").write_text(json.dumps({new if k == old else k: v for k, v in asked.items()}))


# ---- names that lead elsewhere


@pytest.mark.parametrize("name", ["../documents", "/tmp", "..", ".", "", "a/b", ".git", "a\\b", "a\0b"])
@pytest.mark.parametrize("command", ["resume", "report"])
def test_a_name_in_a_comparison_leads_nowhere_else(cli, begun, documents, name, command):
    name = str(documents) if name == "/tmp" else name
    rename(begun, "fedavg-seed0", name)
    said = cli(command, begun).sentence()
    assert f"compare.json: a run cannot be named {name!r}" in said


def test_a_name_given_in_python_leads_nowhere_else_either(documents, tmp_path):
    config = Config.from_dict({"data": {"name": "digits"}, "model": {"name": "mlp"}, "rounds": 1}, "here")
    with pytest.raises(fs.InputError, match="cannot be named"):
        runner.start_comparison(runner.Comparison({"../documents": config}), tmp_path / "c")


@given(st.text(min_size=1))
def test_a_name_that_is_taken_is_a_folder_in_its_parent(name):
    try:
        check_folder_name(name)
    except fs.InputError:
        return
    assert os.path.dirname(os.path.normpath(os.path.join("/a/b", name))) == "/a/b"


def test_a_comparison_of_something_else_than_configurations_says_so(cli, begun):
    (begun / "compare.json").write_text('{"local-seed0": 3}')
    assert "local-seed0 must be a configuration, not 3" in cli("resume", begun).sentence()


# ---- links


def test_a_run_folder_that_is_a_link_is_refused(cli, begun, documents):
    (begun / "fedavg-seed0").symlink_to(documents)
    assert "fedavg-seed0 is a link" in cli("resume", begun).sentence()


@pytest.mark.parametrize("target", ["documents", "run"])
def test_overwrite_through_a_link_is_refused(cli, documents, begun, tmp_path, target):
    (tmp_path / "link").symlink_to({"documents": documents, "run": begun}[target])
    before = content(begun)
    for command in (("run", *TINY, "--rounds", 1), COMPARE, ("sweep", *TINY, "--rounds", 1, "--lr", "0.1,0.2")):
        assert "link is a link, but --overwrite replaces only folders" in (
            cli(*command, "--out", tmp_path / "link", "--overwrite").sentence()
        )
    assert content(begun) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "masks.jsonl", "checkpoint", ".lock"])
def test_a_run_does_not_write_through_a_link_in_its_directory(cli, tmp_path, name):
    """A folder that was received may hold links to what its reader has."""
    for out in ("a", "other"):
        assert cli("run", *TINY, "--rounds", 2, "--out", tmp_path / out).code == 0
    before, path = content(tmp_path / "other"), tmp_path / "a" / name
    (tmp_path / "a" / "summary.json").unlink()
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(tmp_path / "other" / name)
    said = cli("resume", tmp_path / "a").sentence()
    assert f"{name} is a link" in said or f"{name} cannot be written" in said
    assert content(tmp_path / "other") == before


def test_a_link_among_what_a_run_made_is_not_followed(cli, begun, documents):
    (begun / "local-seed0" / "figures").symlink_to(documents)
    assert "contains files that are not part of a run" in cli(*COMPARE, "--out", begun, "--overwrite").sentence()


# ---- folders that are not runs


def test_resume_leaves_a_folder_that_took_a_runs_place(cli, begun, documents):
    shutil.copytree(documents, begun / "fedavg-seed0")
    before = content(begun)
    assert "fedavg-seed0 contains files that are not part of a run, so nothing was changed" in cli("resume", begun).sentence()
    assert content(begun) == before


OURS = '{"method": {"name": "local"}, "data": {"name": "digits"}}'
FOREIGN = {
    "another program's settings": {"config.json": '{"app": 1}'},
    "settings that are no table": {"compare.json": "[1]"},
    "a folder of runs": {"a/config.json": "{}", "b/config.json": "{}"},
    "a checkpoint of somebody else's": {"config.json": OURS, "checkpoint/model.pt": "weeks on a GPU"},
    "snapshots that are none": {"config.json": OURS, "checkpoint/000001/photo.jpg": "a wedding"},
    "a download": {".film.part": "half of it"},
    "a figure of somebody else's": {"config.json": OURS, "figures/thesis.tex": "years of work"},
    "a folder named as a file of ours": {"config.json": OURS, "summary.json/thesis.tex": "years of work"},
    "nothing but a folder named track": {"track/record.mp3": "a song"},
}


@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.parametrize("command", [("run", *TINY, "--rounds", 1), COMPARE], ids=["run", "compare"])
def test_overwrite_replaces_runs_alone(cli, tmp_path, foreign, command):
    write(tmp_path / "x", FOREIGN[foreign])
    before = content(tmp_path / "x")
    assert "contains files that are not part of a run" in cli(*command, "--out", tmp_path / "x", "--overwrite").sentence()
    assert content(tmp_path / "x") == before


def test_a_table_is_not_made_in_place_of_somebodys_folder(cli, tmp_path):
    args = ("reproduce", "table1", "--columns", "digits", "--scale", 0.2, "--rounds", 1, "--seeds", 0, "--methods", "local")
    assert cli(*args, "--rates", "paper", "--out", tmp_path, "-q").code == 0
    (cell,) = (tmp_path / "cells").iterdir()
    shutil.rmtree(cell)
    write(cell, {"thesis.tex": "years of work"})
    assert "contains files that are not part of a run" in cli(*args, "--rates", "paper", "--out", tmp_path, "-q").sentence()
    assert content(cell) == {"thesis.tex": b"years of work"}


def test_a_saved_simulation_leaves_what_else_lies_in_its_folder(digits, documents, tmp_path):
    """Old states are dropped; a folder whose name is a number is none."""
    folder = shutil.copytree(documents / "checkpoint", tmp_path / "states")
    write(folder, {"2024/photo.jpg": "a holiday", ".film.part": "half of it"})
    before = content(folder)
    simulation = fs.Simulation(fs.FedAvg(), fs.models.mlp(digits, hidden=4), digits)
    for _ in range(4):
        simulation.step()
        if simulation.round != 1:  # that place is taken
            simulation.save(folder)
    after = content(folder)
    assert {k: v for k, v in after.items() if k in before} == before
    assert {k.split("/")[0] for k in after.keys() - before.keys()} == {"000003", "000004"}


def test_a_state_is_not_saved_in_place_of_somebodys_folder(digits, documents, tmp_path):
    folder = shutil.copytree(documents / "checkpoint", tmp_path / "states")
    simulation = fs.Simulation(fs.FedAvg(), fs.models.mlp(digits, hidden=4), digits)
    simulation.step()
    before = content(folder)
    with pytest.raises(fs.RunError, match="000001 is not a saved state"):
        simulation.save(folder)
    assert content(folder) == before


# ---- a site


@pytest.mark.parametrize("extra", ["thesis.tex", "server", "link"])
def test_a_demo_replaces_a_demo_alone(cli, tmp_path, documents, extra):
    pytest.importorskip("flwr")
    out = tmp_path / "x"
    assert cli("deploy", "init", out, "--clients", 2).code == 0
    if extra == "link":
        shutil.move(out, tmp_path / "away")
        out.symlink_to(tmp_path / "away")
    elif extra == "server":  # a simulated run has a file federation.json, too
        shutil.rmtree(out)
        assert cli("run", *TINY, "--rounds", 1, "--out", out).code == 0
    else:
        write(out, {extra: "years of work"})
    before = content(tmp_path)
    assert "choose another" in cli("deploy", "demo", "--out", out, "--overwrite", "-q").sentence()
    assert content(tmp_path) == before


# ---- any byte of any file


@pytest.fixture(scope="module")
def halfway(tmp_path_factory):
    """A run and a comparison that were stopped after their second of three rounds."""
    out, args = tmp_path_factory.mktemp("halfway"), {"model": {"name": "mlp", "hidden": 2}, "rounds": 3}
    data = {"name": "digits", "clients": 2, "train": 4, "test": 2, "val": 0}
    config = Config.from_dict({**args, "data": data, "method": {"name": "fedselect"}}, "here")

    def stop(config, record):
        if record["round"] == 2:
            raise loop.Stopped("stopped")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "OVERHEAD", 1e9)  # a checkpoint every round
        for start, what in ((runner.start, config), (runner.start_comparison, runner.Comparison({"one": config}))):
            with pytest.raises(loop.Stopped):
                start(what, out / start.__name__, watch=stop)
    return out


@pytest.mark.filterwarnings("ignore:.*using the checkpoint before it")
@settings(max_examples=settings.default.max_examples // 2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_is_said_or_does_no_harm(cli, halfway, tmp_path_factory, data):
    """In whatever file: resume, report and export say what is wrong in a sentence, or do what they would have done."""
    folder = tmp_path_factory.mktemp("flipped") / "x"
    shutil.copytree(halfway, folder)
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")
    path = data.draw(st.sampled_from(files), "file")
    text = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(text) - 1), "byte")
    text[at] ^= 1 << data.draw(st.integers(0, 7), "bit")
    path.write_bytes(text)
    for run in folder.iterdir():
        for command in (("report", run), ("export", run, "--client", 0, "--out", folder / "model"), ("resume", run, "-q")):
            said = cli(*command)
            if said.code != 0:
                said.sentence()
    shutil.rmtree(folder)
