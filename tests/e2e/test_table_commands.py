"""Tables on the command line: shown, trained on, exported with what turns raw rows into inputs."""

import csv
import json

import numpy as np
import pytest
import torch

NAMES = ("age", "dose", "level", "smoker", "site", "outcome", "weight")
FLAGS = ("--client", "site", "--target", "outcome", "--drop", "weight")


def write(path, changed=0.0):
    draw = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(NAMES)
        for i in range(150):
            site = i % 3
            age, dose, level = draw.normal(50 + 5 * site, 9), draw.integers(1, 4), draw.normal(site, 1)
            smoker = draw.choice(["no", "once, long ago", "yes"])
            ill = age + 4 * dose + draw.normal(0, 3) > 58 + 5 * site
            weight = 40 + age / 2 + 3 * dose
            gap = draw.random() < 0.2
            numbers = [f"{age + changed:.2f}", dose, "" if gap else f"{level:.3f}"]
            out.writerow([*numbers, smoker, "nws"[site], "ill" if ill else "well", f"{weight:.2f}"])
    return path


@pytest.fixture
def table(tmp_path):
    return write(tmp_path / "people.csv")


def test_show_says_what_the_columns_are_and_who_has_what(cli, table, tmp_path):
    said = cli("data", "show", f"table:{table}", *FLAGS)
    assert said.code == 0, said
    rows = {cells[0]: cells[1:] for line in said.out.splitlines() if (cells := line.split())}
    assert "people: 3 clients, 2 classes, inputs (7,)" in said.out
    assert rows["n"][:3] == ["38", "0", "12"]  # a quarter of 50 rows, 12.5, is 12: Python rounds to even
    assert rows["age"][:2] == ["number", "0.0%"]
    assert rows["smoker"][0] == "category"
    assert 10 < float(rows["level"][1].removesuffix("%")) < 30
    numbers = cli("data", "show", f"table:{table}", "--client", "site", "--target", "weight", "--drop", "outcome")
    assert "targets of one number" in numbers.out
    assert "±" in numbers.out
    assert "these targets are numbers" in cli(
        "data", "show", f"table:{table}", "--client", "site", "--target", "weight", "--out", tmp_path / "p.png"
    ).sentence()  # fmt: skip


@pytest.mark.parametrize("form", ["safetensors", "pt2", "onnx"])
def test_an_exported_model_predicts_from_raw_rows(cli, table, tmp_path, form):
    if form == "onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    run = tmp_path / "run"
    flags = ("--method", "fedavg+ft", "--lr", 0.1, "--rounds", 2, "--scale", "client", "--out", run, "-q")
    assert cli("run", "--data", f"table:{table}", *FLAGS, *flags).code == 0
    said = cli("export", run, "--client", 1, "--format", form)
    assert said.code == 0, said
    with table.open() as file:
        rows = [r for r in csv.DictReader(file) if r["site"] == "s"]  # clients n, s, w in this order
    scope = {"rows": {n: [r[n] for r in rows] for n in NAMES if n not in ("site", "outcome")}}
    exec(said.out.split("\n", 2)[2], scope)
    logits = torch.as_tensor(scope["logits"])
    tested = scope["schema"].division.parts(scope["schema"].frame(scope["rows"]), "s").test
    right = [scope["classes"][int(logits[i].argmax())] == rows[i]["outcome"] for i in tested]
    assert sum(right) / len(right) == pytest.approx(json.loads((run / "summary.json").read_text())["clients"][1], abs=1e-6)
    again = cli("run", "--data", f"table:{table}", *FLAGS, *flags, "--overwrite")  # it knows its own files
    assert again.code == 0, again


def test_a_table_that_was_changed_since_is_noticed(cli, table, tmp_path):
    run = tmp_path / "run"
    assert cli("run", "--data", f"table:{table}", *FLAGS, "--rounds", 1, "--out", run, "-q").code == 0
    write(table, changed=0.5)
    assert "has changed since the run started; restore it" in cli("export", run, "--client", 0).sentence()
    write(table)
    assert cli("export", run, "--client", 0).code == 0
    write(table, changed=0.5)
    assert cli("run", "--data", f"table:{table}", *FLAGS, "--rounds", 1, "--out", run, "-q", "--overwrite").code == 0


@pytest.mark.parametrize("target", ["weight", "weight,dose"])
def test_numbers_are_trained_on_and_exported(cli, table, tmp_path, target):
    run, flags = tmp_path / "run", ("--client", "site", "--target", target, "--drop", "outcome", "--lr", 0.001, "-q")
    said = cli("run", "--data", f"table:{table}", *flags, "--method", "fedavg", "--rounds", 2, "--out", run)
    assert said.out.startswith("mae "), said  # of numbers the task is regression
    exported = cli("export", run, "--client", "N")
    assert "on the test data of client n (number 0)" in exported.out
    assert "there is no client 'q'; choose one of n, s, w" in cli("export", run, "--client", "q").sentence()
    scope = {"rows": table}
    exec(exported.out.split("\n", 2)[2], scope)
    assert scope["predicted"].shape == (150, len(target.split(",")))


def test_a_schema_needs_a_table(cli, table, tmp_path):
    assert "only a table has a schema" in cli("data", "schema", "digits", "--out", tmp_path / "s.json").sentence()
    assert "--target COLUMN" in cli("data", "schema", f"table:{table}", "--out", tmp_path / "s.json").sentence()
    assert "no-such.json is missing" in cli("data", "merge", tmp_path / "no-such.json", "--out", tmp_path / "s.json").sentence()
