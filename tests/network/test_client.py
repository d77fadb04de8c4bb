"""The client: a round is applied once, a lost one never happened, and nothing but its own run is answered."""

import dataclasses
import shutil

import pytest
import torch
from local import QUICK, Room, alone, assignment, rounds

import fedselect as fs
from fedselect.aggregate import codec
from fedselect.network.client import Node
from fedselect.network.letters import Letter
from fedselect.network.server import Server
from fedselect.simulate import Simulation


def letters_to(room, client):
    return [letter for i, letter in room.asked if i == client]


def files(room, client):
    return {p: p.read_bytes() for p in room.node(client).vault.folder.rglob("*") if p.is_file()}


@pytest.fixture
def trained(room, server, monkeypatch):
    """After two rounds; counts how often a client trains from then on."""
    rounds(server, room, 2)
    calls = []
    real = fs.Partial.client
    monkeypatch.setattr(fs.Partial, "client", lambda *a: calls.append(1) or real(*a))
    return room, calls


def test_asked_again_it_hands_over_the_same_reply_without_training(trained):
    room, calls = trained
    last = letters_to(room, 1)[-1]
    before = files(room, 1)
    replies = [room.node(1).answer(last).seal() for _ in range(2)]
    assert replies[0][0] == replies[1][0]
    assert replies[0][1].equal(replies[1][1])
    assert not calls
    assert files(room, 1) == before


def test_a_round_the_server_never_took_in_never_happened(trained):
    """Client 1 trains round 3 and its reply is lost; round 4 starts from round 2, as if it had sat round 3 out."""
    room, calls = trained
    node = room.node(1)
    values = {"values": codec.pack(room.assigned.initial, node._wants(node._state(2))).values}

    def ask(round):
        head = {**letters_to(room, 1)[-1].head, "round": round, "base": 2}
        return room.node(1).answer(Letter(head, values)).seal()[1]

    ask(3)
    after = ask(4)
    assert len(calls) == 2
    assert node.vault.rounds() == [1, 2, 4]  # what it stands on, what that stands on, and what it made of it
    shutil.rmtree(node.vault.folder / "000004")
    assert ask(4).equal(after)


def test_a_client_that_lost_its_last_snapshot_goes_on_from_the_one_before(trained, server):
    room, _ = trained
    (room.node(1).vault.folder / "000002" / "state.safetensors").write_bytes(b"damaged")
    room.here = [0, 2]
    server.step(room)  # while it is away
    room.here = [0, 1, 2]
    outcome = server.step(room)
    assert outcome.rejected == {}
    copy = "; if you have a copy of the vault, stop the client and restore it before the run ends"
    assert outcome.set_back == {"client 1": f"its vault lost round 2, so it continues from round 1{copy}"}
    assert sorted(outcome.uploads) == [0, 1, 2]


def test_a_client_without_its_vault_joins_anew(trained, server):
    room, _ = trained
    shutil.copytree(room.folder / "vault-1", room.folder / "copy")
    shutil.rmtree(room.folder / "vault-1")
    outcome = server.step(room)  # the server finds out by asking
    assert "has no state of round 2" in outcome.missed[1]
    outcome = server.step(room)
    assert outcome.rejected == {}
    assert outcome.set_back["client 1"].startswith("its vault lost round 2, so its personal parameters start over; if you have")
    assert 1 in outcome.uploads
    room.here = [0, 2]
    server.step(room)  # while it is stopped
    shutil.rmtree(room.folder / "vault-1")
    shutil.move(room.folder / "copy", room.folder / "vault-1")
    room.here = [0, 1, 2]
    outcome = server.step(room)
    assert "continues from round 2" in outcome.set_back["client 1"]
    assert 1 in outcome.uploads


def test_a_base_it_does_not_have_is_refused_by_name(trained):
    room, _ = trained
    last = letters_to(room, 1)[-1]
    with pytest.raises(fs.CheckpointError, match=r"client 1 has no state of round 7 in .*; rounds there: 1, 2"):
        room.node(1).answer(Letter({**last.head, "round": 8, "base": 7}, last.parts))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"run": "another"}, "got a message for run 'another', but its own is 'run'"),
        ({"plan": "another"}, "got a message for plan 'another', but its own is ''"),
        ({"federation": "another"}, "got a message for federation 'another'"),
        ({"client": 2}, "client 1 got a message for client 2"),
        ({"kind": "delete"}, "of unknown kind 'delete'"),
        ({"round": -1}, "has the round -1"),
        ({"round": True}, "has the round True"),
        ({"base": 9}, "was asked for round 2 after round 9"),
    ],
)
def test_a_letter_that_is_not_for_it_is_refused(trained, changed, said):
    room, calls = trained
    last = letters_to(room, 1)[-1]
    with pytest.raises(fs.DataError, match=said):
        room.node(1).answer(Letter({**last.head, **changed}, last.parts))
    assert not calls


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda v: v[:-4], "bytes of values, but its mask marks"),
        (lambda v: torch.cat([v, v]), "bytes of values, but its mask marks"),
        (lambda v: torch.full_like(v.view(torch.float32), torch.nan).view(torch.uint8), "the server sent NaN in"),
        (lambda v: v.view(torch.float32), "does not hold its values as flat bytes"),
    ],
)
def test_what_a_server_sends_is_checked_before_use(room, server, spoil, said):
    rounds(server, room, 1)
    last = letters_to(room, 1)[-1]
    shutil.rmtree(room.node(1).vault.folder)  # so that the round is not there yet
    with pytest.raises(fs.DataError, match=said):
        room.node(1).answer(Letter(last.head, {"values": spoil(last.parts["values"])}))


