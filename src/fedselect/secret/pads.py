"""Pads: pseudo-random ring elements from a seed, by AES-256 in counter mode."""

from typing import Any

import numpy as np

BLOCK = 1 << 20
"""Elements per block: a pad is never whole in memory."""


def stream(key: bytes) -> Any:
    """An endless byte stream from a 32-byte key: `update` of zeros gives the next bytes."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    return Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()


def add(line: "np.ndarray[Any, Any]", key: bytes, sign: int) -> None:
    """Add the pad of a key to a line of ring elements in place, or subtract it (sign -1)."""
    source, width = stream(key), line.dtype.itemsize
    zeros = memoryview(bytes(BLOCK * width))
    room = np.empty(BLOCK * width + 16, dtype=np.uint8)  # the cipher needs one block more than it fills
    change = np.add if sign > 0 else np.subtract
    for at in range(0, len(line), BLOCK):
        part = line[at : at + BLOCK]
        source.update_into(zeros[: part.nbytes], room.data)
        change(part, room[: part.nbytes].view(line.dtype), out=part)
