"""Tables over a network: each client names its file, the plan brings the schema, and numbers are those of the simulation."""

import json

import numpy as np
import pytest
import torch
from local import QUICK, Room

import fedselect as fs
from fedselect.core.errors import DataError, InputError
from fedselect.network import site
from fedselect.network.export import export_model
from fedselect.network.home import Home, own_data
from fedselect.network.plan import Plan, Shape, digest_of, plan
from fedselect.network.rounds import Limits
from fedselect.network.server import Server
from fedselect.runs.config import Config
from fedselect.simulate import Simulation

SITES = ("a", "b", "c")


def write(path, i, count=40, **more):
    draw = np.random.default_rng(i)
    age, kind = draw.normal(50 + 10 * i, 8, count), draw.choice(["x", "y", "z"], count)
    blood = ["" if draw.random() < 0.3 else f"{v:.3f}" for v in draw.normal(i, 1, count)]
    ill = np.where(age + draw.normal(0, 4, count) > 50 + 10 * i, "ill", "well")
    columns = {"age": [f"{v:.2f}" for v in age], "kind": kind, "blood": blood, "outcome": ill, **more}
    rows = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(rows) + "\n")


@pytest.fixture
def folder(tmp_path):
    """Three clients' tables, whose names are those of the clients."""
    (tmp_path / "tables").mkdir()
    for i, name in enumerate(SITES):
        write(tmp_path / "tables" / f"{name}.csv", i)
    return tmp_path / "tables"


def simulated(folder, **options):
    return fs.load("table", path=str(folder), target="outcome", **options)


def agreed(folder, cli, tmp_path, *options):
    """The schema as clients make it who see their own table alone, merged."""
    for name in SITES:
        said = cli(
            "data", "schema", f"table:{folder / name}.csv", "--target", "outcome", *options, "--out", tmp_path / f"{name}.json"
        )
        assert said.code == 0, said
    assert cli("data", "merge", *(tmp_path / f"{n}.json" for n in SITES), "--out", tmp_path / "schema.json").code == 0
    return Shape.of_table(fs.Schema.read(tmp_path / "schema.json"))


def config(**more):
    return Config.from_dict(
        {"data": {"name": "table"}, "method": {"name": "fedselect", "lr": 0.1}, "rounds": 2, **more}, "test"
    )


@pytest.mark.parametrize("options", [{}, {"scale": "client", "val_share": 0.1}], ids=str)
def test_a_client_alone_has_the_tensors_of_the_simulation(folder, cli, tmp_path, options):
    flags = [str(part) for k, v in options.items() for part in (f"--{k.replace('_', '-')}", v)]
    shape = agreed(folder, cli, tmp_path, *flags)
    whole = simulated(folder, **options)
    assert shape == Shape.of(whole)
    for i, name in enumerate(SITES):
        mine = own_data({"name": "table", "path": str(folder / f"{name}.csv")}, config(), i, 3, shape).clients[0]
        for part in ("train", "val", "test"):
            pair, wanted = getattr(mine, part), getattr(whole.clients[i], part)
            assert (pair is None) == (wanted is None)
            assert pair is None or all(torch.equal(x, y) for x, y in zip(pair, wanted, strict=True))
        assert mine.schema == whole.clients[i].schema


def test_means_stay_at_home_where_each_client_has_a_scale_of_its_own(folder, cli, tmp_path):
    agreed(folder, cli, tmp_path, "--scale", "client")
    for name in (*SITES, "schema"):
        columns = json.loads((tmp_path / f"{name}.json").read_text())["columns"]
        assert all(c["mean"] is None and c["variance"] is None for c in columns)


def test_a_plan_carries_the_schema_and_the_run_is_the_simulation(folder, cli, tmp_path):
    shape = agreed(folder, cli, tmp_path)
    made = plan(config(), "site", "r", 3, shape, Limits())
    flat = made.to_flat()
    assert all(type(v) in (bool, int, float, str) for v in flat.values())
    assert Plan.from_flat(flat, "r") == made
    assigned, data = made.assignment("cpu"), simulated(folder)
    room = Room(assigned, data, tmp_path)
    server = Server(assigned, QUICK, tmp_path / "masks")
    homes = [Home(i, tmp_path / f"vault-{i}", {"name": "table", "path": str(folder / f"{n}.csv")}) for i, n in enumerate(SITES)]
    room.data = fs.Federation([home.load(made).clients[0] for home in homes], 2, class_names=data.class_names)
    simulation = Simulation(made.config.make_method(), made.config.make_model(data), data, training=made.config.make_training())
    for _ in range(2):
        outcome = server.step(room)
        record = simulation.step()
        assert {i: up["train_loss"] for i, up in outcome.uploads.items()} == dict(enumerate(record["clients"]["train_loss"]))
    server.close(room)
    out = tmp_path / "model.safetensors"
    said = export_model(tmp_path / "vault-1", out, "r", None)
    assert out.stat().st_mode & 0o777 == 0o600
    scope = {"rows": folder / "b.csv"}
    exec(said.snippet, scope)
    frame = scope["schema"].frame(scope["rows"])
    division = scope["schema"].division.parts(frame, "b")
    right = scope["logits"][division.test].argmax(1) == data.clients[1].test[1]
    assert float(right.double().mean()) == pytest.approx(record["clients"]["accuracy"][1], abs=1e-6)


