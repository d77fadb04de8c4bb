"""Who has what, before anything is trained: a table and a picture of a partition."""

from collections import Counter
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedselect.core.errors import InputError, RunError
from fedselect.core.files import disk
from fedselect.data import Federation


def table(data: Federation) -> Table:
    grid = Table(
        title=f"{data.name}: {len(data.clients)} clients, {data.classes} classes, inputs {data.shape}", box=SIMPLE_HEAD
    )
    grid.title_justify = "left"
    grid.add_column("client", no_wrap=True)
    for column in ("train", "val", "test"):
        grid.add_column(column, justify="right", no_wrap=True)
    grid.add_column("classes in training (samples)")
    if any(client.shift for client in data.clients):
        grid.add_column("how it differs")
    for i, client in enumerate(data.clients):
        held = _held(data, Counter(client.train[1].tolist()))
        val = len(client.val[1]) if client.val else 0
        cells = [str(len(client.train[1])), str(val), str(len(client.test[1])), held, "; ".join(client.shift.values())]
        grid.add_row(client.name or str(i), *cells[: len(grid.columns) - 1])
    return grid


def _held(data: Federation, counts: Counter[int]) -> str:
    """A client's classes with their samples; in short where it has as many of every class."""
    if len(counts) == data.classes > 2 and len(set(counts.values())) == 1:
        return f"all {data.classes} ({counts[0]} each)"
    listed = ", ".join(f"{_name(data, c)} ({counts[c]})" for c in sorted(counts)[:12])
    return listed + (f" and {len(counts) - 12} more" if len(counts) > 12 else "")


def picture(data: Federation, path: Path) -> Path:
    """Training samples by client and class, as a bubble chart with totals."""
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise InputError(f"a picture is a .png, .pdf or .svg file, not {path.name!r}.")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RunError("a picture needs matplotlib; install it with: pip install 'fedselect[report]'") from None
    clients = len(data.clients)
    counts = [Counter(c.train[1].tolist()) for c in data.clients]
    most = max(max(c.values()) for c in counts)
    figure = Figure(figsize=(min(16, 3.5 + 0.32 * data.classes), min(14, 1.6 + 0.34 * clients)), layout="constrained")
    axes, totals = figure.subplots(1, 2, width_ratios=(5, 1), sharey=True)
    points = [(c, i, n) for i, held in enumerate(counts) for c, n in held.items()]
    axes.scatter(
        [c for c, _, _ in points], [i for _, i, _ in points], s=[8 + 160 * n / most for _, _, n in points],
        c=[c for c, _, _ in points], cmap="tab20" if data.classes <= 20 else "turbo", linewidths=0,
    )  # fmt: skip
    axes.set_yticks(range(clients), [c.name or str(i) for i, c in enumerate(data.clients)])
    step = max(1, data.classes // 40)
    axes.set_xticks(
        range(0, data.classes, step), [_name(data, c) for c in range(0, data.classes, step)], rotation=90, fontsize=8
    )
    axes.set_xlim(-0.8, data.classes - 0.2)
    axes.set_ylim(clients - 0.4, -0.6)
    axes.set_xlabel("class (area: training samples)")
    axes.set_ylabel("client")
    axes.grid(alpha=0.25, linewidth=0.6)
    totals.barh(range(clients), [sum(c.values()) for c in counts], color="#888888")
    totals.set_xlabel("training samples")
    for each in (axes, totals):
        each.spines[["top", "right"]].set_visible(False)
    with disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    return path


def _name(data: Federation, c: int) -> str:
    return data.class_names[c] if c < len(data.class_names) else str(c)
