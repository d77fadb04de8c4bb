"""A plugin: sentences as counts of words. `--data sentences:FOLDER` (one CSV file for each client) or `sentences:FILE`."""

import csv
import re
from pathlib import Path
from zlib import crc32

import torch

import fedselect as fs

KINDS = ("class", "function", "method")  # agreed beforehand: one client alone may not have all of them


def sentences(path: str, words: int = 512, seed: int = 0) -> fs.Federation:
    """Which words a sentence has; a third of each file, drawn by the seed, is for testing.

    words: how many numbers a sentence becomes; a word is counted in one of them, without a dictionary to agree on.
    """
    place = Path(path)
    files = sorted(place.glob("*.csv")) if place.is_dir() else [place]
    return fs.Federation([client(file, words, seed) for file in files], len(KINDS), "sentences", KINDS)


def client(file: Path, words: int, seed: int) -> fs.ClientData:
    with file.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    x, y = torch.zeros(len(rows), words), torch.tensor([KINDS.index(row["kind"]) for row in rows])
    for i, row in enumerate(rows):
        for place, word in enumerate(re.findall(r"[a-z]+", row["text"].lower())):
            x[i, crc32(f"{place == 0} {word}".encode()) % words] = 1.0  # the first word is another one there: "Return", "A"
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    test, train = order[: len(rows) // 3], order[len(rows) // 3 :]
    return fs.ClientData((x[train], y[train]), (x[test], y[test]), name=file.stem)


fs.DATA["sentences"] = sentences
