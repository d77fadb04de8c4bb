"""The command line: one file per group of commands, assembled in program.py."""

from fedselect.core.interrupts import interruptible


def main() -> None:
    """Entry point. The commands are imported here, so that Ctrl-C gets one sentence while they load, too."""
    with interruptible():
        from fedselect.cli.program import main as program
    program()
