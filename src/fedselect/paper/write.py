"""Write a target's numbers to the terminal, and as CSV, LaTeX and JSON.

± is the standard error of the mean over seeds. Numbers are of the last round; "tail" is the mean over the last quarter of
the rounds, which is less noisy.
"""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedselect.paper.numbers import PUBLISHED
from fedselect.paper.outcome import TEST, Block, Entry
from fedselect.paper.plan import How
from fedselect.paper.protocol import Target, read_column
from fedselect.runs.tables import tex


def about(target: Target, how: How) -> str:
    """A description of the numbers."""
    seeds = len(how.on(target).seeds or ())
    data = "own test data" if target.score == "test" else "images held out of the client's training data"
    said = [f"mean client accuracy on {data}, %, {seeds} seed{'s, ± standard error' if seeds > 1 else ''}"]
    published = "the protocol files" if any(read_column(c).stands_for for c in target.on) else "the paper"
    rates = {"paper": f"as in {published}", "tuned": "tuned on held-out training data", "own": "set by each row"}
    said.append(f"rates {rates[how.on(target).rates]}")
    return "; ".join([*said, *([how.mark] if how.mark else [])])


def render(target: Target, block: Block, how: How) -> Table:
    mark = f" ({how.mark})" if how.mark else ""
    table = Table(
        title=f"{target.name}, {block.title}{mark}",
        caption=about(target, how),
        title_justify="left", caption_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True,
    )  # fmt: skip
    table.add_column("method", no_wrap=True)
    tested, published = target.against is not None, target.table in PUBLISHED
    names = ["ours", "±", "tail", *(["paper", "diff"] if published else []), "rank", *(["gain", "p", "n"] if tested else [])]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for e in block.entries:
        test = e.compared
        more = [_points(test.gain), _p(test.p), str(test.pairs)] if test else ["-"] * 3
        theirs = [_two(e.paper), _points(None if how.mark else e.difference)] if published else []
        table.add_row(
            e.row, _two(e.mean), _two(e.error), _two(e.tail), *theirs, _rank(e),
            *(more if tested else []), style="bold" if e.row == target.against else None,
        )  # fmt: skip
    return table


def notes(target: Target, block: Block) -> list[str]:
    """Footnotes: diverged runs and the meaning of columns."""
    said = [f"{e.row}: {len(e.failed)} seed(s) diverged: {e.failed[0]}" for e in block.entries if e.failed]
    if block.weights:
        said.append(f"starts from the weights in {block.weights}")
    if target.against is not None and any(e.compared for e in block.entries):
        said.append(f"gain: {target.against} minus this row, in points; p: {TEST}; n: pairs")
    return said


