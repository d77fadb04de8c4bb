"""docs/own-method.md: its examples run, and the method passes the checks every method passes."""

import re
from pathlib import Path

import cases
import pytest
import torch

import fedselect as fs

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "own-method.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


@pytest.fixture
def halfway(monkeypatch):
    scope: dict = {"__name__": __name__}
    exec(BLOCKS[1], scope)
    monkeypatch.setitem(cases.CASES, "halfway", scope["Halfway"])
    return scope["Halfway"]


def test_the_example_is_short():
    lines = [line for line in BLOCKS[1].splitlines() if line.strip() and "import" not in line]
    assert len(lines) < 25


def test_the_one_line_method_runs():
    scope: dict = {}
    exec(BLOCKS[0], scope)
    data = cases.federation()
    result = fs.run(scope["personal_norms_and_head"], model=fs.models.small_cnn(data, norm="batch"), data=data, rounds=2)
    personal = {n for n, m in result.masks.items() if bool(m.all())}
    assert personal == {"norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "fc.weight", "fc.bias"}


def test_the_selector_keeps_one_tensor_of_each_client(monkeypatch):
    scope: dict = {"__name__": __name__}
    exec(BLOCKS[3], scope)
    monkeypatch.setitem(cases.CASES, "farthest", lambda: scope["farthest"])
    first, whole, chunked = (cases.simulation("farthest", "mlp", **how) for how in ({}, {}, {"chunk": 2}))
    cases.rounds(first, 1)
    trained = first.models(range(first.clients), "local")
    moved = [[float((v[i] - first.initial[n]).square().mean()) for n, v in trained.items()] for i in range(first.clients)]
    cases.rounds(whole), cases.rounds(chunked)
    for i, far in enumerate(moved):
        marks = [m[i] for m in fs.Result(whole, []).masks.values()]
        assert [bool(m.all()) for m in marks] == [bool(m.any()) for m in marks] == [f == max(far) for f in far]
    cases.assert_equal(cases.everything(chunked), cases.everything(whole))


@pytest.mark.parametrize("model", cases.MODELS)
def test_it_runs_stacked_in_chunks_and_over_messages(halfway, model, tmp_path):
    whole = cases.simulation("halfway", model)
    cases.rounds(whole)
    chunked = cases.simulation("halfway", model, chunk=2)
    cases.rounds(chunked)
    cases.assert_equal(cases.everything(chunked), cases.everything(whole))
    server, room = cases.deployed("halfway", model, tmp_path)
    for _ in range(cases.ROUNDS):
        server.step(room)
    server.close(room)
    for view in ("local", "merged"):
        cases.assert_equal(cases.kept(room, view), cases.models_of(whole, view))


def test_clients_of_one_size_that_sit_rounds_out_keep_models_of_their_own(halfway):
    """All join at once with the same values, of which some are then written."""
    data = fs.load("digits", clients=6, classes_per_client=3, train=12, test=12, seed=5)
    ends = []
    for how in ({}, {"chunk": 2}, {"rows": "personal"}):
        sim = cases.simulation("halfway", "mlp", data, fraction=0.5, **how)
        before = {n: v.clone() for n, v in sim.initial.items()}
        cases.rounds(sim)
        assert all(torch.equal(v, before[n]) for n, v in sim.initial.items())
        ends.append(sim.models(range(6), "merged"))
    assert all(len(v.unique(dim=0)) == 6 for v in ends[0].values())
    for other in ends[1:]:
        cases.assert_equal(other, ends[0])


def test_a_full_step_is_the_global_models_next_round(halfway):
    """step = 1 forgets the personal model: what is left is the shared copy trained once more."""
    sim = cases.simulation("halfway", "mlp")
    sim.method = halfway(step=1.0)
    sim.step()
    other = cases.simulation("halfway", "mlp")
    other.method = halfway(step=1.0)
    other.store.put(
        torch.arange(other.clients), {"own": {n: torch.randn(other.clients, *v.shape) for n, v in other.initial.items()}}
    )
    other.step()
    cases.assert_equal(sim.models(range(sim.clients)), other.models(range(sim.clients)), tol=1e-6)


def test_the_command_line_takes_it_with_data_and_a_model_of_ones_own(fork, tmp_path):
    """The commands of the page, in its order; one whose rows are not there says so."""
    (tmp_path / "halfway.py").write_text(BLOCKS[1] + BLOCKS[2])
    commands = [line.split()[1:] for line in PAGE.split("every command takes it:\n```\n")[1].split("\n```")[0].splitlines()]
    assert [c[0] for c in commands] == ["run", "methods", "resume", "export"]

    def fed(*args):
        process = fork("from fedselect.cli import main; main()", *args, cwd=tmp_path)
        return (*process.communicate(), process.returncode)

    said = []
    for command in commands:
        out, err, code = fed(*command, *(["--rounds", "2", "-q"] if command[0] == "run" else []))
        assert code == 0, err
        said.append(out)
    assert (tmp_path / "runs" / "a" / "summary.json").exists()
    assert "--step" in said[1]
    assert "halfway" in said[2]
    assert "net = tiny(data, width=4).build()  # a model of your own" in said[3]
    _, err, code = fed("methods", "halfway")
    assert (code, err.startswith("error: there is no method 'halfway'")) == (2, True)
