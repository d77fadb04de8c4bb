"""Images: a labeled set of images from a source, before it is partitioned among clients."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fedselect.core.errors import DataError


@dataclass(frozen=True)
class Images:
    """Images as uint8 (N, height, width, channels), possibly memory-mapped; rows are selected by number.

    `test` marks rows of an official test set (None: there is none, and each partition sets some rows aside).
    `domain` is the domain number of each row, if the set has domains.
    """

    name: str
    x: NDArray[np.uint8]
    y: NDArray[np.int64]
    class_names: tuple[str, ...]
    test: NDArray[np.bool_] | None = None
    domain: NDArray[np.int64] | None = None
    _: KW_ONLY
    domain_names: tuple[str, ...] = ()
    mean: tuple[float, ...] = field(default=())  # per channel, of pixels in [0, 1]; empty: 0.5
    std: tuple[float, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.x.ndim != 4 or self.x.dtype != np.uint8:
            raise DataError(
                f"{self.name}: images must be uint8 (N, height, width, channels), not {self.x.dtype} {self.x.shape}."
            )
        for what, rows in (("labels", self.y), ("test marks", self.test), ("domains", self.domain)):
            if rows is not None and len(rows) != len(self.x):
                raise DataError(f"{self.name}: {len(self.x)} images but {len(rows)} {what}.")
        if len(self.y) and not 0 <= int(self.y.min()) <= int(self.y.max()) < len(self.class_names):
            raise DataError(f"{self.name}: labels must lie in 0 to {len(self.class_names) - 1}.")

    def only(self, classes: Sequence[int]) -> "Images":
        """The images of these classes, renumbered in this order."""
        numbers = np.full(len(self.class_names), -1)
        numbers[list(classes)] = np.arange(len(classes))
        rows = np.flatnonzero(numbers[self.y] >= 0)
        test = None if self.test is None else self.test[rows]
        domain = None if self.domain is None else self.domain[rows]
        names = tuple(self.class_names[c] for c in classes)
        return replace(self, x=self.x[rows], y=numbers[self.y[rows]], class_names=names, test=test, domain=domain)
