"""Misspelt arguments of the Python API: one sentence with the name that was probably meant."""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import ParamSpec, TypeVar

from fedselect.core.errors import OptionError, nearest
from fedselect.core.options import options
from fedselect.methods import METHODS
from fedselect.simulate.inputs import RunOptions
from fedselect.training.settings import Training

P = ParamSpec("P")
R = TypeVar("R")
SAME = {"batch": "batch_size", "learning_rate": "lr", "local_epochs": "epochs"}
"""Names of other packages."""


def knows_its_options(said: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function refuse arguments that it does not have.

    `said`: how users call it. Its **how stands for all options of a run.
    """

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        taken = inspect.signature(function).parameters.values()
        known = {p.name for p in taken if p.kind is not p.VAR_KEYWORD and p.name != "self"}
        if any(p.kind is p.VAR_KEYWORD for p in taken):
            known |= RunOptions.__annotations__.keys()

        @wraps(function)
        def checked(*args: P.args, **given: P.kwargs) -> R:
            if strange := [name for name in given if name not in known]:
                name = strange[0]
                raise OptionError(
                    f"{said} has no option {name!r}; {_meant(name, given[name], known, (*args, *given.values()))}"
                )
            return function(*args, **given)

        return checked

    return wrap


def _meant(name: str, value: object, known: Iterable[str], others: Iterable[object]) -> str:
    """What to write instead. `others`: what else was passed, perhaps the name of a method."""
    name = SAME.get(name, name)
    if name in options(Training):
        return f"it belongs to local training: training=fs.Training({name}={value!r})."
    passed = [METHODS[m] for m in others if isinstance(m, str) and m in METHODS]
    for method in (*passed, *METHODS.values()):
        if name in options(method):
            return f"it belongs to the method, as in fs.{method.__name__}({name}={value!r})."
    if near := nearest(name, known):
        return f"did you mean {' or '.join(map(repr, near))}?"
    return f"it has {', '.join(sorted(known))}."
