"""A partition as a table and as a picture: which client has which data."""

import math
from collections import Counter
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from fedselect.core.errors import InputError, RunError
from fedselect.core.files import disk
from fedselect.data import ClientData, Federation
from fedselect.data.columns import Column


def table(data: Federation) -> Table:
    asked = f"{data.classes} classes" if data.classes else f"targets {data.target_shape or 'of one number'}"
    grid = Table(
        title=f"{data.name}: {len(data.clients)} clients, {asked}, inputs {data.layout or data.shape}", box=SIMPLE_HEAD
    )
    grid.title_justify = "left"
    grid.add_column("client", no_wrap=True)
    for column in ("train", "val", "test"):
        grid.add_column(column, justify="right", no_wrap=True)
    grid.add_column("training classes (samples)" if data.classes else "training targets, mean ± standard deviation")
    if any(client.shift for client in data.clients):
        grid.add_column("shift")
    for i, client in enumerate(data.clients):
        held = _held(data, _counted(client)) if data.classes else _numbers(client.train[1])
        val = len(client.val[1]) if client.val else 0
        cells = [str(len(client.train[1])), str(val), str(client.tested), held, "; ".join(client.shift.values())]
        grid.add_row(client.name or str(i), *cells[: len(grid.columns) - 1])
    return grid


def columns(data: Federation) -> Table | None:
    """The columns of a table: kind, share of missing values in training rows, and values. None if the data is no table."""
    schemas = [client.schema for client in data.clients]
    if schemas[0] is None:
        return None
    grid = Table(box=SIMPLE_HEAD)
    for name in ("column", "kind", "missing", "most missing at", "values"):
        grid.add_column(name, justify="right" if name == "missing" else "left", no_wrap=name != "values")
    at = 0
    for i, column in enumerate(schemas[0].columns):
        width = len(column.inputs)
        gaps = {c.name: _gaps(column, c.train[0][:, at : at + width]).double() for c in data.clients}
        at += width
        share = float(torch.cat(list(gaps.values())).mean())
        worst, most = max(((name, float(g.mean())) for name, g in gaps.items()), key=lambda pair: pair[1])
        where = f"{worst} {most:.0%}" if most else ""
        own = {s.columns[i] for s in schemas if s is not None}
        grid.add_row(column.name, str(column.kind), f"{share:.1%}", where, _values(column) if len(own) == 1 else "by client")
    return grid


def _gaps(column: Column, x: Tensor) -> Tensor:
    """Which rows lack a value in this column."""
    if column.kind == "category":
        return x.sum(1) == 0
    return x[:, 1] > 0 if column.gaps else torch.zeros(len(x), dtype=torch.bool)


def _values(column: Column) -> str:
    if column.kind == "category":
        return ", ".join(column.categories[:8]) + (
            f" and {len(column.categories) - 8} more" if len(column.categories) > 8 else ""
        )
    if column.mean is None or column.variance is None:
        return ""
    return f"{column.mean:.4g} ± {math.sqrt(column.variance):.4g}"


def _numbers(y: Tensor) -> str:
    """Mean and standard deviation of numeric targets."""
    parts = y.double().reshape(len(y), -1)
    return ", ".join(f"{float(v.mean()):.4g} ± {float(v.std(correction=0)):.4g}" for v in parts.T[:6])


def _counted(client: ClientData) -> Counter[int]:
    """Training samples per class. Classes below 0 are padding."""
    y = client.train[1]
    return Counter(y[y >= 0].tolist())


def _held(data: Federation, counts: Counter[int]) -> str:
    """A client's classes with their number of samples, abbreviated if all are equal."""
    if len(counts) == data.classes > 2 and len(set(counts.values())) == 1:
        return f"all {data.classes} ({counts[0]} each)"
    listed = ", ".join(f"{_name(data, c)} ({counts[c]})" for c in sorted(counts)[:12])
    return listed + (f" and {len(counts) - 12} more" if len(counts) > 12 else "")


def picture(data: Federation, path: Path) -> Path:
    """Draw training samples by client and class as a bubble chart with totals."""
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise InputError(f"--out must end in .png, .pdf or .svg, unlike {path.name!r}.")
    if not data.classes:
        raise InputError("only data with classes can be drawn, and these targets are numbers; remove --out.")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RunError("drawing needs matplotlib; install it with: pip install 'fedselect[report]'") from None
    clients = len(data.clients)
    counts = [_counted(c) for c in data.clients]
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
