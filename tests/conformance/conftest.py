"""The plain runs that the others are compared with, made once for each case and model, whichever file asks."""

from collections.abc import Callable
from functools import cache

import pytest
from cases import AWAY, rounds, simulation

from fedselect.simulate import Simulation

Made = Callable[[str, str], tuple[Simulation, list[dict]]]


@pytest.fixture(scope="session")
def whole() -> Made:
    """Everybody takes part, all at once; the simulation and its records."""

    @cache
    def get(case: str, model: str) -> tuple[Simulation, list[dict]]:
        sim = simulation(case, model)
        return sim, rounds(sim)

    return get


@pytest.fixture(scope="session")
def away() -> Made:
    """Some sit rounds out and some come later."""

    @cache
    def get(case: str, model: str) -> tuple[Simulation, list[dict]]:
        sim = simulation(case, model, **AWAY)
        return sim, rounds(sim, 4)

    return get
