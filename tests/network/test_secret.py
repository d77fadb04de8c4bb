"""Secure aggregation over letters: the numbers of the simulation, whoever is lost; what a client refuses; what nobody sees."""

import dataclasses
import json
import signal

import numpy as np
import pytest
import torch
from local import QUICK, assignment, choose, rounds, server_state
from secretly import SecretRoom, identity, node_key, secret

import fedselect as fs
from fedselect.core import random
from fedselect.methods import METHODS
from fedselect.network.client import Node
from fedselect.network.letters import Letter
from fedselect.network.masking import Masking, signed_part, survivors_part
from fedselect.network.server import Server
from fedselect.network.vault import Vault
from fedselect.secret import keys
from fedselect.secret.protocol import Cohort
from fedselect.secret.ring import Ring
from fedselect.simulate import Simulation
from fedselect.training.settings import Training

CLIENTS = 4
FEDSELECT = fs.FedSelect(rate=0.2, limit=0.5, epochs=1, lr=0.1, personal_lr=0.1)


@pytest.fixture(scope="module")
def data():
    return fs.load("digits", clients=CLIENTS, classes_per_client=3, train=16, test=8, val=4, seed=0)


def mlp(data):
    return fs.models.mlp(data, hidden=6)


def cnn(data):
    return fs.models.small_cnn(data)


def made(data, method=FEDSELECT, model=mlp, mean="senders"):
    return secret(assignment(method, model, data, seed=4, training=Training(batch_size=8)), fs.Mean(), mean)


@pytest.fixture
def small(data):
    return made(data)


@pytest.fixture
def room(small, data, tmp_path):
    return SecretRoom(small, data, tmp_path)


@pytest.fixture
def server(small, tmp_path):
    return Server(small, QUICK, tmp_path / "masks")


def simulated(data, cohorts, monkeypatch, method=FEDSELECT, model=mlp, **how):
    """The same federation in simulation, with exactly these clients in each round."""
    choose(cohorts, monkeypatch)
    sim = Simulation(method, model(data), data, seed=4, training=Training(batch_size=8), secret=True, **how)
    records = [sim.step() for _ in cohorts]
    monkeypatch.undo()
    return sim, records


def same(server, sim):
    theirs = server_state(sim)
    memory = all(v.equal(sim.memory[k][n]) for k, t in server.memory.items() for n, v in t.items())
    return memory and all(v.equal(theirs[n]) for n, v in server_state(server).items())


ALL = list(range(CLIENTS))
ROWS = {"fedpac", "fedalike", "scaffold"}
"""Methods that send rows of single clients."""
CHOSEN = {"fedselect", "lotteryfl", "fedbn"}
"""With masks that grow and shrink, and norm layers; the other methods in `make test-all`."""


@pytest.mark.parametrize(
    "name", [pytest.param(m, marks=[] if m in CHOSEN else pytest.mark.full) for m in METHODS if m not in ROWS]
)
def test_deployed_is_simulated(name, data, tmp_path, monkeypatch):
    """With pads and without: the server's state and memory, clients' figures, and all bytes."""
    method = METHODS[name](**({"layers": "*.weight"} if name == "layers" else {}))
    model, mean = (cnn, "cohort") if name == "fedbn" else (mlp, "senders")
    assigned = made(data, method, model, mean)
    server = Server(assigned, QUICK, tmp_path / "masks")
    room = SecretRoom(assigned, data, tmp_path)
    outcomes = rounds(server, room, 2)
    sim, records = simulated(data, [ALL] * 2, monkeypatch, method, model, mean=mean)
    assert same(server, sim)
    for outcome, record in zip(outcomes, records, strict=True):
        for way in ("bytes_up", "bytes_down"):
            assert [outcome.uploads[i][way] for i in ALL] == record["clients"][way]
    measured = server.close(room).measured
    assert [measured[i]["accuracy"] for i in ALL] == pytest.approx(records[-1]["clients"]["accuracy"], abs=1e-6)


@pytest.mark.parametrize("name", sorted(ROWS))
def test_methods_that_send_rows_of_clients_refuse(name, data, tmp_path):
    said = "sends rows of single clients .* which secure aggregation would not hide; choose another method"
    with pytest.raises(fs.InputError, match=said):
        Server(made(data, METHODS[name]()), QUICK, tmp_path / "masks")
    with pytest.raises(fs.InputError, match=said):
        Simulation(METHODS[name](), "mlp", data, secret=True).step()


