"""Processes that we start: each in its own group, stopped at the end, or by the system if this process is killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENDS_WITH_US = Path(__file__).with_name("ends_with_parent.py")


@contextmanager
def started(command: list[str], cwd: Path, env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with all its children, which ends with the block."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a SIGTERM also stops the processes we started
    tied = [sys.executable, "-I", str(ENDS_WITH_US), str(os.getpid()), *command]
    with log.open("ab") as out:
        process = subprocess.Popen(tied, cwd=cwd, env=env, stdout=out, stderr=out, start_new_session=True)
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    for how, seconds in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, how)
        except ProcessLookupError:
            break
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
