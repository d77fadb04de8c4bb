"""A heat map of persistence, clients by tensors."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedselect.core.errors import InputError, RunError
from fedselect.core.files import disk

NUMBERS = 240  # number of cells up to which values are printed in them


def figure(persistence: Mapping[str, Sequence[float | None]], clients: Sequence[str]) -> Any:
    """Draw clients as rows and tensors as columns, from the input on the left to the head."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RunError("drawing needs matplotlib; install it with: pip install 'fedselect[report]'") from None
    names, count = list(persistence), len(clients)
    z = [[persistence[n][i] for n in names] for i in range(count)]
    written = count * len(names) <= NUMBERS
    wide, high = (0.55, 0.34) if written else (0.2, 0.2)
    made = Figure(figsize=(2.4 + wide * len(names), 1.8 + high * count), layout="constrained")
    axes = made.subplots()
    shown = axes.imshow(
        [[float("nan") if v is None else v for v in row] for row in z], vmin=0, vmax=1, cmap="Blues", aspect="auto"
    )
    size = 9 if written else 7
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=size)
    axes.set_yticks(range(count), clients, fontsize=size)
    axes.set_xlabel("tensor, from the input to the output")
    axes.set_ylabel("client")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for i, k in [(i, k) for i in range(count) for k in range(len(names))] if written else []:
        value = z[i][k]
        if value is not None:
            axes.text(k, i, f"{value:.2f}", ha="center", va="center", fontsize=8, color="white" if value > 0.55 else "black")
    made.colorbar(shown, ax=axes, label="persistence", shrink=min(1.0, 3.0 / (high * count)), aspect=12)
    return made


def save(draw: Callable[[], Any], path: Path) -> Path:
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise InputError(f"the file must end in .png, .pdf or .svg, unlike {path.name!r}.")
    made = draw()
    with disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        made.savefig(path, dpi=120)
    return path
