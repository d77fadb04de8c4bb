"""Which task targets are for, where that is clear from the targets."""

from fedselect.tasks.task import Known


def suited(data: Known) -> str | None:
    """The name of the task that this data is for; None where it is not clear.

    One whole number a sample is a class; one float, or several, are regression; several of 0 and 1 alone are labels; other
    whole numbers in a row are a class for each position.
    """
    found = list(data.targets())
    floats, sides = found[0].is_floating_point(), len(data.target_shape)
    if sides > 1:
        return None
    if sides == 0:
        return "regression" if floats else "classification"
    if not data.classes and all(bool(((y == 0) | (y == 1)).all()) for y in found):
        return "multilabel"
    return "regression" if floats else "sequences"
