"""Write docs/robust.md from results/robust.json, which benchmarks/robust.py made; --check says whether it is stale instead."""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = "docs/robust.md", "results/robust.json"
Row = dict[str, Any]
NAMES = {"fedavg": "FedAvg", "fedavg+ft": "FedAvg + FT", "fedselect": "FedSelect", "fedalike": "FedAlike"}
TEXT = Path(__file__).with_name("robust.md.j2")


def of(rows: list[Row], **wanted: Any) -> dict[int, Row]:
    """The rows that have these values, by seed."""
    return {r["seed"]: r for r in rows if all(r.get(k) == v for k, v in wanted.items())}


def order(rows: list[Row], name: str) -> list[Any]:
    """The values that rows have for a name, as they were first met."""
    return list(dict.fromkeys(r[name] for r in rows if name in r))


def mean(found: dict[int, Row], what: str = "accuracy") -> str:
    """The mean over seeds; a run whose numbers stopped being finite has none."""
    values = [r[what] for r in found.values()]
    if not values:
        return ""
    lost = values.count(None)
    return f"diverged {lost} of {len(values)}" if lost else f"{statistics.fmean(values):.1f}"


def less(found: dict[int, Row], base: dict[int, Row]) -> str:
    """The difference from a base seed by seed, and its standard error; "=" where every shared model has the same bits."""
    apart = [r["accuracy"] - base[seed]["accuracy"] for seed, r in found.items()]
    if all(r["shared"] == base[seed]["shared"] for seed, r in found.items()):
        return "="
    return f"{statistics.fmean(apart):+.1f} ± {statistics.stdev(apart) / len(apart) ** 0.5:.1f}"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|---{'|--:' * (len(head) - 1)}|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def attacked(rows: list[Row], method: str, what: str) -> str:
    """Defences by attacks; in a cell, with one and with two bad clients."""
    attacks = order([r for r in rows if what in r], "attack")

    def cell(defence: str, attack: str) -> str:
        return " / ".join(mean(of(rows, method=method, defence=defence, attack=attack, bad=bad), what) for bad in (1, 2))

    honest = what == "accuracy"
    head = ["accuracy, %" if honest else "fooled, %", *(["nobody"] if honest else []), *attacks]
    body = [
        [
            defence,
            *([mean(of(rows, method=method, defence=defence, bad=0))] if honest else []),
            *(cell(defence, attack) for attack in attacks),
        ]
        for defence in order(rows, "defence")
    ]
    return table(head, body)


def costs(rows: list[Row], method: str) -> str:
    """Defences by kinds of difference: of the mean its accuracy, of others how far they are from it."""
    kinds, defences = order(rows, "shift"), order(rows, "defence")

    def cell(defence: str, kind: str) -> str:
        base, own = (of(rows, method=method, shift=kind, defence=d) for d in ("mean", defence))
        return mean(own) if defence == "mean" else less(own, base)

    return table(["accuracy, %", *kinds], [[d, *(cell(d, k) for k in kinds)] for d in defences])


def profiles(rows: list[Row]) -> str:
    """False profiles by kinds of difference: the accuracy, and in how many groups honest clients are."""
    kinds = order(rows, "shift")

    def cell(attack: str, kind: str) -> str:
        found = of(rows, shift=kind, attack=attack)
        return f"{mean(found)} ({mean(found, 'groups')})"

    head = ["accuracy, % (groups of honest clients)", *kinds]
    return table(head, [[a, *(cell(a, k) for k in kinds)] for a in order(rows, "attack")])


def made(found: dict[str, Any]) -> str:
    """With what the numbers were measured, and which of them later than others."""
    seeds = found["seeds"]
    again = "".join(
        f" {NAMES[m]} was measured again: commit {a['commit']}, {a['machine']}, {a['date']}."
        for m, a in found.get("again", {}).items()
    )
    return (
        f"{found['clients']} clients with digits, mlp, {found['rounds']} rounds, means over seeds {seeds[0]} to {seeds[-1]}. "
        "Accuracy is that of the honest clients on their own test data after the last round. "
        f"Commit {found['commit']}, {found['machine']}, {found['date']}.{again} "
        "To repeat: `python benchmarks/robust.py`, then `python scripts/robust.py`."
    )


def worst(rows: list[Row]) -> float:
    """How many points median or trimmed mean lose most, over methods and kinds."""
    lost = []
    for r in {
        (r["method"], r["shift"], r["defence"]): r for r in rows if r["defence"].startswith(("median", "trimmed"))
    }.values():
        own, base = (of(rows, method=r["method"], shift=r["shift"], defence=d) for d in (r["defence"], "mean"))
        lost.append(statistics.fmean(base[seed]["accuracy"] - own[seed]["accuracy"] for seed in own))
    return max(lost)


def each(rows: list[Row], make: Callable[[str], str]) -> str:
    return "\n\n".join(f"**{NAMES[m]}**\n\n{make(m)}" for m in order(sorted(rows, key=_place), "method"))


def _place(row: Row) -> int:
    return list(NAMES).index(row["method"])


def page(root: Path) -> str:
    found = json.loads((root / RESULTS).read_text(encoding="utf-8"))
    bad, honest = found["attacked"], found["honest"]
    false = found["profiles"]
    cost = float(mean(of(false, shift="groups", attack="true"))) - float(
        mean(of(false, shift="groups", attack="opposite halves"))
    )
    return Template(TEXT.read_text(encoding="utf-8"), undefined=StrictUndefined, keep_trailing_newline=True).render(
        made=made(found),
        profiles=profiles(false),
        profile_cost=f"{cost:.1f}",
        worst=f"{worst(honest):.0f}",
        acc=lambda m, d, attack, count: mean(of(bad, method=m, defence=d, attack=attack, bad=count)),
        attacked=each(bad, lambda m: attacked(bad, m, "accuracy")),
        fooled=each(bad, lambda m: attacked(bad, m, "fooled")),
        costs=each(honest, lambda m: costs(honest, m)),
    )


def stale(root: Path) -> list[str]:
    """The files that are not what the results say."""
    return [PAGE] if (root / PAGE).read_text(encoding="utf-8") != page(root) else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        if found := stale(ROOT):
            sys.exit(f"stale: {', '.join(found)}; run python scripts/robust.py")
        return
    (ROOT / PAGE).write_text(page(ROOT), encoding="utf-8")


if __name__ == "__main__":
    main()
