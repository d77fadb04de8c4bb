"""Write docs/adapters.md from results/adapters.jsonl, which benchmarks/adapters.py made; --check says if it is stale."""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = "docs/adapters.md", "results/adapters.jsonl"
SPEED, FROZEN = "results/lora.jsonl", "results/frozen.jsonl"
TEXT = Path(__file__).with_name("adapters.md.j2")
Row = dict[str, Any]
RATE_OF = {"LoRA, shared, exact": "LoRA, shared", "LoRA, shared + FT, exact": "LoRA, shared + FT"}
"""Ways that take the rate of another."""
TITLES = {"pacs": "PACS, 4 styles", "audiomnist": "AudioMNIST, 20 speakers", "cifar10": "CIFAR-10, 10 clients"}


def of(rows: list[Row], **wanted: Any) -> list[Row]:
    """The rows that have these values."""
    return [r for r in rows if all(r[k] == v for k, v in wanted.items())]


def order(rows: list[Row], name: str) -> list[Any]:
    """The values that rows have for a name, as they were first met."""
    return list(dict.fromkeys(r[name] for r in rows))


def cell(found: list[Row]) -> str:
    """Mean and standard deviation over seeds; a run whose numbers stopped being finite has none."""
    values = [r["accuracy"] for r in found]
    if not values:
        return ""
    if None in values:
        return f"diverged {values.count(None)} of {len(values)}"
    return f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}" if len(values) > 1 else f"{values[0]:.1f}"


def table(rows: list[Row], place: str) -> str:
    """Ways by kinds of shift, with what a client sends and receives in a round."""
    own = of(rows, place=place, score="test")
    shifts = order(own, "shift")
    heads = ["accuracy, %", *(s or "test" for s in shifts), "up, kB", "down, kB", "rate, of those tried", "seconds"]
    lines = [f"| {' | '.join(heads)} |", f"|---{'|--:' * (len(heads) - 1)}|"]
    for way in order(own, "way"):
        tried, rate = choice(rows, place, way)
        if not (mine := of(own, way=way, rate=rate)):
            continue
        cells = [cell(of(mine, shift=s)) for s in shifts]
        size = [f"{mine[0][k] / 1000:,.0f}" for k in ("up", "down")]
        seconds = statistics.fmean(r["seconds"] for r in mine)
        lines.append(f"| {' | '.join([way, *cells, *size, f'{rate:g} of {tried}', f'{seconds:.1f}'])} |")
    return "\n".join(lines)


def choice(rows: list[Row], place: str, way: str) -> tuple[str, float]:
    """The rates that were tried on held-out samples, in words, and the best; a run that diverged counts as 0."""
    held = of(rows, place=place, way=RATE_OF.get(way, way), score="val")
    rates = sorted({r["rate"] for r in held})
    best = max(rates, key=lambda v: statistics.fmean(r["accuracy"] or 0.0 for r in of(held, rate=v)))
    return ", ".join(f"{v:g}" for v in rates), best


PAIRS = (
    ("LoRA, shared + FT", "full, shared + FT", "LoRA against full fine-tuning, both shared and then fine-tuned"),
    ("LoRA, shared + FT", "head, shared + FT", "LoRA against the head alone, both shared and then fine-tuned"),
    ("LoRA, personal", "LoRA, shared", "An adapter for each client against one for all"),
    ("LoRA, FedPersist by rank", "LoRA, FedPersist by layer", "Whole ranks that are personal against whole layers"),
    ("LoRA, Ditto", "LoRA, personal", "Personal adapters pulled to a shared one (Ditto) against an adapter for each client"),
    ("LoRA, shared, exact", "LoRA, shared", "Products averaged exactly against A and B averaged separately"),
)
"""What is compared, way against way, where both were run."""


def lessons(rows: list[Row], place: str) -> str:
    """What the rows of a place say: ways against each other, paired by seed and shift, and which rates are at an edge."""
    ways = order(of(rows, place=place, score="test"), "way")
    lines = [f"- {words}: {said}." for a, b, words in PAIRS if {a, b} <= set(ways) and (said := against(rows, place, a, b))]
    edges = {w: edge for w in ways if w not in RATE_OF and (edge := at_edge(rows, place, w))}
    for which in ("smallest", "largest"):
        if names := [w for w, edge in edges.items() if edge == which]:
            lines.append(f"- The best rate was the {which} one tried, so a better one may lie beyond: {'; '.join(names)}.")
    held = of(rows, place=place, score="val")
    if lost := [r["rate"] for r in held if r["accuracy"] is None]:
        rates = ", ".join(f"{v:g} ({lost.count(v)})" for v in sorted(set(lost)))
        lines.append(f"- Of {len(held)} runs on held-out samples, {len(lost)} diverged; by rate: {rates}.")
    return "\n".join(lines)


