"""Layout: several inputs of a module packed as columns of one tensor, and unpacked when the module is called.

So everything in between, from batches to GPU kernels, handles one tensor of inputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fedselect.core.errors import DataError

EXACT = 1 << 24
"""Integers below this are exact in float32."""
_WHOLE = (torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Field:
    """One input: its name or position, the shape of one sample, and whether it holds floats, integers or bools."""

    name: str
    shape: tuple[int, ...]
    kind: str

    @property
    def width(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Layout:
    """Which columns hold which input. Named inputs are passed by name, those of a tuple by position."""

    fields: tuple[Field, ...]
    named: bool

    def __str__(self) -> str:
        return ", ".join(f"{f.name} {f.shape}" for f in self.fields)

    @classmethod
    def of(cls, inputs: Any, who: str) -> "Layout":
        """The layout of these inputs."""
        found = _by_name(inputs)
        if not found:
            what = f"an empty {type(inputs).__name__}" if are_several(inputs) else "one tensor, and those of others are several"
            raise DataError(f"{who} are {what}; give all clients a dict or a tuple of tensors.")
        for name, v in found.items():
            if not isinstance(name, str):
                raise DataError(f"{who} have the name {name!r}; use the argument names of the model's forward.")
            _check_part(v, f"{who}, {name}:")
        return cls(tuple(Field(n, tuple(v.shape[1:]), _kind(v)) for n, v in found.items()), isinstance(inputs, Mapping))

    @property
    def mixed(self) -> bool:
        """Whether there are both integers and floats."""
        return len({f.kind == "floats" for f in self.fields}) > 1

    @property
    def width(self) -> int:
        return sum(f.width for f in self.fields)

    def pack(self, inputs: Any, who: str = "the inputs") -> Tensor:
        """Inputs as one tensor (N, columns): int64 if all are integers, else floats."""
        found = _by_name(inputs)
        if isinstance(inputs, Mapping) != self.named or found.keys() != {f.name for f in self.fields}:
            raise DataError(f"{who} are {_said(inputs)}; the first client trains on {self._said()}.")
        parts = [self._checked(f, found[f.name], f"{who}, {f.name}:") for f in self.fields]
        for f, v in zip(self.fields, parts, strict=True):
            if len(v) != len(parts[0]):
                raise DataError(f"{who} have {len(parts[0])} rows of {self.fields[0].name} but {len(v)} of {f.name}.")
            if v.device != parts[0].device:
                raise DataError(f"{who} are on {parts[0].device} and {v.device}; move all of them to one device.")
            if self.mixed and f.kind == "integers" and v.numel() and int(v.abs().max()) >= EXACT:
                raise DataError(
                    f"{who}, {f.name}: integers beside floats must be smaller than {EXACT} (2**24), not "
                    f"{int(v.abs().max())}; number them from 0, or give them as floats."
                )
        floats = [v.dtype for v in parts if v.is_floating_point()]
        kind = torch.int64
        for dtype in floats:
            kind = torch.promote_types(dtype, torch.float32 if kind == torch.int64 else kind)
        return torch.cat([v.detach().reshape(len(v), f.width).to(kind) for f, v in zip(self.fields, parts, strict=True)], 1)

    def parts(self, x: Tensor, floats: torch.dtype | None = None) -> list[Tensor]:
        """The inputs in order, each with its type; `floats`: the type of floating-point inputs."""
        ends = accumulate(f.width for f in self.fields)
        found = [x[:, end - f.width : end].reshape(len(x), *f.shape) for f, end in zip(self.fields, ends, strict=True)]
        kinds = {"floats": floats or x.dtype, "integers": torch.int64, "bools": torch.bool}
        return [v.to(kinds[f.kind]) for f, v in zip(self.fields, found, strict=True)]

    def unpack(self, x: Tensor, floats: torch.dtype | None = None) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """The arguments of the module, by position and by name."""
        parts = self.parts(x, floats)
        return ((), dict(zip(self.names, parts, strict=True))) if self.named else (tuple(parts), {})

    @property
    def names(self) -> list[str]:
        return [f.name for f in self.fields]

    def example(self, rows: int) -> Tensor:
        """Made-up inputs, packed: floats from -1 to 1, integers 0, and masks that mask nothing."""
        kinds = {"floats": torch.float32, "integers": torch.int64, "bools": torch.bool}

        def part(f: Field) -> Tensor:
            if f.kind == "floats":
                return torch.linspace(-1.0, 1.0, rows * max(1, f.width)).view(rows, *f.shape)
            return torch.full((rows, *f.shape), int(f.kind == "bools" or "mask" in f.name), dtype=kinds[f.kind])

        parts = {f.name: part(f) for f in self.fields}
        return self.pack(parts if self.named else tuple(parts.values()))

    def to_json(self) -> dict[str, Any]:
        return {"named": self.named, "fields": [[f.name, list(f.shape), f.kind] for f in self.fields]}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> "Layout":
        return cls(
            tuple(Field(str(n), tuple(map(int, shape)), str(kind)) for n, shape, kind in said["fields"]), bool(said["named"])
        )

    def _checked(self, field: Field, v: Any, who: str) -> Tensor:
        _check_part(v, who)
        if tuple(v.shape[1:]) != field.shape or _kind(v) != field.kind:
            raise DataError(
                f"{who} samples are {_kind(v)} of shape {tuple(v.shape[1:])}; the first client trains on {field.kind} of shape "
                f"{field.shape}, so give the same."
            )
        return v  # type: ignore[no-any-return]

    def _said(self) -> str:
        return f"a dict of {', '.join(self.names)}" if self.named else f"a tuple of {len(self.fields)}"


def are_several(inputs: Any) -> bool:
    """Whether there are several inputs, a dict or a tuple; a list is one input with a row per sample."""
    return isinstance(inputs, Mapping | tuple)


def each(inputs: Any, do: Callable[[Any, str], Any]) -> Any:
    """Apply `do` to every input and its name, keeping the dict or tuple; a single input has the name ""."""
    if not are_several(inputs):
        return do(inputs, "")
    made = {name: do(v, str(name)) for name, v in _by_name(inputs).items()}
    return made if isinstance(inputs, Mapping) else tuple(made.values())


def _by_name(inputs: Any) -> dict[Any, Any]:
    if isinstance(inputs, Mapping):
        return dict(inputs)
    return {f"input_{i}": v for i, v in enumerate(inputs)} if isinstance(inputs, tuple) else {}


def _said(inputs: Any) -> str:
    if isinstance(inputs, Mapping):
        return f"a dict of {', '.join(map(str, inputs))}"
    return f"a tuple of {len(inputs)}" if isinstance(inputs, tuple) else f"a {type(inputs).__name__}"


def _check_part(v: Any, who: str) -> None:
    if not isinstance(v, Tensor):
        raise DataError(f"{who} give a tensor, not a {type(v).__name__}; convert arrays with torch.as_tensor.")
    if v.ndim == 0:
        raise DataError(f"{who} give one row per sample, not a single number.")
    if not (v.is_floating_point() or v.dtype in (*_WHOLE, torch.bool)):
        raise DataError(
            f"{who} give floats, int64 or bools, not {v.dtype}; uint8 images are scaled only if they are the single input."
        )


def _kind(v: Tensor) -> str:
    return "floats" if v.is_floating_point() else "bools" if v.dtype == torch.bool else "integers"
