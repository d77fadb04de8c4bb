"""Elementwise functions whose last bit depends on a number's position, and how clients are kept from noticing.

A CPU computes sigmoid, GELU and the like for whole registers of numbers, and torch uses other code, with other rounding, for
the few left over at the end. Where the end is depends on how many clients are stacked, and on the machine's register width. So
each client's numbers are padded to whole registers: then none are left over, not even in the backward pass.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

WHOLE = 64
"""A count that is whole on any CPU: two of its widest registers of its smallest floats."""
_IN_PLACE: dict[Any, Callable[..., Tensor]] = {
    torch.sigmoid_: torch.sigmoid, Tensor.sigmoid_: torch.sigmoid, F.elu_: F.elu, F.selu_: F.selu, F.celu_: F.celu,
}  # fmt: skip
_UNEVEN = {
    torch.sigmoid, Tensor.sigmoid, torch.special.expit, F.glu, F.silu, F.gelu, F.mish, F.softplus, F.elu, F.selu, F.celu,
    torch.exp2, Tensor.exp2, torch.special.exp2, torch.sinh, Tensor.sinh, torch.cosh, Tensor.cosh,
    torch.asin, Tensor.asin, torch.acosh, Tensor.acosh, torch.rsqrt, Tensor.rsqrt, torch.pow, Tensor.pow, Tensor.__pow__,
    torch.atan2, Tensor.atan2, torch.logaddexp, Tensor.logaddexp, F.binary_cross_entropy_with_logits, *_IN_PLACE,
}  # fmt: skip


def uneven(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether this is such a function, on a count of numbers that leaves some over at the end."""
    if func not in _UNEVEN or not args or not isinstance(args[0], Tensor):
        return False
    x = args[0]
    if x.is_cuda or not x.is_floating_point() or x.numel() % WHOLE == 0:
        return False
    alike = all(v.shape == x.shape for v in args if isinstance(v, Tensor))
    return alike and kwargs.get("reduction", "none") == "none" and not any(isinstance(v, Tensor) for v in kwargs.values())


def filled(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The function's result for one client, computed on numbers padded with ones."""
    x: Tensor = args[0]
    if func is F.glu:
        value, gate = x.chunk(2, kwargs.get("dim", -1))
        return value * (filled(torch.sigmoid, (gate,), {}) if gate.numel() % WHOLE else gate.sigmoid())
    plain: Callable[..., Tensor] = _IN_PLACE.get(func, func)
    options = {n: v for n, v in kwargs.items() if n != "inplace"}
    full = [F.pad(v.reshape(-1), (0, -v.numel() % WHOLE), value=1.0) if isinstance(v, Tensor) else v for v in args]
    y: Tensor = plain(*full, **options)[: x.numel()].view(x.shape)
    return x.copy_(y) if func in _IN_PLACE or kwargs.get("inplace") else y
