"""What a network must know of the data: the shape of one input and the number of classes."""

from typing import Protocol

from fedselect.core.errors import InputError


class Shaped(Protocol):
    """Anything with the shape of one input and the number of classes, such as data."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def classes(self) -> int: ...


def image_shape(data: Shaped) -> tuple[int, int, int]:
    if len(data.shape) != 3:
        raise InputError(f"this model needs inputs of shape (channels, height, width), not {data.shape}.")
    return data.shape[0], data.shape[1], data.shape[2]


def check_positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise InputError(f"{name} must be at least 1, not {value}.")
