"""The command line: a file for each group of commands, put together in main.py."""

from fedselect.cli.main import main

__all__ = ["main"]
