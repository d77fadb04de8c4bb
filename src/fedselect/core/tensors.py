"""Tensors in a safetensors file with a checksum in its metadata; other readers can read it too, unchecked."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fedselect.core.errors import RunError
from fedselect.core.tree import Tree

KEY = "sha256"


def to_bytes(values: Tree, notes: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a file with these tensors, these notes and the checksum of both."""
    whole = {n: v.detach().cpu().contiguous() for n, v in values.items()}
    return save(whole, {**(notes or {}), KEY: _digest(whole, notes or {})})


def read(path: Path, advice: str) -> Tree:
    """The tensors of a file, after checking its checksum, if it has one; `advice` completes the error."""
    return read_all(path, advice)[0]


def read_all(path: Path, advice: str) -> tuple[Tree, dict[str, str]]:
    """Like `read`, with the notes."""
    try:
        with safe_open(path, "pt") as file:
            notes = dict(file.metadata() or {})
            values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as e:
        raise RunError(f"{path} cannot be read ({e}); {advice}") from None
    told = notes.pop(KEY, None)
    if told is not None and told != _digest(values, notes):
        raise RunError(f"{path} is damaged: it does not match its checksum; {advice}")
    return values, notes


def _digest(values: Tree, notes: Mapping[str, str]) -> str:
    found = hashlib.sha256(json.dumps(notes, sort_keys=True).encode())
    for name in sorted(values):
        v = values[name]
        found.update(f"\n{name} {v.dtype} {tuple(v.shape)}\n".encode())
        found.update(v.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
