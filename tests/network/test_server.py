"""The server: who misses a round is named, who sends nonsense is turned away, and neither changes the model."""

import dataclasses

import pytest
import torch
from local import QUICK, Room, assignment, choose, rounds, server_state

import fedselect as fs
from fedselect.network.letters import Letter
from fedselect.network.rounds import Limits
from fedselect.network.server import Server
from fedselect.network.vault import Vault
from fedselect.simulate import Simulation
from fedselect.training.settings import Training


def simulated(small, digits, cohorts, monkeypatch):
    """The same federation in simulation, with exactly these clients in each round."""
    choose(cohorts, monkeypatch)
    sim = Simulation(small.method, fs.models.mlp(digits, hidden=8), digits, seed=4, training=small.training)
    for _ in cohorts:
        sim.step()
    monkeypatch.undo()
    return sim


def same(server, sim):
    theirs = server_state(sim)
    return all(v.equal(theirs[n]) for n, v in server_state(server).items())


# ---- who misses a round


def away(room, server):
    room.here = [0, 2]


def raises(room, server):
    room.spoil = lambda i, letter: "raised an error: ValueError" if i == 1 else letter


def hangs(room, server):
    room.spoil = lambda i, letter: "no reply within 5 s" if i == 1 else letter


@pytest.mark.parametrize(
    ("fault", "why"),
    [(away, "not connected"), (raises, "raised an error: ValueError"), (hangs, "no reply within 5 s")],
)
def test_a_client_that_misses_rounds_is_named_and_comes_back(small, digits, room, server, fault, why, monkeypatch):
    """As a simulation in which it sits those rounds out: what it did and nobody took in never happened."""
    rounds(server, room, 1)
    fault(room, server)
    missed = [o.missed for o in rounds(server, room, 2)]
    assert [set(m) for m in missed] == [{1}, {1}]
    assert missed[0][1] == why
    room.here, room.spoil = [0, 1, 2], lambda i, letter: letter
    outcome = server.step(room)
    assert sorted(outcome.uploads) == [0, 1, 2]
    assert outcome.missed == {}
    assert same(server, simulated(small, digits, [[0, 1, 2], [0, 2], [0, 2], [0, 1, 2]], monkeypatch))


def test_a_client_that_joins_late_starts_from_the_aggregate(small, digits, room, server, monkeypatch):
    room.here = [0, 1]
    first = rounds(server, room, 2)
    assert [o.missed for o in first] == [{2: "not connected"}] * 2
    room.here = [0, 1, 2]
    assert sorted(server.step(room).uploads) == [0, 1, 2]
    assert same(server, simulated(small, digits, [[0, 1], [0, 1], [0, 1, 2]], monkeypatch))


def test_too_few_clients_stop_the_run_in_one_sentence(small, room, tmp_path):
    room.here = [0]
    server = Server(small, dataclasses.replace(QUICK, min_clients=2), tmp_path / "masks")
    said = (
        r"round 1: only 1 of at least 2 clients connected \(no other client is connected\); "
        "start the others, then continue with --resume"
    )
    with pytest.raises(fs.RunError, match=said):
        server.step(room)


def test_clients_whose_vaults_are_of_another_method_are_told_what_to_do(small, digits, room, server, tmp_path):
    rounds(server, room, 1)
    other = dataclasses.replace(small, method_name="fedavg", run="other")
    with pytest.raises(fs.RunError) as failed:
        Server(other, QUICK, tmp_path / "others").step(Room(other, digits, tmp_path, here=[0, 1]))
    why = (
        "this client's vault belongs to method 'm', not 'fedavg'; "
        "each vault is for one federation, method, model and client: start this client with another --vault"
    )
    assert str(failed.value) == (
        f"round 1: only 0 of at least 1 clients connected (node 100: {why}; node 101: {why}); "
        "fix that, then continue with --resume."
    )


def test_a_round_with_too_few_answers_is_asked_again_and_trained_once(small, room, tmp_path, monkeypatch):
    calls = []
    real = fs.Partial.client
    monkeypatch.setattr(fs.Partial, "client", lambda self, work, *a: calls.append(int(work.ids)) or real(self, work, *a))
    server = Server(small, dataclasses.replace(QUICK, min_clients=3), tmp_path / "masks")
    calls.clear()  # the server's own rehearsal
    lost = [1]
    room.spoil = lambda i, letter: "is gone" if letter.head["kind"] == "update" and i == 2 and lost and lost.pop() else letter
    assert sorted(server.step(room).uploads) == [0, 1, 2]
    assert sorted(calls) == [0, 1, 2]


