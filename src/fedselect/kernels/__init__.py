"""Triton kernels for stacked clients on a GPU. Each has a plain PyTorch twin in `rules` or next to its caller."""

from functools import cache

from torch import Tensor


@cache
def _triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:  # a torch build without it
        return False
    return True


def serve(x: Tensor) -> bool:
    """Whether the kernels accept such a tensor."""
    return x.is_cuda and x.element_size() <= 4 and _triton()
