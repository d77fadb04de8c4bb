"""Tables of every metric over clients: mean, worst tenth, mean weighted by samples, and number of clients that have it."""

import csv
import io
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedselect.core.errors import RunError
from fedselect.runs import tables
from fedselect.runs.labels import labels
from fedselect.runs.rundir import again, described, finished, headline, measures, outcome
from fedselect.runs.tables import DATA, spread
from fedselect.tasks import Measure, Spread
from fedselect.tasks.metrics import LOSS


@dataclass(frozen=True)
class Row:
    """One metric of the runs with one label, one per seed."""

    method: str
    measure: Measure
    seeds: list[Spread]

    def mean(self, of: Callable[[Spread], float | None]) -> float | None:
        """The mean over seeds, or None if a seed lacks it."""
        found = [v for s in self.seeds if (v := of(s)) is not None]
        return statistics.fmean(found) if len(found) == len(self.seeds) else None

    @property
    def clients(self) -> str:
        """How many clients have the metric: "3 of 4", or "3 to 4 of 4" if seeds differ."""
        low, high = min(s.defined for s in self.seeds), max(s.defined for s in self.seeds)
        return f"{low if low == high else f'{low} to {high}'} of {self.seeds[0].clients}"


def rows(runs: Sequence[Path]) -> list[Row]:
    """Every metric of the finished runs, grouped by label, in the order of the main table."""
    found: dict[tuple[str, str], Row] = {}
    order = [line.method for line in tables.rows(runs)]
    for label, run in zip(labels([described(run) for run in runs]), runs, strict=True):
        for measure, over in spreads(run) if finished(run) else ():
            found.setdefault((label, measure.name), Row(label, measure, [])).seeds.append(over)
    return sorted(found.values(), key=lambda row: order.index(row.method))


def spreads(run: Path) -> list[tuple[Measure, Spread]]:
    """Every metric of a finished run over its clients. Runs of older versions have only the headline."""
    said, first = outcome(run), headline(run)
    if "over_clients" not in said:
        return [(first, Spread.of(first, said["clients"]))]
    try:
        return [(m, Spread(**said["over_clients"][m.name])) for m in measures(run)]
    except (KeyError, TypeError) as e:
        raise RunError(f"{run / 'summary.json'} is damaged ({e}); delete it, then: {again(run)}") from None


def several(runs: Sequence[Path]) -> bool:
    """Whether any run has more metrics than one and the loss."""
    return any(len({m.name for m in measures(run)} - {LOSS}) > 1 for run in runs)


def render(found: Sequence[Row], score: str = "test") -> Table:
    many = ", ± standard deviation over seeds" if max(len(row.seeds) for row in found) > 1 else ""
    table = Table(
        title=f"every metric over clients, each on its own {DATA[score]} data{many}", title_justify="left", box=SIMPLE_HEAD
    )
    for column in ("method", "metric"):
        table.add_column(column, no_wrap=True)
    for column in ("mean", "worst tenth", "weighted", "clients"):
        table.add_column(column, justify="right", no_wrap=True)
    before = ""
    for row in found:
        means = [s.mean for s in row.seeds if s.mean is not None]
        others = [row.mean(lambda s: s.worst_tenth), row.mean(lambda s: s.weighted)]
        shown = [row.measure.show(v) if v is not None else "-" for v in others]
        mean = spread(means, row.measure) if means else "-"
        table.add_row(row.method if row.method != before else "", row.measure.title, mean, *shown, row.clients)
        before = row.method
    table.caption = (
        "worst tenth: mean of the worst tenth of clients, at least one; weighted: by test samples; clients: number of clients "
        "for which the metric is defined; others are excluded"
    )
    table.caption_justify = "left"
    return table


def as_csv(found: Sequence[Row]) -> str:
    """The table as CSV, not in percent. The standard deviation is over seeds; unknown numbers are blank."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["method", "metric", "seeds", "mean", "std", "worst_tenth", "weighted", "defined", "clients"])
    for row in found:
        means = [s.mean for s in row.seeds if s.mean is not None]
        deviation = statistics.stdev(means) if len(means) > 1 else None
        numbers = [row.mean(lambda s: s.mean), deviation, row.mean(lambda s: s.worst_tenth), row.mean(lambda s: s.weighted)]
        defined = f"{statistics.fmean(s.defined for s in row.seeds):g}"
        cells = ["" if v is None else f"{v:.6f}" for v in numbers]
        writer.writerow([row.method, row.measure.name, len(row.seeds), *cells, defined, row.seeds[0].clients])
    return out.getvalue()
