"""scikit-learn's handwritten digits: 1,797 images of 8x8, ten classes, inside the package: nothing to download."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from fedselect.data.federation import ClientData, Federation, Part
from fedselect.data.partition import Indices, Pool, Sizes, SplitName
from fedselect.data.shifts import deal_for, differ, parse


def digits(
    clients: int = 10,
    split: SplitName = "classes",
    classes_per_client: int = 5,
    concentration: float = 0.5,
    *,
    train: int | None = 25,
    test: int | None = 100,
    val: int = 5,
    shift: str = "labels",
    seed: int = 0,
) -> Federation:
    """Handwritten digits, 8x8 gray, ten classes; sizes are samples per client."""
    x, y = _read()

    def pick(index: Indices) -> Part:
        at = torch.from_numpy(index)
        return x[at], y[at]

    kinds, sizes = parse(shift), Sizes(train, test, val)
    parts = deal_for(
        kinds, Pool(y.numpy()), split, clients, sizes, seed,
        classes_per_client=classes_per_client, concentration=concentration,
    )  # fmt: skip
    data = Federation(
        [ClientData(pick(p.train), pick(p.test), pick(p.val) if val else None, str(i)) for i, p in enumerate(parts)],
        classes=10,
        name="digits",
        class_names=tuple(map(str, range(10))),
    )
    return differ(data, kinds, seed)


@cache
def _read() -> tuple[Tensor, Tensor]:
    """All images and labels, cached: they are slow to parse, and a table of runs loads them often. Clients get copies."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return torch.from_numpy(pixels.astype(np.float32) / 16.0).view(-1, 1, 8, 8), torch.from_numpy(labels.astype(np.int64))
