"""Shell completion for the names of methods, data sets and models."""

from collections.abc import Iterable


def method(incomplete: str) -> list[str]:
    from fedselect.methods import METHODS

    return _names(METHODS, incomplete)


def methods(incomplete: str) -> list[str]:
    """Complete the last name of a comma-separated list."""
    from fedselect.methods import METHODS

    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in _names(METHODS, last)]


def data(incomplete: str) -> list[str]:
    from fedselect.data import DATA

    return _names(DATA, incomplete)


def model(incomplete: str) -> list[str]:
    from fedselect.models import MODELS

    return _names(MODELS, incomplete)


def _names(table: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in table if name.startswith(incomplete.lower())]
