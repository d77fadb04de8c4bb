"""What was started ends with who started it, however that ends."""

import sys
from pathlib import Path

import pytest
from children import PATIENCE, until

STARTER = """
import sys, time
from pathlib import Path
from fedselect.network.processes import started as _process
here = Path(sys.argv[1])
with _process([sys.executable, "-c", "import time; time.sleep(1200)"], here, {}, here / "log.txt") as process:
    print(process.pid, flush=True)
    time.sleep(1200)
"""


def runs(pid):
    """Whether this process is there and is more than a memory of one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="the system ends the children of a killed process on Linux alone")
def test_a_starter_that_is_killed_leaves_nothing_running(spawn, tmp_path):
    starter = spawn(sys.executable, "-c", STARTER, tmp_path)
    child = int(starter.stdout.readline())
    assert runs(child)
    starter.kill()
    starter.wait(PATIENCE)
    until(lambda: not runs(child))
