"""The command line: one file per group of commands, assembled in main.py."""

from fedselect.cli.main import main

__all__ = ["main"]
