"""Processes that tests start: each is given time on a busy machine, and each ends with the test that started it."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PATIENCE = 600.0
"""Seconds after which something hangs. Nothing is tested by it: a busy machine may take as long as it likes below that."""
FEDSELECT = (sys.executable, "-m", "fedselect")


def env(**more):
    """This process's environment, with as many threads as it has itself."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def call(*command, **how):
    """A command's code and output, once it has ended."""
    how = {"env": env(), "capture_output": True, "text": True, "timeout": PATIENCE, **how}
    return subprocess.run([str(c) for c in command], check=False, **how)


def until(condition, process=None, pause=0.01):
    """Wait for something to become true while a process is at work; returns what was true."""
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert process is None or process.poll() is None, f"it ended with {process.poll()}: {_said(process)}"
        assert time.monotonic() < end, "it never came to that"
        time.sleep(pause)
    return found


class Children:
    """Starts processes, and ends those that are left together with all that they started."""

    def __init__(self):
        self._started = []

    def __enter__(self):
        return self

    def start(self, *command, **how):
        """A command, as a user starts it."""
        how = {"env": env(), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **how}
        self._started.append(subprocess.Popen([str(c) for c in command], **how))
        return self._started[-1]

    def fork(self, code, *args, cwd=None):
        """Python code with these arguments in a process that has fedselect imported already, which takes two seconds."""
        self._started.append(_Forked(code, [str(a) for a in args], str(cwd or Path.cwd())))
        return self._started[-1]

    def __exit__(self, *error):
        for process in self._started:
            if process.poll() is None:
                for pid in [process.pid, *descendants(process.pid)]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            process.communicate()  # also closes its pipes


_FORKS = multiprocessing.get_context("forkserver")
_ROOMS = [
    "cli",
    "public",
    "runs.trackers",
    "network.flower.launch",
    "network.grpc.launch",
    "report.live",
    "tuning.trials",
    "paper.write",
]
_FORKS.set_forkserver_preload([*(f"fedselect.{room}" for room in _ROOMS), "sklearn.datasets"])


class _Forked:
    """A forked process that can be asked what a `subprocess.Popen` can."""

    def __init__(self, code, args, cwd):
        self._said = [tempfile.NamedTemporaryFile() for _ in range(2)]  # noqa: SIM115  # closed when it has ended
        self._process = _FORKS.Process(target=_run, args=(code, args, cwd, env(), [f.name for f in self._said]))
        self._process.start()
        self.pid, self._told = self._process.pid, None

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout=PATIENCE):
        """Its code, once it has ended."""
        self._process.join(timeout)
        assert self.returncode is not None, "it never ended"
        return self.returncode

    def communicate(self, timeout=PATIENCE):
        """What it printed, once it has ended."""
        self.wait(timeout)
        if self._told is None:
            for f in self._said:
                f.seek(0)
            self._told = tuple(f.read().decode() for f in self._said)
            for f in self._said:
                f.close()
        return self._told


def _run(code, args, cwd, environment, said):
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for name, at in zip(said, (1, 2), strict=True):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND), at)
    import torch

    torch.set_num_threads(1)
    sys.argv = ["-c", *args]
    sys.path.insert(0, cwd)
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})


def children(pid):
    """The processes that a process started and that are still there, the oldest first."""
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended while we looked
            if int(place.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(place.parent.name))
    return sorted(found)


def descendants(pid):
    return [d for child in children(pid) for d in (child, *descendants(child))]


def _said(process):
    return process.communicate() if process.poll() is not None else ""
