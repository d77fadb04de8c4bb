"""The paper as a command: its tables and figures from runs that are made where they are missing, beside its numbers."""
