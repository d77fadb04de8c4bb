"""Triton kernels for stacked clients on a GPU. Each has a plain PyTorch twin next to its caller."""

import os
from functools import cache

from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's own switch: kernels run in Python, on any device. Slow, but it checks them without a GPU."""


@cache
def _triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:  # a torch build without it
        return False
    return True


def serve(x: Tensor) -> bool:
    """Whether the kernels accept such a tensor."""
    return (x.is_cuda or INTERPRETED) and x.element_size() <= 4 and _triton()