def test_a_client_whose_numbers_run_away_says_so_as_in_simulation(digits, tmp_path):
    method = fs.FedAvg(lr=1e30)
    made = assignment(method, lambda data: fs.models.mlp(data, hidden=8), digits, seed=4, training=fs.Training())
    room = Room(made, digits, tmp_path)
    with pytest.raises(fs.RunError) as deployed:
        Server(made, QUICK, tmp_path / "masks").step(room)
    with pytest.raises(fs.TrainingError) as simulated:
        Simulation(method, made.model, digits, seed=4, training=made.training).step()
    assert str(simulated.value).startswith("client 0, round 1: ")
    assert f"client 0: {str(simulated.value).removesuffix('.')};" in str(deployed.value)


@pytest.mark.parametrize("lr", [10.0, 1e30])  # updates of an absurd length, and NaN
def test_a_run_whose_numbers_run_away_is_not_told_to_resume(digits, tmp_path, lr):
    made = assignment(fs.FedAvg(lr=lr), lambda data: fs.models.mlp(data, hidden=8), digits, seed=4, training=fs.Training())
    with pytest.raises(fs.RunError) as failed:
        Server(made, QUICK, tmp_path / "masks").step(Room(made, digits, tmp_path))
    assert "lower the learning rate, or limit gradients with clip (--clip 1)" in str(failed.value)
    assert str(failed.value).endswith("; start a new run with that changed; if resumed, training would diverge again.")
    assert "--resume" not in str(failed.value)


def test_data_of_another_shape_or_number_of_classes_is_refused(small, digits, tmp_path):
    other = dataclasses.replace(alone(digits, 0), classes=11)
    with pytest.raises(fs.DataError, match=r"client 0 has inputs of shape \(1, 8, 8\) and 11 classes, but this federation has"):
        Node(small, 0, other, tmp_path)


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"method_name": "fedavg"}, "method 'm', not 'fedavg'"), ({"federation": "g"}, "federation 'federation', not 'g'")],
)
def test_a_vault_of_another_method_or_federation_is_refused(small, digits, room, server, changed, said):
    rounds(server, room, 1)
    other = dataclasses.replace(small, **changed)
    head = {**other.address, "kind": "hello", "accepted": [0, 0, 0]}
    with pytest.raises(fs.CheckpointError, match=said):
        Node(other, 0, alone(digits, 0), room.folder / "vault-0").answer(Letter(head))


def test_a_vault_of_another_model_is_refused(small, digits, room, server):
    rounds(server, room, 1)
    other = dataclasses.replace(small, model=fs.models.mlp(digits, hidden=9))
    head = {**other.address, "kind": "hello", "accepted": [0, 0, 0]}
    with pytest.raises(fs.CheckpointError, match="belongs to model 'mlp"):
        Node(other, 0, alone(digits, 0), room.folder / "vault-0").answer(Letter(head))


def test_a_node_of_its_own_counts_live_entries_as_the_simulation_does(tmp_path):
    """Nothing but the plan tells a node what its model does with its inputs."""
    draw = torch.Generator().manual_seed(0)
    parts = [(torch.randn(12, 3, 2, 2, generator=draw), torch.arange(12) % 3) for _ in range(3)]
    data = fs.Federation([fs.ClientData(p, p, p) for p in parts], 3)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 5, padding=2), torch.nn.Flatten(), torch.nn.Linear(16, 3))  # 5x5 on 2x2
    method = fs.FedSelect(rate=0.2, limit=0.5, epochs=1, lr=0.1, personal_lr=0.1, select=fs.Reading(counts="live"))

    def own():
        return assignment(method, lambda d: fs.Model.wrap(net), data, seed=4, training=fs.Training(batch_size=4))

    server, room = Server(own(), QUICK, tmp_path / "masks"), Room(own(), data, tmp_path)
    rounds(server, room, 2)
    whole = Simulation(method, fs.Model.wrap(net), data, seed=4, training=fs.Training(batch_size=4), device="cpu")
    for _ in range(2):
        whole.step()
    got = room.node(0)._state(2)["mask"]
    assert all(m.flatten().equal(whole.store.rows["mask"][n][0].flatten()) for n, m in got.items())
    assert sum(int(d.sum()) for d in whole.fitted.dead().values()) > 0