def test_weights_by_samples_are_refused(data, tmp_path):
    method = fs.FedAvg(weight="samples")
    with pytest.raises(fs.InputError, match="secure aggregation weights all clients equally; use weight=uniform"):
        Server(made(data, method), QUICK, tmp_path / "masks")
    with pytest.raises(fs.InputError, match="secure aggregation weights all clients equally"):
        Simulation(method, "mlp", data, secret=True).step()


# ---- who is lost, at every stage


def never_greeted(room):
    room.here = [0, 1, 2]


def never_sends(room):
    room.spoil = lambda i, letter: "is gone" if i == 3 and letter.head["kind"] == "update" else letter


def never_agrees(room):
    room.spoil = lambda i, letter: "is gone" if i == 3 and letter.head["kind"] == "agreed" else letter


def agrees_to_nonsense(room):
    room.spoil = lambda i, letter: (
        Letter({**letter.head, "signature": "12" * 100}, {}) if i == 3 and letter.head["kind"] == "agreed" else letter
    )


def signs_no_words(room):
    room.spoil = lambda i, letter: (
        Letter({**letter.head, "signature": "zz"}, {}) if i == 3 and letter.head["kind"] == "agreed" else letter
    )


def never_opens(room):
    room.spoil = lambda i, letter: "is gone" if i == 3 and letter.head["kind"] == "opened" else letter


def opens_nonsense(room):
    spoilt = {"shares": torch.zeros(3, dtype=torch.uint8)}
    room.spoil = lambda i, letter: Letter(letter.head, spoilt) if i == 3 and letter.head["kind"] == "opened" else letter


def sends_nonsense(room):
    room.spoil = lambda i, letter: (
        Letter(letter.head, {**letter.parts, "line": letter.parts["line"][:-4]})
        if i == 3 and letter.head["kind"] == "update"
        else letter
    )


@pytest.mark.parametrize(
    ("fault", "counts"),
    [
        (never_greeted, False),
        (never_sends, False),
        (sends_nonsense, False),
        (never_agrees, True),
        (agrees_to_nonsense, True),
        (signs_no_words, True),
        (never_opens, True),
        (opens_nonsense, True),
    ],
)
def test_a_client_lost_at_any_stage_costs_nobody_else_the_round(data, room, server, fault, counts, monkeypatch):
    """Whose values had arrived is in the sum, whoever opens it; and who comes back goes on."""
    rounds(server, room, 1)
    fault(room)
    outcome = server.step(room)
    assert sorted(outcome.uploads) == (ALL if counts else [0, 1, 2])
    assert (3 in outcome.missed) == (not counts)
    room.here, room.spoil = ALL, lambda i, letter: letter
    assert sorted(server.step(room).uploads) == ALL
    assert same(server, simulated(data, [ALL, ALL if counts else [0, 1, 2], ALL], monkeypatch)[0])


def test_with_two_thirds_or_fewer_the_round_is_asked_again_and_then_ends(room, server):
    """Of four clients three must send; asked again with whom it reached, there are three and all must."""
    gone = {2, 3}
    room.spoil = lambda i, letter: "is gone" if i in gone and letter.head["kind"] == "update" else letter
    with pytest.raises(fs.RunError, match=r"secret: 2 of \d clients sent their values, and --secret needs at least 3"):
        server.step(room)
    assert server.round == 0
    gone.clear()
    assert sorted(server.step(room).uploads) == ALL


def test_no_sum_is_opened_of_fewer_clients_than_the_round_needs(data, small, room, tmp_path, monkeypatch):
    """Once a sum is opened, the round cannot be repeated with others: a client lost for a moment would end the run."""
    server = Server(small, dataclasses.replace(QUICK, min_clients=4), tmp_path / "all")
    rounds(server, room, 1)
    lost = iter([True])
    room.spoil = lambda i, letter: "is gone" if i == 2 and letter.head["kind"] == "update" and next(lost, False) else letter
    assert sorted(server.step(room).uploads) == ALL
    room.spoil = lambda i, letter: "is gone" if i == 2 and letter.head["kind"] == "update" else letter
    with pytest.raises(fs.RunError, match=r"secret: 3 of 4 clients sent their values, and this run needs 4"):
        server.step(room)
    room.spoil = lambda i, letter: letter
    assert sorted(server.step(room).uploads) == ALL
    assert same(server, simulated(data, [ALL] * 3, monkeypatch)[0])