def as_csv(target: Target, found: Sequence[Block], how: How) -> str:
    """One line per cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        [
            "target", "data", "setting", "row", "seeds", "mean", "std", "standard_error", "tail", "paper", "difference",
            "rank", "paper_rank", "against", "gain", "p", "pairs", "rates", "note",
        ]
    )  # fmt: skip
    for block in found:
        for e in block.entries:
            test = [target.against, e.compared.gain, e.compared.p, e.compared.pairs] if e.compared else [None] * 4
            off = None if how.mark else e.difference
            numbers = [len(e.seeds), e.mean, e.std, e.error, e.tail, e.paper, off, e.rank, e.paper_rank, *test]
            cells = [f"{v:.6g}" if isinstance(v, float) else v for v in numbers]
            writer.writerow([target.name, block.column, block.setting, e.row, *cells, how.on(target).rates, how.mark])
    return out.getvalue()


def as_latex(target: Target, found: Sequence[Block], how: How) -> str:
    """A booktabs table like the paper's: our numbers, with the paper's in brackets; our best is bold."""
    rows = list(dict.fromkeys(e.row for b in found for e in b.entries))
    head = " & ".join(["", *(tex(b.title) for b in found)]) + r" \\"
    where = PUBLISHED[target.table].where if target.table in PUBLISHED else None
    lines = [f"% {target.name}: {about(target, how)}" + (f"; in brackets: the paper, {where}" if where else "")]
    lines += [f"\\begin{{tabular}}{{l{'r' * len(found)}}}", "\\toprule", head, "\\midrule"]
    for row in rows:
        cells = [next((_tex_cell(e) for e in b.entries if e.row == row), "--") for b in found]
        lines.append(" & ".join([tex(row), *cells]) + r" \\")
    if how.mark:
        lines += ["\\midrule", rf"\multicolumn{{{1 + len(found)}}}{{l}}{{{tex(how.mark)}}} \\"]
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def as_json(target: Target, found: Sequence[Block], how: How, tuned: dict[str, Any]) -> dict[str, Any]:
    """Everything a page needs: results by seed and client, curves, traffic, options, and the origin of the runs."""
    how = how.on(target)
    seeds = [s for b in found for e in b.entries for s in e.seeds]
    return {
        "target": target.name,
        "title": target.title,
        "paper": PUBLISHED[target.table].where if target.table in PUBLISHED else None,
        "comparable": not how.mark,
        "note": how.mark or None,
        "about": about(target, how),
        "date": max((s.date for s in seeds), default=None),
        "environments": _distinct([s.environment for s in seeds]),
        "how": {k: v for k, v in asdict(how).items() if k not in ("device", "precision")},
        "score": target.score,
        "test": TEST if target.against else None,
        "against": target.against,
        "columns": [
            {
                "data": b.column,
                "setting": b.setting,
                "title": b.title,
                "weights": b.weights,
                "clients": max((len(s.clients) for e in b.entries for s in e.seeds), default=0),
                "rounds": b.entries[0].config["rounds"],
                "common": _common(b.entries[0]),
                "rows": [_row(e, _common(b.entries[0]), None if how.mark else e.difference) for e in b.entries],
            }
            for b in found
        ],
        "tuned": tuned,
    }


def lean(value: Any, width: int = 100, at: int = 0) -> str:
    """Compact JSON: short values and lists of numbers stay on one line, so that diffs are small."""
    flat = json.dumps(value, ensure_ascii=False)
    numbers = isinstance(value, (list, tuple)) and not any(isinstance(v, (list, tuple, dict)) for v in value)
    if not isinstance(value, (list, tuple, dict)) or numbers or len(flat) <= width:
        return flat
    pad = " " * (at + 1)
    if isinstance(value, dict):
        items = [f"{pad}{json.dumps(k, ensure_ascii=False)}: {lean(v, width, at + 1)}" for k, v in value.items()]
        return "{\n" + ",\n".join(items) + "\n" + " " * at + "}"
    return "[\n" + ",\n".join(pad + lean(v, width, at + 1) for v in value) + "\n" + " " * at + "]"


def _row(e: Entry, common: dict[str, Any], difference: float | None) -> dict[str, Any]:
    """A row, its seeds as lists beside each other, and in what it departs from what its column has in common."""
    test = asdict(e.compared) if e.compared else None
    return {
        "row": e.row,
        "method": e.config["method"]["name"],
        "options": {k: v for k, v in e.config["method"].items() if k != "name"},
        **{k: v for k, v in _common(e).items() if v != common[k]},
        **{k: _short(v) for k, v in (("mean", e.mean), ("std", e.std), ("error", e.error), ("tail_mean", e.tail))},
        "paper": e.paper,
        "difference": _short(difference),
        "rank": e.rank,
        "paper_rank": e.paper_rank,
        "compared": test and {**test, "gain": _short(test["gain"]), "p": float(f"{test['p']:.3g}")},
        "seeds": [s.seed for s in e.seeds],
        "accuracy": [_short(s.accuracy) for s in e.seeds],
        "tail": [_short(s.tail) for s in e.seeds],
        "local": [_short(s.local) for s in e.seeds],
        "merged": [_short(s.merged) for s in e.seeds],
        "share": [_short(s.share) for s in e.seeds],
        "share_live": [_short(s.share_live) for s in e.seeds],
        "bytes_up": [round(s.bytes_up) for s in e.seeds],
        "bytes_down": [round(s.bytes_down) for s in e.seeds],
        "seconds": [round(s.seconds, 1) for s in e.seeds],
        "clients": [[_short(a) for a in s.clients] for s in e.seeds],
        "rounds": list(e.seeds[0].rounds) if e.seeds else [],
        "curve": [[round(a, 2) for a in s.curve] for s in e.seeds],
        "runs": list(e.runs),
        "failed": list(e.failed),
    }


def _common(e: Entry) -> dict[str, Any]:
    return {k: e.config[k] for k in ("data", "model", "training")}


def _distinct(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e for i, e in enumerate(found) if e not in found[:i]]


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _two(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _points(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"


def _p(value: float) -> str:
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def _rank(e: Entry) -> str:
    """Our rank, and the paper's in brackets."""
    return "-" if e.rank is None else f"{e.rank}" + (f" ({e.paper_rank})" if e.paper_rank else "")


def _tex_cell(e: Entry) -> str:
    if e.mean is None:
        return "--"
    own = f"{e.mean:.2f}" + (rf" \pm {e.error:.2f}" if e.error is not None else "")
    own = rf"\boldmath${own}$" if e.rank == 1 else f"${own}$"
    return own + (f" ({e.paper:.2f})" if e.paper is not None else "")
