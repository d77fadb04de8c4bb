"""ClientData and Federation: checked data, client by client."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedselect.core.errors import DataError
from fedselect.data.columns import Schema
from fedselect.data.several import packed
from fedselect.models.inputs import Layout, are_several
from fedselect.training.batches import Split
from fedselect.training.transforms import check_augment

Part = tuple[Any, Tensor]
"""Inputs and targets. Inputs are a tensor; where a model takes several, a dict of them by name, or a tuple."""


@dataclass(frozen=True, eq=False, repr=False)
class ClientData:
    """One client's samples: (inputs, targets) to train on, to test on, and optionally to validate on."""

    train: Part
    test: Part
    val: Part | None = None
    name: str | None = None
    shift: Mapping[str, str] = field(default_factory=dict)  # how it was made to differ: kind -> in words
    schema: Schema | None = None  # of a table: how raw rows become inputs
    layout: Layout | None = None  # of several inputs, once a Federation has packed them: which columns are which

    def __repr__(self) -> str:
        parts = {part: data for part in ("train", "val", "test") if (data := getattr(self, part)) is not None}
        return f"ClientData({', '.join(f'{part} {len(y)}' for part, (_, y) in parts.items())}, name={self.name!r})"


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """The data of all clients.

    Targets that are whole numbers are labels, one a sample or several in a row, and `classes` is found from them when it is
    not given; in a row, those below 0 are none. Targets of another kind (floats, several of 0 and 1 alone, more than a row)
    are for other tasks; then there are 0 classes.
    """

    clients: Sequence[ClientData]
    classes: int = 0
    name: str = "tensors"
    class_names: tuple[str, ...] = ()
    _: KW_ONLY
    mean: tuple[float, ...] = ()  # of uint8 pictures, by channel, as pixels in [0, 1]; not given: 0.5
    std: tuple[float, ...] = ()
    augment: str = "none"  # of training pictures: none or crop-flip
    pools: dict[str, Part] = field(default_factory=dict)  # clients' parts as slices of these; no longer used where they are not
    shape: tuple[int, ...] = field(init=False)
    target_shape: tuple[int, ...] = field(init=False)

    def __repr__(self) -> str:
        kind = f"{self.classes} classes" if self.classes else f"targets {self.target_shape}"
        return f"Federation({self.name!r}: {len(self.clients)} clients, {kind}, inputs {self.layout or self.shape})"

    def __post_init__(self) -> None:
        if not self.clients:
            raise DataError("there are no clients; give data for at least one.")
        for i, client in enumerate(self.clients):
            for part in ("train", "test", *(() if client.val is None else ("val",))):
                pair: Any = getattr(client, part)
                if not isinstance(pair, tuple | list) or len(pair) != 2:
                    raise DataError(f"client {client.name or i}: {part} must be a pair of tensors, (inputs, labels).")
                if not all(isinstance(v, Tensor) for v in (pair[1], *(() if are_several(pair[0]) else pair[:1]))):
                    raise DataError(f"client {client.name or i} must hold tensors; turn arrays into them with torch.as_tensor.")
        object.__setattr__(self, "clients", packed(self.clients))
        first = self.clients[0].train[1]
        object.__setattr__(self, "target_shape", tuple(first.shape[1:]))
        if not self.classes and _are_labels(first):
            ends = [(int(y.min()), int(y.max())) for y in self.targets() if y.numel()]
            low, high = min((e[0] for e in ends), default=0), max((e[1] for e in ends), default=0)
            yes_or_no = first.ndim == 2 and low >= 0 and high <= 1
            object.__setattr__(self, "classes", 0 if yes_or_no else max(0, high + 1))
        object.__setattr__(self, "shape", tuple(self.clients[0].train[0].shape[1:]))
        if check_augment(self.augment) != "none" and len(self.shape) != 3:
            raise DataError(
                f"augment={self.augment} is for pictures (channels, height, width), not inputs of shape {self.shape}."
            )
        for i, client in enumerate(self.clients):
            for part, pair in (("training", client.train), ("test", client.test), ("validation", client.val)):
                if pair is not None:
                    self._check(f"client {client.name or i}", part, *pair)

    @property
    def whole(self) -> bool:
        """Whether inputs are whole numbers, as for an embedding."""
        return _kind(self.clients[0].train[0]) == "integers"

    @property
    def layout(self) -> Layout | None:
        """Of several inputs: which columns of a client's one tensor are which."""
        return self.clients[0].layout

    def targets(self) -> Iterator[Tensor]:
        """All clients' targets, to train and to test on."""
        yield from (y for client in self.clients for _, y in (client.train, client.test))

    def _check(self, who: str, part: str, x: Tensor, y: Tensor) -> None:
        if len(x) != len(y):
            raise DataError(f"{who} has {len(x)} {part} inputs but {len(y)} labels.")
        if len(x) == 0:
            raise DataError(f"{who} has no {part} data; leave it out or give it some.")
        home = self.clients[0].train[0].device
        if x.device != home or y.device != home:
            raise DataError(
                f"{who} has {part} data on {x.device} and {y.device}; put all of it on {home}, as the first client's."
            )
        if tuple(x.shape[1:]) != self.shape:
            raise DataError(f"{who} has {part} inputs of shape {tuple(x.shape[1:])}; the first client has {self.shape}.")
        kind, first = _kind(x), _kind(self.clients[0].train[0])
        if kind is None:
            raise DataError(
                f"{who} has {part} inputs of type {x.dtype}; give floats, pictures as uint8 (N, channels, H, W), or int64 "
                "for an embedding."
            )
        self._check_targets(who, part, y)
        if kind != first:
            raise DataError(
                f"{who} has {part} inputs of type {x.dtype}; the first client trains on {self.clients[0].train[0].dtype}."
            )
        if x.is_floating_point() and not bool(torch.isfinite(x).all()):
            row = int((~torch.isfinite(x.flatten(1)).all(1)).nonzero()[0])
            raise DataError(f"{who} has NaN or Inf in its {part} inputs, first in sample {row}; mend or drop it.")

    def _check_targets(self, who: str, part: str, y: Tensor) -> None:
        if self.classes and not _are_labels(y):
            raise DataError(
                f"{who} has {part} labels of type {y.dtype} and shape {tuple(y.shape)}; give a vector of whole numbers, or a "
                "row of them for each sample."
            )
        like = self.clients[0].train[1]
        if tuple(y.shape[1:]) != self.target_shape or y.is_floating_point() != like.is_floating_point():
            raise DataError(
                f"{who} has {part} targets of type {y.dtype} and shape {tuple(y.shape[1:])}; the first client trains on "
                f"{like.dtype} and {self.target_shape}."
            )
        if y.is_floating_point() and not bool(torch.isfinite(y).all()):
            row = int((~torch.isfinite(y.view(len(y), -1)).all(1)).nonzero()[0])
            raise DataError(f"{who} has NaN or Inf in its {part} targets, first in sample {row}; mend or drop it.")
        if not self.classes:
            return
        low = 0 if self.target_shape else int(y.min())  # in a row, labels below 0 are none
        if low < 0 or int(y.max()) >= self.classes:
            bad = low if low < 0 else int(y.max())
            raise DataError(f"{who} has the {part} label {bad}; labels must lie in 0 to {self.classes - 1}.")

    def labels(self, client: int) -> list[int]:
        """The classes a client has in its training data, where every sample is of one."""
        return sorted(set(self.clients[client].train[1].tolist())) if self.classes and not self.target_shape else []

    def on_validation(self) -> "Federation":
        """The same clients, scored on their validation samples: the test samples are not in it."""
        for i, client in enumerate(self.clients):
            if client.val is None:
                raise DataError(
                    f"client {client.name or i} has no validation data to be scored on; hold some out with val, of a table "
                    "with val_share."
                )
        pools = {**self.pools, "test": self.pools["val"]} if "val" in self.pools else {}
        return replace(self, clients=[replace(c, test=c.val) for c in self.clients if c.val is not None], pools=pools)

    def split(self, part: str, dtype: torch.dtype) -> Split:
        """All clients' samples of one part (train, val or test) in one pool; pictures stay as they are."""
        x0, y0 = self.clients[0].train
        pairs = [getattr(c, part) or (x0[:0], y0[:0]) for c in self.clients]
        n = torch.tensor([len(y) for _, y in pairs])
        if part in self.pools and _lie_in(self.pools[part], pairs):
            x, y = self.pools[part]
        else:
            x, y = torch.cat([x.detach() for x, _ in pairs]), torch.cat([y for _, y in pairs])
        pool = Split(x, y.to(dtype if y.is_floating_point() else torch.int64), n.cumsum(0) - n, n)
        if x.dtype != torch.uint8:
            kind = dtype if x.is_floating_point() else torch.int64
            if self.layout is not None and self.layout.mixed:
                kind = torch.promote_types(kind, torch.float32)  # in which its whole numbers are exact
            return replace(pool, x=x.to(kind), augment=self.augment if part == "train" else "none")
        channels = self.shape[0]
        mean = torch.tensor(self.mean or (0.5,) * channels, dtype=dtype).view(-1, 1, 1)
        std = torch.tensor(self.std or (0.5,) * channels, dtype=dtype).view(-1, 1, 1)
        return replace(pool, scale=1 / (255 * std), shift=-mean / std, augment=self.augment if part == "train" else "none")


def _lie_in(pool: Part, pairs: Sequence[Part]) -> bool:
    """Whether clients' samples are the pool's, one client after the other from its first row to its last."""
    at = 0
    for pair in pairs:
        n = len(pair[1])
        if n and not all(_same(whole[at : at + n], mine) for whole, mine in zip(pool, pair, strict=True)):
            return False
        at += n
    return at == len(pool[1])


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one piece of memory, seen alike."""
    return (a.data_ptr(), a.device, a.dtype, a.shape, a.stride()) == (b.data_ptr(), b.device, b.dtype, b.shape, b.stride())


def _are_labels(y: Tensor) -> bool:
    return not y.is_floating_point() and (y.ndim == 1 or (y.ndim == 2 and y.shape[1] > 1))


def _kind(x: Tensor) -> str | None:
    """What a model is given: numbers in its own type, pictures, or whole numbers as they are."""
    if x.is_floating_point():
        return "floats"
    if x.dtype == torch.uint8 and x.ndim == 4:
        return "pictures"
    return "integers" if x.dtype in (torch.int16, torch.int32, torch.int64) else None