def test_a_round_whose_sum_is_being_opened_needs_no_others(data, small, room, server, tmp_path, monkeypatch):
    """As a server left it that did not yet know how many clients it needs."""

    def die(i, letter):
        if i == 0 and letter.head["kind"] == "opened":
            raise KeyboardInterrupt
        return letter if i != 2 or letter.head["kind"] != "update" else "is gone"

    room.spoil = die
    with pytest.raises(KeyboardInterrupt):
        server.step(room)
    room.spoil = lambda i, letter: letter
    again = Server(small, dataclasses.replace(QUICK, min_clients=4), tmp_path / "masks")
    assert sorted(again.step(room).uploads) == [0, 1, 3]
    assert same(again, simulated(data, [[0, 1, 3]], monkeypatch)[0])


def test_a_list_of_two_is_refused(room, server):
    room.here = [0, 1]
    with pytest.raises(fs.RunError, match="client 0 was listed with 1 other clients; it needs at least 2"):
        server.step(room)


def test_part_of_the_clients_and_one_that_joins_late(data, tmp_path, monkeypatch):
    assigned = dataclasses.replace(made(data), secret=Ring(3))
    room = SecretRoom(assigned, data, tmp_path, here=[0, 1, 2])
    server = Server(assigned, dataclasses.replace(QUICK, fraction=0.75), tmp_path / "masks")
    monkeypatch.setattr(random, "choose", lambda seed, here, count, *a: here[:3] if len(here) == 3 else here[1:])
    assert sorted(server.step(room).uploads) == [0, 1, 2]
    room.here = ALL
    outcome = server.step(room)
    assert sorted(outcome.uploads) == [1, 2, 3]
    assert sorted(outcome.measured) == ALL
    monkeypatch.undo()
    sim = Simulation(
        FEDSELECT, mlp(data), data, seed=4, training=Training(batch_size=8), secret=True, fraction=0.75, late=(1, 2)
    )
    choose([[0, 1, 2], [1, 2, 3]], monkeypatch)
    sim.step(), sim.step()
    assert same(server, sim)


# ---- the server's own life


@pytest.mark.parametrize("kind", ["agreed", "opened"])
def test_a_server_killed_while_a_sum_is_opened_goes_on_to_the_same_bits(data, small, room, server, tmp_path, monkeypatch, kind):
    """Two clients have agreed or opened when the server dies. Resumed, it must ask for the same sum: they open no other."""
    vault = Vault(tmp_path / "checkpoint")
    rounds(server, room, 1)
    server.save(vault, {})

    def die(i, letter):
        if i == 2 and letter.head["kind"] == kind:
            raise KeyboardInterrupt
        return letter

    room.spoil = lambda i, letter: "is gone" if i == 3 and letter.head["kind"] == "update" else die(i, letter)
    with pytest.raises(KeyboardInterrupt):
        server.step(room)
    room.spoil = lambda i, letter: letter
    resumed = Server(small, QUICK, tmp_path / "masks")
    resumed.load(vault, 1)
    outcome = resumed.step(room)
    assert outcome.missed == {3: "it comes too late: the sum without it is being opened"}
    assert sorted(resumed.step(room).uploads) == ALL
    assert same(resumed, simulated(data, [ALL, [0, 1, 2], ALL], monkeypatch)[0])


def test_a_server_that_forgot_what_it_opened_is_refused(small, room, server, tmp_path):
    """It asks for another sum of a round: the difference of both could be one client's values."""
    vault = Vault(tmp_path / "checkpoint")
    rounds(server, room, 1)
    server.save(vault, {})
    server.step(room)
    other = Server(small, QUICK, tmp_path / "other-masks")
    other.load(vault, 1)
    room.here = [0, 1, 2]
    with pytest.raises(fs.RunError, match="client 0 has opened or passed round 2 and joins no other sum of round 2"):
        other.step(room)


