"""A plugin: text files as rows of characters. `--data letters:FOLDER` (one file for each client) or `letters:FILE`."""

from pathlib import Path

import torch

import fedselect as fs

ALPHABET = " abcdefghijklmnopqrstuvwxyz.,()_=`?"  # agreed beforehand; the last one stands for all others
NUMBER = {letter: i for i, letter in enumerate(ALPHABET)}


def letters(path: str, length: int = 24, seed: int = 0) -> fs.Federation:
    """Rows of characters, and for each character the one that follows; the last third of a text is for testing."""
    place = Path(path)
    files = sorted(place.glob("*.txt")) if place.is_dir() else [place]
    return fs.Federation([client(file, length) for file in files], len(ALPHABET), "letters", tuple(ALPHABET))


def client(file: Path, length: int) -> fs.ClientData:
    text = file.read_text(encoding="utf-8").lower()
    codes = torch.tensor([NUMBER.get(letter, len(ALPHABET) - 1) for letter in text])
    cut = 2 * len(codes) // 3
    parts = [(part[:-1].unfold(0, length, length), part[1:].unfold(0, length, length)) for part in (codes[:cut], codes[cut:])]
    return fs.ClientData(*parts, name=file.stem)


fs.DATA["letters"] = letters
