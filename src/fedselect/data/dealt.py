"""Images partitioned among clients: a Federation whose images stay uint8, with one pool per part."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fedselect.data.federation import ClientData, Federation
from fedselect.data.images import Images
from fedselect.data.partition import Part, Pool

BLOCK = 256
Change = Callable[[int, NDArray[np.uint8], NDArray[np.int64]], NDArray[np.uint8]]
"""Changes a client's images: (client, images, their numbers in the set) -> images."""


def pool_of(images: Images) -> Pool:
    return Pool(images.y, images.test, images.domain, images.domain_names, images.class_names)


def federate(
    images: Images, parts: Sequence[Part], names: Sequence[str] = (), augment: str = "none", change: Change | None = None
) -> Federation:
    """Load the rows of all clients, and nothing else: one pool each for training, validation and test."""
    pools, slices = {}, {}
    for part in ("train", "val", "test"):
        rows = [getattr(p, part) for p in parts]
        height, width, channels = images.x.shape[1:]
        x = np.empty((sum(map(len, rows)), channels, height, width), dtype=np.uint8)
        at = 0
        for i, mine in enumerate(rows):
            for block in np.array_split(mine, max(1, len(mine) // BLOCK)):  # what a memory map gives is a copy: keep it small
                picked = images.x[block]
                x[at : at + len(block)] = (picked if change is None else change(i, picked, block)).transpose(0, 3, 1, 2)
                at += len(block)
        y = torch.from_numpy(np.concatenate([images.y[mine] for mine in rows]).astype(np.int64))
        pool = torch.from_numpy(x)
        ends = np.cumsum([len(mine) for mine in rows])
        pools[part] = (pool, y)
        slices[part] = [(pool[e - len(m) : e], y[e - len(m) : e]) for e, m in zip(ends, rows, strict=True)]
    clients = [
        ClientData(
            slices["train"][i],
            slices["test"][i],
            slices["val"][i] if len(parts[i].val) else None,
            names[i] if names else str(i),
        )
        for i in range(len(parts))
    ]
    return Federation(
        clients, len(images.class_names), images.name, images.class_names,
        mean=images.mean, std=images.std, augment=augment, pools=pools,
    )  # fmt: skip
