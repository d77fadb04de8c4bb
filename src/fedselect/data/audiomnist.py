"""AudioMNIST: spoken digits of sixty speakers; each recording is a log-mel image of 32 time steps by 32 frequencies."""

import re
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedselect.core.errors import DataError
from fedselect.data.cache import Pixels, decoded, listing_stamp
from fedselect.data.federation import Federation
from fedselect.data.natural import Recorded, arrays, below, data_folder, divide, federation
from fedselect.data.partition import Indices, Sizes
from fedselect.data.places import find

NAMES = ("AudioMNIST", "AudioMNIST-master", "audiomnist", "audiomnist.npz")
MEAN, STD = (0.436,), (0.236,)  # of all pixels of the first 25 repetitions
RATE, SLOWER = 48_000, 6  # Hz as recorded; every sixth value is kept: 8 kHz
WINDOW = 256  # values: 32 ms
MELS, MOMENTS = 32, 32
LOWEST, HIGHEST = 60.0, 3900.0  # Hz
RANGE_DB = 70.0  # below a recording's loudest value everything is black


def audiomnist(
    clients: int | None = None,
    *,
    train: int | None = 50,
    test: int | None = None,
    val: int = 0,
    data_dir: str | None = None,
    seed: int = 0,
) -> Federation:
    """AudioMNIST, spoken digits as 32x32 images; one client per speaker, tested on its last repetitions."""
    data = read(data_folder(data_dir)).first(clients)
    parts = divide(data, Sizes(train, test, val), seed, later=True)
    return federation("audiomnist", data, parts, mean=MEAN, std=STD)


def read(data_dir: Path | None = None) -> Recorded:
    """All recordings of all speakers, from the published folder or a prepared file."""
    path = find(NAMES, data_dir, origin="audiomnist")
    x, y, speaker, repetition = _folder(path.resolve()) if path.is_dir() else arrays(path, "x", "y", "client", "rep")
    if x.dtype != np.uint8 or x.shape[1:] != (1, MOMENTS, MELS):
        raise DataError(f"{path}: x must be uint8 (N, 1, {MOMENTS}, {MELS}), not {x.dtype} {x.shape}; prepare it again.")
    speakers, client = np.unique(speaker, return_inverse=True)
    names = tuple(f"{s:02d}" for s in speakers)
    digits = tuple(map(str, range(10)))
    return Recorded(x, y.astype(np.int64), client.astype(np.int64), repetition.astype(np.int64), names, digits)


def _folder(path: Path) -> tuple[Pixels, Indices, Indices, Indices]:
    """data/SPEAKER/DIGIT_SPEAKER_REPETITION.wav."""
    found = []
    for file in below(path, "data").glob("*/*.wav"):
        if said := re.fullmatch(r"(\d)_(\d+)_(\d+)", file.stem):
            digit, speaker, repetition = map(int, said.groups())
            found.append((speaker, repetition, digit, file))
    if not found:
        raise DataError(f"{path} has no recordings such as data/01/0_01_0.wav; give the folder above data/.")
    found.sort()
    files = [file for *_, file in found]
    x = decoded("audiomnist", path, len(files), (1, MOMENTS, MELS), lambda i: picture(files[i]), stamp=listing_stamp(files))
    speaker, repetition, digit = np.array([row[:3] for row in found], np.int64).T
    return x, digit, speaker, repetition


def picture(file: Path) -> Pixels:
    """A recording as uint8 (1, 32 moments, 32 pitches): loudness in dB on the mel scale, white at its loudest."""
    from scipy.io import wavfile

    try:
        rate, raw = wavfile.read(file)
    except (OSError, ValueError) as e:
        raise DataError(f"{file} cannot be read as sound ({e}); download it again.") from None
    if rate != RATE or raw.ndim != 1:
        raise DataError(f"{file} must have one channel of {RATE} Hz; download the original again.")
    slow = np.convolve(raw.astype(np.float64), _lowpass(), "same")[::SLOWER]
    peak = np.abs(slow).max(initial=0.0)
    if len(slow) < WINDOW or peak == 0:
        raise DataError(f"{file} is silent or shorter than {WINDOW * SLOWER} values; download it again.")
    starts = np.arange(MOMENTS) * ((len(slow) - WINDOW) // (MOMENTS - 1))
    frames = (slow / peak)[starts[:, None] + np.arange(WINDOW)] * np.hanning(WINDOW)
    power = np.abs(np.fft.rfft(frames)) ** 2 @ _mels().T
    loud = 10 * np.log10(power + 1e-6)
    grey: Pixels = (np.clip((loud - loud.max()) / RANGE_DB + 1, 0, 1) * 255).astype(np.uint8)
    return grey[None]


@cache
def _lowpass() -> NDArray[np.float64]:
    """Removes frequencies that 8 kHz cannot represent."""
    from scipy.signal import firwin

    taps: NDArray[np.float64] = firwin(97, 3600, fs=RATE)
    return taps


@cache
def _mels() -> NDArray[np.float64]:
    """Triangles at equal distances on the mel scale: (32, frequencies)."""
    low, high = (2595 * np.log10(1 + f / 700) for f in (LOWEST, HIGHEST))
    edge = 700 * (10 ** (np.linspace(low, high, MELS + 2) / 2595) - 1)
    frequency = np.fft.rfftfreq(WINDOW, SLOWER / RATE)
    left, middle, right = edge[:-2, None], edge[1:-1, None], edge[2:, None]
    return np.maximum(0, np.minimum((frequency - left) / (middle - left), (right - frequency) / (right - middle)))
