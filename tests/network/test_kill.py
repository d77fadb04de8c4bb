"""kill -9 of a client at any moment: started again, it goes on with consistent state, and the run ends in the same bits."""

import signal

import pytest
from local import QUICK, Room, rounds, server_state

from fedselect.network.server import Server

# one letter answered in a process of its own, which kills itself when it calls a function for the n-th time
ANSWER = """
import os, shutil, sys
from pathlib import Path
import numpy as np
import torch
torch.set_num_threads(1)
import fedselect as fs
from local import alone, assignment, at
from fedselect.network.letters import unseal
from fedselect.network.client import Node
from fedselect.core import snapshots
from fedselect.network import vault
from fedselect.training.settings import Training
from fedselect.training.work import Work
#MOMENT
folder = Path(sys.argv[1])
data = fs.load("digits", clients=3, classes_per_client=3, train=20, test=10, val=0, seed=0)
method = fs.FedSelect(rate=0.2, limit=0.5, epochs=1, lr=0.1, personal_lr=0.1)
made = assignment(method, lambda d: fs.models.mlp(d, hidden=8), data, seed=4, training=Training(batch_size=8))
letter = unseal((folder / "in.json").read_text(), torch.from_numpy(np.fromfile(folder / "in.bin", dtype=np.uint8)))
Node(made, 1, alone(data, 1), folder / "vault-1").answer(letter)
#LAST
"""
DIE = "os.kill(os.getpid(), 9)"
MOMENTS = {
    "before training": ("at(fs.Partial, 'client', 1)", ""),
    "while training": ("at(Work, 'train', 1, after=True)", ""),
    "after training": ("at(fs.Partial, 'client', 1, after=True)", ""),
    "before writing": ("at(vault.Vault, 'save', 1)", ""),
    "while writing the tensors": ("at(snapshots, 'save_file', 1)", ""),
    "with the tensors written": ("at(snapshots, 'save_file', 1, after=True)", ""),
    "before the snapshot is in place": ("at(os, 'replace', 2)", ""),
    "with the snapshot in place": ("at(os, 'replace', 2, after=True)", ""),
    "while dropping an old one": ("at(shutil, 'rmtree', 1)", ""),
    "after replying": ("", DIE),
}


class Apart(Room):
    """A room in which client 1 answers round 4 in another process, and dies there at one moment."""

    def __init__(self, *args, fork, moment, last):
        super().__init__(*args)
        self.fork, self.code, self.died = fork, ANSWER.replace("#MOMENT", moment).replace("#LAST", last), False

    def ask(self, letters, timeout):
        for number, letter in letters:
            if (number, letter.head["kind"], letter.head.get("round"), self.died) != (101, "train", 4, False):
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
def test_killed_at_any_moment_it_goes_on_and_no_round_counts_twice(small, digits, fork, tmp_path, moment):
    """The round is asked again at once (all three clients are wanted), so the run must end as an unbroken one."""
    limits = type(QUICK)(min_clients=3, wait=5.0, poll=0.01, timeout=60.0)
    whole = Server(small, limits, tmp_path / "masks-a")
    rounds(whole, Room(small, digits, tmp_path / "a"), 5)
    (tmp_path / "b").mkdir()
    broken = Server(small, limits, tmp_path / "masks-b")
    room = Apart(small, digits, tmp_path / "b", fork=fork, moment=MOMENTS[moment][0], last=MOMENTS[moment][1])
    rounds(broken, room, 5)
    assert room.died
    assert all(v.equal(server_state(whole)[n]) for n, v in server_state(broken).items())
    for i in range(3):
        ours, theirs = (Room(small, digits, tmp_path / k).node(i) for k in ("b", "a"))
        assert ours.vault.rounds() == theirs.vault.rounds() == [3, 4, 5]
        for k, tree in theirs._state(5).items():
            assert all(v.equal(ours._state(5)[k][n]) for n, v in tree.items())
