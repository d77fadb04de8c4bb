"""docs/own-aggregator.md: its example runs, passes what every aggregator passes, and its table is complete."""

import re
from pathlib import Path

import cases
import pytest
import torch
from local import server_state

import fedselect as fs

PAGE = (Path(__file__).parents[2] / "docs" / "own-aggregator.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
MOST = 0.05


@pytest.fixture
def clipped():
    scope: dict = {"__name__": __name__}
    exec(EXAMPLE, scope)
    return scope["Clipped"]


def test_the_table_has_every_aggregator_and_every_option_is_explained():
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE, re.M))
    assert rows.keys() == fs.AGGREGATORS.keys()
    for name, factory in fs.AGGREGATORS.items():
        assert all(f"`{option}`" in rows[name] for option in factory.__dataclass_fields__)


@pytest.mark.parametrize("case", ["fedavg", "fedselect"])
def test_it_runs_stacked_in_chunks_and_over_messages(clipped, case, tmp_path):
    aggregator = clipped(most=MOST, server_momentum=0.5)
    whole = cases.simulation(case, "cnn-batchnorm", aggregator=aggregator)
    cases.rounds(whole)
    chunked = cases.simulation(case, "cnn-batchnorm", aggregator=aggregator, chunk=2)
    cases.rounds(chunked)
    cases.assert_equal(cases.everything(chunked), cases.everything(whole))
    server, room = cases.deployed(case, "cnn-batchnorm", tmp_path, aggregator)
    for _ in range(cases.ROUNDS):
        server.step(room)
    cases.assert_equal(server_state(server), server_state(whole))


def test_no_step_is_longer_than_most_and_long_enough_is_the_mean(clipped):
    def lengths(aggregator):
        sim = cases.simulation("fedavg", "mlp", aggregator=aggregator)
        found = []
        for _ in range(3):
            before = {n: v.clone() for n, v in sim.server["params"].items()}
            sim.step()
            found.append(float(sum((v - before[n]).double().square().sum() for n, v in sim.server["params"].items()).sqrt()))
        return found

    plain = lengths(fs.Mean())
    assert min(plain) > MOST
    assert max(lengths(clipped(most=MOST))) <= MOST * (1 + 1e-5)
    assert lengths(clipped(most=1e9)) == pytest.approx(plain, rel=1e-5)


def test_what_was_not_sent_does_not_count(clipped):
    fold = clipped(most=1.0).fold({}, {"a": torch.zeros(2)})
    fold.add({"a": torch.tensor([[3.0, torch.nan]])}, {"a": torch.tensor([[True, False]])}, torch.ones(1))
    mean, heard, _ = fold.finish()
    assert heard["a"].tolist() == [True, False]
    assert mean["a"][0] == 1.0


def test_the_command_line_takes_it(clipped, cli, tmp_path, monkeypatch):
    monkeypatch.setitem(fs.AGGREGATORS, "clipped", clipped)
    how = ("--aggregate", "clipped", "--most", "0.5", "--model", "mlp", "--clients", "3", "--rounds", "1", "-q")
    assert cli("run", *how, "--out", tmp_path / "a").code == 0
    assert cli("resume", tmp_path / "a", "-q").code == 0
    assert "most=1.0" in cli("aggregators").out
