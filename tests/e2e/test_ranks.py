"""One run in several processes: torchrun, gloo, on this machine."""

import shutil
import sys

import pytest
from children import call

from fedselect.core.files import read_json
from fedselect.network.site import free_port
from fedselect.runs.rundir import read_records

RUN = [
    "run",
    "--data",
    "digits",
    "--clients",
    "5",
    "--train",
    "40",
    "--test",
    "20",
    "--model",
    "mlp",
    "--epochs",
    "1",
    "--method",
]
MAIN = "from fedselect.cli import main; main()"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@pytest.fixture
def start(fork):
    """The command line in so many processes, which are told what torchrun tells those that it starts."""

    def begin(*args, processes=1):
        told = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        ranks = [{**told, "RANK": str(i), "LOCAL_RANK": str(i)} for i in range(processes)]
        return [fork(f"import os; os.environ.update({rank}); {MAIN}", *args) for rank in ranks]

    return begin


def finish(processes):
    """What all of them printed."""
    said = [p.communicate() for p in processes]
    assert [p.returncode for p in processes] == [0] * len(processes), said
    return "".join(out for out, _ in said)


def records(out):
    return [{k: v for k, v in r.items() if k != "seconds"} for r in read_records(out / "metrics.jsonl")]


def test_a_command_that_ends_leaves_the_group(tmp_path):
    """Left to the end of a process, the group's threads aborted it now and then."""
    (tmp_path / "ends.py").write_text(
        "import sys, torch.distributed as dist\n"
        "from fedselect.simulate import ranks\n"
        "try:\n"
        "    with ranks.joined():\n"
        "        ranks.everywhere(1)\n"
        "        sys.exit(0)\n"
        "finally:\n"
        "    sys.stdout.write('in it still\\n' if dist.is_initialized() else 'left\\n')\n"
    )
    done = call(*TORCHRUN, 2, tmp_path / "ends.py")
    assert (done.returncode, done.stdout.split()) == (0, ["left", "left"]), done.stderr[-2000:]


@pytest.mark.parametrize(
    "method",
    [
        ("fedpac", "--rounds", "3"),
        ("fedpersist", "--window", "2", "--rounds", "6"),
        ("fedselect", "--aggregate", "clip", "--clip-factor", "1", "--rounds", "4"),
    ],
)
def test_two_processes_find_what_one_finds(method, start, tmp_path):
    """FedPAC, for its side statistics travel too; with more rounds than clients of one process in the cohort.

    FedPersist, whose clients store less after their test. Clipped updates, whose limit goes by the clients of all. And with
    server momentum: what an aggregator remembers is the same in every process.
    """
    how = [*RUN, *method, "--fraction", "0.6", "--cross", "--server-momentum", "0.5"]
    waiting = [start(*how, "--out", tmp_path / str(n), processes=n) for n in (1, 2)]
    shown = [finish(p) for p in waiting]
    one, two = (records(tmp_path / n) for n in "12")
    assert [r["clients"]["accuracy"] for r in one] == [r["clients"]["accuracy"] for r in two]
    assert [r["bytes_up"] for r in one] == [r["bytes_up"] for r in two]
    for a, b in zip(one, two, strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-5)
    cross = [read_json(tmp_path / n / "summary.json", "")["cross"] for n in "12"]
    assert cross[0] == cross[1]
    assert shown[1].count("round {0}/{0}".format(method[-1])) == 1  # one process speaks


# a checkpoint every round, and one of two processes ends in the fifth
DIES = f"""
import os
from fedselect.runs import loop
from fedselect.simulate.engine import Simulation
loop.OVERHEAD, asks = 1e9, Simulation.asks
def dying(self, *args):
    if os.environ["RANK"] == "1" and self.round == 4:
        os.kill(os.getpid(), 9)
    return asks(self, *args)
Simulation.asks = dying
{MAIN}
"""


def test_a_lost_process_ends_the_run_and_any_number_goes_on(start, tmp_path):
    how = [*RUN, "fedselect", "--rounds", "8"]
    whole = start(*how, "--out", tmp_path / "whole")
    (tmp_path / "dies.py").write_text(DIES)
    broken = call(*TORCHRUN, 2, tmp_path / "dies.py", *how, "--out", tmp_path / "broken")
    assert broken.returncode != 0
    assert "a process of this run was lost" in broken.stderr
    assert "fedselect resume" in broken.stderr
    assert 2 <= len(records(tmp_path / "broken")) <= 4
    shutil.copytree(tmp_path / "broken", tmp_path / "broken 2")
    for processes in [start("resume", tmp_path / "broken"), start("resume", tmp_path / "broken 2", processes=2), whole]:
        finish(processes)
    assert records(tmp_path / "broken") == records(tmp_path / "broken 2") == records(tmp_path / "whole")
