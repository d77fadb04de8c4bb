"""AudioMNIST for benchmarks/adapters.py: a small vision transformer trained on twenty speakers, and others who federate."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

import fedselect as fs
from fedselect.core import tensors
from fedselect.data.audiomnist import MEAN, STD, read
from fedselect.data.natural import Recorded, divide, federation
from fedselect.data.partition import Sizes, deal_classes, rng
from fedselect.data.shifts import MOTLEY, differ, parse
from fedselect.models.vit import build_vit
from fedselect.models.weights import fitting, read_tensors

BASE = 20  # speakers that the base is trained on: the first
CLIENTS = 10
FEW = 3  # classes of a client whose classes are few
VIT = (1, [4, 4], 8, [48, 3, 3], 10, [0.0, 0.0])  # channels, patches, their side; width, blocks, heads; classes; dropout


def network(weights: Path | None = None) -> fs.Model:
    """The transformer; with weights it starts from these, with a new head."""
    start = {} if weights is None else fitting(read_tensors(weights), build_vit(*VIT), "head", weights)
    return fs.Model(partial(build_vit, *VIT, start=start), head="head", name="vit")


@cache
def recordings(folder: Path) -> Recorded:
    return read(folder)


def make_base(folder: Path, weights: Path, epochs: int = 12) -> float:
    """Train on all recordings of the first speakers and write the weights; how many the others' recordings it gets right, in %.

    Of the others, those that clients are tested on are left out.
    """
    data = recordings(folder)
    mine = data.client < BASE
    later = data.recording >= np.quantile(data.recording, 0.75)
    pairs = [(torch.from_numpy(data.x[rows]), torch.from_numpy(data.y[rows])) for rows in (mine, ~mine & ~later)]
    one = fs.Federation([fs.ClientData(*pairs)], 10, "audiomnist", mean=MEAN, std=STD)
    training = fs.Training(batch_size=64, optimizer="adamw", weight_decay=0.05, schedule="cosine")
    result = fs.run(
        fs.Local(epochs=1, lr=2e-3), model=network(), data=one, rounds=epochs, seed=0, training=training, eval_every=epochs
    )
    weights.write_bytes(tensors.to_bytes(result.personal(0)))
    return 100 * result.accuracy


def speakers(folder: Path, shift: str, sizes: Sizes, seed: int) -> fs.Federation:
    """Ten of the other speakers, drawn by the seed, that differ by nature and by this kind of shift.

    Tests are on a speaker's last repetitions. With `labels` each has few classes, as in `motley` the last ones have.
    """
    data = recordings(folder)
    who = np.sort(rng(seed, 0).choice(np.arange(BASE, len(data.names)), CLIENTS, replace=False))
    first = {"labels": 0, "motley": MOTLEY["camera"] * CLIENTS // 10}.get(shift, CLIENTS)
    hands = (
        [list(range(10))] * first + deal_classes(CLIENTS - first, 10, FEW, seed) if first < CLIENTS else [range(10)] * CLIENTS
    )
    rows = [np.flatnonzero((data.client == w) & np.isin(data.y, list(hand))) for w, hand in zip(who, hands, strict=True)]
    every, client = np.concatenate(rows), np.repeat(np.arange(CLIENTS), [len(r) for r in rows])
    own: Recorded = replace(
        data, x=data.x[every], y=data.y[every], client=client, recording=data.recording[every],
        names=tuple(data.names[w] for w in who),
    )  # fmt: skip
    found = federation("audiomnist", own, divide(own, sizes, seed, later=True), mean=MEAN, std=STD)
    return differ(found, parse(shift), seed)
