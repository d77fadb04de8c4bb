"""Compiles the kernels that a program will need in parallel before it runs: one after another they take half a minute."""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

import torch

from fedselect.kernels import INTERPRETED

SILENT = 1.0
"""Seconds before a message: kernels that were compiled before are only loaded."""
_ONE = threading.Lock()


def compile_for(*programs: Callable[[], Any]) -> None:
    """Compile the kernels that these programs launch. The programs run without launching kernels, so what those would write
    stays as it was; programs must work on copies. An error in a program is ignored: it will occur again in the real run.

    Batches are made nevertheless: inputs may be indices, and must be in range.
    """
    if INTERPRETED:  # there is nothing to compile
        return
    try:
        from triton.runtime._async_compile import AsyncCompileMode
        from triton.runtime.jit import JITFunction
    except ImportError:  # this Triton compiles kernels only when they first run
        return
    from fedselect.kernels import batch

    run, here, inputs = JITFunction.run, threading.get_ident(), batch._pictures

    def only_compile(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, warmup=warmup or (threading.get_ident() == here and self is not inputs), **kwargs)

    with _ONE, ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True) as mode:
        JITFunction.run = only_compile
        try:
            with torch.autograd.set_multithreading_enabled(False):  # the backward pass in this thread
                for program in programs:
                    with suppress(Exception):
                        program()
        finally:
            JITFunction.run = run
        if left := len(wait(mode.raw_futures, SILENT).not_done):
            print(f"compiling {left} GPU kernels, once on this machine ...", file=sys.stderr, flush=True)
