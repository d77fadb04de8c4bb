"""Simulation: all clients of a federation in one process, stacked."""

from fedselect.simulate.engine import Result, Simulation, run

__all__ = ["Result", "Simulation", "run"]
