"""Runs a command that ends with the process that started it, even if that is killed: `ends_with_parent.py PARENT COMMAND...`.

Flower's own children watch their parents, so they follow. A script of its own, for importing the package takes seconds.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # the signal that a process gets when its parent dies

if __name__ == "__main__":
    parent, *command = sys.argv[1:]
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux alone has it
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):  # it was gone before the system was asked
            sys.exit(1)
    os.execv(command[0], command)
