"""Privacy over a network: the numbers of the simulation, nothing but updates on the wire, budgets that survive."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from local import QUICK, Room, assignment, server_state

import fedselect as fs
from fedselect.network.drive import prepare, serve
from fedselect.network.home import Home
from fedselect.network.letters import Letter
from fedselect.network.plan import Plan, Shape, defaults, plan
from fedselect.network.rounds import Limits
from fedselect.network.server import Server
from fedselect.private.budget import NAME
from fedselect.runs.config import Config
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


def test_a_server_that_lost_its_budget_makes_no_room_in_it(digits, tmp_path):
    room, server = federation(digits, tmp_path, "epsilon=8", rounds=3)
    server.budget.keep(tmp_path / NAME)
    server.step(room)
    server.step(room)
    (tmp_path / NAME).unlink()
    server.budget.charged = 0  # as after a restart
    server.budget.keep(tmp_path / NAME)
    server.step(room)
    assert server.budget.spent
    assert '"charged": 3' in (tmp_path / NAME).read_text()


def test_a_lost_vault_makes_no_room_in_the_budget(digits, tmp_path):
    room, server = federation(digits, tmp_path, "epsilon=8,unit=sample", rounds=3)
    server.step(room)
    server.step(room)
    shutil.rmtree(tmp_path / "vault-0")
    server._guests.clear()
    outcome = server.step(room)
    assert outcome.set_back
    assert outcome.epsilon == pytest.approx(8, rel=0.01)
    assert '"charged": 3' in (tmp_path / "vault-0" / "run" / NAME).read_text()


PRIVATE = {"method.name": "fedavg", "data.name": "digits", "model.name": "mlp", "clients": 3, "shape": "[1, 8, 8]"}
PRIVATE |= {"classes": '["0", "1"]', "rounds": 2}


@pytest.mark.parametrize(
    ("own", "asked", "said"),
    [
        ("epsilon=8,unit=sample", None, "this one is not private"),
        ("epsilon=8,unit=sample", "epsilon=9,unit=sample", "this one is private with epsilon=9,unit=sample"),
        ("epsilon=8,unit=sample", "epsilon=8", "this one is private with epsilon=8"),
        ("epsilon=8,unit=sample", "epsilon=8,unit=sample,delta=0.1", "at least as private as epsilon=8,unit=sample"),
        ("epsilon=8,unit=sample", "epsilon=8,unit=sample,seeded=yes", "at least as private as epsilon=8,unit=sample"),
        ("", "epsilon=8,unit=sample,seeded=yes", "everyone who has the seed knows the noise"),
    ],
)
def test_a_client_refuses_a_run_that_promises_less(tmp_path, own, asked, said):
    home = Home.from_flat(Home(1, tmp_path, private=own).to_flat())
    run = Plan.from_flat({**PRIVATE, **({"private": asked} if asked else {})}, "r")
    with pytest.raises(fs.InputError, match=said):
        home.adapt(run)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"keep": "own", "data.val": 10}, "choose a round on validation data, which differential privacy does not cover"),
        ({"patience": 3, "data.val": 10}, "choose a round on validation data, which differential privacy does not cover"),
        ({"view": "best", "data.val": 10}, "chooses a model on validation data, which differential privacy does not cover"),
    ],
)
def test_a_client_refuses_a_run_that_a_server_should_not_have_started(tmp_path, more, said):
    """A server may leave out its own checks."""
    run = Plan.from_flat({**PRIVATE, "private": "epsilon=8,unit=sample", **more}, "r")
    with pytest.raises(fs.InputError, match=said):
        Home(1, tmp_path, private="epsilon=8,unit=sample").adapt(run)


@pytest.mark.parametrize("private", ["epsilon=8,unit=sample", "epsilon=8"])
def test_a_private_client_tells_nobody_about_its_targets(digits, tmp_path, private):
    """With class weights from the data it would say in its first message which classes it has, without noise."""
    room, _ = federation(digits, tmp_path, private)
    room.assigned = replace(room.assigned, task=fs.Classification(class_weights="balanced"))
    hello = Letter({**room.assigned.address, "kind": "hello", "accepted": [0, 0, 0]})
    with pytest.raises(
        fs.InputError, match="learns from all clients' training targets, which differential privacy does not cover"
    ):
        room.node(0).answer(hello)


def test_a_client_takes_part_where_the_promise_is_kept(tmp_path):
    run = Plan.from_flat({**PRIVATE, "private": "unit=sample,epsilon=4"}, "r")
    assert run.to_flat()["private"] == "epsilon=4,unit=sample"
    assert Home(1, tmp_path, private="epsilon=8,unit=sample").adapt(run).config.private == "epsilon=4,unit=sample"
    assert Home(1, tmp_path).adapt(run).digest() != Plan.from_flat(PRIVATE, "r").digest()
    assert "private" not in Plan.from_flat(PRIVATE, "r").to_flat()


def test_a_plan_says_what_it_promises_and_refuses_what_it_cannot(digits):
    def made(private, **how):
        config = Config.from_dict({**CONFIG, "private": private, **how}, "test")
        return plan(config, "f", "r", 3, Shape.of(digits), Limits())

    assert made("epsilon=8").promise().startswith("Private: epsilon 8, delta 1e-05 for the whole run of 2 rounds, for all data")
    assert "Each client chooses its noise" in made("epsilon=8,unit=sample").promise()
    assert made(None).promise() == ""
    with pytest.raises(fs.InputError, match="use the aggregator mean or adam, not ClippedMean"):
        made("epsilon=8", aggregate={"name": "clip"})
    with pytest.raises(fs.InputError, match="uses training or validation data"):
        made("epsilon=8,unit=sample", method={"name": "fedpac"})
    with pytest.raises(fs.InputError, match="which noise on updates does not protect"):
        made("epsilon=8", method={"name": "scaffold"})
    assert defaults({"private": "epsilon=8"}) == {}
    assert defaults({"private": "epsilon=8,unit=sample"}) == defaults({}) == {"aggregate": {"name": "clip"}}


CONFIG = {"method": {"name": "fedavg"}, "data": {"name": "digits", "clients": 3}, "model": {"name": "mlp"}, "rounds": 2}
DRIVEN = {**CONFIG, "data": {"name": "digits", "clients": 3, "classes_per_client": 3, "train": 20, "test": 10, "val": 0}}


@pytest.mark.parametrize("unit", ["client", "sample"])
def test_a_deployed_run_records_what_is_spent_and_does_not_reset_it(digits, tmp_path, unit):
    config = Config.from_dict({**DRIVEN, "private": f"epsilon=8,unit={unit}"}, "test")
    made = plan(config, "f", "r", 3, Shape.of(digits), QUICK)
    out = tmp_path / "r"
    prepare(out, made)
    room = Room(made.assignment("cpu"), digits, tmp_path)
    if unit == "client":  # a server that died after it had charged a round and before it stored it
        (out / NAME).write_text('{"round": 1, "charged": 1}\n')
    serve(out, room, None, lambda config, record: None)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = json.loads((out / "summary.json").read_text())["privacy"]
    assert len(records) == (1 if unit == "client" else 2)
    assert records[-1]["epsilon"] == pytest.approx(8, rel=0.01)
    assert {**found, "epsilon": None} == {"epsilon": None, "budget": 8, "delta": 1e-5, "unit": unit}
    assert [r["train_loss"] for r in records] == [None] * len(records)
