"""Write docs/adapters.md from results/adapters.jsonl, which benchmarks/adapters.py made; --check says if it is stale."""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import StrictUndefined, Template
from scipy.stats import t as student
from shifts import regrets, spread

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = "docs/adapters.md", "results/adapters.jsonl"
SPEED, FROZEN = "results/lora.jsonl", "results/frozen.jsonl"
TEXT = Path(__file__).with_name("adapters.md.j2")
Row = dict[str, Any]
RATE_OF = {"LoRA, shared, exact": "LoRA, shared", "LoRA, shared + FT, exact": "LoRA, shared + FT"}
"""Ways that take the rate of another."""
NAMES = {"pacs": "PACS", "audiomnist": "AudioMNIST", "cifar10": "CIFAR-10"}
OURS = ("FedAlike", "FedPersist")
"""Methods of this project, as the names of ways say them."""
PARTS = ("full", "head", "LoRA")
"""What trains, as the names of ways begin."""


def of(rows: list[Row], **wanted: Any) -> list[Row]:
    """The rows that have these values."""
    return [r for r in rows if all(r[k] == v for k, v in wanted.items())]


def order(rows: list[Row], name: str) -> list[Any]:
    """The values that rows have for a name, as they were first met."""
    return list(dict.fromkeys(r[name] for r in rows))


def mean_of(values: list[float]) -> tuple[float, float]:
    """The mean over seeds and its standard error."""
    return statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def cell(values: list[float | None]) -> str:
    """Mean and standard error over seeds; a run whose numbers stopped being finite has none."""
    if None in values:
        return f"diverged {values.count(None)} of {len(values)}"
    return "{:.1f} ± {:.1f}".format(*mean_of([v for v in values if v is not None])) if values else ""


def tests(rows: list[Row], place: str, way: str) -> list[Row]:
    """The rows of a way on test data, with the rate that was chosen for it."""
    return of(rows, place=place, way=way, rate=choice(rows, place, way)[1], score="test")


def shifts_of(rows: list[Row], place: str) -> list[str]:
    return order(of(rows, place=place, score="test"), "shift")


def ways_of(rows: list[Row], place: str) -> list[str]:
    """The ways that ran to the end: those that train everything, then the head, then adapters, as they were first met."""
    own, held = of(rows, place=place, score="test"), set(order(of(rows, place=place, score="val"), "way"))
    every = {(r["shift"], r["seed"]) for r in own}
    known = [w for w in order(own, "way") if RATE_OF.get(w, w) in held]
    whole = [w for w in known if {(r["shift"], r["seed"]) for r in tests(rows, place, w)} == every]
    return sorted(whole, key=lambda w: PARTS.index(w.partition(",")[0]))


def accuracies(rows: list[Row], place: str) -> Any:
    """Accuracies on test data by way, kind of shift and seed; a run that diverged counts as 0."""
    kinds = shifts_of(rows, place)
    found = []
    for way in ways_of(rows, place):
        own = {(r["shift"], r["seed"]): r["accuracy"] or 0.0 for r in tests(rows, place, way)}
        found.append([[own[kind, seed] for seed in sorted({seed for _, seed in own})] for kind in kinds])
    return np.array(found)


def table(rows: list[Row], place: str) -> str:
    """Ways by kinds of shift, what they come to, and what a client sends and receives in a round."""
    kinds, ways = shifts_of(rows, place), ways_of(rows, place)
    several = len(kinds) > 1
    heads = ["accuracy, %", *(s or "test" for s in kinds), *(["mean", "worst regret"] if several else [])]
    heads += ["up, kB", "down, kB", "rate, of those tried", "seconds"]
    lines = [f"| {' | '.join(heads)} |", f"|---{'|--:' * (len(heads) - 1)}|"]
    acc = accuracies(rows, place)
    best, (means, worst) = acc.mean(2).max(0), sums(acc)
    for i, way in enumerate(ways):
        mine, (tried, rate) = tests(rows, place, way), choice(rows, place, way)
        cells = [cell([r["accuracy"] for r in of(mine, shift=s)]) for s in kinds]
        if several:
            cells = [bold(c, acc[i, j].mean() == best[j]) for j, c in enumerate(cells)]
            cells.append(bold("{:.1f} ± {:.1f}".format(*means[i]), means[i] == max(means)))
            cells.append(bold("{:.1f} ± {:.1f}".format(*worst[i]), worst[i][0] == min(worst)[0]))
        sizes = [statistics.fmean(r[k] for r in mine) / 1000 for k in ("up", "down")]
        size = [f"{v:,.0f}" if v >= 10 or not v else f"{v:.1f}" for v in sizes]
        seconds = statistics.fmean(r["seconds"] for r in mine)
        took = f"{seconds:.1f}" if seconds >= 0.05 else f"{seconds:.2f}"
        lines.append(f"| {' | '.join([way, *cells, *size, f'{rate:g} of {tried}', took])} |")
    return "\n".join(lines)


def bold(text: str, best: bool) -> str:
    return f"**{text}**" if best else text


def sums(acc: Any) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Each way's mean over the kinds of shift, and its worst regret, both with their standard errors."""
    every = list(range(len(acc)))
    worst, (_, errors) = regrets(acc, every), spread(acc, every)
    return [mean_of(own.mean(0).tolist()) for own in acc], list(zip(worst.tolist(), errors.tolist(), strict=True))


def choice(rows: list[Row], place: str, way: str) -> tuple[str, float]:
    """The rates that were tried on held-out samples, in words, and the best; a run that diverged counts as 0."""
    held = of(rows, place=place, way=RATE_OF.get(way, way), score="val")
    rates = sorted({r["rate"] for r in held})
    best = max(rates, key=lambda v: statistics.fmean(r["accuracy"] or 0.0 for r in of(held, rate=v)))
    return ", ".join(f"{v:g}" for v in rates), best


PAIRS = (
    ("LoRA, shared + FT", "full, shared + FT", "LoRA against full fine-tuning, both shared and then fine-tuned"),
    ("LoRA, shared + FT", "head, shared + FT", "LoRA against the head alone, both shared and then fine-tuned"),
    ("LoRA, personal", "full, personal", "LoRA against everything, both trained alone"),
    ("LoRA, personal", "head, personal", "LoRA against the head, both trained alone"),
    ("LoRA, personal", "LoRA, shared", "An adapter for each client against one for all"),
    ("LoRA, personal", "LoRA, shared + FT", "An adapter for each client against one for all that is then fine-tuned"),
    ("LoRA, shared + FT", "LoRA, shared", "A shared adapter that is then fine-tuned against the same without"),
    ("LoRA, A shared, B personal", "LoRA, personal", "A shared and B personal against an adapter for each client"),
    ("LoRA, Ditto", "LoRA, personal", "Personal adapters pulled to a shared one (Ditto) against an adapter for each client"),
    ("LoRA, FedPersist by rank", "LoRA, FedPersist by layer", "Whole ranks that are personal against whole layers"),
    ("LoRA, FedPersist by rank", "LoRA, shared + FT", "Ranks with persistent disagreement personal, against all shared"),
    ("LoRA, FedSelect by rank", "LoRA, personal", "Ranks that move most personal, against all personal"),
    ("LoRA, FedAlike", "LoRA, shared + FT", "A head for each group of clients who are alike against one for all"),
    ("LoRA, FedAlike", "full, FedAlike", "FedAlike with adapters against FedAlike that trains everything"),
    ("LoRA, shared, exact", "LoRA, shared", "Products averaged exactly against A and B averaged separately"),
)
"""What is compared, way against way, where both were run."""


def lessons(rows: list[Row], place: str) -> str:
    """What the rows of a place say: who leads, ways against each other, and which rates are at an edge."""
    ways = ways_of(rows, place)
    lines = leaders(rows, place) if len(shifts_of(rows, place)) > 1 else []
    lines += [f"- {words}: {said}." for a, b, words in PAIRS if {a, b} <= set(ways) and (said := against(rows, place, a, b))]
    if {(lora := "LoRA, shared + FT"), (full := "full, shared + FT")} <= set(ways):
        sent = [statistics.fmean(r["up"] for r in tests(rows, place, w)) for w in (full, lora)]
        lines.append(f"- A client sends {sent[0] / sent[1]:.0f} times as much with full fine-tuning as with LoRA.")
    edges = {w: edge for w in ways if w not in RATE_OF and (edge := at_edge(rows, place, w))}
    for which in ("smallest", "largest"):
        if names := [w for w, edge in edges.items() if edge == which]:
            lines.append(f"- The best rate was the {which} one tried, so a better one may lie beyond: {'; '.join(names)}.")
    held = of(rows, place=place, score="val")
    if lost := [r["rate"] for r in held if r["accuracy"] is None]:
        rates = ", ".join(f"{v:g} ({lost.count(v)})" for v in sorted(set(lost)))
        lines.append(f"- Of {len(held)} runs on held-out samples, {len(lost)} diverged; by rate: {rates}.")
    return "\n".join(lines)