def test_a_reply_that_was_lost_comes_again_and_no_other_under_its_list(room, server, small):
    letters = []
    room.spoil = lambda i, letter: letters.append(letter) or letter
    rounds(server, room, 1)
    asked = next(letter for i, letter in room.asked if i == 1 and letter.head["kind"] == "train")
    first = next(letter for letter in letters if letter.head["kind"] == "update" and letter.head["client"] == 1)
    again = room.node(1).answer(asked)
    assert again.head == first.head
    assert all(v.equal(again.parts[n]) for n, v in first.parts.items())
    (room.node(1).vault.folder / "000001" / "manifest.json").unlink()  # its snapshot is damaged
    with pytest.raises(fs.DataError, match="client 1 has opened or passed round 1"):
        room.node(1).answer(asked)


def test_nonsense_that_adds_up_to_nothing_is_seen(room, server):
    """A line of random numbers: the sum says that somebody sent no line of its own, though not who."""
    noise = torch.randint(0, 256, (10**6,), dtype=torch.uint8)
    room.spoil = lambda i, letter: (
        Letter(letter.head, {**letter.parts, "line": noise[: letter.parts["line"].numel()]})
        if i == 3 and letter.head["kind"] == "update"
        else letter
    )
    with pytest.raises(fs.RunError, match="what clients sent does not add up: one of them sent invalid data"):
        server.step(room)
    assert server.round == 0


def test_a_client_that_is_sent_another_model_spoils_the_sum(room, server):
    """A server could send everybody else a model whose updates are 0, and so single one out: pads depend on what was sent."""
    rounds(server, room, 1)
    real = room.ask

    def ask(letters, timeout):
        for number, letter in letters:
            if number == 102 and letter.head["kind"] == "train":
                values = letter.parts["values"].clone()
                values[3] ^= 1
                letter = Letter(letter.head, {**letter.parts, "values": values})
            yield from real([(number, letter)], timeout)

    room.ask = ask
    with pytest.raises(fs.RunError, match=r"too few clients opened the sum .*client 2 was asked to open a list"):
        server.step(room)
    assert server.round == 1


def test_a_client_that_is_told_another_task_spoils_the_sum(room, server):
    """Options of the task say how a client trains: with weights of 0 for everybody else, a sum would be one client's update."""
    real = room.ask

    def ask(letters, timeout):
        for number, letter in letters:
            if number == 102 and letter.head["kind"] == "train":
                letter = Letter({**letter.head, "task": {"class_weights": "1 1 1 1 1 1 1 1 1 0"}}, letter.parts)
            yield from real([(number, letter)], timeout)

    room.ask = ask
    with pytest.raises(fs.RunError, match=r"too few clients opened the sum .*client 2 was asked to open a list"):
        server.step(room)


def test_too_few_who_agree_open_nothing_and_what_they_say_is_cut(room, server):
    room.spoil = lambda i, letter: (
        Letter({**letter.head, "kind": "agreed\x1b[31m" + "x" * 1000}, {}) if letter.head["kind"] == "agreed" else letter
    )
    with pytest.raises(fs.RunError, match="too few clients agreed for whom to open the sum") as e:
        server.step(room)
    assert "open" not in {letter.head["kind"] for _, letter in room.asked}
    assert "x" * 300 not in str(e.value)
    assert "\x1b" not in str(e.value)


def test_a_client_whose_sealed_shares_nobody_can_read_is_named(room, server):
    room.spoil = lambda i, letter: (
        Letter(letter.head, {**letter.parts, "bundles": torch.zeros_like(letter.parts["bundles"])})
        if i == 3 and letter.head["kind"] == "update"
        else letter
    )
    with pytest.raises(fs.RunError, match="too few clients opened the sum for client 3, who may have sent shares that nobody"):
        server.step(room)


def test_what_a_client_opens_wrongly_is_cut_and_escaped(room, server):
    room.spoil = lambda i, letter: (
        Letter({**letter.head, "of": "\x1b[31m" + "x" * 1000}, letter.parts) if letter.head["kind"] == "opened" else letter
    )
    with pytest.raises(fs.RunError, match="too few clients opened the sum") as e:
        server.step(room)
    assert "x" * 300 not in str(e.value)
    assert "\x1b" not in str(e.value)


