"""Private clients under secure aggregation over letters: the simulation's bits, whoever is lost; budgets that clients keep."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from calls import make_site, run_server
from local import QUICK, alone, assignment, rounds, server_state
from secretly import SecretRoom, identity, secret

import fedselect as fs
from fedselect.network.client import Node
from fedselect.network.drive import prepare, serve
from fedselect.network.home import Home
from fedselect.network.masking import Masking
from fedselect.network.plan import Plan, Shape, plan
from fedselect.network.rounds import Limits
from fedselect.network.server import Server
from fedselect.network.site import Site
from fedselect.network.unmasking import Round, Unmasking
from fedselect.network.vault import Vault
from fedselect.private.budget import NAME, Budget
from fedselect.runs.config import Config
from fedselect.simulate import Simulation
from fedselect.training.settings import Training

CLIENTS = 4
METHOD = fs.FedSelect(rate=0.2, limit=0.5, epochs=1, lr=0.1, personal_lr=0.1)
HOW = Training(batch_size=8)


@pytest.fixture(scope="module")
def data():
    return fs.load("digits", clients=CLIENTS, classes_per_client=3, train=16, test=8, val=4, seed=0)


def mlp(data):
    return fs.models.mlp(data, hidden=6)


def federation(data, tmp_path, private, total=3):
    assigned = secret(assignment(METHOD, mlp, data, seed=4, training=HOW, rounds=total), fs.Mean())
    assigned = replace(assigned, private=fs.Private.read(private))
    return SecretRoom(assigned, data, tmp_path), Server(assigned, QUICK, tmp_path / "masks", aggregator=fs.Mean())


@pytest.mark.parametrize(
    ("private", "lost"),
    [("epsilon=8,seeded=yes", None), ("epsilon=8,seeded=yes", 2), ("epsilon=8,unit=sample,seeded=yes", None)],
)
def test_a_deployment_is_the_simulation(data, tmp_path, monkeypatch, private, lost):
    """Noise and all, to the bit; a client that is lost took its noise with it, and the sum is that of the others."""
    room, server = federation(data, tmp_path, private)
    if lost is not None:
        room.deaf = lambda i, letter: i == lost and letter.head["kind"] == "train"
    outcomes = rounds(server, room, 2)
    simulation = Simulation(METHOD, mlp(data), data, seed=4, training=HOW, rounds=3, private=private, secret=True, device="cpu")
    if lost is not None:
        there = torch.tensor([i for i in range(CLIENTS) if i != lost])
        monkeypatch.setattr(simulation, "_cohort", lambda present: there)
        expect = "fedselect.secret.mean.SecretFold.expect"  # noise is for the list, which has the one that is lost
        monkeypatch.setattr(expect, lambda fold, clients: setattr(fold, "_clients", CLIENTS))
    records = [simulation.step() for _ in range(2)]
    theirs = server_state(simulation)
    assert all(torch.equal(v, theirs[n]) for n, v in server_state(server).items())
    for outcome, record in zip(outcomes, records, strict=True):
        assert set(outcome.missed) == ({lost} - {None})
        assert outcome.epsilon == record["epsilon"]


def test_nothing_but_noisy_sums_leaves_a_client(data, tmp_path):
    room, server = federation(data, tmp_path, "epsilon=8")
    sent = []
    room.spoil = lambda node, letter: sent.append(letter) or letter
    rounds(server, room, 2)
    for letter in sent:
        assert not {"values", "bits"} & letter.parts.keys()
        assert letter.head.get("train_loss") is None
    assert server.budget is None  # the server has neither noise nor budget of its own


def test_a_round_that_is_asked_again_is_charged_again_unless_its_reply_was_lost(data, tmp_path):
    """Another list has other pads and other noise; only the same reply costs nothing."""
    room, server = federation(data, tmp_path, "epsilon=8", total=9)
    ledger = tmp_path / "vault-0" / "run" / NAME
    server.step(room)
    first = next(letter for i, letter in room.asked if i == 0 and letter.head["kind"] == "train")
    again = room.node(0).answer(first)
    assert 0 < again.head["epsilon"] < 8
    assert len(ledger.read_text().splitlines()) == 1
    room.deaf = lambda i, letter: letter.head["kind"] == "train" and i in (2, 3) and len(room.asked) < 20
    outcome = server.step(room)
    assert len(outcome.uploads) == CLIENTS
    assert len(ledger.read_text().splitlines()) == 3
    assert outcome.epsilon > again.head["epsilon"]


class Killed(BaseException):
    """As kill -9: nothing that follows is done."""


def killed_at(monkeypatch, owner, name, after=False):
    """The next call of a function is the last thing that a process does, or comes close to it."""
    real = getattr(owner, name)

    def dies(*args, **how):
        monkeypatch.setattr(owner, name, real)
        if after:
            real(*args, **how)
        raise Killed

    monkeypatch.setattr(owner, name, dies)


MOMENTS = {
    "charged": (Budget, "charge", True, 2),
    "trained": (Vault, "save", False, 2),
    "saved": (Masking, "note", False, 1),
    "noted": (Masking, "note", True, 1),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_client_killed_in_a_round_has_one_answer_to_a_list_and_nothing_refunded(data, tmp_path, monkeypatch, moment):
    """Two answers with noise drawn anew would show, averaged, more than was paid for."""
    room, server = federation(data, tmp_path, "epsilon=8", total=9)
    owner, name, after, charges = MOMENTS[moment]
    vault, ledger = Vault(tmp_path / "vault-1" / "run"), tmp_path / "vault-1" / "run" / NAME
    room.deaf = lambda i, letter: i == 1 and letter.head["kind"] == "train"
    rounds(server, room, 1)
    letter = next(letter for i, letter in room.asked if i == 1 and letter.head["kind"] == "train")
    killed_at(monkeypatch, owner, name, after)
    with pytest.raises(Killed):
        room.node(1).answer(letter)
    kept = vault.find(1)
    replies = [room.node(1).answer(letter) for _ in range(3)]
    assert len(ledger.read_text().splitlines()) == charges
    assert all(torch.equal(r.seal()[1], replies[0].seal()[1]) for r in replies)
    if kept is not None:  # what it had drawn before it was killed
        assert torch.equal(kept.tensors["reply"], replies[0].seal()[1])
    shutil.rmtree(vault.folder / "000001")  # with the answer lost, there is none
    with pytest.raises(fs.DataError, match="has sent other values under this list"):
        room.node(1).answer(letter)
    assert len(ledger.read_text().splitlines()) == charges


@pytest.mark.parametrize(("name", "charges"), [("announce", 2), ("_settle", 1)])
def test_a_server_killed_in_a_round_gets_the_same_sum_or_pays_for_another(data, tmp_path, monkeypatch, name, charges):
    """Before it says whom it opens for, a new list and new noise; after that, the same values."""
    room, server = federation(data, tmp_path, "epsilon=8", total=9)
    killed_at(monkeypatch, Unmasking if name == "announce" else Round, name)
    with pytest.raises(Killed):
        server.step(room)
    first = {i: (tmp_path / f"vault-{i}" / "run" / "000001" / "state.safetensors").read_bytes() for i in range(CLIENTS)}
    again = Server(server.assigned, QUICK, tmp_path / "masks", aggregator=fs.Mean())
    outcome = again.step(room)
    assert set(outcome.uploads) == set(range(CLIENTS))
    for i in range(CLIENTS):
        assert len((tmp_path / f"vault-{i}" / "run" / NAME).read_text().splitlines()) == charges
        now = (tmp_path / f"vault-{i}" / "run" / "000001" / "state.safetensors").read_bytes()
        assert (now == first[i]) is (charges == 1)


CONFIG = {"method": {"name": "fedavg"}, "data": {"name": "digits", "clients": CLIENTS}, "model": {"name": "mlp"}, "rounds": 3}
CONFIG |= {"secret": True, "private": "epsilon=8"}


@pytest.mark.parametrize(("killed", "rounds"), [([1], 3), ([1, 2], 2)])
def test_who_has_spent_its_budget_is_left_out_and_a_run_ends_where_too_few_remain(data, tmp_path, killed, rounds):
    """Of four clients some were killed in the first round before they had sent: charged, and charged again."""
    made = plan(Config.from_dict(CONFIG, "test"), "f", "r", CLIENTS, Shape.of(data), QUICK)
    assert "so the server need not be trusted" in made.promise()
    room = SecretRoom(made.assignment("cpu"), data, tmp_path)
    room.node = lambda i: node_of(room, i)
    prepare(tmp_path / "r", made)
    for i in killed:
        ledger = tmp_path / f"vault-{i}" / "r" / NAME
        ledger.parent.mkdir(parents=True)
        ledger.write_text('{"round": 1, "charged": 1}\n')
    serve(tmp_path / "r", room, None, lambda config, record: None)
    records = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    found = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert len(records) == rounds
    assert records[-1].get("stopped", False) is (rounds < 3)
    assert records[-1]["epsilon"] == pytest.approx(8, rel=0.01)
    assert found["privacy"]["budget"] == 8
    assert found["absent"] == {}
    if rounds == 3:
        asked = {i for i, letter in room.asked if letter.head["kind"] == "train" and letter.head["round"] == 3}
        assert asked == {0, 2, 3}


def test_one_client_cannot_end_a_run_by_what_it_says_it_has_spent(data, tmp_path):
    """A false claim leaves that client out, also after the server was started again; a claim of more than there is, at once."""
    room, server = federation(data, tmp_path, "epsilon=8", total=9)
    claim = {"epsilon": server._most_spent}
    room.spoil = lambda i, letter: _saying(letter, claim) if i == 2 and "epsilon" in letter.head else letter
    rounds(server, room, 1)
    server.save(Vault(tmp_path / "saved"), {})
    again = Server(server.assigned, QUICK, tmp_path / "masks", aggregator=fs.Mean())
    again.load(Vault(tmp_path / "saved"), 1)
    assert not again.spent
    outcome = again.step(room)
    assert set(outcome.uploads) == {0, 1, 3}
    assert outcome.missed == {}
    claim["epsilon"], again._spent = 1e9, set()
    assert "epsilon 1e+09 of a budget of 8" in again.step(room).rejected["client 2"]


def _saying(letter, more):
    return replace(letter, head={**letter.head, **more})


@pytest.mark.parametrize("keep", ["best", "own"])
def test_kept_rounds_are_those_of_the_simulation(data, tmp_path, keep):
    """--keep with --secret: clients choose on data that stays theirs, and only sums travel."""
    said = {"name": "digits", "clients": CLIENTS, "classes_per_client": 3, "train": 16, "test": 8, "val": 4}
    config = Config.from_dict({**CONFIG, "data": said, "private": None, "keep": keep, "rounds": 4}, "test")
    room = SecretRoom(plan(config, "f", "r", CLIENTS, Shape.of(data), QUICK).assignment("cpu"), data, tmp_path)
    room.node = lambda i: node_of(room, i)
    prepare(tmp_path / "r", plan(config, "f", "r", CLIENTS, Shape.of(data), QUICK))
    serve(tmp_path / "r", room, None, lambda config, record: None)
    records = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    simulation = config.simulation()
    history = [simulation.step(evaluate=True) for _ in range(4)]
    for name in ("accuracy", "val_loss"):
        assert [r["clients"][name] for r in records] == [r["clients"][name] for r in history]
    assert [r["kept"] for r in records] == [r["kept"] for r in history]


def test_clients_take_part_in_no_round_twice_and_say_what_to_do(data, tmp_path):
    """A server whose copy is one round older asks for the same sum again; one two rounds older is told by its clients."""
    assigned = secret(assignment(METHOD, mlp, data, seed=4, training=HOW, rounds=9), fs.Mean())
    room, server = SecretRoom(assigned, data, tmp_path), Server(assigned, QUICK, tmp_path / "masks")
    for _ in range(5):
        server.step(room)
        server.save(Vault(tmp_path / f"saved-{server.round}"), {})
    for round, said in ((4, None), (3, "has opened or passed round 5"), (1, "no client repeats a round, because the sums")):
        back = Server(assigned, QUICK, tmp_path / "masks")
        back.load(Vault(tmp_path / f"saved-{round}"), round)
        if said is None:
            back.step(room)
            assert all(torch.equal(v, server_state(server)[n]) for n, v in server_state(back).items())
            continue
        with pytest.raises(fs.RunError, match=said) as e:
            back.step(room)
        assert "start a new run" in str(e.value)
        assert "--go-back" not in str(e.value)


def test_over_grpc_with_the_sites_own_keys(data, tmp_path):
    """A run to its end, mutual TLS, roster and all: the records are those of letters that pass in one process."""
    root = make_site(tmp_path / "site", CLIENTS)
    federation = Site.read(root).federation
    config = Config.from_dict({**CONFIG, "private": "epsilon=8,unit=client", "rounds": 2}, "test")
    made = plan(config, federation, "r", CLIENTS, Shape.of(data), Limits(min_clients=3))
    prepare(out := root / "server" / "runs" / "r", made)
    homes = [
        Home(i, tmp_path / f"vault-{i}", device="cpu", site=str(root / f"client-{i}"), secret=True) for i in range(CLIENTS)
    ]
    run_server(root, homes, made.to_flat(), out)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["absent"] == {}
    assert summary["privacy"]["epsilon"] == pytest.approx(8, rel=0.01)
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 2


def node_of(room, i):
    return Node(room.assigned, i, alone(room.data, i), room.folder / f"vault-{i}", identity(i, CLIENTS, "f"))


def test_a_client_that_counts_on_fewer_traitors_refuses(tmp_path):
    run = {"method.name": "fedavg", "data.name": "digits", "model.name": "mlp", "clients": 9, "shape": "[1, 8, 8]", "rounds": 2}
    run |= {"classes": '["0", "1"]', "secret": True, "private": "epsilon=4,colluding=2"}
    agreed = Plan.from_flat(run, "r")
    assert Home(1, tmp_path, private="epsilon=8,colluding=1").adapt(agreed)
    with pytest.raises(fs.InputError, match="at least as private as epsilon=8,colluding=3"):
        Home(1, tmp_path, private="epsilon=8,colluding=3").adapt(agreed)
