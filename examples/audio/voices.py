"""A plugin: wav files as pictures of their sound, `--data voices:FOLDER` (a folder for each client) or one client's folder."""

import wave
from pathlib import Path

import numpy as np
import torch

import fedselect as fs

VOWELS = ("a", "e", "i", "o", "u")  # agreed beforehand; the first letter of a file's name


def voices(path: str, seed: int = 0) -> fs.Federation:
    """Sounds as (1, frequencies, time); half of each client's recordings, drawn by the seed, are for testing."""
    place = Path(path)
    folders = sorted(folder for folder in place.iterdir() if folder.is_dir()) or [place]
    return fs.Federation([client(folder, seed) for folder in folders], len(VOWELS), "voices", VOWELS)


def client(folder: Path, seed: int) -> fs.ClientData:
    files = [Path(name) for name in np.random.default_rng(seed).permutation(sorted(map(str, folder.glob("*.wav"))))]
    x = torch.stack([spectrogram(file) for file in files])
    y = torch.tensor([VOWELS.index(file.name[0]) for file in files])
    half = len(files) // 2
    return fs.ClientData((x[half:], y[half:]), (x[:half], y[:half]), name=folder.name)


def spectrogram(file: Path, bands: int = 32) -> torch.Tensor:
    """Loudness in decibels, standardized, of windows of 32 ms: (1, bands, times)."""
    with wave.open(str(file), "rb") as sound:
        signal = torch.frombuffer(bytearray(sound.readframes(sound.getnframes())), dtype=torch.int16).float()
    power = torch.stft(signal, 256, 128, window=torch.hann_window(256), return_complex=True).abs().square()[:-1]
    loud = 10 * torch.log10(power.view(bands, -1, power.shape[1]).mean(1) + 1)
    return ((loud - loud.mean()) / loud.std()).unsqueeze(0)


fs.DATA["voices"] = voices
