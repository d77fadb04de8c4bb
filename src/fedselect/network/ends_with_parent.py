"""Run a command that ends with its parent process, even if that is killed: `ends_with_parent.py PARENT COMMAND...`.

Flower's own children watch their parents, so they follow. This is a separate script because importing the package is slow.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # the signal that a process gets when its parent dies

if __name__ == "__main__":
    parent, *command = sys.argv[1:]
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux only
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):  # the parent ended before prctl was called
            sys.exit(1)
    os.execv(command[0], command)
