"""The command line: one file per group of commands, assembled in program.py."""

from fedselect.core.interrupts import Interruptible


def main() -> None:
    """Entry point. The commands are imported here, so that Ctrl-C gets one sentence while they load, too."""
    with Interruptible():
        from fedselect.cli.program import main as program
    program()
