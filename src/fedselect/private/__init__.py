"""Differential privacy: what is promised, what it costs in noise, and what was spent of it."""

from fedselect.private.settings import Private

__all__ = ["Private"]
