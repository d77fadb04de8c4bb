"""The figures of docs/reproduction.md, drawn from results alone: accuracy over rounds, limits and data sizes, mask overlap."""

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from reproduction_results import Table, with_ours

from fedselect.report.figures import MARKERS, STYLE, draw_matrix
from fedselect.runs.labels import BLUE, PALETTE, looks

Drawings = dict[str, tuple[Any, Callable[[Any], Figure]]]
LOOK = {**STYLE, "svg.fonttype": "none", "svg.hashsalt": "fedselect", "figure.dpi": 72}
FAR = 25.0  # points below the middle of the methods: where showing one would hide how the others differ
HOLLOW: dict[str, Any] = {"markerfacecolor": "white", "linestyle": ":", "alpha": 0.6}


def drawings(targets: dict[str, Table]) -> Drawings:
    """By name: the data of a figure and what draws it. Figures of targets that were not run are left out."""
    out: Drawings = {}
    if table := targets.get("table1"):
        out["accuracy"] = [_panel(c, ("mean", "error", "paper")) for c in with_ours(targets)["columns"]], accuracy
        out["convergence"] = [_panel(c, ("rounds", "curve")) for c in table["columns"]], convergence
    if table := targets.get("alpha"):
        out["alpha"] = [_panel(c, ("mean", "error", "paper")) for c in table["columns"]], limits
    if table := targets.get("data-size"):
        out["data-size"] = [_panel(c, ("mean", "error", "paper")) for c in table["columns"]], sizes
    if table := targets.get("fig-iou"):
        out["overlap"] = table["overlap"], overlap
    return out


def svg(draw: Callable[[Any], Figure], data: Any, identity: str) -> bytes:
    """The same bytes for the same data: no date, no version, and names of parts that do not change."""
    out = io.BytesIO()
    with matplotlib.rc_context(LOOK):
        draw(data).savefig(
            out, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Identifier": identity}
        )
    lines = b"\n".join(line.rstrip() for line in out.getvalue().splitlines()) + b"\n"
    return lines.replace(b"</style>", f"\n{DARK}</style>".encode(), 1)


def _dark() -> str:
    """Style rules that turn the colours of a drawing into those for dark paper, where the reader prefers it."""
    pairs = {**dict(PALETTE), "#000000": "#c9ced6", "#444444": "#b6bcc6", "#ffffff": "#1e2129"}
    rules = ["text { fill: #e5e7eb; }"]
    rules += [
        f'[style*="{what}: {light}"] {{ {what}: {dark} !important; }}'
        for light, dark in pairs.items()
        for what in ("fill", "stroke")
    ]
    return "@media (prefers-color-scheme: dark) {\n" + "\n".join(f"  {rule}" for rule in rules) + "\n}\n"


DARK = _dark()


def accuracy(panels: list[Table]) -> Figure:
    """A line for each method: ours with two standard errors, the paper's hollow. One far below the others is said in words."""
    rows = max(len(p["rows"]) for p in panels)
    figure, axes = _grid(len(panels), 2, 0.75 + 0.17 * rows)
    for ax, panel in zip(axes, panels, strict=True):
        low = _low({row["row"]: row["mean"] for row in panel["rows"] if row["mean"] is not None})
        for at, (row, (colour, _)) in enumerate(zip(panel["rows"], _looks(panel), strict=True)):
            if row["row"] in low:
                paper = "" if row["paper"] is None else f", the paper {row['paper']:.1f}"
                said = f"◂ {row['mean']:.1f}{paper}"
                ax.annotate(said, (0.01, at), xycoords=("axes fraction", "data"), va="center", fontsize=7, color=colour)
                continue
            if row["mean"] is not None:
                ax.errorbar(row["mean"], at, xerr=2 * (row["error"] or 0), fmt="o", color=colour, markersize=4, capsize=2)
            if row["paper"] is not None:
                ax.plot(row["paper"], at, "D", color=colour, markerfacecolor="white", markersize=4)
        ax.set_yticks(range(len(panel["rows"])), [r["row"] for r in panel["rows"]])
        ax.set_ylim(len(panel["rows"]) - 0.5, -0.5)
        ax.set_title(panel["title"], fontsize=8)
        ax.set_xlabel("accuracy, %")
    grey: dict[str, Any] = {"color": "#444444", "linestyle": "", "markersize": 4}
    kinds = [Line2D([], [], marker="o", **grey), Line2D([], [], marker="D", markerfacecolor="white", **grey)]
    said = ["ours, ± 2 standard errors", "the paper"]
    figure.legend(kinds, said, loc="outside lower center", ncols=2, frameon=False, fontsize=7)
    return figure


