"""A target's numbers on the terminal, as CSV, LaTeX and JSON."""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedselect.experiments.paper import PUBLISHED
from fedselect.experiments.reproduce.outcome import TEST, Block, Entry
from fedselect.experiments.reproduce.plan import How
from fedselect.experiments.reproduce.protocol import Target, read_column
from fedselect.experiments.tables import tex


def about(target: Target, how: How) -> str:
    """What a reader must know of these numbers."""
    said = [f"mean client accuracy on own test data, %, {len(how.seeds)} seed{'s' if len(how.seeds) > 1 else ''}"]
    published = "the protocol files" if any(read_column(c).stands_for for c in target.on) else "the paper"
    said.append(f"rates as in {published}" if how.rates == "paper" else "rates tuned on held-out training data")
    return "; ".join([*said, *([how.mark] if how.mark else [])])


def render(target: Target, block: Block, how: How) -> Table:
    mark = f" ({how.mark})" if how.mark else ""
    table = Table(
        title=f"{target.name}, {block.title}{mark}",
        caption=about(target, how),
        title_justify="left", caption_justify="left", box=SIMPLE_HEAD,
    )  # fmt: skip
    table.add_column("method", no_wrap=True)
    tested = target.against is not None
    for name in ("ours", "± sd", "paper", "diff", "rank", *(["gain", "p", "n"] if tested else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for e in block.entries:
        test = e.compared
        more = [_points(test.gain), _p(test.p), str(test.pairs)] if test else ["-"] * 3
        table.add_row(
            e.row, _two(e.mean), _two(e.std), _two(e.paper), _points(None if how.mark else e.difference), _rank(e),
            *(more if tested else []), style="bold" if e.row == target.against else None,
        )  # fmt: skip
    return table


def notes(target: Target, block: Block) -> list[str]:
    """What the table's signs mean, and runs that came to nothing."""
    said = [f"{e.row}: {len(e.failed)} seed(s) without a number: {e.failed[0]}" for e in block.entries if e.failed]
    if block.weights:
        said.append(f"starts from the weights in {block.weights}")
    if target.against is not None and any(e.compared for e in block.entries):
        said.append(f"gain: {target.against} less this row, in points; p: {TEST}; n: pairs")
    return said


def as_csv(target: Target, found: Sequence[Block], how: How) -> str:
    """A line for each cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        [
            "target", "data", "setting", "row", "seeds", "mean", "std", "paper", "difference", "rank", "paper_rank",
            "against", "gain", "p", "pairs", "rates", "note",
        ]
    )  # fmt: skip
    for block in found:
        for e in block.entries:
            test = [target.against, e.compared.gain, e.compared.p, e.compared.pairs] if e.compared else [None] * 4
            off = None if how.mark else e.difference
            numbers = [len(e.seeds), e.mean, e.std, e.paper, off, e.rank, e.paper_rank, *test]
            cells = [f"{v:.6g}" if isinstance(v, float) else v for v in numbers]
            writer.writerow([target.name, block.column, block.setting, e.row, *cells, how.rates, how.mark])
    return out.getvalue()


def as_latex(target: Target, found: Sequence[Block], how: How) -> str:
    """A booktabs table as the paper's: ours, and the paper's in brackets; the best of ours is bold."""
    rows = list(dict.fromkeys(e.row for b in found for e in b.entries))
    head = " & ".join(["", *(tex(b.title) for b in found)]) + r" \\"
    lines = [f"% {target.name}: {about(target, how)}; in brackets: the paper, {PUBLISHED[target.table].where}"]
    lines += [f"\\begin{{tabular}}{{l{'r' * len(found)}}}", "\\toprule", head, "\\midrule"]
    for row in rows:
        cells = [next((_tex_cell(e) for e in b.entries if e.row == row), "--") for b in found]
        lines.append(" & ".join([tex(row), *cells]) + r" \\")
    if how.mark:
        lines += ["\\midrule", rf"\multicolumn{{{1 + len(found)}}}{{l}}{{{tex(how.mark)}}} \\"]
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def as_json(target: Target, found: Sequence[Block], how: How, tuned: dict[str, Any]) -> dict[str, Any]:
    """Everything: each seed, each client, the run directories, and the rates they had."""
    return {
        "target": target.name,
        "title": target.title,
        "paper": PUBLISHED[target.table].where,
        "comparable": not how.mark,
        "note": how.mark or None,
        "how": asdict(how),
        "test": TEST if target.against else None,
        "against": target.against,
        "columns": [
            {
                "data": b.column,
                "setting": b.setting,
                "title": b.title,
                "weights": b.weights,
                "rows": [
                    {**asdict(e), "mean": e.mean, "std": e.std, "difference": None if how.mark else e.difference}
                    for e in b.entries
                ],
            }
            for b in found
        ],
        "tuned": tuned,
    }


def _two(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _points(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"


def _p(value: float) -> str:
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def _rank(e: Entry) -> str:
    """Ours, and the paper's in brackets."""
    return "-" if e.rank is None else f"{e.rank}" + (f" ({e.paper_rank})" if e.paper_rank else "")


def _tex_cell(e: Entry) -> str:
    if e.mean is None:
        return "--"
    own = f"{e.mean:.2f}" + (rf" \pm {e.std:.2f}" if e.std is not None else "")
    own = rf"\boldmath${own}$" if e.rank == 1 else f"${own}$"
    return own + (f" ({e.paper:.2f})" if e.paper is not None else "")
