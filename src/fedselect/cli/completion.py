"""Names that the shell completes after an option: methods, data sets and models."""

from collections.abc import Iterable

from fedselect.data import DATA
from fedselect.methods import METHODS
from fedselect.models import MODELS


def method(incomplete: str) -> list[str]:
    return _names(METHODS, incomplete)


def methods(incomplete: str) -> list[str]:
    """The last of names with commas between."""
    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in _names(METHODS, last)]


def data(incomplete: str) -> list[str]:
    return _names(DATA, incomplete)


def model(incomplete: str) -> list[str]:
    return _names(MODELS, incomplete)


def _names(table: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in table if name.startswith(incomplete.lower())]
