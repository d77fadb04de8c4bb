"""Plans and homes: what a run is comes back from Flower's configuration, and a server cannot choose files at a client."""

import dataclasses

import pytest
import torch
from PIL import Image

from fedselect.core.errors import DataError, InputError
from fedselect.methods import METHODS
from fedselect.network.home import Home, own_data
from fedselect.network.plan import Plan, Shape, plan
from fedselect.network.rounds import Limits
from fedselect.runs.config import Config

DIGITS = Shape((1, 8, 8), tuple("0123456789"))


def config(method="fedselect", **data):
    layers = {"layers": "*.weight"} if method == "layers" else {}
    raw = {"method": {"name": method, **layers}, "data": {"name": "digits", "clients": 2, **data}, "model": {"name": "mlp"}}
    return Config.from_dict({**raw, "rounds": 7, "fraction": 0.5}, "test")


@pytest.mark.parametrize("method", METHODS)
def test_a_plan_comes_back_from_flowers_configuration(method):
    made = plan(config(method), "site", "r-1", 2, DIGITS, Limits(2, 30.0, 5.0, fraction=0.5, max_norm=9.0))
    flat = made.to_flat()
    assert all(type(v) in (bool, int, float, str) for v in flat.values())
    again = Plan.from_flat(flat, "other")
    assert again == made


@pytest.mark.parametrize(
    "aggregate", [{"name": "median", "least_senders": 3}, {"name": "mean", "server_momentum": 0.5}], ids=str
)
def test_a_plan_carries_the_aggregator(aggregate):
    wants = dataclasses.replace(config(), aggregate=aggregate).complete()
    again = Plan.from_flat(Plan(wants, "site", "r", 2, DIGITS).to_flat(), "r")
    assert again.config.aggregate == aggregate
    assert again.digest() != Plan(config(), "site", "r", 2, DIGITS).digest()


def test_a_plan_from_before_there_were_aggregators_takes_the_mean():
    flat = Plan(config(), "site", "r", 2, DIGITS).to_flat()
    older = {k: v for k, v in flat.items() if not k.startswith("aggregate.")} | {"method.server_momentum": 0.0}
    assert older.keys() != flat.keys()
    assert Plan.from_flat(older, "r") == Plan.from_flat(flat, "r")


def test_a_run_without_a_name_takes_flowers():
    assert Plan.from_flat({**Plan(config(), "", "", 2, DIGITS).to_flat()}, "flower-7").run == "flower-7"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"run": "../../home"}, "cannot be named"),
        ({"run": "/etc"}, "cannot be named"),
        ({"shape": "[1, 'x']"}, "cannot be used"),
        ({"clients": "many"}, "cannot be used"),
        ({"method.name": "nothing"}, "there is no method 'nothing'"),
        ({"method.limit": 7}, "limit"),
        ({"timeout": "soon"}, "timeout must be a number"),
        ({"min_clients": 0}, "min_clients must be at least 1"),
    ],
)
def test_a_configuration_that_cannot_be_used(changed, said):
    flat = Plan(config(), "site", "r", 2, DIGITS).to_flat()
    with pytest.raises(InputError, match=said):
        Plan.from_flat({**flat, **changed}, "r").assignment("cpu")


def test_a_configuration_that_lacks_something():
    flat = Plan(config(), "site", "r", 2, DIGITS).to_flat()
    del flat["shape"]
    with pytest.raises(InputError, match="KeyError: 'shape'"):
        Plan.from_flat(flat, "r")


def test_a_home_comes_back_from_a_node_configuration(tmp_path):
    home = Home(3, tmp_path, {"name": "folder", "path": "/data", "val": 2}, "/w.safetensors", "cpu")
    assert Home.from_flat(home.to_flat()) == home


@pytest.mark.parametrize(
    ("flat", "said"),
    [
        ({}, "must name partition-id and vault"),
        ({"partition-id": 1}, "vault"),
        ({"partition-id": 1, "vualt": "x"}, "unknown 'vualt'"),
        ({"partition-id": 1, "vault": "x", "secret": "true"}, "secret in the node configuration is true or false, not 'true'"),
    ],
)
def test_a_node_configuration_that_cannot_be_used(flat, said):
    with pytest.raises(InputError, match=said):
        Home.from_flat(flat)


@pytest.mark.parametrize("data", [{"name": "folder", "path": "/etc"}, {"name": "cifar10", "data_dir": "/root"}])
def test_a_server_cannot_choose_a_clients_files(tmp_path, data):
    wants = dataclasses.replace(config(), data=data).complete()
    with pytest.raises(InputError, match="start the client with: --data"):
        Home(0, tmp_path).load(Plan(wants, "site", "r", 2, DIGITS))


def test_a_server_cannot_choose_a_clients_weights(tmp_path):
    made = Plan(dataclasses.replace(config(), model={"name": "resnet18", "weights": "/etc/passwd"}), "site", "r", 2, DIGITS)
    with pytest.raises(InputError, match="start the client with --weights FILE"):
        Home(0, tmp_path).adapt(made)
    assert Home(0, tmp_path, weights="/mine").adapt(made).config.model["weights"] == "/mine"


def test_a_dealt_set_gives_every_client_its_part(tmp_path):
    made = Plan(config(train=20, test=10), "site", "r", 2, DIGITS)
    whole = made.config.make_data()
    for i in range(2):
        mine = Home(i, tmp_path).load(made)
        assert len(mine.clients) == 1
        assert mine.clients[0].train[0].equal(whole.clients[i].train[0])
        assert mine.clients[0].train[1].equal(whole.clients[i].train[1])


def test_a_folder_of_ones_own_is_numbered_as_the_federation_numbers(tmp_path):
    """This client has owls and cats alone: numbered by itself they were 1 and 0, here they are 2 and 0."""
    for kind in ("cat", "owl"):
        (tmp_path / "mine" / kind).mkdir(parents=True)
        for i in range(10):
            Image.new("RGB", (4, 4), (0 if kind == "cat" else 250, 0, 0)).save(tmp_path / "mine" / kind / f"{i}.png")
    agreed = Shape((3, 4, 4), ("cat", "dog", "owl"))
    folder = Config.from_dict({"data": {"name": "folder", "size": 4}, "model": {"name": "mlp"}}, "test")
    mine = own_data({"name": "folder", "path": str(tmp_path / "mine"), "size": 4}, folder, 1, 5, agreed)
    x, y = mine.clients[0].train
    assert mine.classes == 3
    assert set(y.tolist()) == {0, 2}
    assert torch.equal(x[:, 0, 0, 0] > 100, y == 2)
    with pytest.raises(DataError, match="client 1 has the class 'owl'"):
        own_data({"name": "folder", "path": str(tmp_path / "mine"), "size": 4}, folder, 1, 5, Shape((3, 4, 4), ("cat", "dog")))


def test_more_nodes_than_parts(tmp_path):
    with pytest.raises(InputError, match="client 2 has no data: the data set is partitioned among 2 clients"):
        Home(2, tmp_path).load(Plan(config(train=20, test=10), "site", "r", 2, DIGITS))
