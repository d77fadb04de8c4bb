"""What follows a BatchNorm: a ReLU, or a sum and a ReLU as at the end of a residual block. Its kernels can do both.

`Endings` watches one step and learns which BatchNorms are used only in this way; later steps then do it in the kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Union

import torch
import torch.nn.functional as F
from torch import Tensor

RELUS_IN_PLACE = {F.relu_, torch.relu_, Tensor.relu_}
RELUS = {F.relu, torch.relu, Tensor.relu, *RELUS_IN_PLACE}
SUMS = {torch.add, Tensor.add, Tensor.add_}
_LOOKS = {"shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_leaf", "grad_fn"}
Make = Callable[[bool, Tensor | None], Tensor]
"""Runs a BatchNorm: whether with a ReLU, and with which tensor added before it."""


@dataclass(eq=False)
class _Followed:
    """The output of a BatchNorm, or of a sum with it; `value` is None once a ReLU has changed it in place."""

    value: Tensor | None
    done: Literal["", "relu", "sum"] = ""  # what the BatchNorm's kernels do in place of the model
    make: Make | None = None
    uses: list[Union[str, "_Followed"]] = field(default_factory=list)


class Endings:
    """Follows the BatchNorms of a model while it runs. They are identified by number.

    `rectified` and `joined` hold those that are followed by a ReLU, or by a sum and a ReLU, and are used in no other way.
    """

    def __init__(self) -> None:
        self.watching = False
        self.rectified: frozenset[int] = frozenset()
        self.joined: frozenset[int] = frozenset()
        self._norms: list[_Followed] = []
        self._sums: list[_Followed] = []

    def found(self) -> tuple[frozenset[int], frozenset[int]]:
        """Candidates for `rectified` and `joined`. Of two BatchNorms in one sum the first is joined."""
        rectified, joined, taken = set(), set(), set()
        for number, norm in enumerate(self._norms):
            use = norm.uses[0] if len(norm.uses) == 1 else ""
            if use == "relu":
                rectified.add(number)
            elif isinstance(use, _Followed) and use.uses == ["relu"] and id(use) not in taken:
                joined.add(number)
                taken.add(id(use))
        return frozenset(rectified), frozenset(joined)

    def norm(self, x: Tensor, make: Make) -> Tensor:
        """The result of the next BatchNorm, in the shape of its input. A joined one runs when its sum is computed; until then
        another tensor stands in for it."""
        number = len(self._norms)
        y = x.view_as(x) if number in self.joined else make(number in self.rectified, None)
        if self.watching or self.rectified or self.joined:
            done: Any = "relu" if number in self.rectified else "sum" if number in self.joined else ""
            self._norms.append(_Followed(y, done, make if done == "sum" else None))
        return y

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Look at an operation of the model: returns its result if it is done here, else None."""
        if not self._norms or looks(func):
            return None
        first = self._find(args[0]) if args else None
        if func in RELUS and first is not None and first.done != "sum":
            in_place = func in RELUS_IN_PLACE or bool(kwargs.get("inplace"))
            if in_place:
                first.value = None  # from now on it is the ReLU's output
            if first.done == "relu":
                return args[0] if in_place else args[0].view_as(args[0])  # type: ignore[no-any-return]
            first.uses.append("relu")
            return None
        if func in SUMS and not kwargs and len(args) == 2 and _alike(*args):
            in_place = func is Tensor.add_  # the changed tensor may be used elsewhere, unseen, unless it is the BatchNorm's own
            pair = [f for f in (first, None if in_place else self._find(args[1])) if f is not None]
            if pair and all(f.make or not f.done for f in pair):
                self.follow(args[1:] if in_place else ())
                return self._sum(func, args, pair)
        self.follow((*args, *kwargs.values()))
        return None

    def follow(self, values: tuple[Any, ...]) -> None:
        """Note that these tensors are used in some other way."""
        for value in values:
            for v in value if isinstance(value, list | tuple) else (value,):
                if (found := self._find(v)) is None:
                    continue
                if found.done:
                    raise RuntimeError("a BatchNorm is used in another way than before")
                found.uses.append("other")

    def _sum(self, func: Callable[..., Any], args: tuple[Any, ...], pair: list[_Followed]) -> Tensor:
        norm = next((f for f in pair if f.make), None)
        value: Tensor
        if norm is not None and norm.make is not None:
            make, norm.make = norm.make, None
            value = make(True, args[1] if args[0] is norm.value else args[0])
        else:
            value = func(*args)
            if value is args[0]:  # in place: distinguish it from its earlier value, which a model may still use
                value = value.view_as(value)
        end = _Followed(value, "" if norm is None else "relu")
        for f in pair:
            f.uses.append(end)
        self._sums.append(end)
        return value

    def _find(self, v: Any) -> _Followed | None:
        return next((f for f in (*self._norms, *self._sums) if f.value is v and v is not None), None)


def looks(func: Callable[..., Any]) -> bool:
    """Whether a function only looks at a tensor's form, not at its values."""
    return getattr(getattr(func, "__self__", None), "__name__", "") in _LOOKS


def _alike(a: Any, b: Any) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype
