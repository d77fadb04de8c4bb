"""Write docs/private.md from results/private.json, which benchmarks/private.py made; --check: say if it is stale instead."""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template

from fedselect.private import Private
from fedselect.private.guarantee import client_guarantee

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS, SHARED = "docs/private.md", "results/private.json", "results/private_secret.json"
TEXT = Path(__file__).with_name("private.md.j2")
Row = dict[str, Any]


def of(rows: list[Row], **wanted: Any) -> list[Row]:
    """The rows that have these values."""
    return [r for r in rows if all(r[k] == v for k, v in wanted.items())]


def cell(found: list[Row]) -> str:
    """Mean and standard deviation over seeds."""
    values = [r["accuracy"] for r in found]
    return f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}"


def budgets(rows: list[Row]) -> list[float | None]:
    return list(dict.fromkeys(r["epsilon"] for r in rows))


def said(epsilon: float | None) -> str:
    return "none" if epsilon is None else f"{epsilon:g}"


def cases(rows: list[Row], unit: str) -> list[tuple[str, int]]:
    """Which data and how many clients there are, as they were first met."""
    return list(dict.fromkeys((r["data"], r["clients"]) for r in rows if r["unit"] == unit))


def table(rows: list[Row], unit: str) -> str:
    """Accuracy by epsilon; a column for each number of clients."""
    columns = cases(rows, unit)
    heads = [f"{clients:,} clients" if unit == "client" else f"{data}, {clients} clients" for data, clients in columns]
    lines = [f"| accuracy, %, with epsilon | {' | '.join(heads)} |", f"|---{'|--:' * len(heads)}|"]
    for e in budgets(rows):
        cells = [cell(of(rows, unit=unit, data=d, clients=c, epsilon=e)) for d, c in columns]
        lines.append(f"| {said(e)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def noises(rows: list[Row], unit: str) -> str:
    """How long the noise is beside the longest update, and what was chosen, by epsilon."""
    columns = cases(rows, unit)
    heads = [f"{clients:,} clients" if unit == "client" else f"{data}, {clients} clients" for data, clients in columns]
    lines = [f"| noise over clip; rate, clip | {' | '.join(heads)} |", f"|---{'|--:' * len(heads)}|"]
    for e in filter(None, budgets(rows)):
        found = [of(rows, unit=unit, data=d, clients=c, epsilon=e)[0] for d, c in columns]
        cells = [f"{r['ratio']:.2g}; {r['lr']:g}, {r['clip']}" for r in found]
        lines.append(f"| {e:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def compared(rows: list[Row], shared: list[Row]) -> str:
    """Noise added by the server beside noise added by clients in shares; accuracy, and how long the noise is."""
    counts = [c for _, c in cases(shared, "client")]
    lines = [
        f"| accuracy, %, with epsilon | who adds the noise | {' | '.join(f'{c:,} clients' for c in counts)} |",
        f"|---|---{'|--:' * len(counts)}|",
    ]
    for e in budgets(shared):
        for who, source in (("server", rows), ("clients (`--secret`)", shared)):
            found = [of(source, unit="client", clients=c, epsilon=e) for c in counts]
            cells = [f"{cell(f)} ({f[0]['ratio']:.2g})" for f in found]
            lines.append(f"| {said(e)} | {who} | {' | '.join(cells)} |")
    return "\n".join(lines)


def mean(rows: list[Row], **wanted: Any) -> str:
    return f"{statistics.fmean(r['accuracy'] for r in of(rows, **wanted)):.0f}%"


def page(root: Path) -> str:
    found = json.loads((root / RESULTS).read_text(encoding="utf-8"))
    shared = json.loads((root / SHARED).read_text(encoding="utf-8"))
    template = Template(TEXT.read_text(encoding="utf-8"), undefined=StrictUndefined, keep_trailing_newline=True)
    resnet = round(client_guarantee(Private(8), 10, 1.0, 100, entries=11_000_000).ratio, -2)
    return template.render(
        resnet=int(resnet),
        shared=shared,
        compared=compared,
        found=found,
        rows=found["rows"],
        table=table,
        noises=noises,
        mean=mean,
        of=of,
    )


def stale(root: Path) -> list[str]:
    there = root / PAGE
    return [] if there.exists() and there.read_text(encoding="utf-8") == page(root) else [PAGE]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is stale")
    if parser.parse_args().check:
        for name in stale(ROOT):
            print(f"{name} is not what {RESULTS} says; write it with: python scripts/private.py")
        sys.exit(bool(stale(ROOT)))
    (ROOT / PAGE).write_text(page(ROOT), encoding="utf-8")


if __name__ == "__main__":
    main()
