"""Convert NumPy arrays, tensors, pandas columns and torch datasets to tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from fedselect.core.errors import DataError
from fedselect.models.inputs import are_several, each

Pair = tuple[Any, Tensor]
"""Inputs, one tensor or several in a dict or a tuple, and targets."""


def part(value: Any, who: str, what: str) -> Pair:
    """Samples as (inputs, targets): from a pair of arrays, or from a torch Dataset of such pairs."""
    if is_dataset(value):
        return from_dataset(value, who, what)
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise DataError(
            f"{who}: {what} must be a pair (inputs, targets) of arrays or tensors, or a torch Dataset of such pairs, not "
            f"{_said(value)}."
        )
    x, y = inputs(value[0], f"{who}: {what}"), targets(value[1], f"{who}: {what}")
    hint = " (A tuple means several inputs; a list has one row per sample.)" if isinstance(value[0], tuple) else ""

    def check(v: Tensor, name: str) -> None:
        if not v.ndim or not y.ndim or len(v) != len(y):
            raise DataError(
                f"{_named(f'{who}: {what}', name)} has {_count(v)} but {_count(y, 'target')}; give one target per input, "
                f"in the same order.{hint}"
            )

    each(x, check)
    return x, y


def inputs(value: Any, who: str) -> Any:
    """The inputs of a model, one row per sample. Tensors are unchanged; float64 arrays become float32.

    Several inputs, in a dict or a tuple, are converted one by one.
    """
    mend = "convert them to numbers, or give a table: fs.Federation.from_frame."
    return each(value, lambda v, name: _tensor(v, _named(who, name), "inputs", mend))


def targets(value: Any, who: str) -> Tensor:
    """The targets of a model; in arrays, booleans become 0 and 1, and other integers int64."""
    y = _tensor(value, who, "targets", "number the classes from 0, or let fs.Federation.from_arrays(x, y, client) do that.")
    return y if isinstance(value, Tensor) or y.is_floating_point() else y.to(torch.int64)


def array(value: Any, who: str, what: str) -> NDArray[Any]:
    """An array from a list, a tensor, a pandas column or an array."""
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    try:
        return np.asarray(value)
    except ValueError:  # rows of different lengths
        raise DataError(f"{who} has {what} of different shapes; pad or crop them to one shape.") from None


def is_text(values: NDArray[Any]) -> bool:
    """Whether an array holds texts."""
    return values.dtype.kind in "US" or (values.dtype.kind == "O" and any(isinstance(v, str) for v in values.flat))


def is_dataset(value: Any) -> bool:
    return isinstance(value, Dataset)


def from_dataset(dataset: Any, who: str, what: str) -> Pair:
    """All samples of a map-style torch Dataset of (input, target), read once."""
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        x, y = dataset.tensors
        return x, y
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{who}: {what} is a {type(dataset).__name__}, which has no length; give one with __len__ and __getitem__, "
            "or arrays."
        )
    samples = [dataset[i] for i in range(len(dataset))]
    for i, sample in enumerate(samples):
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise DataError(
                f"{who}: sample {i} of the {what} dataset is {_said(sample)}; let it return a pair (input, target)."
            )
    return (
        inputs(_inputs([s[0] for s in samples], f"{who}: {what}"), f"{who}: {what}"),
        targets(_stacked([s[1] for s in samples], f"{who}: {what}", "targets"), f"{who}: {what}"),
    )


def compact(pair: Pair | None) -> Pair | None:
    """The samples, copied if they are a small part of a larger tensor, all of which would be pickled."""
    if pair is None:
        return None
    x, y = (each(value, lambda v, _: v if v.untyped_storage().nbytes() <= 2 * v.nbytes else v.clone()) for value in pair)
    return x, y


def rows(x: Any, which: Any) -> Any:
    """These rows of the inputs, one or several."""
    return each(x, lambda v, _: v[which])


def _inputs(values: Sequence[Any], who: str) -> Any:
    """The stacked inputs of all samples; with several inputs, all samples must have the same ones."""
    if not any(map(are_several, values)):
        return _stacked(values, who, "inputs")
    first = _keys(values[0])
    if lone := [i for i, v in enumerate(values) if _keys(v) != first]:
        raise DataError(f"{who} has other inputs in sample {lone[0]} than in sample 0; give all samples the same inputs.")
    found = {key: _stacked([v[key] for v in values], f"{who}, {key}", "inputs") for key in first}
    return found if isinstance(values[0], Mapping) else tuple(found.values())


def _keys(value: Any) -> Any:
    """The keys of several inputs: names or positions."""
    return dict.fromkeys(value) if isinstance(value, Mapping) else range(len(value)) if isinstance(value, tuple) else ()


def _stacked(values: Sequence[Any], who: str, what: str) -> Any:
    if not values or not all(isinstance(v, Tensor) for v in values):
        if any(hasattr(v, "convert") and hasattr(v, "tobytes") for v in values):  # of PIL
            raise DataError(f"{who} has {what} that are PIL images; add a transform to tensors to the dataset.")
        return array([v.numpy() if isinstance(v, Tensor) else v for v in values], who, what)
    if len(shapes := {tuple(v.shape) for v in values}) > 1:
        first, second, *_ = sorted(shapes)
        raise DataError(f"{who} has {what} of the shapes {first} and {second}; pad or crop them to one shape.")
    return torch.stack(list(values))


def _tensor(value: Any, who: str, what: str, mend: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    found = array(value, who, what)
    if found.dtype.kind == "O" and not is_text(found):
        try:  # columns of several types, or with gaps
            found = found.astype(np.float64)
        except (TypeError, ValueError):
            raise DataError(f"{who} has {what} that are not numbers ({_said(found.flat[0])}); {mend}") from None
    if found.dtype.kind not in "biuf":
        held = "texts" if is_text(found) else f"values of type {found.dtype}"
        raise DataError(f"{who} has {what} that are {held}; {mend}")
    if found.dtype.kind == "f" and found.dtype != np.float16:
        found = found.astype(np.float32)
    elif found.dtype.kind in "iu" and found.dtype != np.uint8:
        found = found.astype(np.int64, copy=False)
    return torch.from_numpy(found if found.flags.c_contiguous and found.flags.writeable else found.copy())


def _named(who: str, name: str) -> str:
    return f"{who}, {name}" if name else who


def _count(v: Tensor, what: str = "input") -> str:
    return f"no list of {what}s" if not v.ndim else f"{len(v)} {what}{'' if len(v) == 1 else 's'}"


def _said(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
