"""What the tests of kernels share. They run on a GPU, or anywhere with TRITON_INTERPRET=1, which runs kernels in Python."""

from contextlib import contextmanager

import pytest
import torch

from fedselect import kernels
from fedselect.kernels import INTERPRETED

if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)
if not INTERPRETED:  # asked for by name, it must be there
    pytest.importorskip("triton")

MARKS = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*[Dd]eterministic"),  # asked for by the fixture `poison` only to fill memory
]
DEVICE = "cpu" if INTERPRETED else "cuda"
OFF = {"float32": 1e-5, "tf32": 2e-3, "bf16": 2e-2}
"""How far a result may be off, by the norm."""
LOW_PRODUCTS = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter multiplies matrices in float32 alone")
LARGE = pytest.mark.skipif(INTERPRETED, reason="takes too long in Triton's interpreter")


@contextmanager
def plain():
    """Without kernels, also where the tensors are such that kernels would accept them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "serve", lambda x: False)
        yield


def randn(*shape, seed=0):
    """In float64, on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def there(v, kind="float32"):
    """Where kernels run, as numbers of this kind."""
    return None if v is None else v.to(DEVICE, torch.bfloat16 if kind == "bf16" else torch.float32)


def rounded(v, kind):
    """The same number as the kernel is given, in float64."""
    return None if v is None else v.to(torch.bfloat16 if kind == "bf16" else torch.float32).double()


def assert_near(got, want, kind="float32"):
    got = got.double().cpu()
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    off = (got - want).norm() / want.norm().clamp_min(1e-30)
    assert float(off) < OFF[kind], float(off)
