"""The report: one self-contained HTML page from run directories."""

import statistics
from collections import defaultdict
from io import StringIO
from pathlib import Path
from typing import Any

from fedselect.errors import RunError
from fedselect.experiments import tables
from fedselect.experiments.runner import finished, read_configs, read_records
from fedselect.files import read_json, write_bytes
from fedselect.simulate.notes import Record

Histories = dict[str, list[list[Record]]]
"""Every method's histories, one for each seed."""


def write_report(out: Path) -> Path:
    """report.html for a run directory or a comparison."""
    try:
        import jinja2
        import matplotlib
    except ImportError as e:
        raise RunError(f"a report needs {e.name}; install it with: pip install 'fedselect[report]'") from None
    matplotlib.use("svg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "fedselect"
    runs = [r for r in ([out / n for n in read_configs(out)] if (out / "compare.json").exists() else [out]) if finished(r)]
    found = tables.rows(runs)
    summaries = [read_json(r / "summary.json", "it should hold the outcome of a run.") for r in runs]
    histories: Histories = defaultdict(list)
    for run, s in zip(runs, summaries, strict=True):
        histories[s["method"]].append(read_records(run / "metrics.jsonl"))
    histories = {row.method: histories[row.method] for row in found}
    env = jinja2.Environment(loader=jinja2.PackageLoader("fedselect.experiments", "."), autoescape=True)
    views = ("accuracy", "local", "merged")
    figures = [
        (
            "Accuracy over rounds",
            "Mean over clients and seeds; the band is one standard deviation over seeds.",
            _lines(histories, "accuracy", "mean client accuracy"),
        ),
        (
            "Every client",
            "Final accuracy of each client on its own test data, mean over seeds.",
            _clients(histories),
        ),
        (
            "Personal share over rounds",
            "Share of the parameters that stay with the client.",
            _lines(histories, "share", "personal share"),
        ),
    ]
    configs = [read_json(r / "config.json", "it should say how to run.") for r in runs]
    page = env.get_template("report.html.j2").render(
        title=f"{found[0].method if len(found) == 1 else f'{len(found)} methods'} on {summaries[0]['data']}",
        rows=[{**vars(r), **{view: tables.spread(getattr(r, view)) for view in views}} for r in found],
        figures=figures,
        summary=summaries[0],
        config={k: v for k, v in configs[0].items() if k not in ("method", "seed")},
        methods={c["method"]["name"]: {k: v for k, v in c["method"].items() if k != "name"} for c in configs},
    )
    write_bytes(out / "report.html", page.encode())
    return out / "report.html"


def _colours(names: list[str]) -> dict[str, Any]:
    """One colour a method on every figure; FedSelect always the same one."""
    from matplotlib import colormaps

    wheel = colormaps["tab10"].resampled(10)([i / 9 for i in range(10)])
    others = [n for n in names if n != "fedselect"]
    return {"fedselect": wheel[0], **{n: wheel[1 + i % 9] for i, n in enumerate(others)}}


def _lines(histories: Histories, field: str, label: str) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.8), layout="constrained")
    axes = figure.subplots()
    colours = _colours(list(histories))
    for method, seeds in histories.items():
        by_round: dict[int, list[float]] = defaultdict(list)
        for history in seeds:
            for r in history:
                if r[field] is not None:
                    by_round[r["round"]].append(r[field])
        x = sorted(by_round)
        mean = [statistics.fmean(by_round[t]) for t in x]
        off = [statistics.pstdev(by_round[t]) for t in x]
        axes.plot(x, mean, label=method, color=colours[method], linewidth=2.4 if method == "fedselect" else 1.4)
        axes.fill_between(
            x, [m - o for m, o in zip(mean, off, strict=True)], [m + o for m, o in zip(mean, off, strict=True)],
            color=colours[method], alpha=0.15, linewidth=0,
        )  # fmt: skip
    axes.set_xlabel("round")
    axes.set_ylabel(label)
    return _svg(figure, axes)


def _clients(histories: Histories) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.8), layout="constrained")
    axes = figure.subplots()
    colours = _colours(list(histories))
    for at, (method, seeds) in enumerate(histories.items()):
        finals = [next(r for r in reversed(h) if r["accuracy"] is not None)["clients"]["accuracy"] for h in seeds]
        means = [
            statistics.fmean(v for v in values if v is not None)
            for values in zip(*finals, strict=True)
            if any(v is not None for v in values)
        ]
        axes.scatter(means, [-at] * len(means), color=colours[method], alpha=0.7, s=36, linewidths=0)
        axes.scatter([statistics.fmean(means)], [-at], color=colours[method], marker="|", s=420, linewidths=2.4)
    axes.set_yticks([-i for i in range(len(histories))], list(histories))
    axes.set_xlabel("client accuracy (bar: mean)")
    return _svg(figure, axes, legend=False)


def _svg(figure: Any, axes: Any, legend: bool = True) -> str:
    """Drawn in the page's own text colour, so that it reads in light and in dark."""
    if legend:
        axes.legend(frameon=False, ncols=2, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    out = StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :].replace("#000000", "currentColor").replace("font: 10px", "fill: currentColor; font: 10px")