def test_a_sum_that_could_fall_into_two_is_not_asked_for_and_comes_with_another_list(room, server, monkeypatch):
    """Nobody is bound to these survivors; another list has another circle."""
    monkeypatch.setattr(Cohort, "joins", lambda self, survivors: len(survivors) == CLIENTS)
    gone = {3}
    room.spoil = lambda i, letter: "is gone" if i in gone and letter.head["kind"] == "update" else letter
    with pytest.raises(fs.RunError, match="too many clients were lost that are next to each other in the round's list"):
        server.step(room)
    assert "agree" not in {letter.head["kind"] for _, letter in room.asked}
    gone.clear()
    assert sorted(server.step(room).uploads) == ALL


@pytest.mark.parametrize("key", [["zz" * 32, "00"], ["00" * 31, "00"], ["00" * 32, "0"], ["00" * 32, ""], ["00" * 32]])
def test_a_key_that_nobody_could_read_is_rejected_before_all_others_refuse_the_list(room, server, key):
    room.spoil = lambda i, letter: Letter({**letter.head, "key": key}, {}) if i == 3 and "key" in letter.head else letter
    outcome = server.step(room)
    assert sorted(outcome.uploads) == [0, 1, 2]
    assert outcome.rejected == {"node 103": "it sent no key for the next round"}


# ---- what a client refuses


def first_round(data, folder):
    """The letters of a first round to client 1, which has sent its values and opened nothing; and the room."""
    assigned = made(data)
    room, seen = SecretRoom(assigned, data, folder), {}
    room.deaf = lambda i, letter: i == 1 and letter.head["kind"] == "open"
    Server(assigned, QUICK, folder / "masks").step(room)
    for i, letter in room.asked:
        if i == 1:
            seen[letter.head["kind"]] = letter
    return seen, room


@pytest.fixture
def asked(data, tmp_path):
    return first_round(data, tmp_path)


@pytest.fixture(scope="module")
def asked_once(data, tmp_path_factory):
    """The same for clients that refuse, and so change nothing."""
    return first_round(data, tmp_path_factory.mktemp("asked"))


def listed(change):
    def spoil(letter):
        said = {**letter.head["secret"], "list": change([list(row) for row in letter.head["secret"]["list"]])}
        return Letter({**letter.head, "round": 2, "secret": said}, letter.parts)

    return spoil


def other_key(rows):
    """The server puts a key of its own in the place of client 2's, with the old signature."""
    rows[2][1] = keys.public(keys.new_key()).hex()
    return rows


def invented(rows):
    """A client that is not in the roster, with a signature of its own."""
    public = keys.public(keys.new_key()).hex()
    address = {"federation": "federation", "run": "run", "plan": ""}
    return [*rows[:3], [9, public, keys.sign(node_key(9), signed_part(address, 9, public)).hex()]]


def borrowed(rows):
    """Client 0's key as that of client 2: the server would know none of its secrets, but the pair would count twice."""
    rows[2][1:] = rows[0][1:]
    return rows


LISTS = {
    "other key": (other_key, "the key of client 2 is not signed by a client of this federation"),
    "invented": (invented, "the key of client 9 is not signed by a client of this federation"),
    "borrowed": (borrowed, "the key of client 2 is not signed by a client of this federation"),
    "few": (lambda rows: rows[:2], "was listed with 1 other clients"),
    "without it": (lambda rows: [rows[0], *rows[2:]], "has an outdated key of client 1"),
    "twice": (lambda rows: [*rows[:3], rows[0]], "sent an invalid list"),
    "short": (lambda rows: [[i, p[:10], s] for i, p, s in rows], "sent an invalid list"),
    "many": (lambda rows: [*rows, [4, *rows[0][1:]]], "the server's list has 5 clients; this run allows at most 4"),
    "none": (lambda rows: None, "the server sent no list of clients"),
}


@pytest.mark.parametrize("kind", LISTS)
def test_a_client_refuses_a_list_that_was_tampered_with(asked_once, kind):
    change, said = LISTS[kind]
    letters, room = asked_once
    with pytest.raises(fs.DataError, match=said):
        room.node(1).answer(listed(change)(letters["train"]))


