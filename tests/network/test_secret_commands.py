"""--secret on the command line, in plans and over Flower's messages: what is refused in a sentence, and what works."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from grid import RUN, LocalGrid, run_server

from fedselect.cli import deploy
from fedselect.core.errors import InputError
from fedselect.core.tree import nested
from fedselect.network import control, site
from fedselect.network.home import Home
from fedselect.network.plan import Plan, Shape, plan
from fedselect.network.rounds import Limits
from fedselect.network.vault import Vault
from fedselect.runs.config import Config
from fedselect.runs.rundir import read_records
from fedselect.simulate.checkpoint import as_first_written

CLIENTS = 3
DATA = {"name": "digits", "clients": CLIENTS, "train": 20, "test": 10, "val": 0}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made") / "site"
    shape = Shape((1, 8, 8), tuple("0123456789"))
    site.make(root, CLIENTS, f"127.0.0.1:{site.free_port()}", DATA, shape, insecure=False, days=30)
    return root


def config(**given):
    raw = {"method": {"name": "fedselect"}, "data": DATA, "model": {"name": "mlp"}, "rounds": 2, "seed": 3, "secret": True}
    return Config.from_dict({**raw, **given}, "test")


def test_over_flowers_messages_it_is_the_simulation(made, tmp_path, monkeypatch):
    """The real apps, keys from the clients' parts of a site; and a client that insists on it takes part."""
    monkeypatch.chdir(tmp_path)
    chosen = config(mean="cohort", aggregate={"name": "adam"})
    agreed = plan(chosen, site.Site.read(made).federation, "", CLIENTS, Shape.of(chosen.make_data()), Limits(wait=1.0))
    nodes = {
        100 + i: Home(i, tmp_path / f"vault-{i}", device="cpu", site=str(made / f"client-{i}"), secret=i == 1).to_flat()
        for i in range(CLIENTS)
    }
    run_server(LocalGrid(nodes, agreed.to_flat()))
    out = Path("fedselect-runs") / f"flower-{RUN}"
    simulation = chosen.simulation()
    records = [{k: v for k, v in simulation.step().items() if k != "seconds"} for _ in range(2)]
    drop = ("seconds", "missed", "rejected", "set_back", "absent")
    assert [{k: v for k, v in r.items() if k not in drop} for r in read_records(out / "metrics.jsonl")] == records
    assert all("cut" in r for r in records)
    state = nested("server", Vault(out / "checkpoint").load(2).tensors)
    assert all(torch.equal(state[k][n], v) for k, tree in simulation.server.items() for n, v in tree.items())


def test_a_plan_survives_the_wire_and_one_without_is_as_it_was():
    secret, plain = (Plan(config(secret=s), "f", "r", CLIENTS, Shape((1, 8, 8), ("a", "b"))) for s in (True, False))
    assert Plan.from_flat(secret.to_flat(), "r").config.secret
    assert not {"secret", "mean"} & plain.to_flat().keys()
    assert secret.digest() != plain.digest()


def test_a_run_without_it_keeps_its_identity():
    said = as_first_written(config(secret=False).to_json())
    assert not {"secret", "mean"} & said.keys()
    assert as_first_written(config().to_json())["secret"] is True


def test_a_client_that_insists_refuses_a_run_without(tmp_path):
    home = Home(1, tmp_path, secret=True)
    plain = Plan(config(secret=False), "f", "r", CLIENTS, Shape((1, 8, 8), ("a", "b")))
    with pytest.raises(InputError, match="client 1 only takes part in runs with --secret, and this run is without it"):
        home.identity(plain)
    assert Home.from_flat(home.to_flat()) == home
    secret = Plan(config(), "f", "r", CLIENTS, Shape((1, 8, 8), ("a", "b")))
    with pytest.raises(InputError, match="client 1 does not know its folder of a site"):
        home.identity(secret)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"method": {"name": "fedpac"}}, r"sends rows of single clients \(head, prototypes, statistics\)"),
        ({"method": {"name": "fedavg", "weight": "samples"}}, "secure aggregation weights all clients equally"),
        ({"fraction": 0.5}, "at least 3 clients in a round, and this run has 2"),
    ],
)
def test_a_plan_that_cannot_be_hidden_is_refused(given, said):
    chosen = config(**given)
    with pytest.raises(InputError, match=said):
        plan(chosen, "f", "r", CLIENTS, Shape.of(chosen.make_data()), Limits())


def test_a_limit_on_lengths_is_refused():
    chosen = config()
    with pytest.raises(InputError, match="--max-norm limits the length of a client's update, which --secret hides"):
        plan(chosen, "f", "r", CLIENTS, Shape.of(chosen.make_data()), Limits(max_norm=3.0))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--secret", "--aggregate", "median"), "Median looks at the values of single clients, which secure aggregation hides"),
        (("--secret", "--aggregate", "clip"), "ClippedMean looks at the values of single clients"),
        (("--mean", "cohort"), "mean=cohort needs secure aggregation"),
        (("--secret", "--mean", "median"), "mean"),
    ],
)
def test_a_command_says_what_is_wrong(cli, tmp_path, args, said):
    assert said in cli("run", "--method", "fedavg", *args, "--out", tmp_path / "run").sentence()


def test_deployed_it_is_the_mean_unless_something_else_is_asked_for(cli, made, monkeypatch):
    started = []
    monkeypatch.setattr(control, "start", lambda engine, part, config, *a: started.append(config) or part)
    monkeypatch.setattr(control, "follow", lambda *a: None)
    monkeypatch.setattr(deploy, "_outcome", lambda place: None)
    for args in (("--secret",), (), ("--secret", "--aggregate", "adam")):
        assert cli("deploy", "run", made, *args, "--quiet").code == 0
    assert [c.aggregate["name"] for c in started] == ["mean", "clip", "adam"]
    assert [c.secret for c in started] == [True, False, True]


def test_an_insecure_site_has_no_keys_for_it(cli, made, tmp_path):
    root = tmp_path / "site"
    site.make(root, CLIENTS, "127.0.0.1:8000", DATA, Shape((1, 8, 8), tuple("0123456789")), insecure=True, days=1)
    for command in (("run", root), ("client", root / "client-0"), ("demo", "--insecure", "--out", tmp_path / "demo")):
        said = cli("deploy", *command, "--secret")
        assert (said.code, "--secret needs the keys of a site" in said.err) == (2, True)


def test_every_client_has_the_same_roster(made):
    rosters = [json.loads((made / f"client-{i}" / "roster.json").read_text()) for i in range(CLIENTS)]
    assert all(r["keys"] == rosters[0]["keys"] for r in rosters)
    public = [(made / "server" / "keys" / f"client-{i}.pub").read_text() for i in range(CLIENTS)]
    assert rosters[0]["keys"] == public
    assert dataclasses.astuple(site.Site.read(made))[0] == rosters[0]["federation"]
