"""Gradient checkpointing by block: only the inputs of each repeated block are kept, and the rest is recomputed.

The block runs a second time in the backward pass, with the same values and the same random keys.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._pytree import tree_flatten, tree_unflatten

from fedselect.core.errors import InputError
from fedselect.models import Model

Run = Callable[..., tuple[Tensor, ...]]


def recompute(module: nn.Module, model: Model) -> None:
    """Recompute the repeated blocks of this module: those in lists of two or more of one class."""
    changing = {n.rpartition(".")[0] for n in model.stats}
    found: list[tuple[str, nn.ModuleList]] = []
    for path, m in module.named_modules():
        alike = len(list(m.children())) > 1 and len({type(b) for b in m.children()}) == 1
        inside = any(path.startswith(f"{p}.") for p, _ in found)
        if isinstance(m, nn.ModuleList) and alike and not inside and not any(n.startswith(f"{path}.") for n in changing):
            found.append((path, m))
    if not found:
        raise InputError(
            f"{model.name} has no list of equal blocks without BatchNorm that could be recomputed; leave recompute "
            "(--recompute) out."
        )
    for _, blocks in found:
        for block in blocks:
            block.forward = _Outer(block, copy.copy(block))


class _Outer:
    """Replaces a block's forward. `inner` shares all of its parameters and keeps the original forward."""

    def __init__(self, outer: nn.Module, inner: nn.Module) -> None:
        self.outer, self.inner = outer, inner

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.inner.training = self.outer.training
        return block(self.inner, *args, **named)


def block(inner: nn.Module, *args: Any, **named: Any) -> Any:
    """The block's results; our rules replace this function while they are active."""
    if has_torch_function(args):
        return handle_torch_function(block, args, inner, *args, **named)
    return inner(*args, **named)


def again(
    inner: nn.Module, args: tuple[Any, ...], named: dict[str, Any], key: Tensor, within: Callable[[Tensor], Any], stacked: bool
) -> Any:
    """The block's results, keeping only its inputs. `within(key)`: the context in which it runs, each time."""
    values = dict(inner.named_parameters()) | dict(inner.named_buffers())
    given, form = tree_flatten((key, values, args, named))
    at = [i for i, v in enumerate(given) if isinstance(v, Tensor)]
    made: list[Any] = []

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        whole = list(given)
        for i, v in zip(at, tensors, strict=True):
            whole[i] = v
        key, values, args, named = tree_unflatten(whole, form)
        with within(key):
            out, kind = tree_flatten(functional_call(inner, values, args, named))
        which = [isinstance(v, Tensor) for v in out]
        made[:] = [kind, [None if t else v for v, t in zip(out, which, strict=True)], which]
        return tuple(v for v in out if isinstance(v, Tensor))

    tensors = (given[i] for i in at)
    found = iter((_Lifted if stacked else _Again).apply(run, *tensors))  # type: ignore[no-untyped-call]
    kind, rest, which = made
    return tree_unflatten([next(found) if t else v for v, t in zip(rest, which, strict=True)], kind)


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.save_for_backward(*tensors)
        return run(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        needed = ctx.needs_input_grad[1:]
        tensors = [v.detach().requires_grad_(n) for v, n in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            out = ctx.run(*tensors)
        pairs = [(y, g) for y, g in zip(out, grads, strict=True) if y.requires_grad]
        leaves = [v for v, n in zip(tensors, needed, strict=True) if n]
        found = iter(torch.autograd.grad([y for y, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True))
        return None, *(next(found) if n else None for n in needed)


class _Lifted(torch.autograd.Function):
    """`_Again` as vmap sees it."""

    @staticmethod
    def forward(*args: Any) -> Any:
        raise RuntimeError("a block was called on tensors without a client axis")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, run: Run, *tensors: Tensor) -> Any:
        stacked = vmap(run, in_dims[1:])
        out = _Again.apply(stacked, *tensors)  # type: ignore[no-untyped-call]
        return out, (0,) * len(out)
