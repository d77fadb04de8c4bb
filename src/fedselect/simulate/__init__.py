"""Simulation: all clients of a federation in one process, stacked."""

from fedselect.simulate.engine import Simulation

__all__ = ["Simulation"]
