"""Find the outputs in what a module returns."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fedselect.core.errors import InputError


def outputs_of(returned: Any, which: str | int | None, model: str) -> Tensor:
    """The tensor of outputs in a tensor, a tuple, a dict, or an object with attributes.

    `which`: their name or index; None: `logits`, or the first element of a tuple. `model`: the model's name, for errors.
    """
    found = returned if isinstance(returned, Tensor) else _found(returned, "logits" if which is None else which)
    if which is None and found is None and isinstance(returned, tuple | list) and _are_rows(returned[:1]):
        found = returned[0]
    if isinstance(found, Tensor) and (which is None or found is not returned):
        return found
    asked = "" if which is None else f" and has no tensor {which!r} in it"
    what = "leave out output=" if isinstance(returned, Tensor) else _choices(returned)
    raise InputError(f"{model} returns {_said(returned)}{asked}; {what}.")


def _found(returned: Any, key: str | int) -> Any:
    """The value of this name or index; None if there is none."""
    try:
        return getattr(returned, key, None) if isinstance(key, str) and not isinstance(returned, Mapping) else returned[key]
    except (KeyError, IndexError, TypeError):
        return None


def _are_rows(values: Sequence[Any]) -> bool:
    """Whether these are tensors with a row per sample, and not a loss."""
    return bool(values) and all(isinstance(v, Tensor) and v.ndim > 0 for v in values)


def _said(returned: Any) -> str:
    """What a module returned, in words."""
    if isinstance(returned, Tensor):
        return "one tensor"
    held = f" of {', '.join(map(str, returned))}" if isinstance(returned, Mapping) and returned else ""
    held = f" of {', '.join(type(v).__name__ for v in returned)}" if isinstance(returned, tuple | list) and returned else held
    return f"a {type(returned).__name__}{held}"


def _choices(returned: Any) -> str:
    """What to type if the outputs were not found."""
    named = (
        returned
        if isinstance(returned, Mapping)
        else {}
        if isinstance(returned, tuple | list)
        else getattr(returned, "__dict__", {})
    )
    pairs = list(enumerate(returned)) if isinstance(returned, tuple | list) else list(named.items())
    tensors = [k for k, v in pairs if _are_rows([v])]
    if not tensors:
        return "wrap it in a module that returns the outputs as one tensor"
    return f"say which holds the outputs: Model.wrap(module, output={tensors[0]!r})"
