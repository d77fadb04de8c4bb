"""Which task targets are for, where that is clear from the targets."""

from collections.abc import Iterable

from torch import Tensor

from fedselect.tasks.task import Targets


def suited(data: Targets, targets: Iterable[Tensor]) -> str | None:
    """The name of the task that such targets are for; None where it must be said. `targets`: all clients', if it comes to that.

    One whole number a sample is a class; one float, or several, are regression; several of 0 and 1 alone are labels; other
    whole numbers in a row are a class for each position.
    """
    found = list(targets)
    floats, sides = found[0].is_floating_point(), len(data.target_shape)
    if sides > 1:
        return None
    if sides == 0:
        return "regression" if floats else "classification"
    if not data.classes and all(bool(((y == 0) | (y == 1)).all()) for y in found):
        return "multilabel"
    return "regression" if floats else "sequences"
