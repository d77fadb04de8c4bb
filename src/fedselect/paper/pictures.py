"""The paper's figures from our runs, as PDF and PNG."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedselect.core.errors import RunError
from fedselect.paper.outcome import Block
from fedselect.paper.plan import How
from fedselect.paper.protocol import Target, read_column
from fedselect.report.figures import MARKERS, canvas, client_names, draw_matrix, lines, overlap, require_matplotlib, save_all
from fedselect.report.runs import gather
from fedselect.runs.labels import looks
from fedselect.runs.rundir import finished


def draw(target: Target, found: Sequence[Block], how: How, cells: Path, out: Path) -> list[Path]:
    """Draw a target's figure for each data set."""
    require_matplotlib()
    kinds = {"convergence": _convergence, "sizes": _sizes, "overlap": _overlap}
    make = kinds[target.figure or ""]

    def figures() -> Iterator[tuple[str, Any]]:
        for column in dict.fromkeys(b.column for b in found):
            figure = make(target, [b for b in found if b.column == column], cells)
            figure.suptitle(", ".join(filter(None, (read_column(column).title, how.mark))), fontsize=8)
            yield f"{target.name}-{column}{how.suffix}", figure

    return save_all(figures(), out)


def _convergence(target: Target, found: Sequence[Block], cells: Path) -> Any:
    places = [cells / run for b in found for e in b.entries if not e.failed for run in e.runs]
    for place in filter(finished, places):
        _need(place / "metrics.jsonl")
    return lines(gather(places), "round")


def _need(path: Path) -> None:
    if not path.exists():
        raise RunError(f"{path.parent} has a summary but no {path.stem}; remove that folder to run it again.")


def _sizes(target: Target, found: Sequence[Block], cells: Path) -> Any:
    """Accuracy over training images. The paper's numbers are hollow and dotted."""
    figure, axes = canvas(5.6, 3.1)
    sizes = sorted({e.config["data"]["train"] for b in found for e in b.entries})
    methods = [r.method for r in target.rows]
    published = any(e.paper is not None for b in found for e in b.entries)
    for row, ((colour, _), symbol) in zip(target.rows, looks(methods), strict=True):
        own = [e for b in found for e in b.entries if e.row == row.name]
        look: dict[str, Any] = {
            "color": colour, "marker": MARKERS[symbol], "linewidth": 2.0 if row.method == "fedselect" else 1.1, "markersize": 3,
        }  # fmt: skip
        mean, std, paper = (
            [np.nan if v is None else v for v in values]
            for values in ([e.mean for e in own], [e.std or 0.0 for e in own], [e.paper for e in own])
        )
        at = [e.config["data"]["train"] for e in own]
        axes.errorbar(at, mean, std, label=row.name, **look)
        if published:
            axes.plot(at, paper, linestyle=":", markerfacecolor="white", alpha=0.5, **look)
    axes.set_xscale("log")
    axes.set_xticks(sizes, [str(s) for s in sizes])
    axes.minorticks_off()
    axes.set_xlabel("training images per client" + (" (dotted: the paper)" if published else ""))
    axes.set_ylabel("mean client accuracy, %")
    axes.legend(frameon=False, fontsize=7, ncols=2)
    return figure


def overlaps(target: Target, found: Sequence[Block], cells: Path) -> list[dict[str, Any]]:
    """Overlap of clients' masks in the final linear layer, for each row, from the first seed of the first column."""
    entries = [e for e in found[0].entries if e.seeds]
    if not entries:
        raise RunError(f"{target.name}: no run finished; remove the diverged runs to retry.")
    out = []
    for e in entries:
        place = next(cells / name for name in e.runs if finished(cells / name))
        _need(place / "masks.jsonl")
        data = gather([place])
        (run,) = data["runs"]
        if not run["iou"]:
            raise RunError(f"{place} has no record of mask overlap, because it has too many clients.")
        layers = list(data["federations"][run["federation"]]["layers"])
        last = max(i for i, name in enumerate(layers) if name.endswith(".weight"))
        iou = [[None if v != v else round(v, 4) for v in row] for row in overlap(run, 1 + last).tolist()]
        classes = [c["classes"] for c in data["federations"][run["federation"]]["clients"]][: len(iou)]
        own = {"row": e.row, "seed": run["seed"], "layer": layers[last]}
        out.append({**own, "clients": client_names(data, run)[: len(iou)], "classes": classes, "iou": iou})
    return out


def _overlap(target: Target, found: Sequence[Block], cells: Path) -> Any:
    """One panel per limit, in increasing order."""
    shown = overlaps(target, found, cells)
    figure, panels = canvas(2.3 * len(shown) + 0.8, 2.6, len(shown))
    for axes, one in zip(np.atleast_1d(panels), shown, strict=True):
        image = draw_matrix(axes, np.array(one["iou"], dtype=float), one["clients"])
        axes.set_title(re.sub(r".*\((.*)\)", r"\1", one["row"]), fontsize=8)
    figure.colorbar(image, ax=panels, label="overlap %", shrink=0.7)
    return figure