def test_a_round_that_nobody_can_answer_ends_the_run(small, room, tmp_path):
    room.spoil = lambda i, letter: "is gone" if letter.head["kind"] == "update" else letter
    server = Server(small, QUICK, tmp_path / "masks")
    with pytest.raises(
        fs.RunError,
        match=r"round 1: 0 clients answered, at least 1 .*client 0: is gone.*; fix that, then continue with --resume",
    ):
        server.step(room)
    assert server.round == 0


# ---- who is turned away


def values(change):
    def spoil(letter):
        v = letter.parts["values"].clone().view(torch.float32)
        return {**letter.parts, "values": change(v).view(torch.uint8)}

    return lambda letter: Letter(letter.head, spoil(letter))


FIGURES = ("accuracy", "accuracy_local", "accuracy_merged", "share", "test_loss")


def head(**changed):
    return lambda letter: Letter({**letter.head, **changed}, letter.parts)


def put(v, value):
    v[0] = value
    return v


def bits(change):
    return lambda letter: Letter(letter.head, {**letter.parts, "bits": change(letter.parts["bits"].clone())})


NONSENSE = {
    "nan": (values(lambda v: put(v, torch.nan)), "it sent NaN in 1.weight"),
    "inf": (values(lambda v: put(v, torch.inf)), "it sent Inf in 1.weight"),
    "short": (values(lambda v: v[:-1]), "bytes of values, but its mask marks"),
    "long": (values(lambda v: torch.cat([v, v])), "bytes of values, but its mask marks"),
    "mask count": (bits(lambda b: put(b, 0)), "bytes of values, but its mask marks"),
    "mask size": (bits(lambda b: b[:-1]), "bytes of mask instead of"),
    "norm": (values(lambda v: v * 1e6), "more than 100 times the model's"),
    "tensors": (head(whole=["1.weight"]), "it sent tensors other than those the method shares"),
    "client": (head(client=0), "it sent client 0, expected 1"),
    "stale": (head(round=1), "it sent round 1, expected 2"),
    "base": (head(base=0), "it sent base 0, expected 1"),
    "run": (head(run="another"), "it sent run 'another', expected 'run'"),
    "kind": (head(kind="measured"), "it sent kind 'measured', expected 'update'"),
    "type": (head(client=True), "it sent client True, expected 1"),
    "weight": (head(weight=1e9), "it sent the weight 1000000000.0, expected 1.0"),
    "weight nan": (head(weight=float("nan")), "it sent the weight nan"),
    "loss": (head(train_loss="low"), "it sent the training loss 'low'"),
    "loss inf": (head(train_loss=float("inf")), "it sent the training loss inf"),
    "loss long": (head(train_loss=10**400), "it sent the training loss 1000"),
    "accuracy": (head(measured=dict.fromkeys(FIGURES, 2)), "it measured accuracy 2"),
    "test loss long": (head(measured={**dict.fromkeys(FIGURES, 1), "test_loss": 10**400}), "it measured test_loss 1000"),
    "figures": (head(measured={"accuracy": 0.5}), "it measured {'accuracy': 0.5}"),
    "statistics": (lambda letter: Letter(letter.head, {**letter.parts, "extra/a/b": torch.ones(2)}),
                   "it sent the statistics extra/a/b (2,) float32, but the method has none"),
}  # fmt: skip


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_is_turned_away_by_name_and_does_not_change_the_model(small, digits, room, server, kind, monkeypatch):
    spoil, why = NONSENSE[kind]
    rounds(server, room, 1)
    room.spoil = lambda i, letter: spoil(letter) if i == 1 and letter.head["kind"] == "update" else letter
    outcome = server.step(room)
    assert why in outcome.rejected["client 1"]
    assert why in outcome.missed[1]
    assert sorted(outcome.uploads) == [0, 2]
    room.spoil = lambda i, letter: letter
    assert sorted(server.step(room).uploads) == [0, 1, 2]  # and it may come back once it behaves
    assert same(server, simulated(small, digits, [[0, 1, 2], [0, 2], [0, 1, 2]], monkeypatch))


def far_off(i, letter):
    """Client 1 sends thirty times its model."""
    return values(lambda v: v * 30)(letter) if i == 1 and letter.head["kind"] == "update" else letter


def test_how_long_an_update_may_be_follows_what_is_usual(small, room, tmp_path):
    """Thirty times the model: within --max-norm 100, but not where updates before were far shorter; also after a restart."""
    server = Server(small, QUICK, tmp_path / "masks")
    rounds(server, room, 2)
    assert set(server.past) == {"1", "2"}
    assert all(len(v) == 3 for v in server.past.values())
    vault = Vault(tmp_path / "checkpoint")
    server.save(vault, {})
    resumed = Server(small, QUICK, tmp_path / "masks-2")
    resumed.load(vault, 2)
    assert all(v.equal(resumed.past[age]) for age, v in server.past.items())
    fixed = Server(small, dataclasses.replace(QUICK, max_norm=100.0), tmp_path / "masks-3")
    fixed.load(vault, 2)
    room.spoil = far_off
    assert sorted(fixed.step(room).uploads) == [0, 1, 2]
    outcome = resumed.step(room)
    assert sorted(outcome.uploads) == [0, 2]
    assert "more than 100 times the usual" in outcome.rejected["client 1"]
    assert all(len(v) == n for v, n in zip(resumed.past.values(), (2, 3, 3), strict=True))  # what is refused does not count


