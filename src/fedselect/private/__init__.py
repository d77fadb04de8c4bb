"""Differential privacy: what is promised, the noise it takes, and what was spent of it."""

from fedselect.private.settings import Private

__all__ = ["Private"]