def convergence(panels: list[Table]) -> Figure:
    """Mean over seeds, the band one standard error. Methods far below the others are named, not shown."""
    figure, axes = _grid(len(panels), 2, 2.3)
    for ax, panel in zip(axes, panels, strict=True):
        ends = {row["row"]: np.array(row["curve"]).mean(0)[-1] for row in panel["rows"] if row["curve"]}
        low = _low(ends)
        for row, (colour, marker) in zip(panel["rows"], _looks(panel), strict=True):
            if row["row"] not in ends or row["row"] in low:
                continue
            y = np.array(row["curve"])
            wide = 2.0 if row["method"] == "fedselect" else 1.0
            every = {"marker": marker, "markersize": 4, "markevery": max(1, len(row["rounds"]) // 6)}
            ax.plot(row["rounds"], y.mean(0), color=colour, linewidth=wide, label=row["row"], **every)
            off = y.std(0, ddof=1) / len(y) ** 0.5 if len(y) > 1 else 0 * y[0]
            ax.fill_between(row["rounds"], y.mean(0) - off, y.mean(0) + off, color=colour, alpha=0.12, linewidth=0)
        if low:
            said = ", ".join(f"{name} ends at {end:.0f}%" for name, end in low.items())
            ax.annotate(f"below: {said}", (0.98, 0.04), xycoords="axes fraction", ha="right", fontsize=7, color="#444444")
        ax.set_title(panel["title"], fontsize=8)
        ax.set_xlabel("round")
        ax.set_ylabel("accuracy, %")
    _legend(figure, axes)
    return figure


def _low(ends: dict[str, float]) -> dict[str, float]:
    """Those far below the middle."""
    return {name: end for name, end in ends.items() if end < np.median(list(ends.values())) - FAR}


def limits(panels: list[Table]) -> Figure:
    figure, axes = _grid(len(panels), 2, 2.0)
    for ax, panel in zip(axes, panels, strict=True):
        x = [float(r["row"].partition("=")[2]) for r in panel["rows"]]
        _ours_and_paper(ax, x, panel["rows"], (BLUE[0], "o"), "FedSelect")
        ax.set_title(panel["title"], fontsize=8)
        ax.set_xlabel("personalization limit α")
        ax.set_ylabel("accuracy, %")
    return figure


def sizes(panels: list[Table]) -> Figure:
    """Panels are settings here: one data set, more and more images."""
    figure, (ax,) = _grid(1, 1, 3.0)
    x = [int(p["setting"].partition("=")[2]) for p in panels]
    for row, look in zip(panels[0]["rows"], _looks(panels[0]), strict=True):
        there = {at: r for at, p in zip(x, panels, strict=True) for r in p["rows"] if r["row"] == row["row"]}
        _ours_and_paper(ax, [*there], [*there.values()], look, row["row"], row["method"] == "fedselect")
    ax.set_xscale("log")
    ax.set_xticks(x, [str(v) for v in x])
    ax.minorticks_off()
    ax.set_xlabel("training images a client")
    ax.set_ylabel("accuracy, %")
    _legend(figure, [ax])
    return figure


def overlap(shown: list[Table]) -> Figure:
    across = min(2, len(shown))
    side = 1.5 + 0.17 * len(shown[0]["iou"])
    figure, axes = _grid(len(shown), across, side, square=True)
    for ax, one in zip(axes, shown, strict=True):
        image = draw_matrix(ax, np.array(one["iou"], dtype=float), one["clients"])
        ax.set_title(re.sub(r".*\((.*)\)", r"\1", one["row"]), fontsize=8)
    figure.colorbar(image, ax=axes, label="overlap, %", shrink=0.6)
    return figure


def _panel(column: Table, fields: tuple[str, ...]) -> Table:
    rows = [{k: r[k] for k in ("row", "method", *fields)} for r in column["rows"]]
    size = f", {column['note'].removesuffix(', not comparable')}" if column["note"] else ""
    return {"title": column["title"] + size, "setting": column["setting"], "rows": rows}


def _looks(panel: Table) -> list[tuple[str, str]]:
    """The color on light paper and the marker of each row."""
    return [(light, MARKERS[symbol]) for (light, _), symbol in looks([r["method"] for r in panel["rows"]])]


def _ours_and_paper(ax: Any, x: list[float], rows: list[Table], look: tuple[str, str], label: str, wide: bool = True) -> None:
    """Ours with standard errors, the paper's hollow and dotted."""
    ours, paper = ([np.nan if r[k] is None else r[k] for r in rows] for k in ("mean", "paper"))
    style: dict[str, Any] = {"color": look[0], "marker": look[1], "linewidth": 1.8 if wide else 1.0, "markersize": 3.5}
    ax.errorbar(x, ours, [r["error"] or 0.0 for r in rows], label=label, capsize=2, **style)
    if not np.isnan(paper).all():
        ax.plot(x, paper, **{**style, "linewidth": 1.0, **HOLLOW})


def _legend(figure: Figure, axes: list[Any]) -> None:
    found = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=5, frameon=False, fontsize=7)


def _grid(panels: int, across: int, height: float, square: bool = False) -> tuple[Figure, list[Any]]:
    across = min(across, panels)
    down = -(-panels // across)
    width = 3.6 * across if across > 1 else 5.6
    figure = Figure(figsize=((height + 0.5) * across if square else width, height * down), layout="constrained")
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for spare in axes[panels:]:
        spare.remove()
    return figure, axes[:panels]
