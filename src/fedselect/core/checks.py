"""Checks of options: each refuses a value by its name."""

from numbers import Real

import torch
from torch import Tensor

from fedselect.core.errors import InputError
from fedselect.core.tree import Scalar


def check_number(name: str, value: Scalar) -> Tensor:
    if not isinstance(value, Real | Tensor):
        raise InputError(f"{name} must be a number, or a tensor with one per client, not {value!r}.")
    return torch.as_tensor(value)


def check_positive(**given: Scalar | None) -> None:
    for name, value in given.items():
        if value is not None and not bool((check_number(name, value) > 0).all()):
            raise InputError(f"{name} must be positive, not {value}.")


def check_not_negative(**given: Scalar) -> None:
    for name, value in given.items():
        if not bool((check_number(name, value) >= 0).all()):
            raise InputError(f"{name} must not be negative, not {value}.")


def check_shares(**given: Scalar) -> None:
    for name, value in given.items():
        v = check_number(name, value)
        if not bool(((v >= 0) & (v <= 1)).all()):
            raise InputError(f"{name} is a share and must be in [0, 1], not {value}.")


def check_choice(known: tuple[str, ...], **given: str) -> None:
    for name, value in given.items():
        if value not in known:
            raise InputError(f"{name} is {' or '.join(known)}, not {value!r}.")
