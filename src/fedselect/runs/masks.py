"""masks.jsonl: small statistics of the masks during training, enough to draw them later.

The file has a line for each evaluated round in which the masks changed. "share" is the personal share of every layer, one
number per client. "iou", the overlap of each pair of clients (intersection over union of their personal parameters), is
recorded in the last round and in ever rarer rounds (1, 2, 3, 4, 6, 10, 16, ...), for all parameters together and then for
every layer, as the upper triangle of the matrix row by row. Numbers are uint16 in base64, in units of 1/10000; 65535 means
undefined (a client has not joined, or both clients have no personal parameters).

federation.json lists the clients with their classes, and the layers in the model's order.
"""

import base64
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedselect.core import sums
from fedselect.core.errors import RunError
from fedselect.core.files import write_bytes
from fedselect.core.tree import Mask, counts, rows
from fedselect.simulate import Simulation

PAIRED = 50  # record overlap among this many clients at most: its size is quadratic
NONE = 65535
COLUMNS = 1 << 22  # entries counted at once, few enough for exact counts in float32


class MaskLog:
    """Appends statistics of a simulation's masks to masks.jsonl whenever they changed."""

    def __init__(self, out: Path, rounds: int, simulation: Simulation) -> None:
        """Open the file and drop lines of rounds after the simulation's, since those rounds run again."""
        self.path, self.rounds, self.simulation = out / "masks.jsonl", rounds, simulation
        kept = [line for line in read_lines(self.path) if line["round"] <= simulation.round]
        write_bytes(self.path, "".join(map(sums.to_line, kept)).encode())
        self._last = kept[-1]["share"] if kept else None

    def add(self) -> None:
        """Call after an evaluated round."""
        s = self.simulation
        mask = s.method.mask(s.model, s.store.dump())
        share = pack(shares(mask, s))
        pairs = overlap(mask, s) if self._due(s.round) and any(isinstance(m, Tensor) for m in mask.values()) else None
        if share == self._last and pairs is None:
            return
        line: dict[str, Any] = {"round": s.round, "share": share}
        if pairs is not None:
            line["iou"] = pack(pairs)
        with self.path.open("a") as f:
            f.write(sums.to_line(line))
        self._last = share

    def sync(self) -> None:
        """Call before a checkpoint, which must never be ahead of this file."""
        with self.path.open("rb") as f:
            os.fsync(f.fileno())

    def _due(self, done: int) -> bool:
        """Whether a round is the first one evaluated at or after 10^(k/5) for some k, or the last."""
        before = done - self.simulation.eval_every
        return done == self.rounds or _fifth(done) > (_fifth(before) if before > 0 else -1)


def federation(s: Simulation) -> dict[str, Any]:
    """The clients and layers of a federation. The same for every run on the same data and model."""
    names = s.data.class_names
    return {
        "clients": [
            {
                "name": client.name or str(i),
                "classes": [names[c] if c < len(names) else str(c) for c in s.data.labels(i)],
                "train": len(client.train[1]),
                "test": client.tested,
            }
            for i, client in enumerate(s.data.clients)
        ],
        "layers": {n: s.initial[n].numel() for n in s.model.params},
    }


def shares(mask: Mask, s: Simulation) -> Tensor:
    """The personal share of each layer: (layers, clients), NaN for a client that has not joined."""
    partly = {n: m for n in s.model.params if isinstance(m := mask.get(n, False), Tensor)}
    found = dict(zip(partly, counts(partly).T.double().cpu(), strict=True)) if partly else {}
    whole = torch.ones(s.clients, dtype=torch.float64)
    out = torch.stack([found[n] / s.initial[n].numel() if n in found else whole * bool(mask.get(n)) for n in s.model.params])
    out[:, ~s.store.joined] = math.nan
    return out


def overlap(mask: Mask, s: Simulation) -> Tensor:
    """Overlap of the personal parameters of each pair of clients: (1 + layers, pairs), all parameters together first."""
    first = min(s.clients, PAIRED)
    both = torch.zeros(len(s.model.params), first, first, dtype=torch.float64, device=s.device)
    for at, n in enumerate(s.model.params):
        m = mask.get(n, False)
        if isinstance(m, Tensor):
            for part in torch.split(rows(m[:first]), COLUMNS, 1):
                ones = part.to(s.device, torch.float32)
                both[at] += ones @ ones.T  # sums of ones: exact in any order and precision
        else:
            both[at] = s.initial[n].numel() * float(m)
    both = torch.cat([both.sum(0, keepdim=True), both]).cpu()
    size = both.diagonal(dim1=1, dim2=2)
    iou = both / (size.unsqueeze(2) + size.unsqueeze(1) - both)  # 0 / 0 is NaN: both have no personal parameters
    away = ~s.store.joined[:first]
    iou[:, away] = math.nan
    iou[:, :, away] = math.nan
    i, j = torch.triu_indices(first, first, 1)
    return iou[:, i, j]


def pack(values: Tensor) -> str:
    whole = torch.where(values.isnan(), NONE, (values * 10_000).round()).to(torch.int32).numpy()
    return base64.b64encode(whole.astype("<u2").tobytes()).decode()


def unpack(text: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    whole = np.frombuffer(base64.b64decode(text, validate=True), "<u2")
    return np.where(whole == NONE, np.nan, whole / 10_000.0)


def _fifth(done: int) -> int:
    """The largest k with round(10^(k/5)) <= done."""
    k = 0
    while round(10 ** ((k + 1) / 5)) <= done:
        k += 1
    return k


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a masks file, without an incomplete last line."""
    lines = sums.lines(path.read_bytes() if path.exists() else b"")
    try:
        return [_checked(sums.from_line(line)) for line in lines]
    except ValueError as e:
        raise RunError(f"{path} is damaged ({e}); start again with --overwrite.") from None


def _checked(line: Any) -> dict[str, Any]:
    """Check that a line can be drawn."""
    if not isinstance(line, dict) or not isinstance(line.get("round"), int) or "share" not in line:
        raise ValueError("a line lacks its round or its shares")
    for name in ("share", "iou"):
        unpack(line.get(name, ""))
    return line