def test_a_site_keeps_the_schema_and_shapes_of_targets(folder, tmp_path):
    shape = Shape.of(simulated(folder))
    site.make(tmp_path / "one", 3, "127.0.0.1:8000", {"name": "table"}, shape, insecure=True, days=1)
    assert site.Site.read(tmp_path / "one" / "client-0").shape == shape
    numbers = Shape((3,), (), (2,))
    site.make(tmp_path / "two", 3, "127.0.0.1:8000", {"name": "table"}, numbers, insecure=True, days=1)
    assert site.Site.read(tmp_path / "two").shape == numbers


def test_a_server_cannot_ask_for_other_columns_than_were_agreed(folder, tmp_path):
    """Shape and plan come from the server; which columns of its table are read, a client has agreed to before."""
    shape, other = (Shape.of(simulated(folder, **o)) for o in ({}, {"drop": "blood"}))
    home = Home(0, tmp_path, {"name": "table", "path": str(folder / "a.csv")}, schema=digest_of(shape.schema))
    assert Home.from_flat(home.to_flat()) == home
    assert home.load(Plan(config(), "site", "r", 3, shape)).shape == shape.shape
    with pytest.raises(InputError, match="reads different table columns than client 0 agreed to"):
        home.load(Plan(config(), "site", "r", 3, other))
    with pytest.raises(InputError, match="start the client with: --data table:PATH"):
        Home(0, tmp_path).load(Plan(config(), "site", "r", 3, shape))


def test_a_run_cannot_ask_for_other_options_than_the_schema_has(folder):
    with pytest.raises(InputError, match="it has scale federation; leave --scale out"):
        plan(config(data={"name": "table", "scale": "client"}), "site", "r", 3, Shape.of(simulated(folder)), Limits())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"kind": ["x"] * 39 + ["w"] * 41}, "column kind is 'w' in row .*, and the schema knows x, y, z"),
        ({"outcome": ["dead"] * 80}, "outcome is 'dead' in row 1; the agreed classes are ill, well"),
        ({"outcome": [""] * 80}, "80 of 80 rows have no outcome"),
        ({"age": ["old"] * 80}, "column age is to hold numbers, and row 1 has 'old'"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_in_a_sentence(folder, cli, tmp_path, more, said):
    write(tmp_path / "mine.csv", 1, 80, **more)
    shape = Shape.of(simulated(folder))
    with pytest.raises(DataError, match=rf"mine.csv: {said}"):
        own_data({"name": "table", "path": str(tmp_path / "mine.csv")}, config(), 1, 3, shape)


def test_commands_of_a_site_for_tables(folder, cli, tmp_path):
    pytest.importorskip("flwr")
    agreed(folder, cli, tmp_path)
    said = cli("deploy", "init", tmp_path / "one", "--clients", 3, "--schema", tmp_path / "schema.json", "--insecure")
    assert said.code == 0, said
    at_hand = cli(
        "deploy", "init", tmp_path / "two", "--clients", 3, "--data", f"table:{folder}", "--target", "outcome", "--insecure"
    )
    assert at_hand.code == 0, at_hand
    one, two = (site.Site.read(tmp_path / name) for name in ("one", "two"))
    assert (one.data, one.shape) == (two.data, two.shape)
    assert "--data table:" in (tmp_path / "one" / "README.md").read_text()
    write(tmp_path / "mine.csv", 1, kind=["w"] * 40)
    sentence = cli("deploy", "client", tmp_path / "one" / "client-0", "--data", f"table:{tmp_path / 'mine.csv'}").err
    assert "column kind is 'w' in row" in sentence
    assert "leave --target out" in cli(
        "deploy", "client", tmp_path / "one" / "client-0", "--data", f"table:{folder / 'a.csv'}", "--target", "age"
    ).err  # fmt: skip
    assert "remove --data and its options" in cli(
        "deploy", "init", tmp_path / "three", "--schema", tmp_path / "schema.json", "--shape", "3,4,4"
    ).sentence()  # fmt: skip
    assert "has 3 clients; pass --clients 3" in cli(
        "deploy", "demo", "--data", f"table:{folder}", "--target", "outcome", "--clients", 2, "--out", tmp_path / "demo"
    ).sentence()  # fmt: skip