def test_a_client_refuses_a_letter_without_a_list(asked_once):
    letters, room = asked_once
    plain = Letter({k: v for k, v in letters["train"].head.items() if k != "secret"}, letters["train"].parts)
    with pytest.raises(fs.DataError, match="the server sent no list of clients"):
        room.node(1).answer(plain)


@pytest.mark.parametrize("where", ["federation", "run", "plan"])
def test_a_key_that_was_signed_for_another_run_is_refused(asked_once, where):
    letters, room = asked_once
    public = keys.public(keys.new_key()).hex()
    address = {**room.assigned.address, where: "another"}
    said = [2, public, keys.sign(node_key(2), signed_part(address, 2, public)).hex()]
    with pytest.raises(fs.DataError, match="the key of client 2 is not signed by a client of this federation"):
        room.node(1).answer(listed(lambda rows: [*rows[:2], said, rows[3]])(letters["train"]))


def survivors(*ids):
    return lambda letter: Letter({**letter.head, "survivors": list(ids)}, letter.parts)


OPENINGS = {
    "few": (survivors(0, 1), "was asked to open the sum of 2 of 4 clients; it needs at least 3"),
    "itself": (survivors(0, 2, 3), r"was sent \[0, 2, 3\] as survivors, which is invalid"),
    "stranger": (survivors(0, 1, 2, 7), "as survivors, which is invalid"),
    "twice": (survivors(0, 1, 1, 2), "as survivors, which is invalid"),
    "no list": (lambda letter: Letter({**letter.head, "survivors": "all"}, letter.parts), "as survivors, which is invalid"),
    "round": (lambda letter: Letter({**letter.head, "round": 2}, letter.parts), "was asked to open a list of round 2"),
    "list": (lambda letter: Letter({**letter.head, "list": "00"}, letter.parts), "was asked to open a list of round 1"),
    "bytes": (lambda letter: Letter(letter.head, {}), "0 bytes of sealed shares, expected"),
}


@pytest.mark.parametrize("kind", OPENINGS)
def test_a_client_refuses_to_open_what_it_should_not(asked_once, kind):
    change, said = OPENINGS[kind]
    letters, room = asked_once
    with pytest.raises(fs.DataError, match=said):
        room.node(1).answer(change(letters["open"]))
    if kind != "bytes":
        with pytest.raises(fs.DataError, match=said):
            room.node(1).answer(change(letters["agree"]))


def agreed(change):
    return lambda letter: Letter({**letter.head, "agreed": change(letter.head["agreed"])}, letter.parts)


AGREED = {
    "none": (lambda said: None, "the server sent client 1 no signatures of who agreed"),
    "no hex": (lambda said: [[i, "zz"] for i, _ in said], "the server sent client 1 no signatures of who agreed"),
    "two": (lambda said: said[:2], "a sum to which 2 of 4 clients agreed; it needs at least 3"),
    "one many times": (lambda said: said[:1] * 4, "a sum to which 1 of 4 clients agreed"),
    "one for all": (lambda said: [[i, said[0][1]] for i, _ in said], "a sum to which 1 of 4 clients agreed"),
    "strangers": (lambda said: [[i + 7, s] for i, s in said], "a sum to which 0 of 4 clients agreed"),
}


@pytest.mark.parametrize("kind", AGREED)
def test_a_client_does_not_open_what_others_have_not_agreed_to(asked_once, kind):
    change, said = AGREED[kind]
    letters, room = asked_once
    with pytest.raises(fs.DataError, match=said):
        room.node(1).answer(agreed(change)(letters["open"]))


def test_a_signature_agrees_to_one_set_of_survivors_under_one_list(asked_once):
    """Those of other survivors, or of another round, do not count."""
    letters, room = asked_once
    known = room.node(1)._masking
    cohort, ids = known._bound(letters["open"], 1)
    others = [Cohort({**cohort.address, "round": 2}, cohort.keys), Cohort({**cohort.address, "values": ""}, cohort.keys)]
    for listed, survivors in [(cohort, ids[:3]), *((other, ids) for other in others)]:
        signed = [[i, keys.sign(node_key(i), survivors_part(listed, survivors)).hex()] for i in ids]
        with pytest.raises(fs.DataError, match="a sum to which 0 of 4 clients agreed"):
            room.node(1).answer(agreed(lambda said, signed=signed: signed)(letters["open"]))


