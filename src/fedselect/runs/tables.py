"""Tables of runs: one row per method, with mean and standard deviation over seeds."""

import csv
import io
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedselect.core.errors import RunError
from fedselect.runs.labels import labels
from fedselect.runs.rundir import again, described, failure, finished, headline, outcome, view_of
from fedselect.tasks import Measure

DATA = {"test": "test", "val": "validation"}  # names of the data that a run is scored on


@dataclass(frozen=True)
class Line:
    method: str  # label: the method and what distinguishes it from other runs of the method
    asked: int  # number of runs, one per seed, finished or not
    seeds: list[int]  # of the finished runs
    headline: Measure
    _: KW_ONLY
    values: list[float]  # headline metric per seed: reported view, local model, merged model
    local: list[float]
    merged: list[float]
    share: float
    bytes_up: float
    seconds: float
    reports: str
    score: str  # data of these values: test or val
    kept: bool  # whether rounds were chosen on validation data, instead of the last
    chosen: Counter[str]  # models that clients chose, with --view best
    others: float | None  # headline metric on other clients' data, with --cross
    drawn: str = ""  # how many clients were evaluated, if not all: "100 of 10000"

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def name(self) -> str:
        """The label, and how many seeds are missing."""
        return self.method if len(self.seeds) == self.asked else f"{self.method}, {len(self.seeds)} of {self.asked} seeds"


def rows(runs: Sequence[Path]) -> list[Line]:
    """The finished runs, grouped by label, best first."""
    summaries: dict[str, list[dict[str, Any]]] = {}
    shown = common_headline(runs)
    first = shown.name
    named = _named(runs)
    asked = Counter(label for label, _ in named)
    for label, run in named:
        if finished(run):
            summaries.setdefault(label, []).append(outcome(run))
    if not summaries:
        raise RunError(f"no run is finished yet; continue with: {again(runs[0])}")
    made = [
        Line(
            method,
            asked[method],
            [s["seed"] for s in group],
            shown,
            values=[s[first] for s in group],
            local=[s[f"{first}_local"] for s in group],
            merged=[s[f"{first}_merged"] for s in group],
            share=statistics.fmean(s["share"] for s in group),
            bytes_up=statistics.fmean(s["bytes_up"] for s in group),
            seconds=statistics.fmean(s["seconds"] for s in group),
            reports=_reports([view_of(s, s, first) for s in group]),
            score=group[0].get("score", "test"),
            chosen=Counter(c["model"] for s in group for c in s.get("chosen", ()) if c["model"]),
            kept=any(s.get("kept") is not None for s in group),
            drawn=_drawn(group, first),
            others=_mean([_elsewhere(s["cross"]) for s in group if "cross" in s], len(group)),
        )
        for method, group in summaries.items()
    ]
    return sorted(made, key=lambda r: r.mean, reverse=shown.more_is_better)


def common_headline(runs: Sequence[Path]) -> Measure:
    """The headline metric of these runs, which must all have the same one."""
    by = {headline(run): run for run in runs}
    if len(by) > 1:
        (one, first), (other, second), *_ = by.items()
        raise RunError(f"{first} has the headline {one.name}, but {second} has {other.name}; pass runs with the same headline.")
    return next(iter(by))


def failures(runs: Sequence[Path]) -> list[tuple[str, str]]:
    """The diverged runs, by label and seed, and why they diverged."""
    return [(f"{label}, seed {described(run)['seed']}", why) for label, run in _named(runs) if (why := failure(run))]


def rowless(runs: Sequence[Path]) -> list[str]:
    """The labels whose runs all diverged."""
    labelled: dict[str, list[Path]] = {}
    for label, run in _named(runs):
        labelled.setdefault(label, []).append(run)
    return [label for label, group in labelled.items() if all(map(failure, group))]


def render(found: Sequence[Line], diverged: Sequence[str] = ()) -> Table:
    """The table, with diverged labels at the end."""
    seeds = max(r.asked for r in found)
    crossed = any(r.others is not None for r in found)
    many = "s, ± standard deviation" if seeds > 1 else ""
    first, unit = found[0].headline, " %" if found[0].headline.percent else ""
    table = Table(
        title=f"mean client {first.name} on each client's {DATA[found[0].score]} data, {seeds} seed{many}",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=not crossed,  # fit one more column in 80 characters
        collapse_padding=crossed,
    )
    table.add_column("method", no_wrap=True, min_width=max(map(len, [*(r.name for r in found), *diverged])))
    views = [f"{name}{unit}" for name in ("local", "merged", *(["others"] if crossed else []))]
    for column in (first.title, *views, "personal %", "MB up", "sec"):
        table.add_column(column, justify="right", no_wrap=True)
    for r in found:
        views = [first.show(statistics.fmean(v)) for v in (r.local, r.merged)]
        if r.reports != "best":
            mark = 0 if r.reports == "local" else 1
            views[mark] = f"[bold]{views[mark]}[/bold]"
        others = [first.show(r.others) if r.others is not None else "-"] if crossed else []
        figures = [f"{100 * r.share:.1f}", f"{r.bytes_up / 1e6:.2f}", f"{r.seconds:.1f}"]
        table.add_row(r.name, spread(r.values, first), *views, *others, *figures)
    for label in diverged:
        table.add_row(label, "diverged")
    table.caption = (
        f"{first.name}: the view that the method reports (bold); local: after local training; merged: after aggregation; "
        f"{'others: on the data of other clients; ' if crossed else ''}"
        "personal: share of the parameters that stay on the client; MB up: uploads of all clients in the whole run; "
        "sec: seconds for one run"
    )
    for r in found:
        if r.chosen:
            named = ", ".join(f"{model} {many}" for model, many in r.chosen.most_common())
            table.caption += f"; {r.name}: each client's choice on its validation data ({named})"
    if drawn := {r.drawn: None for r in found if r.drawn}:
        table.caption += f"; evaluated on {' or '.join(drawn)} clients, drawn at random"
    if any(r.kept for r in found):
        table.caption += "; rounds were chosen on validation data"
    table.caption_justify = "left"
    return table


