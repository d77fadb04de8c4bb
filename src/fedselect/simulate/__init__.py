"""Simulation: all clients of a federation in one process, stacked."""

from fedselect.simulate.engine import Simulation
from fedselect.simulate.result import Result, compare, run

__all__ = ["Result", "Simulation", "compare", "run"]
