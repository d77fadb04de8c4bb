"""fedselect diagnose: what it prints and writes, what it says to bad input; persistence in run directories and reports."""

import dataclasses
import json
import shlex
import shutil

import pytest

from fedselect.core import snapshots
from fedselect.diagnosis import words
from fedselect.report import gather
from fedselect.runs import loop, persistence, rundir, runner
from fedselect.runs.config import Config

DATA = ("--data", "digits", "--shift", "motley", "--model", "mlp", "--train", 60, "--val", 0, "--test", 10)
BARE = """
from torch import nn

import fedselect as fs

def bare(data: fs.Federation) -> fs.Model:
    '''No Linear.'''
    return fs.Model(lambda: nn.Sequential(nn.Conv2d(1, 10, 8), nn.Flatten()), name="bare")

fs.MODELS["bare"] = bare
"""


def test_it_says_who_differs_how_and_what_to_type(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = cli("diagnose", *DATA, "--seed", 1, "--fedpersist.lr", 0.1, "--threshold", 0.1)
    assert said.code == 0, said
    first, *lines = said.out.splitlines()
    assert first.startswith("training fedpersist on digits: mlp, 10 clients, 11 rounds, on c")
    assert lines[0].startswith("fedpersist seed 1  round 11/11  loss ")
    assert lines[3].split() == ["client", "1.weight", "1.bias", "3.weight", "3.bias"]
    assert lines[5].split()[:2] == ["0", "none"]
    assert "Clients 8 and 9: different classes or class frequencies (persistent in the head and its bias)." in lines
    assert any("no parameters" not in line and line.startswith("FedPersist would make") for line in lines)
    command = next(line for line in lines if line.startswith("  fedselect "))
    assert command.split()[1:4] == ["compare", "--methods", "fedalike,fedavg+ft"]
    assert command.endswith("--seeds 1 --shift motley --train 60 --val 0 --test 10 --lr 0.1")  # a threshold is FedPersist's own
    assert any(line.startswith("FedAlike would use ") for line in lines)
    assert "Limits: 10 rounds are few" in said.out
    assert not list(tmp_path.iterdir())  # without --out it writes nothing
    assert cli(*shlex.split(command)[1:], "--rounds", 1, "--out", "a", "-q").code == 0  # it can be typed as it stands


def test_it_writes_a_page_a_picture_and_numbers(cli, tmp_path):
    out, asked = tmp_path / "d", ("diagnose", *DATA, "--rounds", 2, "-q")
    assert cli(*asked, "--out", out).out.endswith(f"wrote diagnosis.json, diagnosis.png, diagnosis.md to {out}\n")
    assert {p.name for p in out.iterdir()} == {"diagnosis.json", "diagnosis.png", "diagnosis.md"}
    numbers = json.loads((out / "diagnosis.json").read_text())
    assert [len(v) for v in numbers["persistence"].values()] == [10] * 4
    assert len(numbers["losses"]) == 2
    assert len(numbers["groups"]) == 10
    page = (out / "diagnosis.md").read_text()
    assert all(sentence in page for sentence in numbers["sentences"])
    assert numbers["command"] in page
    assert (
        f"{out} already exists; choose another --out, or pass --overwrite to replace it" in cli(*asked, "--out", out).sentence()
    )
    assert cli(*asked, "--out", out, "--overwrite").code == 0
    (out / "thesis.md").write_text("years of work")
    said = cli(*asked, "--out", out, "--overwrite").sentence()
    assert f"{out} contains files that are not part of a diagnosis; choose another --out." in said


def test_it_takes_the_file_of_a_run(cli, tmp_path):
    runner.start(config("fedavg", rounds=1), tmp_path / "a")
    said = cli("diagnose", "--config", tmp_path / "a" / "config.json", "--rounds", 2, "-q")
    assert said.code == 0, said
    assert f"--config {tmp_path / 'a' / 'config.json'}" in said.out
    assert "1.weight" in said.out


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--data", "digit"), "there is no data 'digit'; did you mean 'digits'"),
        (
            ("--rounds", 1),
            "a diagnosis needs at least 2 rounds, one for each half of the samples, not 1; try rounds=10 (--rounds 10).",
        ),
        (("--window", 5), "a diagnosis sets its window with --rounds; remove --window."),
        (("--limt", 0.1), "there is no option 'limt'"),
        (("--model", "bare", "--plugin", "bare"), "a diagnosis needs the model's head, and bare has no Linear"),
    ],
)
def test_bad_input_is_one_sentence(cli, tmp_path, monkeypatch, args, sentence):
    (tmp_path / "bare.py").write_text(BARE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert sentence in cli("diagnose", *args, "-q").sentence()


# ---- in run directories and reports

FILES = {"fedpersist": "persistence.json", "fedalike": "groups.json"}


def config(method="fedpersist", rounds=4, **options):
    return Config.from_dict(
        {
            "method": {"name": method, **({"window": 2} if method == "fedpersist" else {}), **options},
            "data": {"name": "digits", "clients": 4, "classes_per_client": 3, "train": 20, "test": 10, "val": 0},
            "model": {"name": "mlp", "hidden": 8},
            "rounds": rounds,
        },
        "test",
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out = tmp_path_factory.mktemp("persist") / "a"
    runner.start(config(), out)
    return out


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    out = tmp_path_factory.mktemp("grouped") / "a"
    runner.start(config("fedalike"), out)
    return out


def test_a_run_of_fedpersist_keeps_what_it_measured(done, tmp_path):
    found = persistence.read(done)
    assert list(found["persistence"]) == list(found["roles"]) == ["1.weight", "1.bias", "3.weight", "3.bias"]
    assert all(isinstance(v, float) for values in found["persistence"].values() for v in values)
    assert rundir.is_run(done)  # so that --overwrite may replace it
    runner.start(config("fedavg"), tmp_path / "b")
    runner.start(config(window=4), tmp_path / "c")  # its window is over with the run, and nobody has looked back
    assert not (tmp_path / "b" / "persistence.json").exists()
    assert not (tmp_path / "c" / "persistence.json").exists()


def test_a_run_of_fedalike_keeps_who_shares_a_head(grouped, tmp_path):
    found = json.loads((grouped / "groups.json").read_text())["groups"]
    assert len(found) == 4
    assert all(found[g] == g for g in found)
    assert rundir.is_run(grouped)
    assert not (grouped / "persistence.json").exists()
    runner.start(config("fedavg"), tmp_path / "b")
    assert not (tmp_path / "b" / "groups.json").exists()


def test_groups_are_the_servers_to_know_however_clients_are_stored(grouped, tmp_path):
    runner.start(dataclasses.replace(config("fedalike"), rows="personal"), tmp_path / "a")
    assert (tmp_path / "a" / "groups.json").read_bytes() == (grouped / "groups.json").read_bytes()


@pytest.mark.parametrize(("method", "rounds"), [("fedpersist", 2), ("fedpersist", 3), ("fedalike", 1), ("fedalike", 3)])
def test_a_resumed_run_has_the_same_file(done, grouped, tmp_path, method, rounds):
    """From before the clients were tested, and from after it."""
    out, whole = tmp_path / "a", {"fedpersist": done, "fedalike": grouped}[method]
    config_, simulation = config(method), config(method).simulation()
    shutil.copytree(whole, out)
    (out / "summary.json").unlink()
    shutil.rmtree(out / "checkpoint")
    for _ in range(rounds):
        simulation.step()
    loop.checkpoints.save(out / "checkpoint", simulation, rundir.owner(config_))
    assert [p.name for p in snapshots.places(out / "checkpoint")] == [f"{rounds:06}"]
    runner.resume(out)
    assert (out / FILES[method]).read_bytes() == (whole / FILES[method]).read_bytes()


def test_what_a_later_round_wrote_is_dropped(grouped, tmp_path):
    """A run that goes on from before its clients were tested does not show groups that are not made again."""
    out = shutil.copytree(grouped, tmp_path / "a")
    (out / "summary.json").unlink()
    shutil.rmtree(out / "checkpoint")
    loop.Run(out)
    assert not (out / "groups.json").exists()


def test_a_report_has_the_numbers_and_the_words(done, tmp_path):
    (run,) = gather([done])["runs"]
    assert run["persistence"]["tensors"] == ["1.weight", "1.bias", "3.weight", "3.bias"]
    assert [len(v) for v in run["persistence"]["values"]] == [4] * 4
    assert run["persistence"]["sentences"]
    runner.start(config("fedavg"), tmp_path / "b")
    assert gather([tmp_path / "b"])["runs"][0]["persistence"] is None


def test_a_report_says_who_shares_a_head(grouped, done, tmp_path):
    (run,) = gather([grouped])["runs"]
    found = json.loads((grouped / "groups.json").read_text())["groups"]
    assert run["heads"] == {"groups": found, "sentences": words.together(found, ["0", "1", "2", "3"])}
    assert gather([done])["runs"][0]["heads"] is None
    out = shutil.copytree(grouped, tmp_path / "a")
    (out / "groups.json").write_text('{"groups": [0, 0, null, 0]}')
    (run,) = gather([out])["runs"]
    assert run["heads"]["sentences"] == ["Clients 0, 1 and 3 share a head.", "Client 2 is not tested yet."]


@pytest.mark.parametrize(
    "text", ['{"groups": [0, 2, 0, 0]}', '{"groups": [0, 9, 0, 0]}', '{"groups": ["0"]}', '{"groups": []}', "{}"]
)
def test_damaged_groups_are_named(cli, grouped, tmp_path, text):
    out = shutil.copytree(grouped, tmp_path / "a")
    (out / "groups.json").write_text(text)
    said = cli("report", out).sentence()
    assert "groups.json does not have a group for each client; delete it; the report then omits this part." in said


def test_a_damaged_file_is_named(cli, done, tmp_path):
    out = shutil.copytree(done, tmp_path / "a")
    (out / "persistence.json").write_text('{"persistence": {"w": [1, "x"]}, "roles": {"w": "head weights"}}')
    said = cli("report", out).sentence()
    assert (
        "persistence.json does not have a number for each client and tensor; delete it; the report then omits this part."
        in said
    )
