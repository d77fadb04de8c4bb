"""Interrupted at any moment, a run goes on as if it had not been: same metrics, same last checkpoint to the bit."""

import errno
import os
import signal

import pytest
from children import Children, until
from safetensors import SafetensorError

from fedselect.core import snapshots, sums
from fedselect.runs import runner
from fedselect.simulate.engine import Simulation

TINY = ("--model", "mlp", "--clients", "3", "--train", "20", "--test", "10", "--fraction", "0.7", "--limit", "0.4", "-q")
RUN = ("run", *TINY, "--rounds", "6")
LONG = ("run", *TINY, "--rounds", "30", "--epochs", "8")
DISK = ("--rows", "disk", "--eval-fraction", "0.4")
COMPARE = ("compare", *TINY[:-5], "-q", "--methods", "fedselect,fedavg", "--rounds", "40")
MAIN = "from fedselect.cli import main; main()"


def outcome(run):
    """Everything that must not depend on interruptions: metrics (times aside), masks and the final state's bytes."""
    lines = [sums.from_line(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    last = max((run / "checkpoint").glob("[0-9]*"))
    metrics = [{k: v for k, v in line.items() if k != "seconds"} for line in lines]
    files = (run / "masks.jsonl", last / "rows.bin", last / "state.safetensors")
    return metrics, last.name, [path.read_bytes() for path in files if path.exists()]


@pytest.fixture
def start(fork):
    """The command line in a process of its own."""
    return lambda *args, code=MAIN: fork(code, *args)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """What a command comes to that nothing interrupts, made once."""
    made = {}

    def get(command):
        if command not in made:
            out = tmp_path_factory.mktemp("unbroken") / "whole"
            with Children() as children:
                process = children.fork(MAIN, *command, "--out", out)
                said = process.communicate()
            assert process.returncode == 0, said
            made[command] = {p.parent.name: outcome(p.parent) for p in out.rglob("metrics.jsonl")}
        return made[command]

    return get


def wait_for(process, path, lines):
    """Until a file has so many lines; the process must still be at work then."""
    until(lambda: path.exists() and path.read_bytes().count(b"\n") >= lines, process, pause=0.002)


def end(process, how):
    """Send a signal; the process's code and what it said."""
    process.send_signal(how)
    err = process.communicate()[1]
    return process.returncode, err


@pytest.mark.parametrize("command", [LONG, (*LONG, *DISK)], ids=["in memory", "on disk"])
def test_a_run_killed_again_and_again_ends_as_an_unbroken_one(cli, start, unbroken, tmp_path, command):
    out, args = tmp_path / "broken", (*command, "--out", tmp_path / "broken")
    for file, lines in (("config.json", 1), ("metrics.jsonl", 3), ("metrics.jsonl", 12), ("metrics.jsonl", 22)):
        process = start(*args)
        wait_for(process, out / file, lines)
        assert end(process, signal.SIGKILL)[0] == -signal.SIGKILL
        args = ("resume", out, "-q")
    assert cli("resume", out, "-q").code == 0
    assert outcome(out) == unbroken(command)["whole"]


def test_a_comparison_killed_in_its_second_run_ends_as_an_unbroken_one(cli, start, unbroken, tmp_path):
    process = start(*COMPARE, "--out", tmp_path / "broken")
    wait_for(process, tmp_path / "broken" / "fedavg-seed0" / "metrics.jsonl", 4)
    assert end(process, signal.SIGKILL)[0] == -signal.SIGKILL
    assert cli("resume", tmp_path / "broken", "-q").code == 0
    for run in ("fedselect-seed0", "fedavg-seed0"):
        assert outcome(tmp_path / "broken" / run) == unbroken(COMPARE)[run]


# kills itself when it calls a function for the n-th time: moments that no timing would hit; a checkpoint every round
DIE = (
    """
import os, shutil
import fedselect.runs.runner as runner
from fedselect.core import snapshots
from fedselect.runs import loop
from fedselect.simulate.disk import Disk
loop.OVERHEAD = 1e9
def at(module, name, count):
    real, calls = getattr(module, name), []
    def dying(*a, **k):
        calls.append(1)
        if len(calls) == count:
            os.kill(os.getpid(), 9)
        return real(*a, **k)
    setattr(module, name, dying)
at({})
"""
    + MAIN
)


@pytest.fixture
def die(start):
    """The command line in a process that kills itself at one moment."""

    def end(moment, *args):
        process = start(*args, code=DIE.format(moment))
        err = process.communicate()[1]
        assert process.returncode == -signal.SIGKILL, err

    return end


# os.replace puts config.json, federation.json and an empty masks.jsonl in place first, then of each checkpoint the manifest
# and the folder; rmtree drops old ones
@pytest.mark.parametrize(
    "moment",
    [
        "os, 'replace', 2",
        "os, 'replace', 3",
        "os, 'replace', 4",
        "os, 'replace', 5",
        "os, 'replace', 7",
        "os, 'fsync', 5",
        "os, 'fsync', 8",
        "os, 'fsync', 10",
        "shutil, 'rmtree', 1",
    ],
)
def test_a_run_killed_while_it_writes_ends_as_an_unbroken_one(cli, die, unbroken, tmp_path, moment):
    die(moment, *RUN, "--out", tmp_path / "broken")
    assert cli("resume", tmp_path / "broken", "-q").code == 0
    assert outcome(tmp_path / "broken") == unbroken(RUN)["whole"]


@pytest.mark.parametrize(
    "moment",
    [
        "os, 'pwrite', 1",
        "os, 'pwrite', 5",
        "snapshots, '_digest', 2",
        "Disk, '_read_content', 9",
        "Disk, 'save', 1",
        "Disk, 'save', 3",
    ],
)
def test_a_run_on_disk_killed_while_it_writes_ends_as_an_unbroken_one(cli, die, unbroken, tmp_path, moment):
    command = (*RUN, *DISK)
    die(moment, *command, "--out", tmp_path / "broken")
    assert cli("resume", tmp_path / "broken", "-q").code == 0
    assert outcome(tmp_path / "broken") == unbroken(command)["whole"]


def test_entries_that_moved_alike_are_chosen_alike_after_a_resume(cli, tmp_path, ctrl_c):
    # too slow to move anything: every choice is among ties, and there the earlier entry of the model wins
    ties = (*RUN, "--lr", "1e-30", "--personal-lr", "1e-30")
    assert cli(*ties, "--out", tmp_path / "whole").code == 0
    ctrl_c(round=1)
    assert cli(*ties, "--out", tmp_path / "broken").code == 130
    assert cli("resume", tmp_path / "broken", "-q").code == 0
    assert outcome(tmp_path / "broken") == outcome(tmp_path / "whole")


@pytest.mark.parametrize("command", [RUN, COMPARE], ids=["run", "compare"])
def test_a_run_killed_before_it_began_can_be_started_again(cli, die, tmp_path, command):
    die("os, 'replace', 1", *command, "--out", tmp_path / "a")
    assert [p.suffix for p in (tmp_path / "a").iterdir() if p.name != ".lock"] == [".part"]
    assert "start it again with the same command" in cli("resume", tmp_path / "a").sentence()
    assert cli(*command, "--out", tmp_path / "a").code == 0
    assert not list((tmp_path / "a").glob(".*.part"))


def test_a_comparison_killed_before_its_first_run_began_can_be_resumed(cli, die, tmp_path):
    die("os, 'replace', 2", *COMPARE, "--out", tmp_path / "c")  # after compare.json, before the first config.json
    assert cli("resume", tmp_path / "c", "-q").code == 0


# ---- Ctrl-C


def test_ctrl_c_finishes_the_round_and_can_be_resumed(cli, start, unbroken, tmp_path):
    process = start(*LONG, "--out", tmp_path / "broken")
    wait_for(process, tmp_path / "broken" / "metrics.jsonl", 5)
    code, err = end(process, signal.SIGINT)
    assert code == 130
    assert "Traceback" not in err
    stopped = int((tmp_path / "broken" / "metrics.jsonl").read_text().count("\n"))
    assert f"stopped after round {stopped} of 30; resume with: fedselect resume {tmp_path / 'broken'}" in err
    assert (tmp_path / "broken" / "checkpoint" / f"{stopped:06d}").is_dir()  # nothing that was done is lost
    assert cli("resume", tmp_path / "broken", "-q").code == 0
    assert outcome(tmp_path / "broken") == unbroken(LONG)["whole"]


@pytest.fixture
def ctrl_c(monkeypatch):
    """Press Ctrl-C in the middle of a round, once or more often."""

    def press(round, times=1):
        real = Simulation.asks

        def asks(self, *args, **kwargs):
            if self.round == round - 1:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            return real(self, *args, **kwargs)

        monkeypatch.setattr(Simulation, "asks", asks)

    return press


def test_one_press_that_arrives_twice_finishes_the_round(cli, tmp_path, ctrl_c):
    ctrl_c(round=3, times=2)
    said = cli(*RUN, "--out", tmp_path / "a")
    assert said.code == 130
    assert "stopped after round 3" in said.err


def test_a_second_ctrl_c_stops_at_once_and_says_how_to_go_on(cli, tmp_path, ctrl_c, monkeypatch):
    monkeypatch.setattr(runner, "ONE_PRESS", -1.0)  # the second is one of its own, however soon
    ctrl_c(round=3, times=2)
    said = cli(*RUN, "--out", tmp_path / "a")
    assert said.code == 130
    assert len((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()) == 2
    assert "resume" in said.err


def test_after_a_second_ctrl_c_the_run_can_be_resumed(cli, unbroken, tmp_path, ctrl_c, monkeypatch):
    monkeypatch.setattr(runner, "ONE_PRESS", -1.0)
    ctrl_c(round=3, times=2)
    assert cli(*RUN, "--out", tmp_path / "a").code == 130
    monkeypatch.undo()
    assert cli("resume", tmp_path / "a", "-q").code == 0
    assert outcome(tmp_path / "a") == unbroken(RUN)["whole"]


def test_ctrl_c_in_the_last_round_of_a_run_stops_the_comparison(cli, tmp_path, ctrl_c):
    ctrl_c(round=40)  # the last one
    said = cli(*COMPARE, "--out", tmp_path / "c")
    assert said.code == 130
    assert f"fedselect resume {tmp_path / 'c'}" in said.err
    assert not (tmp_path / "c" / "fedavg-seed0" / "metrics.jsonl").exists()


def test_ctrl_c_in_a_comparison_says_how_to_go_on_with_the_comparison(cli, tmp_path, ctrl_c):
    ctrl_c(round=3)
    said = cli(*COMPARE, "--out", tmp_path / "c")
    assert said.code == 130
    assert said.err.rstrip().endswith(f"fedselect resume {tmp_path / 'c'}")


# ---- disk full


def no_space(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_space_for_tensors(*args, **kwargs):
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    ("module", "name", "fails"),
    [(snapshots, "save_file", no_space_for_tensors), (os, "replace", no_space), (os, "fsync", no_space)],
    ids=["tensors", "rename", "flush"],
)
def test_a_full_disk_leaves_the_last_checkpoint_and_says_so(cli, unbroken, tmp_path, monkeypatch, module, name, fails):
    out, real = tmp_path / "broken", getattr(module, name)

    def once_there_is_a_checkpoint(*args, **kwargs):
        return (fails if (out / "checkpoint" / "000001").exists() else real)(*args, **kwargs)

    with monkeypatch.context() as m:
        m.setattr(module, name, once_there_is_a_checkpoint)
        said = cli(*RUN, "--out", out).sentence()
    assert "the disk is full" in said
    assert "free some space, then resume" in said
    assert [p.name for p in (out / "checkpoint").iterdir()] == ["000001"]  # and no half-written one beside it
    assert cli("resume", out, "-q").code == 0
    assert outcome(out) == unbroken(RUN)["whole"]


# ---- two at once


@pytest.fixture
def busy(start, tmp_path):
    """A directory in which another process is at work."""
    process = start("run", *TINY, "--rounds", "100000", "--out", tmp_path / "a")
    wait_for(process, tmp_path / "a" / "metrics.jsonl", 1)
    return tmp_path / "a"


@pytest.mark.parametrize("command", [("resume",), (*RUN, "--overwrite", "--out")], ids=["resume", "overwrite"])
def test_a_second_process_in_the_same_directory_is_refused(cli, busy, command):
    before = len((busy / "metrics.jsonl").read_text().splitlines())
    assert f"{busy} is in use by another process" in cli(*command, busy).sentence()
    assert len((busy / "metrics.jsonl").read_text().splitlines()) >= before
