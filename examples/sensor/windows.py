"""A plugin: CSV files of a logger, cut into windows. `--data windows:FOLDER` (one file for each client) or `windows:FILE`."""

import csv
from pathlib import Path

import numpy as np
import torch

import fedselect as fs

STATES = ("bearing", "loose", "normal", "unbalanced")  # agreed beforehand: one client alone may not have seen all of them


def windows(path: str, length: int = 64, every: int = 32, seed: int = 0) -> fs.Federation:
    """Windows of vibration (channels, time); a third of the recordings, drawn by the seed, is for testing."""
    place = Path(path)
    files = sorted(place.glob("*.csv")) if place.is_dir() else [place]
    return fs.Federation([client(file, length, every, seed) for file in files], len(STATES), "windows", STATES)


def client(file: Path, length: int, every: int, seed: int) -> fs.ClientData:
    recordings: dict[str, list[dict[str, str]]] = {}
    with file.open() as rows:
        for row in csv.DictReader(rows):
            recordings.setdefault(row["recording"], []).append(row)
    parts: dict[bool, list[tuple[torch.Tensor, torch.Tensor]]] = {True: [], False: []}
    for i, number in enumerate(np.random.default_rng(seed).permutation(list(recordings))):  # windows overlap: never divide one
        signal = torch.tensor([[float(row[axis]) for axis in "xyz"] for row in recordings[number]])
        cut = signal.unfold(0, length, every)  # (windows, channels, length)
        state = STATES.index(recordings[number][0]["state"])
        parts[i < len(recordings) // 3].append((cut, torch.full((len(cut),), state)))
    test, train = (tuple(map(torch.cat, zip(*parts[held], strict=True))) for held in (True, False))
    scale = train[0].std()  # its own: how well a sensor couples stays at the client
    return fs.ClientData((train[0] / scale, train[1]), (test[0] / scale, test[1]), name=file.stem)


fs.DATA["windows"] = windows
