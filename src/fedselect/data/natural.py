"""Data with natural clients: people, devices or hospitals. It is not partitioned; each client has its own recordings.

A recording (one repetition of all digits, one execution of an exercise, one patient) is never divided between training,
validation and test.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedselect.core.errors import DataError, InputError
from fedselect.data import archives
from fedselect.data.federation import ClientData, Federation
from fedselect.data.federation import Part as Pair
from fedselect.data.partition import Indices, Part, Sizes, rng

TEST_SHARE = 0.25  # of a client's recordings
RECORDINGS, ROWS = 21, 22  # purposes of random numbers, see `rng`


@dataclass(frozen=True)
class Recorded:
    """Samples with their client and recording.

    `key` gives a number per client; clients with the same number divide their recordings in the same way, like the phone and
    watch of one person.
    """

    x: NDArray[Any]
    y: Indices
    client: Indices  # 0, 1, ...
    recording: Indices
    names: tuple[str, ...]  # of clients
    class_names: tuple[str, ...]
    key: tuple[int, ...] = ()

    def first(self, clients: int | None) -> "Recorded":
        """The first clients; None: all."""
        if clients is None:
            return self
        if not 1 <= clients <= len(self.names):
            raise InputError(f"clients must lie in 1 to {len(self.names)}, not {clients}.")
        rows = self.client < clients
        return replace(
            self,
            x=self.x[rows],
            y=self.y[rows],
            client=self.client[rows],
            recording=self.recording[rows],
            names=self.names[:clients],
        )


def divide(data: Recorded, sizes: Sizes, seed: int, *, later: bool = False) -> list[Part]:
    """Each client's rows to train, validate and test on.

    A quarter of a client's recordings is for testing: the last ones (`later`), or some drawn by the seed. Where `val` asks for
    samples, the next recordings give them, and what is left of the last of these is not used. A client with less than a size
    gives all it has; any beginning of its rows has the classes in the same proportions as the whole.
    """
    return [_divide(data, i, sizes, seed, later) for i in range(len(data.names))]


def _divide(data: Recorded, client: int, sizes: Sizes, seed: int, later: bool) -> Part:
    rows = np.flatnonzero(data.client == client)
    recording = data.recording[rows]
    there = np.unique(recording)
    if len(there) < 2:
        raise DataError(f"client {data.names[client]} has one recording; give it another to test on, or leave it out.")
    draw = rng(seed, RECORDINGS, data.key[client] if data.key else client)
    order = there if later else draw.permutation(there)
    aside = max(1, round(TEST_SHARE * len(order)))
    held, rest = order[-aside:], draw.permutation(order[:-aside])
    ends = np.cumsum([np.count_nonzero(recording == r) for r in rest])
    needed = int(np.searchsorted(ends, sizes.val)) + 1 if sizes.val else 0
    if needed >= len(rest):
        raise DataError(f"client {data.names[client]} has {ends[-1]} samples to train on; val={sizes.val} would leave none.")

    def pick(recordings: Indices, count: int | None, part: int) -> Indices:
        mine = rows[np.isin(recording, recordings)]
        return mine[evenly(data.y[mine], rng(seed, ROWS, client, part))][:count]

    train = None if sizes.train is None else sizes.train - sizes.val
    return Part(pick(rest[needed:], train, 0), pick(held, sizes.test, 1), pick(rest[:needed], sizes.val, 2))


def evenly(y: Indices, draw: np.random.Generator) -> Indices:
    """A random order of rows in which any beginning has the classes in the same proportions as the whole."""
    order = draw.permutation(len(y))
    place = np.empty(len(y))
    for c in np.unique(y):
        mine = np.flatnonzero(y[order] == c)
        place[mine] = (np.arange(len(mine)) + 0.5) / len(mine)
    return order[np.argsort(place, kind="stable")]


def federation(name: str, data: Recorded, parts: Sequence[Part], **how: Any) -> Federation:
    """The clients with their parts; `how` is for `Federation`."""

    def pick(rows: Indices) -> Pair:
        return torch.from_numpy(data.x[rows]), torch.from_numpy(data.y[rows])

    clients = [
        ClientData(pick(p.train), pick(p.test), pick(p.val) if len(p.val) else None, who)
        for p, who in zip(parts, data.names, strict=True)
    ]
    return Federation(clients, len(data.class_names), name, data.class_names, **how)


def arrays(path: Path, *names: str) -> list[NDArray[Any]]:
    """These arrays of a prepared .npz file, a row a sample."""
    file = archives.arrays(path)
    found = [file[n] for n in names if n in file]
    if missing := [n for n in names if n not in file]:
        raise DataError(f"{path} lacks {', '.join(missing)}; save it with {', '.join(names)}.")
    if len({len(v) for v in found}) > 1:
        raise DataError(f"{path}: {', '.join(names)} must have a row a sample, not {', '.join(str(len(v)) for v in found)}.")
    return found


def below(path: Path, name: str) -> Path:
    """The folder of this name in a folder, or the folder itself."""
    return path / name if (path / name).is_dir() else path


def data_folder(data_dir: str | None) -> Path | None:
    return None if data_dir is None else Path(data_dir).expanduser()