def test_an_update_no_longer_than_the_model_is_never_too_long(small, room, tmp_path):
    """Where others have converged: a client that comes late has far to go, and that is no attack."""
    server = Server(small, QUICK, tmp_path / "masks")
    server.past = {"1": torch.full((3,), 1e-9, dtype=torch.float64)}
    assert sorted(server.step(room).uploads) == [0, 1, 2]


def test_a_client_that_sends_long_updates_does_not_decide_the_clipped_mean(small, room, tmp_path):
    """From the first round on. Its own update is trained as always: what it sends is thirty times the model."""
    ends = {}
    for name, aggregator in (("clip", fs.ClippedMean()), ("mean", fs.Mean())):
        own = Room(small, room.data, tmp_path / name)
        server = Server(small, dataclasses.replace(QUICK, max_norm=100.0), tmp_path / name / "masks", aggregator=aggregator)
        own.spoil = far_off
        before = server_state(server)
        rounds(server, own, 3)
        ends[name] = max(float((v - before[n]).abs().max()) for n, v in server_state(server).items())
    assert ends["clip"] < ends["mean"] / 10


HELLOS = {
    "number": (head(client=3), "it says it is client 3; clients are numbered 0 to 2"),
    "text": (head(client="1"), "it says it is client '1'"),
    "samples": (head(samples=0), "it says it has 0 samples"),
    "many": (head(samples=10**12), "it says it has 1000000000000 samples"),
    "base": (head(base=5, newest=5), "it says it is at round 5, but its last accepted round is 0"),
    "negative": (head(base=-1), "it says it is at round -1"),
    "newest": (head(newest=10**4000), "it says its newest round is 1000"),
    "mask": (bits(lambda b: b[:-1]), "bytes of mask instead of"),
    "other": (head(client=0), "it says it is client 0, but another node already is"),
}


@pytest.mark.parametrize("kind", HELLOS)
def test_a_strange_hello_is_turned_away(room, server, kind):
    spoil, why = HELLOS[kind]
    room.spoil = lambda i, letter: spoil(letter) if i == 1 and letter.head["kind"] == "hello" else letter
    outcome = server.step(room)
    assert why in outcome.rejected["node 101"]
    assert sorted(outcome.uploads) == [0, 2]


def test_a_client_that_says_it_is_another_is_known_by_its_key(small, room, tmp_path):
    server = Server(small, QUICK, tmp_path / "masks", keys={100: 0, 101: 1, 102: 2})
    room.spoil = lambda i, letter: head(client=2)(letter) if i == 1 else letter
    outcome = server.step(room)
    assert outcome.rejected["client 1"] == "it says it is client 2, but its key is that of client 1"
    assert sorted(outcome.uploads) == [0, 2]


def test_something_that_is_no_letter_is_turned_away(room, server):
    rounds(server, room, 1)
    room.spoil = lambda i, letter: fs.DataError("a message has no head.") if i == 1 else letter
    assert server.step(room).rejected == {"client 1": "a message has no head."}


@pytest.mark.parametrize("kind", ["refused", "head", "no message", "hello", "figures"])
def test_what_a_client_says_is_cut_and_escaped(small, room, tmp_path, kind):
    """Megabytes would go into metrics.jsonl, and ESC sequences to the operator's terminal."""
    said = "\x1b[2J\u202egone\n" + "x" * 3_000_000
    server = Server(small, QUICK, tmp_path / "masks")

    def spoil(i, letter):
        if i != 1 or (letter.head["kind"] == "hello") != (kind == "hello"):
            return letter
        return {
            "refused": said,
            "hello": said,
            "head": head(run=said)(letter),
            "no message": fs.DataError(said),
            "figures": head(measured={said: 1.0})(letter),
        }[kind]

    room.spoil = spoil
    outcome = server.step(room)
    texts = [*outcome.missed.values(), *outcome.rejected.values()]
    assert sorted(outcome.uploads) == [0, 2]
    assert any("[2J" in t for t in texts)
    assert all(len(t) <= 300 and t.isprintable() for t in texts)


