"""What was started ends with who started it, however that ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STARTER = """
import sys, time
from pathlib import Path
from fedselect.deploy.flower.launch import _process
here = Path(sys.argv[1])
with _process([sys.executable, "-c", "import time; time.sleep(60)"], here, {}, here / "log.txt") as process:
    print(process.pid, flush=True)
    time.sleep(60)
"""


def runs(pid):
    """Whether this process is there and is more than a memory of one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="the system ends the children of a killed process on Linux alone")
def test_a_starter_that_is_killed_leaves_nothing_running(tmp_path):
    starter = subprocess.Popen([sys.executable, "-c", STARTER, tmp_path], stdout=subprocess.PIPE, text=True)
    child = int(starter.stdout.readline())
    assert runs(child)
    starter.kill()
    starter.communicate()
    until = time.monotonic() + 5
    while runs(child) and time.monotonic() < until:
        time.sleep(0.05)
    left = runs(child)
    if left:
        os.kill(child, signal.SIGKILL)
    assert not left
