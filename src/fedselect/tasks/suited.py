"""Choose the task from the targets, if they make it clear."""

from fedselect.tasks.task import Known


def suited(data: Known) -> str | None:
    """The name of the task for this data; None if it is not clear.

    One integer per sample is a class; one float, or several, are regression; rows of 0 and 1 only are labels; other rows of
    integers are a class per position.
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