def leaders(rows: list[Row], place: str) -> list[str]:
    """Who has the highest mean over the kinds of shift, who the smallest worst regret, and how far ours are from it."""
    ways = ways_of(rows, place)
    means, worst = ([v for v, _ in column] for column in sums(accuracies(rows, place)))
    ranked = sorted(ways, key=lambda w: -means[ways.index(w)])
    first, second = ranked[:2]
    safe = ways[worst.index(min(worst))]
    lines = [f"- Highest mean: {first}; against {second}, the next: {against(rows, place, first, second)}."]
    lines.append(f"- Smallest worst regret: {safe}, {min(worst):.1f} points.")
    ours = [w for w in ranked if any(name in w for name in OURS)]
    others = [w for w in ranked if w not in ours]
    if ours and others:
        names, said = " and ".join(OURS), against(rows, place, ours[0], others[0])
        lines.append(f"- The best way with our rules ({names}) is {ours[0]}; against {others[0]}, the best other: {said}.")
    return lines


def paired(rows: list[Row], place: str, way: str, other: str) -> tuple[list[float], dict[str, list[float]]]:
    """Differences in points of runs with the same seed and kind of shift: the mean over kinds by seed, and by kind and seed."""
    one, two = ({(r["shift"], r["seed"]): r["accuracy"] for r in tests(rows, place, w)} for w in (way, other))
    gaps = {k: one[k] - two[k] for k in one if one[k] is not None and two.get(k) is not None}
    by_seed = [statistics.fmean(v for (_, s), v in gaps.items() if s == seed) for seed in sorted({seed for _, seed in gaps})]
    kinds = dict.fromkeys(kind for kind, _ in gaps)
    return by_seed, {kind: [v for (k, _), v in gaps.items() if k == kind] for kind in kinds}


def difference(gaps: list[float]) -> tuple[str, bool]:
    """Their mean with its standard error, in words, and whether it is significant: p < 0.05 in a t-test."""
    mean, error = mean_of(gaps)
    return f"{round(mean, 1) + 0.0:+.1f} ± {error:.1f}", abs(mean) > float(student.ppf(0.975, len(gaps) - 1)) * error


def against(rows: list[Row], place: str, way: str, other: str) -> str:
    """The mean difference of two ways, and the kinds of shift where it is significant; nothing for fewer than two seeds."""
    by_seed, by_kind = paired(rows, place, way, other)
    if len(by_seed) < 2:
        return ""
    points, clear = difference(by_seed)
    said = f"{points} points ({'significant' if clear else 'not significant'})"
    if len(by_kind) == 1:
        return said
    single = {kind: difference(gaps) for kind, gaps in by_kind.items() if len(gaps) > 1}
    named = [f"`{kind}` {points}" for kind, (points, sure) in single.items() if sure]
    if named:
        return f"{said}; significant by kind: {', '.join(named)}"
    return f"{said}; for no single kind" if clear else said


def compared(rows: list[Row], places: Sequence[str]) -> str:
    """Way against way in every place; what is significant is bold."""
    lines = [f"| difference, points | {' | '.join(NAMES[p] for p in places)} |", f"|---{'|--:' * len(places)}|"]
    for a, b, words in PAIRS:
        there = [p for p in places if {a, b} <= set(ways_of(rows, p))]
        cells = [bold(*difference(paired(rows, p, a, b)[0])) if p in there else "" for p in places]
        if there:
            lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines)


def at_edge(rows: list[Row], place: str, way: str) -> str:
    tried, best = choice(rows, place, way)
    ends = [float(v) for v in tried.split(", ")]
    return "" if len(ends) < 2 else {ends[0]: "smallest", ends[-1]: "largest"}.get(best, "")


def made(rows: list[Row], place: str) -> str:
    """The machines, commits and dates of a place's rows."""
    own = of(rows, place=place)
    return "; ".join(dict.fromkeys(f"{r['machine']}, torch {r['torch']}, commit {r['commit']}, {r['date']}" for r in own))


def known(rows: list[Row], place: str) -> Row:
    """What the template says of a place: its table, what follows from it, how it was made, and numbers of its models."""
    own, base = of(rows, place=place, score="test"), of(rows, place=place, score="base")
    return {
        "table": table(rows, place), "lessons": lessons(rows, place), "made": made(rows, place),
        "size": next((r["trained"] for r in own if not r["frozen"]), None), "base": base[0]["accuracy"] if base else None,
        "together": len(tests(rows, place, ways_of(rows, place)[0])),
    }  # fmt: skip


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
    places = {p: known(rows, p) for p in order(rows, "place") if len(ways_of(rows, p)) > 1}
    machine, *timed = rows_of(root, SPEED)
    cpu, *saved = rows_of(root, FROZEN)
    return template.render(
        places=places, compared=compared(rows, list(places)), speeds=speeds(timed), on=machine, savings=savings(saved), cpu=cpu,
        rounds=saved[0],
    )  # fmt: skip


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