def test_a_client_opens_a_round_once_also_after_a_restart(asked):
    letters, room = asked
    first = room.node(1).answer(letters["open"])
    assert room.node(1).answer(letters["open"]).parts["shares"].equal(first.parts["shares"])  # asked again: the same
    others = Letter({**letters["open"].head, "survivors": [0, 1, 2]}, letters["open"].parts)
    with pytest.raises(fs.DataError, match="client 1 has opened round 1 for other survivors; it opens a round once"):
        room.node(1).answer(others)


def test_a_client_whose_memory_of_it_is_damaged_says_so(asked):
    letters, room = asked
    (room.node(1).vault.folder / "secret.json").write_text("{")
    with pytest.raises(fs.RunError, match=r"secret\.json cannot be read .* cannot know what it has sent"):
        room.node(1).answer(letters["open"])


def test_a_client_without_keys_or_with_those_of_another_site_refuses(small, data, tmp_path):
    with pytest.raises(fs.InputError, match="client 1 has no keys for --secret"):
        Node(small, 1, data, tmp_path)
    with pytest.raises(fs.DataError, match="has the roster of 'another', but this run belongs to 'federation'"):
        Masking(small.secret, small.address, identity(1, CLIENTS, "another"), tmp_path)


def test_secrets_are_for_their_owner_alone(room, server):
    rounds(server, room, 1)
    found = room.node(1).vault.folder / "secret.json"
    assert found.stat().st_mode & 0o777 == 0o600
    known = json.loads(found.read_text())
    assert len(known["keys"]) == 2  # that of the round, and the next
    rounds(server, room, 2)
    assert known["keys"].keys() & json.loads(found.read_text())["keys"].keys() == set()  # older ones are gone


# ---- what nobody sees


def windows(content, width):
    return {content[k : k + width] for k in range(len(content) - width + 1)}


def test_no_letter_carries_a_mask_or_a_value(room, server, monkeypatch):
    """Search all bytes that leave a client for its values, its whole numbers and its mask, as they would look in the plain."""
    plain, letters = {}, []
    real = Ring.pack

    def pack(self, codes, sent):
        line = real(self, codes, sent)
        marks = torch.cat([torch.as_tensor(sent[n]).expand_as(v).flatten() for n, v in codes.items() if n in sent])
        plain.setdefault(len(plain), (line.tobytes(), marks))
        return line

    monkeypatch.setattr(Ring, "pack", pack)
    values = []
    client = fs.Partial.client

    def train(self, *a):
        state, up = client(self, *a)
        values.append({n: v[0] for n, v in up.values.items()})
        return state, up

    monkeypatch.setattr(fs.Partial, "client", train)
    room.spoil = lambda i, letter: letters.append(letter) or letter
    rounds(server, room, 2)
    left = [text.encode() + body.numpy().tobytes() for text, body in (letter.seal() for letter in letters)]
    left += [body.numpy().tobytes() for _, letter in room.asked if letter.head["kind"] == "open" for body in [letter.seal()[1]]]
    assert len(plain) == 8
    seen = set().union(*(windows(content, 8) for content in left))
    for line, marks in plain.values():
        # two entries in a row that are not both kept: 8 bytes
        found = [line[k : k + 8] for k in range(0, len(line) - 8, 4)]
        assert not seen & {w for w in found if w.count(0) < 4}
        bits = np.packbits(marks.numpy(), bitorder="little").tobytes()
        assert not seen & {w for w in windows(bits, 8) if len(set(w)) > 2}
    for tree in values:
        for v in tree.values():
            content = v.numpy().tobytes()
            assert not seen & {content[k : k + 8] for k in range(0, len(content) - 8, 4)}
    heads = [letter.head for letter in letters]
    known = {"kind", "federation", "run", "plan", "client", "base", "round", "weight", "train_loss", "measured", "key", "of",
             "newest", "signature"}  # fmt: skip
    assert {name for head in heads for name in head} <= known | {"samples", "tested", "whole", "partly"}
    assert {name for letter in letters for name in letter.parts} == {"line", "bundles", "shares"}


