"""One run in several processes: torchrun, gloo, on this machine."""

import json
import os
import shutil
import signal
import sys

import pytest
from children import PATIENCE, call, children, until

RUN = ["run", "--data", "digits", "--clients", "5", "--train", "40", "--test", "20", "--model", "mlp", "--method"]


MANY = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@pytest.fixture
def start(spawn, fork):
    """The command line in so many processes."""

    def begin(*args, processes=1):
        if processes == 1:
            return fork("from fedselect.cli import main; main()", *args)
        return spawn(*MANY, processes, "-m", "fedselect", *args)

    return begin


def finish(process):
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err[-2000:]
    return out


def records(out):
    return [
        {k: v for k, v in json.loads(line).items() if k != "seconds"}
        for line in (out / "metrics.jsonl").read_text().splitlines()
    ]


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
    done = call(*MANY, 2, tmp_path / "ends.py")
    assert (done.returncode, done.stdout.split()) == (0, ["left", "left"]), done.stderr[-2000:]


@pytest.mark.parametrize("method", [("fedpac", "--rounds", "3"), ("fedpersist", "--window", "2", "--rounds", "6")])
def test_two_processes_find_what_one_finds(method, start, tmp_path):
    """FedPAC, for its side statistics travel too; with more rounds than clients of one process in the cohort.

    FedPersist, whose clients store less after their test. And with server momentum: what an aggregator remembers is the same
    in every process.
    """
    how = [*RUN, *method, "--fraction", "0.6", "--cross", "--server-momentum", "0.5"]
    waiting = [start(*how, "--out", tmp_path / str(n), processes=n) for n in (1, 2)]
    shown = [finish(p) for p in waiting]
    one, two = (records(tmp_path / n) for n in "12")
    assert [r["clients"]["accuracy"] for r in one] == [r["clients"]["accuracy"] for r in two]
    assert [r["bytes_up"] for r in one] == [r["bytes_up"] for r in two]
    for a, b in zip(one, two, strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-5)
    cross = [json.loads((tmp_path / n / "summary.json").read_text())["cross"] for n in "12"]
    assert cross[0] == cross[1]
    assert shown[1].count("round {0}/{0}".format(method[-1])) == 1  # one process speaks


def test_a_lost_process_ends_the_run_and_any_number_goes_on(start, tmp_path):
    how = [*RUN, "fedselect", "--rounds", "40"]
    whole = start(*how, "--out", tmp_path / "whole")
    broken = start(*how, "--out", tmp_path / "broken", processes=2)
    until(lambda: list((tmp_path / "broken" / "checkpoint").glob("0*")), broken)
    os.kill(children(broken.pid)[-1], signal.SIGKILL)
    _, err = broken.communicate(timeout=PATIENCE)
    assert broken.returncode != 0
    assert "a process of this run was lost" in err
    assert "fedselect resume" in err
    shutil.copytree(tmp_path / "broken", tmp_path / "broken 2")
    for process in [start("resume", tmp_path / "broken"), start("resume", tmp_path / "broken 2", processes=2), whole]:
        finish(process)
    assert records(tmp_path / "broken") == records(tmp_path / "broken 2") == records(tmp_path / "whole")
