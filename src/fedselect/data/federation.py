"""ClientData and Federation: checked data, client by client."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor

from fedselect.core.errors import DataError
from fedselect.core.shown import html_table
from fedselect.data import arrays
from fedselect.data.checked import are_labels, check_samples, kind_of
from fedselect.data.columns import Schema
from fedselect.data.division import Division
from fedselect.data.pooled import Pooled
from fedselect.data.several import packed
from fedselect.models.inputs import Layout
from fedselect.training.batches import Split
from fedselect.training.transforms import check_augment

Part = tuple[Any, Tensor]
"""Inputs and targets. Inputs are a tensor; where a model takes several, a dict of them by name, or a tuple."""
MOST = 20  # clients that a notebook shows


class About(TypedDict, total=False):
    """What a federation knows about its data besides the samples."""

    classes: int
    class_names: Sequence[str]
    name: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: str


@dataclass(frozen=True, eq=False, repr=False, init=False)
class ClientData:
    """One client's training data and, optionally, its test and validation data.

    Each part is a pair (inputs, targets) of NumPy arrays, tensors or lists, or a torch Dataset of such pairs; it is converted
    to tensors once. If the model takes several inputs, they are a dict or a tuple of arrays. A client without test data
    trains, but its metrics are blank.

    Examples:
        >>> import fedselect as fs
        >>> client = fs.ClientData(train=([[0.0], [1.0]], [0, 1]), name="north")
        >>> client.train[0].shape
        torch.Size([2, 1])
    """

    train: Part
    test: Part | None
    val: Part | None
    name: str | None
    shift: Mapping[str, str]  # how the client was changed: kind -> description
    schema: Schema | None  # for a table: how raw rows become inputs
    layout: Layout | None  # for several inputs packed by a Federation: which columns hold which input

    def __init__(
        self,
        train: Any,
        test: Any = None,
        val: Any = None,
        name: str | None = None,
        shift: Mapping[str, str] | None = None,
        schema: Schema | None = None,
        *,
        layout: Layout | None = None,
    ) -> None:
        who = "a client" if name is None else f"client {name}"
        given = {"train": train, "test": test, "val": val}
        for part, value in given.items():
            made = None if value is None and part != "train" else arrays.part(value, who, part)
            object.__setattr__(self, part, made)
        for field_, value in {"name": name, "shift": dict(shift or {}), "schema": schema, "layout": layout}.items():
            object.__setattr__(self, field_, value)

    def __repr__(self) -> str:
        parts = {part: data for part in ("train", "val", "test") if (data := getattr(self, part)) is not None}
        return f"ClientData({', '.join(f'{part} {len(y)}' for part, (_, y) in parts.items())}, name={self.name!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), **{part: arrays.compact(getattr(self, part)) for part in ("train", "test", "val")}}

    @property
    def validation(self) -> int:
        """The number of validation samples."""
        return 0 if self.val is None else len(self.val[1])

    @property
    def tested(self) -> int:
        """The number of test samples."""
        return 0 if self.test is None else len(self.test[1])


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """The data of all clients.

    Integer targets are class labels, one per sample or a row of them per sample (negative labels in a row are ignored), and
    `classes` is determined from them unless you give it. Other targets (floats, several that are all 0 or 1, or with more
    axes) belong to other tasks; `classes` is then 0.

    Examples:
        >>> import fedselect as fs
        >>> x, y = [[0.0], [1.0], [2.0], [3.0]], ["low", "high", "low", "high"]
        >>> data = fs.Federation.from_arrays(x, y, ["north", "north", "south", "south"], test_share=0.5, seed=0)
        >>> data.names, data.class_names
        (['north', 'south'], ('high', 'low'))
    """

    clients: Sequence[ClientData]
    classes: int = 0
    name: str = "tensors"
    class_names: tuple[str, ...] = ()
    _: KW_ONLY
    mean: tuple[float, ...] = ()  # of uint8 images, per channel, for pixels in [0, 1]; empty: 0.5
    std: tuple[float, ...] = ()
    augment: str = "none"  # augmentation of training images: none or crop-flip
    pools: dict[str, Part] = field(default_factory=dict)  # clients' parts are slices of these; ignored if they are not
    shape: tuple[int, ...] = field(init=False)
    target_shape: tuple[int, ...] = field(init=False)

    def __repr__(self) -> str:
        kind = f"{self.classes} classes" if self.classes else f"targets {self.target_shape}"
        return f"Federation({self.name!r}: {len(self.clients)} clients, {kind}, inputs {self.layout or self.shape})"

    def _repr_html_(self) -> str:
        parts = [part for part in ("train", "val", "test") if self.has(part)]
        rows = [
            [c.name or str(i), *(str(len(p[1])) if (p := getattr(c, part)) else "" for part in parts)]
            for i, c in enumerate(self.clients[:MOST])
        ]
        more = [[f"... {len(self.clients) - MOST} more", *[""] * len(parts)]] if len(self.clients) > MOST else []
        return html_table(repr(self), ["client", *parts], [*rows, *more])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "pools": {}}  # clients have their samples; pools would store them twice

    def __post_init__(self) -> None:
        if not self.clients:
            raise DataError("there are no clients; give data for at least one.")
        for client in () if isinstance(self.clients, Pooled) else self.clients:
            if not isinstance(client, ClientData):
                raise DataError(
                    f"clients must be fs.ClientData, not {type(client).__name__}; for arrays with a client for "
                    "each row, use fs.Federation.from_arrays(x, y, client)."
                )
        object.__setattr__(self, "clients", self.clients if isinstance(self.clients, Pooled) else packed(self.clients))
        first = self.clients[0].train[1]
        object.__setattr__(self, "target_shape", tuple(first.shape[1:]))
        if not self.classes and are_labels(first):
            ends = [(int(y.min()), int(y.max())) for y in self.targets() if y.numel()]
            low, high = min((e[0] for e in ends), default=0), max((e[1] for e in ends), default=0)
            yes_or_no = first.ndim == 2 and low >= 0 and high <= 1
            object.__setattr__(self, "classes", 0 if yes_or_no else max(0, high + 1))
        object.__setattr__(self, "shape", tuple(self.clients[0].train[0].shape[1:]))
        if check_augment(self.augment) != "none" and len(self.shape) != 3:
            raise DataError(
                f"augment={self.augment} is for images (channels, height, width), not inputs of shape {self.shape}."
            )
        check_samples(self)

    @classmethod
    def from_arrays(
        cls,
        x: Any,
        y: Any,
        client: Any,
        *,
        test_share: float = 0.25,
        val_share: float = 0.0,
        split: Any = None,
        seed: int = 0,
        **about: Unpack[About],
    ) -> "Federation":
        """Make one client per value of `client`, from arrays with one row per sample.

        Args:
            x: Inputs; a dict or a tuple of arrays if the model takes several.
            y: Targets. Class names are numbered alphabetically and keep their names.
            client: The client of each row.
            test_share: Share of each client's rows for testing, drawn at random; 0 for none.
            val_share: Share of each client's rows for validation, drawn at random; 0 for none.
            split: Instead of shares, an array with `train`, `val` or `test` for each row.
            seed: Decides which rows are drawn.
            about: classes, class_names, name, mean, std and augment, as in `Federation`.
        """
        from fedselect.data.given import from_arrays

        return from_arrays(x, y, client, Division(test_share, val_share, seed=seed), split, about)

    @classmethod
    def from_frame(
        cls,
        frame: Any,
        *,
        client: str,
        target: str | Sequence[str],
        drop: str | Sequence[str] = (),
        categories: str | Sequence[str] = (),
        targets: Literal["auto", "classes", "numbers"] = "auto",
        scale: Literal["federation", "client"] = "federation",
        missing: str | Sequence[str] = (),
        test_share: float = 0.25,
        val_share: float = 0.0,
        time: str | None = None,
        group: str | None = None,
        split_column: str | None = None,
        seed: int = 0,
        name: str = "table",
    ) -> "Federation":
        """Make clients from a pandas DataFrame, a pyarrow Table or a dict of columns, as `--data table:` does.

        Args:
            frame: The table.
            client: The column with the client of each row.
            target: The column to predict, or several.
            drop: Columns to leave out.
            categories: Columns to treat as categories although they contain numbers.
            targets: Whether targets are classes or numbers.
            scale: Standardize numbers with the means of all clients, or of each client.
            missing: Further values that mean "missing".
            test_share: Share of each client's rows for testing.
            val_share: Share of each client's rows for validation.
            time: Column of dates or numbers; each client's last rows are for testing.
            group: Column whose values are never divided between parts.
            split_column: Column with `train`, `val` or `test`.
            seed: Decides which rows are drawn.
            name: The name of the data set.
        """
        from fedselect.data.given import from_frame
        from fedselect.data.tables import Columns, words

        what = Columns(words(target), words(drop), words(categories), targets, scale, words(missing))
        return from_frame(frame, client, what, Division(test_share, val_share, time, group, split_column, seed), name)

    @classmethod
    def from_datasets(cls, train: Any, *, test: Any = None, val: Any = None, **about: Unpack[About]) -> "Federation":
        """Make one client per torch Dataset of (input, target). Samples are read into memory once.

        For images from Hugging Face's `datasets`, use `fs.from_datasets`.

        Args:
            train: A list of Datasets, or a dict of them by client name.
            test: The same for test data; in a dict, clients may be missing.
            val: The same for validation data.
            about: As in `from_arrays`.
        """
        from fedselect.data.given import from_datasets

        return from_datasets(train, test, val, about)

    @property
    def whole(self) -> bool:
        """Whether inputs are integers, as for an embedding."""
        return kind_of(self.clients[0].train[0]) == "integers"

    @property
    def layout(self) -> Layout | None:
        """For several inputs: which columns of a client's tensor hold which input."""
        return self.clients[0].layout

    def targets(self) -> Iterator[Tensor]:
        """All clients' training and test targets."""
        if isinstance(self.clients, Pooled):
            yield from (self.clients.targets(part) for part in ("train", "test"))
            return
        yield from (y for c in self.clients for _, y in (c.train, *([] if c.test is None else [c.test])))

    def has(self, part: str) -> bool:
        """Whether any client has samples of this part: train, val or test."""
        if isinstance(self.clients, Pooled):
            return part in self.clients.parts
        return any(getattr(c, part) is not None for c in self.clients)

    def samples(self, part: str) -> list[int | None]:
        """How many samples of this part each client has."""
        if isinstance(self.clients, Pooled):
            return list(self.clients.rows(part).n.tolist())
        return [0 if (pair := getattr(c, part)) is None else len(pair[1]) for c in self.clients]

    @property
    def schemas(self) -> list[Schema | None]:
        """How raw rows become inputs, by client; None for clients that have no table."""
        return [None] * len(self.clients) if isinstance(self.clients, Pooled) else [c.schema for c in self.clients]

    @property
    def names(self) -> list[str]:
        """The clients' names, or their numbers if they have none."""
        if isinstance(self.clients, Pooled):
            return list(map(str, self.clients.names.tolist()))
        return [c.name or str(i) for i, c in enumerate(self.clients)]

    def labels(self, client: int) -> list[int]:
        """The classes in a client's training data, if every sample has one class."""
        return sorted(set(self.clients[client].train[1].tolist())) if self.classes and not self.target_shape else []

    def on_validation(self) -> "Federation":
        """The same clients with their validation data as test data; the real test data is left out."""
        if isinstance(self.clients, Pooled) and bool((self.clients.rows("val").n > 0).all()):
            return replace(self, clients=self.clients.on_validation())
        for i, client in enumerate(self.clients):
            if client.val is None:
                raise DataError(
                    f"client {client.name or i} has no validation data; hold some out with val (--val 20), "
                    "for a table with val_share (--val-share 0.2), in Python with fs.ClientData(val=...)."
                )
        pools = {**self.pools, "test": self.pools["val"]} if "val" in self.pools else {}
        return replace(self, clients=[replace(c, test=c.val) for c in self.clients if c.val is not None], pools=pools)

    def split(self, part: str, dtype: torch.dtype) -> Split:
        """All clients' samples of one part (train, val or test) in one pool; images stay uint8."""
        if isinstance(self.clients, Pooled):
            rows = self.clients.rows(part)
            return self._as_inputs(Split(self.clients.x, self.clients.y, rows.start, rows.n, index=rows.index), part, dtype)
        x0, y0 = self.clients[0].train
        pairs = [getattr(c, part) or (x0[:0], y0[:0]) for c in self.clients]
        n = torch.tensor([len(y) for _, y in pairs])
        if part in self.pools and _lie_in(self.pools[part], pairs):
            x, y = self.pools[part]
        else:
            x, y = torch.cat([x.detach() for x, _ in pairs]), torch.cat([y for _, y in pairs])
        start = (n.cumsum(0) - n).clamp_max(max(0, len(x) - 1))  # also of who has none, as all are read side by side
        return self._as_inputs(Split(x, y, start, n), part, dtype)

    def _as_inputs(self, pool: Split, part: str, dtype: torch.dtype) -> Split:
        """A pool of samples in the types that models and tasks get."""
        x, y = pool.x, pool.y
        pool = replace(pool, y=y.to(dtype if y.is_floating_point() else torch.int64))
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
    """Whether the clients' samples are exactly the rows of the pool, one client after another."""
    at = 0
    for pair in pairs:
        n = len(pair[1])
        if n and not all(_same(whole[at : at + n], mine) for whole, mine in zip(pool, pair, strict=True)):
            return False
        at += n
    return at == len(pool[1])


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same view of the same memory."""
    return (a.data_ptr(), a.device, a.dtype, a.shape, a.stride()) == (b.data_ptr(), b.device, b.dtype, b.shape, b.stride())