def test_two_rounds_of_the_same_values_differ_everywhere(data, tmp_path, monkeypatch):
    """Nothing trains, so a client has the same values in both rounds; what it sends has nothing in common."""
    monkeypatch.setattr(Ring, "code", lambda self, v, *a: {**{n: torch.zeros(1, *t.shape[1:]) for n, t in v.items()},
                                                           "~clients": torch.ones(1, 1), "~over": torch.zeros(1, 4),
                                                           "~near": torch.zeros(1, 4)})  # fmt: skip
    assigned = made(data)
    room, server = SecretRoom(assigned, data, tmp_path), Server(assigned, QUICK, tmp_path / "masks")
    lines = []
    room.spoil = lambda i, letter: lines.append(letter.parts["line"]) or letter if "line" in letter.parts else letter
    rounds(server, room, 2)
    views = [v.numpy().view("<u4") for v in lines]
    assert len(views) == 2 * CLIENTS
    for a in range(len(views)):
        for b in range(a):
            assert np.count_nonzero(views[a] == views[b]) <= 1


def test_a_hello_does_not_show_the_mask(room, server):
    hello = room.node(1).answer(Letter({**room.assigned.address, "kind": "hello", "accepted": [0] * CLIENTS}))
    assert hello.parts == {}
    room.spoil = lambda i, letter: (
        Letter(letter.head, {"bits": torch.zeros(5, dtype=torch.uint8)})
        if i == 1 and letter.head["kind"] == "hello"
        else letter
    )
    outcome = server.step(room)
    assert outcome.rejected == {"node 101": "it sent its mask, which --secret keeps from the server"}


# ---- kill -9

ANSWER = """
import os, sys
from pathlib import Path
import numpy as np
import torch
torch.set_num_threads(1)
import fedselect as fs
from test_secret import CLIENTS, made
from local import at
from secretly import SecretRoom
from fedselect.network import masking
from fedselect.network.letters import unseal
from fedselect.network.vault import Vault
#MOMENT
folder = Path(sys.argv[1])
data = fs.load("digits", clients=CLIENTS, classes_per_client=3, train=16, test=8, val=4, seed=0)
letter = unseal((folder / "in.json").read_text(), torch.from_numpy(np.fromfile(folder / "in.bin", dtype=np.uint8)))
SecretRoom(made(data), data, folder).node(1).answer(letter)
os.kill(os.getpid(), 9)
"""
MOMENTS = {
    "hidden, not yet saved": ("train", "at(Vault, 'save', 1)"),
    "saved, not yet noted": ("train", "at(masking.Masking, 'note', 1)"),
    "noted, not yet sent": ("train", ""),
    "about to note what it opens": ("agree", "at(masking, 'write_json', 1)"),
    "what it opens is noted": ("agree", "at(masking, 'write_json', 1, after=True)"),
    "agreed, not yet sent": ("agree", ""),
    "opened, not yet sent": ("open", ""),
}


class Apart(SecretRoom):
    """A room in which client 1 answers one letter of round 2 in another process, and dies there at one moment."""

    def __init__(self, *args, fork, kind, moment):
        super().__init__(*args)
        self.fork, self.kind, self.code, self.died = fork, kind, ANSWER.replace("#MOMENT", moment), False

    def ask(self, letters, timeout):
        for number, letter in letters:
            if (number, letter.head["kind"], letter.head.get("round"), self.died) != (101, self.kind, 2, False):
                yield from super().ask([(number, letter)], timeout)
                continue
            text, body = letter.seal()
            (self.folder / "in.json").write_text(text)
            (self.folder / "in.bin").write_bytes(body.numpy().tobytes())
            process = self.fork(self.code, self.folder)
            said = process.communicate()
            assert process.returncode == -signal.SIGKILL, said
            self.died = True
            yield number, "is gone"


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_moment_it_refuses_what_it_refused_before_and_the_sums_are_right(
    small, data, fork, tmp_path, moment, monkeypatch
):
    kind, where = MOMENTS[moment]
    room = Apart(small, data, tmp_path, fork=fork, kind=kind, moment=where)
    server = Server(small, QUICK, tmp_path / "masks")
    outcomes = rounds(server, room, 3)
    assert room.died
    here = [0, 2, 3] if kind == "train" else ALL
    assert [sorted(o.uploads) for o in outcomes] == [ALL, here, ALL]
    assert same(server, simulated(data, [ALL, here, ALL], monkeypatch)[0])
