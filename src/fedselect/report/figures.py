"""The report's figures as PDF and PNG, and its tables as LaTeX and CSV, from the same data as the page."""

import csv
import io
import re
import statistics
import warnings
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fedselect.core.errors import RunError
from fedselect.core.files import disk, write_bytes
from fedselect.report.alone import gains
from fedselect.report.runs import Data, distinct, gather
from fedselect.runs import metric_tables, tables
from fedselect.runs.masks import unpack
from fedselect.tasks import Measure

Points = list[tuple[float, float, float, float]]
"""Points of a curve: round, mean of x, mean of y, standard deviation of y over seeds."""
OVERLAP = Measure("overlap", low=0.0, high=1.0)
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif", "font.size": 8, "axes.labelsize": 8, "xtick.labelsize": 7, "ytick.labelsize": 7,
    "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6, "xtick.major.width": 0.6,
    "ytick.major.width": 0.6, "axes.grid": True, "grid.alpha": 0.25, "grid.linewidth": 0.5, "pdf.fonttype": 42,
}  # fmt: skip

MARKERS = {
    "circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "triangle-down": "v", "cross": "P", "x": "X", "star": "*",
}  # fmt: skip
"""Matplotlib's markers for the symbols of the page."""


def write_figures(places: Sequence[Path], folder: Path) -> list[Path]:
    """Write all figures and tables to a folder."""
    require_matplotlib()
    with warnings.catch_warnings(action="ignore"):  # writing the page has already warned
        kept = distinct(places)
    data, rows, none = gather(kept), tables.rows(kept), tables.rowless(kept)
    made = save_all(_figures(data), folder)
    texts = {"table.csv": tables.as_csv(rows, none), "table.tex": tables.as_latex(rows, none), "clients.csv": _clients(data)}
    texts["metrics.csv"] = metric_tables.as_csv(metric_tables.rows(kept))
    for name, text in texts.items():
        write_bytes(folder / name, text.encode())
        made.append(folder / name)
    return made


def require_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise RunError("figures need matplotlib; install it with: pip install 'fedselect[report]'")


def save_all(figures: Iterable[tuple[str, Any]], folder: Path) -> list[Path]:
    """Save figures by name as PDF and PNG. Figures are created one at a time, in the style they are saved in."""
    import matplotlib

    with disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
    made = []
    with matplotlib.rc_context(STYLE):
        for name, figure in figures:
            for ending in ("pdf", "png"):
                out = io.BytesIO()
                figure.savefig(out, format=ending, dpi=200, metadata={"CreationDate": None} if ending == "pdf" else None)
                write_bytes(folder / f"{name}.{ending}", out.getvalue())
                made.append(folder / f"{name}.{ending}")
    return made


def _figures(data: Data) -> Iterator[tuple[str, Any]]:
    yield "convergence", lines(data, "round")
    if any(run["up"][-1] for run in data["runs"]):
        yield "bytes", lines(data, "MB sent")
    yield "clients", _dots(data)
    seen = set()
    for run in data["runs"]:  # only the first seed
        name = re.sub(r"[^\w.+-]+", "-", data["groups"][run["group"]]["label"])
        if name in seen:
            continue
        seen.add(name)
        layers = list(data["federations"][run["federation"]]["layers"])
        if run["iou"]:  # masks differ between clients
            yield f"shares-{name}", _shares(run, layers)
            yield (
                f"overlap-{name}",
                _matrix(overlap(run), client_names(data, run), OVERLAP, "client", "client"),
            )
        if run["cross"]:
            yield (
                f"cross-{name}",
                _matrix(
                    _numbers(run["cross"]),
                    client_names(data, run),
                    Measure.from_json(data["headline"]),
                    f"{data['scored']} data of",
                    "model of",
                ),
            )


