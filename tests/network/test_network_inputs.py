"""Models with several inputs beyond Python: on the command line, over a network, and in exported files."""

import json

import pytest
import torch
from local import QUICK, Room, assignment
from torch import nn

import fedselect as fs
from fedselect.core.errors import DataError
from fedselect.network.client import Node
from fedselect.network.export import export_model
from fedselect.network.home import Home, own_data
from fedselect.network.plan import Plan, Shape, plan
from fedselect.network.rounds import Limits
from fedselect.network.server import Server
from fedselect.runs.config import Config
from fedselect.simulate import Simulation

FORMATS = ["safetensors", "pt2", "onnx"]


class Both(nn.Module):
    """Words and numbers, by name; returns a dict."""

    def __init__(self):
        super().__init__()
        self.embed, self.fc = nn.Embedding(10, 3), nn.Linear(3 + 2, 2)

    def forward(self, *, words, numbers, mask):
        seen = (self.embed(words) * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return {"seen": seen, "logits": self.fc(torch.cat([seen, numbers], 1))}


class Pair(nn.Module):
    """The same by place; returns a tensor."""

    def __init__(self):
        super().__init__()
        self.both = Both()

    def forward(self, words, numbers, mask):
        return self.both(words=words, numbers=numbers, mask=mask)["logits"]


def both(data) -> fs.Model:
    return fs.Model.wrap(Both)


def pair(data) -> fs.Model:
    return fs.Model.wrap(Pair)


def notes(clients: int = 3, by_place: bool = False, words: int = 4, *, seed: int = 0) -> fs.Federation:
    """Clients' words and numbers."""
    g = torch.Generator().manual_seed(seed)

    def part(n):
        found = (
            torch.randint(0, 10, (n, words), generator=g),
            torch.randn(n, 2, generator=g),
            torch.rand(n, words, generator=g) < 0.7,
        )
        found[2][:, 0] = True
        x = found if by_place else dict(zip(("words", "numbers", "mask"), found, strict=True))
        return x, (found[1][:, 0] > 0).long()

    return fs.Federation([fs.ClientData(part(8 + 5 * i), part(20)) for i in range(clients)], 2, "notes", ("low", "high"))


@pytest.fixture
def own(monkeypatch):
    """As a plugin would add them."""
    monkeypatch.setitem(fs.DATA, "notes", notes)
    monkeypatch.setitem(fs.MODELS, "both", both)
    monkeypatch.setitem(fs.MODELS, "pair", pair)


def config(**data):
    raw = {
        "method": {"name": "fedselect", "lr": 0.1},
        "data": {"name": "notes", **data},
        "model": {"name": "both"},
        "rounds": 2,
    }
    return Config.from_dict(raw, "test")


@pytest.mark.parametrize("build", [both, lambda data: fs.Model.wrap(Recurrent)], ids=["several", "one by one"])
@pytest.mark.filterwarnings("ignore:Recurrent cannot run for all clients")
def test_over_a_network_clients_train_as_in_a_simulation(build, tmp_path):
    data = notes() if build is both else sequences()
    method, training = fs.FedSelect(rate=0.2, limit=0.5, lr=0.1), fs.Training(batch_size=8)
    assigned = assignment(method, build, data, seed=4, training=training)
    room, server = Room(assigned, data, tmp_path), Server(assigned, QUICK, tmp_path / "masks")
    for _ in range(3):
        server.step(room)
    simulation = Simulation(method, build(data), data, seed=4, training=training)
    for _ in range(3):
        simulation.step()
    assert simulation.fitted.stackable == (build is both)
    for n, v in simulation.server["params"].items():
        torch.testing.assert_close(server.state["params"][n], v, rtol=1e-6, atol=1e-7)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.fc = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x):
        return self.fc(self.lstm(x)[0][:, -1])


def sequences():
    x = torch.randn(12, 5, 2, generator=torch.Generator().manual_seed(0))
    return fs.Federation([fs.ClientData((x[i:], torch.arange(12 - i) % 2), (x[:4], torch.arange(4) % 2)) for i in range(3)], 2)


def test_a_plan_carries_the_layout(own, tmp_path):
    data = notes()
    shape = Shape.of(data)
    assert Shape.from_json(json.loads(json.dumps(shape.to_json()))) == shape
    made = plan(config(), "site", "r", 3, shape, Limits())
    again = Plan.from_flat(made.to_flat(), "r")
    assert again == made
    mine = Home(1, tmp_path).load(again)
    assert mine.layout == data.layout
    assert torch.equal(mine.clients[0].train[0], data.clients[1].train[0])
    with pytest.raises(
        DataError, match=r"client 1 has inputs words \(5,\), .*; this federation agreed on words \(4,\), numbers"
    ):
        own_data({"name": "notes", "words": 5}, config(), 1, 3, shape)
    with pytest.raises(DataError, match=r"client 0 has inputs words \(5,\), .* this federation has inputs words \(4,\)"):
        Node(made.assignment("cpu"), 0, notes(1, words=5), tmp_path)


def run_snippet(code, inputs):
    scope = {**inputs, "both": both, "pair": pair}
    exec(code, scope)
    return torch.as_tensor(scope["logits"])


def named(data, client, form="safetensors"):
    parts = data.layout.parts(data.clients[client].test[0], torch.float32)
    return {n: v.numpy() if form == "onnx" else v for n, v in zip(data.layout.names, parts, strict=True)}


def test_the_model_that_a_client_keeps_is_loaded_by_what_is_printed(own, tmp_path):
    data = notes()
    made = plan(config(), "site", "r", 3, Shape.of(data), Limits())
    assigned = made.assignment("cpu")
    room, server = Room(assigned, data, tmp_path), Server(assigned, QUICK, tmp_path / "masks")
    server.step(room)
    server.close(room)
    said = export_model(tmp_path / "vault-1", tmp_path / "mine.safetensors", "r", "merged")
    assert (
        "logits = model.outputs_of(net.eval()(words=words, numbers=numbers, mask=mask))  # words: int64 (N, 4); "
        in said.snippet
    )
    assert run_snippet(said.snippet, named(data, 1)).shape == (20, 2)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("model", ["both", "pair"])
def test_an_exported_model_takes_several_inputs(own, cli, tmp_path, model, form):
    if form == "onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    place = () if model == "both" else ("--by-place", "yes")
    said = cli("run", "--data", "notes", *place, "--model", model, "--lr", 0.1, "--rounds", 2, "--out", tmp_path / "a", "-q")
    assert said.code == 0, said
    said = cli("export", tmp_path / "a", "--client", 1, "--format", form)
    assert said.code == 0, said
    data = notes(by_place=model == "pair")
    logits = run_snippet(said.out.split("\n", 2)[2], named(data, 1, form))
    recorded = json.loads((tmp_path / "a" / "summary.json").read_text())["clients"][1]
    assert float((logits.argmax(1) == data.clients[1].test[1]).double().mean()) == pytest.approx(recorded, abs=1e-6)