def test_an_absurd_statistic_is_turned_away(digits, tmp_path):
    """FedPAC sends heads, prototypes and variances beside its values: all are measured."""
    made = assignment(fs.FedPAC(), lambda d: fs.models.mlp(d, hidden=4), digits, seed=0, training=Training())
    for name, factor, why in (
        ("extra/head/3.weight", 1e6, "times the model's"),
        ("extra/prototypes/mean", 1e12, "the largest allowed"),
        ("extra/prototypes/count", -1.0, "it sent a negative number in extra/prototypes/count"),
        ("extra/statistics/v", -1e9, "it sent a negative number in extra/statistics/v"),
    ):
        place = tmp_path / name
        room, server = Room(made, digits, place), Server(made, QUICK, place / "masks")
        room.spoil = lambda i, letter, name=name, factor=factor: (
            Letter(letter.head, {**letter.parts, name: letter.parts[name] * factor})
            if i == 1 and name in letter.parts
            else letter
        )
        assert why in server.step(room).rejected["client 1"]


# ---- the server's own life


def test_a_state_that_is_not_finite_never_takes_the_old_ones_place(room, server, tmp_path, monkeypatch):
    rounds(server, room, 1)
    before, real = server_state(server), fs.Partial.server
    with monkeypatch.context() as spoilt:
        spoilt.setattr(fs.Partial, "server", lambda *a: {"params": {n: v / 0 for n, v in real(*a)["params"].items()}})
        with pytest.raises(
            fs.RunError, match=r"round 2: what clients 0, 1, 2 sent .* server/params/1\.weight, .* with --resume"
        ):
            server.step(room)
    assert (server.round, server.accepted) == (1, [1, 1, 1])
    assert all(v.equal(before[n]) for n, v in server_state(server).items())
    assert sorted(server.step(room).uploads) == [0, 1, 2]


def test_a_resumed_server_goes_on_to_the_same_bits(small, digits, room, server, tmp_path):
    """Its last round was not saved: clients that had done it hand over what they sent then."""
    vault = Vault(tmp_path / "checkpoint")
    rounds(server, room, 2)
    server.save(vault, {"pending": 2})
    lost = server.step(room)
    resumed = Server(small, QUICK, tmp_path / "masks2")
    assert resumed.load(vault, 2)["pending"] == 2
    again = resumed.step(room)
    assert again.uploads == lost.uploads
    assert server_state(resumed).keys() == server_state(server).keys()
    assert all(v.equal(server_state(server)[n]) for n, v in server_state(resumed).items())


def test_a_momentum_that_runs_away_is_not_kept(small, room, tmp_path):
    """The server's values may still be finite then."""
    server = Server(small, QUICK, tmp_path / "masks", aggregator=fs.Mean(server_momentum=1.0))
    server.step(room)
    server.memory = {"velocity": {n: torch.full_like(v, torch.inf) for n, v in server.memory["velocity"].items()}}
    before = server_state(server)
    with pytest.raises(fs.RunError, match=r"combines to NaN or Inf in .*, so it was discarded"):
        server.step(room)
    assert all(v.equal(before[n]) for n, v in server_state(server).items())


def test_closing_twice_measures_the_same(room, server):
    rounds(server, room, 2)
    first, second = server.close(room), server.close(room)
    assert first.measured == second.measured
    assert sorted(first.measured) == [0, 1, 2]


def test_closing_turns_nonsense_away_too(room, server):
    rounds(server, room, 1)
    room.spoil = lambda i, letter: head(measured=None)(letter) if i == 1 else letter
    outcome = server.close(room)
    assert sorted(outcome.measured) == [0, 2]
    assert "it measured None" in outcome.rejected["client 1"]


def test_who_sits_a_round_out_measures_the_one_before_and_is_checked_too(small, room, tmp_path):
    server = Server(small, dataclasses.replace(QUICK, fraction=0.3), tmp_path / "masks")
    first, second = rounds(server, room, 2)
    assert first.measured == {}
    assert (len(second.uploads), sorted(second.measured)) == (1, [0, 1, 2])
    room.spoil = lambda i, letter: head(round=7)(letter) if letter.head["kind"] == "measured" else letter
    third = server.step(room)
    assert [*third.measured] == [*third.uploads]
    assert set(third.rejected.values()) == {"it sent round 7, expected 2"}
    assert len(third.rejected) == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"min_clients": 0}, "min_clients must be at least 1"),
        ({"fraction": 0.0}, "fraction is the share"),
        ({"timeout": 0.0}, "timeout must be positive"),
        ({"wait": float("nan")}, "wait must be positive"),
        ({"max_norm": -1.0}, "max_norm must be positive"),
        ({"eval_every": 0}, "eval_every must be at least 1"),
    ],
)
def test_limits_are_checked(given, said):
    with pytest.raises(fs.InputError, match=said):
        Limits(**given)


def test_more_clients_wanted_than_there_are(small, tmp_path):
    with pytest.raises(fs.InputError, match="min_clients is 4, but this federation has 3 clients"):
        Server(small, Limits(min_clients=4), tmp_path)