def _curve(data: Data, group: int, by: str) -> Points:
    at: dict[int, list[tuple[float, float]]] = {}
    for run in (r for r in data["runs"] if r["group"] == group):
        for round, up, value in zip(run["round"], run["up"], run["value"], strict=True):
            at.setdefault(round, []).append((round if by == "round" else up / 1e6, value * _scale(data)))
    out: Points = []
    for r, pairs in sorted(at.items()):
        xs, ys = zip(*pairs, strict=True)
        out.append((r, statistics.fmean(xs), statistics.fmean(ys), statistics.stdev(ys) if len(ys) > 1 else 0.0))
    return out


def lines(data: Data, by: str) -> Any:
    figure, axes = canvas(5.6, 3.1)
    for g, group in enumerate(data["groups"]):
        points = _curve(data, g, by)
        x, y, off = ([p[k] for p in points] for k in (1, 2, 3))
        look: dict[str, Any] = {"color": group["colour"][0], "label": group["label"]}
        look |= {"marker": MARKERS[group["symbol"]], "markersize": 4, "markevery": max(1, len(points) // 6)}
        look["linewidth"] = 2.0 if group["method"] == "fedselect" else 1.1
        if by == "MB sent" and not x[-1]:
            axes.axhline(y[-1], linestyle=":", color=look["color"], label=look["label"], linewidth=look["linewidth"])
            continue
        axes.plot(x, y, linestyle=":" if group["method"] == "local" else "-", **look)
        if by == "round":
            low, high = ([a + sign * b for a, b in zip(y, off, strict=True)] for sign in (-1, 1))
            axes.fill_between(x, low, high, color=group["colour"][0], alpha=0.12, linewidth=0)
    if by == "MB sent":
        axes.set_xscale("log")
    axes.set_xlabel(by)
    axes.set_ylabel(f"mean client {_axis(data)}")
    axes.legend(frameon=False, fontsize=7, ncols=2)
    return figure


def _dots(data: Data) -> Any:
    """Each client's gain over training alone, or its final value if no run is compared."""
    found = {g: gains(data, g) for g in range(len(data["groups"]))}
    compared = any(found.values())
    if not compared:
        for run in data["runs"]:
            found[run["group"]] += [v for v in run["last"]["value"] if v is not None]
    shown = [(data["groups"][g], [v * _scale(data) for v in values]) for g, values in found.items() if values]
    figure, axes = canvas(5.6, 0.6 + 0.26 * len(shown))
    for at, (group, values) in enumerate(shown):
        axes.scatter(values, [at] * len(values), color=group["colour"][0], alpha=0.5, s=14, linewidths=0)
        axes.scatter([statistics.fmean(values)], [at], color=group["colour"][0], marker="|", s=160, linewidths=1.8)
    if compared:
        axes.axvline(0, color="#666666", linewidth=0.8)
    axes.set_yticks(range(len(shown)), [group["label"] for group, _ in shown])
    axes.invert_yaxis()
    names = list(dict.fromkeys(data["groups"][g["alone"]]["label"] for g, _ in shown if g["alone"] is not None))
    said = "training alone" if names == ["local"] else f"training alone ({'; '.join(names)})"
    name, points = data["headline"]["name"], ", points" if data["headline"]["percent"] else ""
    better = f"client {name} against {said}{points}" if data["headline"]["more_is_better"] else f"client {name} below {said} by"
    axes.set_xlabel(f"{better} (bar: mean)" if compared else f"client {_axis(data)} (bar: mean)")
    return figure


def _shares(run: Data, layers: list[str]) -> Any:
    clients = len(run["last"]["value"])
    lines = [(r, np.nanmean(unpack(text).reshape(len(layers), clients), axis=1)) for r, text in run["shares"]]
    z = np.stack([next(v for r, v in reversed(lines) if r <= max(round, lines[0][0])) for round in run["round"]], axis=1)
    figure, axes = canvas(5.6, 0.9 + 0.12 * len(layers) + (0.6 if len(layers) < 12 else 0))
    shown = axes.pcolormesh([*run["round"], run["round"][-1] + 1], range(len(layers) + 1), 100 * z, cmap="Blues", vmin=0)
    axes.grid(False)
    axes.set_yticks([i + 0.5 for i in range(len(layers))], layers, fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("round")
    figure.colorbar(shown, ax=axes, label="personal, %", shrink=0.8)
    return figure


def _scale(data: Data) -> float:
    return 100.0 if data["headline"]["percent"] else 1.0


def _axis(data: Data) -> str:
    return f"{data['headline']['name']}, %" if data["headline"]["percent"] else str(data["headline"]["name"])


def _matrix(z: Any, names: list[str], measure: Measure, across: str, down: str) -> Any:
    side = 1.6 + 0.22 * len(z)
    figure, axes = canvas(side + 0.7, side)
    figure.colorbar(draw_matrix(axes, z, names, (across, down), measure), ax=axes, label=measure.title, shrink=0.7)
    return figure


def draw_matrix(axes: Any, z: Any, names: list[str], ends: tuple[str, str] = ("", ""), measure: Measure = OVERLAP) -> Any:
    z, low, high = (100 * z, 0.0, 100.0) if measure.percent else (z, float(np.nanmin(z)), float(np.nanmax(z)))
    shown = axes.imshow(z, cmap="Blues" if measure.more_is_better else "Blues_r", vmin=low, vmax=high)
    axes.grid(False)
    axes.set_xticks(range(len(z)), names[: len(z)], rotation=90, fontsize=6)
    axes.set_yticks(range(len(z)), names[: len(z)], fontsize=6)
    axes.set_xlabel(ends[0])
    axes.set_ylabel(ends[1])
    dark = (low + 0.6 * (high - low), 1) if measure.more_is_better else (low + 0.4 * (high - low), -1)
    for i, row in enumerate(z if len(z) <= 12 else []):
        for j, v in enumerate(row):
            if v == v:
                colour = "white" if dark[1] * (v - dark[0]) > 0 else "#222222"
                axes.text(j, i, f"{v:.{0 if measure.percent else 2}f}", ha="center", va="center", fontsize=5.5, color=colour)
    return shown


def canvas(width: float, height: float, panels: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, panels)


def overlap(run: Data, at: int = 0) -> Any:
    """Overlap of clients' masks in the last round: over all parameters, or in layer `at`, counted from 1."""
    n = run["paired"]
    pairs = n * (n - 1) // 2
    z = np.full((n, n), np.nan)
    z[np.triu_indices(n, 1)] = unpack(run["iou"][-1][1])[at * pairs : (at + 1) * pairs]
    return np.where(np.isnan(z), z.T, z)


def _numbers(rows: list[list[float | None]]) -> Any:
    return np.array([[np.nan if v is None else v for v in row] for row in rows])


def client_names(data: Data, run: Data) -> list[str]:
    clients = data["federations"][run["federation"]]["clients"]
    said = [f"{c['name']}: {' '.join(c['classes'])}" if c["classes"] else c["name"] for c in clients]
    return [s if len(s) <= 18 else s[:17] + "…" for s in said]


def _clients(data: Data) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    first, *others = [m["name"] for m in data["metrics"]]
    views = [first, f"{first}_local", f"{first}_merged"]
    writer.writerow(["method", "seed", "client", "name", "classes", *views, "share", *others])
    for run in data["runs"]:
        who = data["federations"][run["federation"]]["clients"]
        for i, client in enumerate(who):
            values = [run["last"][k][i] for k in ("value", "local", "merged", "share")]
            values += [run["metrics"][name]["values"][i] if name in run["metrics"] else None for name in others]
            label = data["groups"][run["group"]]["label"]
            writer.writerow([label, run["seed"], i, client["name"], " ".join(client["classes"]), *values])
    return out.getvalue()