def _named(runs: Sequence[Path]) -> list[tuple[str, Path]]:
    """All runs, finished or not, with their labels."""
    return list(zip(labels([described(run) for run in runs]), runs, strict=True))


def _reports(views: Sequence[str]) -> str:
    """The view that all runs of a row report; "merged" if they differ."""
    return views[0] if len(set(views)) == 1 else "merged"


def _drawn(group: Sequence[Mapping[str, Any]], headline: str) -> str:
    """How many clients were evaluated, if some of these runs drew them."""
    over = [s["over_clients"][headline] for s in group if "eval_fraction" in s]
    return f"{min(o['defined'] for o in over)} of {over[0]['clients']}" if over else ""


def _mean(found: Sequence[float | None], whole: int) -> float | None:
    """The mean, or None if a number is missing."""
    there = [v for v in found if v is not None]
    return statistics.fmean(there) if len(there) == whole else None


def _elsewhere(cross: list[list[float | None]]) -> float | None:
    """The mean of a cross-client matrix without its diagonal."""
    apart = [v for i, row in enumerate(cross) for j, v in enumerate(row) if i != j and v is not None]
    return statistics.fmean(apart) if apart else None


def spread(values: Sequence[float], measure: Measure) -> str:
    """Mean and standard deviation as text."""
    mean = measure.show(statistics.fmean(values))
    return mean if len(values) < 2 else f"{mean} ± {measure.show(statistics.stdev(values))}"


def as_csv(found: Sequence[Line], diverged: Sequence[str] = ()) -> str:
    """The table as CSV, not in percent. Standard deviations are over seeds; diverged rows have no numbers."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    first = found[0].headline.name
    views = [first, "std", f"{first}_local", f"{first}_merged", "others"]
    writer.writerow(["method", "seeds", "asked", *views, "share", "bytes_up", "seconds"])
    for r in found:
        means = [f"{statistics.fmean(v):.6f}" for v in (r.local, r.merged)]
        off = f"{statistics.stdev(r.values):.6f}" if len(r.values) > 1 else ""
        others = "" if r.others is None else f"{r.others:.6f}"
        figures = [f"{r.share:.6f}", f"{r.bytes_up:.0f}", f"{r.seconds:.3f}"]
        writer.writerow([r.method, len(r.seeds), r.asked, f"{r.mean:.6f}", off, *means, others, *figures])
    for label in diverged:
        writer.writerow([label, 0, *[""] * 9])
    return out.getvalue()


def as_latex(found: Sequence[Line], diverged: Sequence[str] = ()) -> str:
    """A booktabs table; the best value is bold."""
    first = found[0].headline
    crossed = any(r.others is not None for r in found)
    columns = [tex(first.name), "local", "merged", *(["others"] if crossed else []), "personal", "total MB up"]
    lines = [
        f"\\begin{{tabular}}{{l{'r' * len(columns)}}}",
        "\\toprule",
        " & ".join(["method", *columns]) + r" \\",
        "\\midrule",
    ]
    best = first.best(r.mean for r in found)
    for r in found:
        value = "$" + spread(r.values, first).replace(" ± ", r" \pm ") + "$"
        cells = [
            tex(r.name),
            rf"\boldmath{value}" if r.mean == best else value,
            *(first.show(statistics.fmean(v)) for v in (r.local, r.merged)),
            *(["--" if r.others is None else first.show(r.others)] if crossed else []),
            f"{100 * r.share:.1f}",
            f"{r.bytes_up / 1e6:.2f}",
        ]
        lines.append(" & ".join(cells) + r" \\")
    lines += [" & ".join([tex(label), "diverged", *[""] * (len(columns) - 1)]) + r" \\" for label in diverged]
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


TEX = {
    **{c: f"\\{c}" for c in "_%&#${}"}, "α": r"$\alpha$", "γ": r"$\gamma$",
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
}  # fmt: skip


def tex(text: str) -> str:
    """Escape text for LaTeX."""
    return "".join(TEX.get(c, c) for c in text)
