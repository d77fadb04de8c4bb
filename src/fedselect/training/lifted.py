"""What is written for one client, for all clients at once: torch's vmap, and layers with rules of their own under it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import _add_batch_dim, _remove_batch_dim, _unwrap_batched, is_batchedtensor
from torch._functorch.predispatch import lazy_load_decompositions
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._functorch.vmap import vmap_increment_nesting

from fedselect.training import layers


def for_all(one: Callable[..., Any], clients: int, *stacked: Any) -> Any:
    """Run `one`, written for one client, for all at once: torch.func.vmap over dicts and tuples, in half its time."""
    lazy_load_decompositions()
    with vmap_increment_nesting(clients, "error") as level:
        found = one(*(_each(v, lambda t: _add_batch_dim(t, 0, level)) for v in stacked))
        return _each(found, lambda t: _remove_batch_dim(t, level, clients, 0))


def _each(value: Any, do: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return do(value)
    return {n: _each(v, do) for n, v in value.items()} if isinstance(value, dict) else tuple(_each(v, do) for v in value)


def batched(*values: Tensor | None) -> bool:
    """Whether any of these tensors has a client axis; a frozen base is shared by all clients."""
    return any(v is not None and is_batchedtensor(v) for v in values)


class Lifted:
    """A layer as vmap sees it: vmap passes the stacked tensors here, and gradients flow through `rule`.

    A custom autograd function with a vmap rule would do the same, but takes longer in torch than a small layer itself.
    """

    def __init__(self, rule: type[torch.autograd.Function]) -> None:
        self._rule = rule

    def apply(self, *args: Any) -> Tensor:
        interpreter = retrieve_current_functorch_interpreter()
        level = interpreter.level()
        parts = [_unwrap_batched(v, level) if isinstance(v, Tensor) else (v, None) for v in args]
        if all(dim is None for _, dim in parts):
            raise RuntimeError(f"{self._rule.__name__} was called on tensors without a client axis")
        clients = next(v.shape[dim] for v, dim in parts if dim is not None)

        def front(v: Any, dim: int | None) -> Any:
            if not isinstance(v, Tensor):
                return v
            return v.expand(clients, *v.shape) if dim is None else v.movedim(dim, 0)

        apply, once = self._rule.apply, set[int]()  # `once`: arguments of the frozen base, passed once for all clients
        if self._rule is layers.AdaptedLinear:
            once = {1, 2}
        elif parts[0][1] is not None and parts[1][1] is None and hasattr(self._rule, "shared") and not args[1].requires_grad:
            apply, once = self._rule.shared, {i for i, (_, dim) in enumerate(parts) if dim is None}
        with interpreter.lower():
            own = (v if i in once else front(v, dim) for i, (v, dim) in enumerate(parts))
            y: Tensor = apply(*own)  # type: ignore[no-untyped-call]
        return _add_batch_dim(y, 0, level)
