"""Inputs of `fedselect predict`: rows of a table, arrays or images."""

import csv
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedselect.core.errors import InputError
from fedselect.core.files import replace
from fedselect.data.cache import picture
from fedselect.data.folders import SUFFIXES
from fedselect.serve.served import Served


def read(model: Served, path: Path) -> tuple[list[str], Any]:
    """The name of each sample and the inputs."""
    if not path.exists():
        raise InputError(f"there is no file {path}; check the path.")
    if model.schema is not None:
        frame = model.schema.frame(path)
        return [str(i) for i in range(1, len(frame) + 1)], frame
    if path.suffix in (".npy", ".npz"):
        x = _arrays(path, model)
        return [str(i) for i in range(len(next(iter(x.values())) if isinstance(x, dict) else x))], x
    return _pictures(path, model)


def _arrays(path: Path, model: Served) -> Any:
    try:
        found = np.load(path, allow_pickle=False)
        arrays = {"x": found} if isinstance(found, np.ndarray) else {n: found[n] for n in found.files}
    except (OSError, ValueError, EOFError) as e:
        raise InputError(f"{path} cannot be read as arrays ({e}).") from None
    layout = model.inputs.layout
    if layout is not None:
        if missing := [n for n in layout.names if n not in arrays]:
            raise InputError(f"{path} lacks {', '.join(missing)}; it has {', '.join(arrays)}.")
        return {n: arrays[n] for n in layout.names}
    if len(arrays) > 1 and "x" not in arrays:
        raise InputError(f"{path} has the arrays {', '.join(arrays)}; name the inputs x.")
    return arrays["x"] if "x" in arrays else next(iter(arrays.values()))


def _pictures(path: Path, model: Served) -> tuple[list[str], Any]:
    files = sorted(f for f in path.rglob("*") if f.suffix.lower() in SUFFIXES) if path.is_dir() else [path]
    shape = model.inputs.shape
    if path.is_file() and path.suffix.lower() not in SUFFIXES:
        raise InputError(f"{path} is not an image, and this model does not take tables; pass an .npy or .npz file, or images.")
    if model.inputs.kind != torch.uint8 or len(shape) != 3 or shape[0] != 3 or shape[1] != shape[2]:
        raise InputError(f"this model takes inputs of shape {shape}, not color images; pass an .npy or .npz file.")
    if not files:
        raise InputError(f"{path} contains no images; pass another folder.")
    x = np.stack([picture(f, shape[1], str(f)) for f in files]).transpose(0, 3, 1, 2)
    return [str(f.relative_to(path)) if path.is_dir() else f.name for f in files], np.ascontiguousarray(x)


def table(model: Served, names: Sequence[str], x: Any, likely: bool) -> tuple[list[str], Iterable[list[Any]]]:
    """Predictions as a table: the header and one row per sample."""
    said = np.asarray(model.predict(x))
    wide = said.reshape(len(said), -1)
    head = list(model.targets) if len(model.targets) == wide.shape[1] else _numbered("prediction", wide.shape[1])
    columns = [wide]
    if likely:
        chances = np.asarray(model.predict_proba(x))
        if chances.ndim != 2:
            raise InputError(
                "--proba works only for models with one class per sample, and this model predicts several; remove it."
            )
        classes = model.classes if len(model.classes) == chances.shape[1] else [str(i) for i in range(chances.shape[1])]
        head += [f"p({c})" for c in classes]
        columns.append(chances.astype(np.float64).round(6))
    rows = ([name, *(v for part in columns for v in _plain(part[i]))] for i, name in enumerate(names))
    return ["sample", *head], rows


def _numbered(name: str, many: int) -> list[str]:
    return [name] if many == 1 else [f"{name} {i}" for i in range(many)]


def _plain(row: NDArray[Any]) -> list[Any]:
    return list(row.tolist())


def write(head: Sequence[str], rows: Iterable[Sequence[Any]], out: Path | None) -> None:
    """Write CSV to a file or to standard output."""
    if out is None:
        csv.writer(sys.stdout, lineterminator="\n").writerows([head, *rows])
        return
    if not out.parent.is_dir():
        raise InputError(f"{out.parent} is not a directory; create it first, or choose another --out.")

    def put(fresh: Path) -> None:
        with fresh.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([head, *rows])

    replace(out, put)
