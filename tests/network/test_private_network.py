"""Privacy over a network: the numbers of the simulation, nothing but updates on the wire, budgets that survive."""

from dataclasses import replace

import pytest
import torch
from local import QUICK, Room, assignment, server_state

import fedselect as fs
from fedselect.network.server import Server
from fedselect.private.budget import NAME
from fedselect.training.settings import Training

HOW = Training(batch_size=8)


def federation(digits, tmp_path, private, method=None, rounds=2, limits=QUICK):
    method = method or fs.FedSelect(rate=0.2, limit=0.5, epochs=1, lr=0.1, personal_lr=0.1)
    plain = assignment(method, lambda d: fs.models.mlp(d, hidden=8), digits, seed=4, training=HOW, rounds=rounds)
    assigned = replace(plain, private=fs.Private.read(private))
    return Room(assigned, digits, tmp_path), Server(assigned, limits, tmp_path / "masks", aggregator=fs.Mean())


@pytest.mark.parametrize(
    "private", ["epsilon=8,seeded=yes", "epsilon=8,seeded=yes,quantile=0.5", "epsilon=8,unit=sample,seeded=yes"]
)
def test_a_deployment_is_the_simulation(digits, tmp_path, private):
    room, server = federation(digits, tmp_path, private)
    found = [server.step(room) for _ in range(2)]
    method = fs.FedSelect(rate=0.2, limit=0.5, epochs=1, lr=0.1, personal_lr=0.1)
    simulation = fs.Simulation(
        method, fs.models.mlp(digits, hidden=8), digits, seed=4, training=HOW, rounds=2, private=private, device="cpu"
    )
    records = [simulation.step() for _ in range(2)]
    ours, theirs = server_state(server), server_state(simulation)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)
    for outcome, record in zip(found, records, strict=True):
        assert outcome.missed == {}
        assert outcome.epsilon == record["epsilon"]


def test_neither_mask_nor_loss_leaves_a_private_client(digits, tmp_path):
    room, server = federation(digits, tmp_path, "epsilon=8")
    sent = []
    room.spoil = lambda node, letter: sent.append(letter) or letter
    for _ in range(2):
        server.step(room)
    assert any(bool(m.any()) for m in room.node(0)._state(2)["mask"].values())  # it does keep something
    updates = [letter for letter in sent if letter.head["kind"] == "update"]
    entries = sum(v.numel() for v in room.assigned.initial.values())
    assert len(updates) == 2 * len(digits.clients)
    for letter in sent:
        assert letter.head["partly"] == []
        assert "bits" not in letter.parts
    for letter in updates:
        assert letter.head["train_loss"] is None
        assert letter.parts["values"].numel() == 4 * entries


def test_a_personal_entry_is_sent_as_an_update_of_zero(digits, tmp_path):
    room, server = federation(digits, tmp_path, "epsilon=inf,clip=1e9")
    server.step(room)
    before = {n: v.clone() for n, v in server.state["params"].items()}
    sent = {}
    room.spoil = lambda node, letter: sent.setdefault(node, letter)
    server.step(room)
    kept = room.node(0)._state(2)["kept"]
    flat = torch.cat([v.flatten() for v in before.values()])
    marks = torch.cat(
        [kept[n][0].flatten() if n in kept else torch.zeros(v.numel(), dtype=torch.bool) for n, v in before.items()]
    )
    values = sent[0].parts["values"].view(torch.float32)
    assert bool(marks.any())
    assert torch.equal(values[marks], flat[marks])
    assert not torch.equal(values[~marks], flat[~marks])


def test_a_round_that_drew_nobody_is_noise_alone(digits, tmp_path):
    limits = replace(QUICK, fraction=1e-9)
    room, server = federation(digits, tmp_path, "epsilon=8", limits=limits)
    before = {n: v.clone() for n, v in server.state["params"].items()}
    outcome = server.step(room)
    assert outcome.uploads == {}
    assert not any(letter.head["kind"] == "train" for _, letter in room.asked)
    assert all(not torch.equal(v, server.state["params"][n]) for n, v in before.items())


def test_who_is_in_a_round_stays_the_same_when_it_is_asked_again(digits, tmp_path):
    limits = replace(QUICK, fraction=0.5)
    _, server = federation(digits, tmp_path, "epsilon=8", limits=limits, rounds=50)
    here = torch.arange(len(digits.clients))
    drawn = [server._cohort(here, r) for r in range(1, 50)]
    assert len({tuple(d) for d in drawn}) > 1
    assert server._cohort(here, 49) == server._cohort(here, 49) == drawn[-1]


def test_a_clients_own_budget_survives_and_refuses(digits, tmp_path):
    room, server = federation(digits, tmp_path, "epsilon=8,unit=sample", rounds=3)
    server.step(room)
    ledger = tmp_path / "vault-0" / "run" / NAME
    assert len(ledger.read_text().splitlines()) == 1
    letter = next(letter for i, letter in room.asked if i == 0 and letter.head["kind"] == "train")
    again = room.node(0).answer(letter)  # the reply was lost: it is handed over once more, and costs nothing
    assert again.head["epsilon"] < 8
    assert len(ledger.read_text().splitlines()) == 1
    with ledger.open("a") as file:
        file.write('{"round": 2, "charged": 2}\n{"round": 2, "charged": 3}\n')  # rounds that ran twice
    outcome = server.step(room)
    assert outcome.missed == {0: outcome.missed[0]}
    assert outcome.missed[0].startswith("the privacy budget is spent: 3 rounds were charged")


def test_a_lost_vault_makes_no_room_in_the_budget(digits, tmp_path):
    import shutil

    room, server = federation(digits, tmp_path, "epsilon=8,unit=sample", rounds=3)
    server.step(room)
    server.step(room)
    shutil.rmtree(tmp_path / "vault-0")
    server._guests.clear()
    outcome = server.step(room)
    assert outcome.set_back
    assert outcome.epsilon == pytest.approx(8, rel=0.01)
    assert '"charged": 3' in (tmp_path / "vault-0" / "run" / NAME).read_text()