def against(rows: list[Row], place: str, way: str, other: str) -> str:
    """The mean difference in points with its standard error, paired by seed and shift; nothing for fewer than two pairs."""
    scores = []
    for w in (way, other):
        found = of(rows, place=place, way=w, rate=choice(rows, place, w)[1], score="test")
        scores.append({(r["shift"], r["seed"]): r["accuracy"] for r in found if r["accuracy"] is not None})
    gaps = [scores[0][k] - scores[1][k] for k in scores[0] if k in scores[1]]
    if len(gaps) < 2:
        return ""
    mean, error = statistics.fmean(gaps), statistics.stdev(gaps) / len(gaps) ** 0.5
    words = "more than two standard errors" if abs(mean) > 2 * error else "within two standard errors"
    return f"{mean:+.1f} ± {error:.1f} points ({words})"


def at_edge(rows: list[Row], place: str, way: str) -> str:
    tried, best = choice(rows, place, way)
    ends = [float(v) for v in tried.split(", ")]
    return "" if len(ends) < 2 else {ends[0]: "smallest", ends[-1]: "largest"}.get(best, "")


def made(rows: list[Row], place: str) -> str:
    """The machines, commits and dates of a place's rows."""
    own = of(rows, place=place)
    return "; ".join(dict.fromkeys(f"{r['machine']}, torch {r['torch']}, commit {r['commit']}, {r['date']}" for r in own))


def speeds(rows: list[Row]) -> str:
    """Stacked and in a loop, by model."""
    lines = ["| model | trains | frozen | stacked | one after another | | MB a client |", "|---|--:|--:|--:|--:|--:|--:|"]
    for r in rows:
        times = " | ".join(f"{1000 * r[k]:,.1f} ms" for k in ("stacked", "loop"))
        ratio, memory = f"{r['ratio']:.0f}x", f"{r['MB a client']:g}"
        lines.append(f"| `{r['model']}` | {r['trained']:,} | {r['frozen']:,} | {times} | {ratio} | {memory} |")
    return "\n".join(lines)


def savings(rows: list[Row]) -> str:
    """A round with the outputs of frozen layers at hand, and one that runs all layers."""
    heads = ["`--adapt`", "runs once per sample", "once", "a round", "a round of all layers", "", "MB"]
    lines = [f"| {' | '.join(heads)} |", "|---|---|--:|--:|--:|--:|--:|"]
    for r in rows:
        times = " | ".join(f"{r[k]:.3f} s" for k in ("once", "kept", "whole"))
        lines.append(f"| `{r['trains']}` | all before `{r['before']}` | {times} | {r['ratio']:.1f}x | {r['MB']:.1f} |")
    return "\n".join(lines)


def rows_of(root: Path, file: str = RESULTS) -> list[Row]:
    return [json.loads(line) for line in (root / file).read_text(encoding="utf-8").splitlines()]


def page(root: Path) -> str:
    rows = rows_of(root)
    template = Template(TEXT.read_text(encoding="utf-8"), undefined=StrictUndefined, keep_trailing_newline=True)
    places = [p for p in TITLES if of(rows, place=p, score="test")]
    tables = "\n\n".join(f"**{TITLES[p]}**\n\n{table(rows, p)}\n\n{lessons(rows, p)}\n\n{made(rows, p)}." for p in places)
    machine, *timed = rows_of(root, SPEED)
    cpu, *saved = rows_of(root, FROZEN)
    return template.render(tables=tables, speeds=speeds(timed), on=machine, savings=savings(saved), cpu=cpu, rounds=saved[0])


def stale(root: Path) -> list[str]:
    return [] if (root / PAGE).read_text(encoding="utf-8") == page(root) else [PAGE]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is stale")
    if parser.parse_args().check:
        for name in stale(ROOT):
            print(f"{name} is not what {RESULTS} says; write it with: python scripts/adapters.py")
        sys.exit(bool(stale(ROOT)))
    (ROOT / PAGE).write_text(page(ROOT), encoding="utf-8")


if __name__ == "__main__":
    main()
