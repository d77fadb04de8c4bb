"""A server whose newest checkpoint was lost, or whose older copy was put back, does not make its clients begin anew."""

import shutil

import pytest
from grid import RUN, LocalGrid, run_server
from local import QUICK, Room, rounds, server_state

import fedselect as fs
from fedselect.core.files import read_json
from fedselect.network.drive import say
from fedselect.network.plan import Shape, plan
from fedselect.network.rounds import Limits
from fedselect.network.server import Server
from fedselect.network.vault import Vault
from fedselect.runs.config import Config
from fedselect.runs.rundir import read_records


@pytest.fixture
def saved(server, room, tmp_path):
    """A server that was saved after each of four rounds, each copy apart."""
    for _ in range(4):
        server.step(room)
        server.save(Vault(tmp_path / f"saved-{server.round}"), {})
    return server


def restored(small, tmp_path, round):
    back = Server(small, QUICK, tmp_path / "masks2")
    back.load(Vault(tmp_path / f"saved-{round}"), round)
    return back


def test_clients_keep_three_generations(saved, room):
    assert [room.node(i).vault.rounds() for i in range(3)] == [[2, 3, 4]] * 3


@pytest.mark.parametrize("round", [2, 3])
def test_clients_go_back_with_the_server_to_the_same_bits(saved, small, room, tmp_path, round):
    """The newest checkpoint was being written, or damaged, while clients were a round ahead already."""
    back = restored(small, tmp_path, round)
    outcomes = rounds(back, room, 4 - round)
    assert [(o.set_back, o.missed) for o in outcomes] == [({}, {})] * len(outcomes)
    assert all(v.equal(server_state(saved)[n]) for n, v in server_state(back).items())


@pytest.mark.parametrize("round", [0, 1])
def test_a_server_far_behind_most_clients_stops_before_they_begin_anew(saved, small, room, tmp_path, round):
    back = restored(small, tmp_path, round) if round else Server(small, QUICK, tmp_path / "masks2")
    said = rf"checkpoint is of round {round}, but 3 of 3 clients have later rounds \(up to 4\) .*--resume --go-back"
    with pytest.raises(fs.RunError, match=said):
        back.step(room)
    assert [room.node(i).vault.rounds() for i in range(3)] == [[2, 3, 4]] * 3  # nothing happened to them
    back = restored(small, tmp_path, round) if round else Server(small, QUICK, tmp_path / "masks2")
    back.goes_back = True
    outcome = back.step(room)
    assert sorted(outcome.uploads) == [0, 1, 2]
    assert ["start over" in why for why in outcome.set_back.values()] == [True] * 3 * round


def test_one_client_that_is_ahead_does_not_stop_the_others(saved, small, room, tmp_path):
    for i in (0, 2):
        shutil.rmtree(room.folder / f"vault-{i}")
        room.here = [i]
        Server(small, QUICK, tmp_path / f"alone-{i}").step(Room(small, room.data, room.folder, [i]))
    room.here = [0, 1, 2]
    outcome = restored(small, tmp_path, 1).step(room)
    has = "its vault has later rounds (up to 4) but no longer round 1, so its personal parameters start over; if you have"
    assert outcome.set_back.keys() == {"client 1"}
    assert outcome.set_back["client 1"].startswith(has)
    assert sorted(outcome.uploads) == [0, 1, 2]


def test_a_client_that_boasts_of_less_than_it_is_at_is_turned_away(saved, small, room, tmp_path):
    def boast(i, letter):
        return fs.network.letters.Letter({**letter.head, "newest": 1}, letter.parts) if i == 1 else letter

    room.spoil = boast
    outcome = restored(small, tmp_path, 3).step(room)
    assert outcome.rejected == {"node 101": "it says its newest round is 1, and that it is at round 3"}


# ---- in a run directory


CLIENTS = 2
GOES_ON = ", so it continues from round 2 and repeats the rounds since"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of four rounds over messages that was killed after its third; go(): it goes on, and stops after a round."""
    monkeypatch.chdir(tmp_path)
    made = Config.from_dict(
        {
            "method": {"name": "fedselect"}, "model": {"name": "mlp"}, "rounds": 4, "seed": 3,
            "data": {"name": "digits", "clients": CLIENTS, "train": 20, "test": 10},
        },
        "test",
    )  # fmt: skip
    agreed = plan(made, "site", "", CLIENTS, Shape.of(made.make_data()), Limits(wait=1.0, timeout=60.0))
    homes = {100 + i: {"partition-id": i, "vault": str(tmp_path / f"v{i}"), "device": "cpu"} for i in range(CLIENTS)}
    out = tmp_path / "fedselect-runs" / f"flower-{RUN}"

    def go(after=None):
        step = Server.step

        def stopping(self, nodes):
            if self.round == after:
                raise KeyboardInterrupt
            return step(self, nodes)

        with monkeypatch.context() as patched:
            patched.setattr(Server, "step", stopping)
            run_server(LocalGrid(homes, agreed.to_flat()))

    with pytest.raises(KeyboardInterrupt):
        go(after=3)
    return out, go


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_a_damaged_newest_checkpoint_costs_nobody_anything_and_is_named(run, tmp_path):
    out, go = run
    flip(out / "checkpoint" / "000003" / "state.safetensors")
    go()
    records = read_records(out / "metrics.jsonl")
    assert [len(r["set_back"]) for r in records] == [0, 0, 1, 0]
    assert records[2]["set_back"]["server"].endswith(f"000003 is damaged{GOES_ON}")
    assert all(r["missed"] == {} for r in records)


def test_where_no_checkpoint_is_whole_nobody_begins_anew(run):
    out, go = run
    for place in ("000002", "000003"):
        flip(out / "checkpoint" / place / "state.safetensors")
    with pytest.raises(fs.CheckpointError, match=r"no checkpoint in .* is intact; restore a copy"):
        go()
    assert read_json(out / "status.json", "")["status"] == "failed"


def test_a_lost_checkpoint_folder_stops_the_run_unless_it_is_to_go_back(run):
    out, go = run
    shutil.rmtree(out / "checkpoint")
    (out / "metrics.jsonl").unlink()
    with pytest.raises(fs.RunError, match=r"checkpoint is of round 0, but 2 of 2 clients .* --go-back"):
        go()
    say(out, "submitted", goes_back=True)
    go()
    assert len(read_records(out / "metrics.jsonl")) == 4


def test_a_flipped_line_of_metrics_sends_the_server_back_and_is_named(run):
    out, go = run
    lines = (out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == 2  # the third is written with the fourth round
    (out / "metrics.jsonl").write_bytes(lines[0] + lines[1].replace(b'"round": 2', b'"round": 6'))
    go()
    records = read_records(out / "metrics.jsonl")
    said = f"metrics.jsonl is damaged in line 2 (it does not match its checksum){GOES_ON}"
    assert records[2]["set_back"]["server"].endswith(said)
