"""Write docs/results.md and its pictures from results/; --check says whether they are stale instead."""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import reproduction as full
import reproduction_figures as pictures
import shifts
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure
from reproduction_results import Results, Table, read
from scipy.stats import t as student

from fedselect.runs.labels import BLUE, LOOKS
from fedselect.runs.labels import GREY as GREYS

ROOT = Path(__file__).resolve().parents[1]
PAGE, IMAGES = "docs/results.md", "docs/img"
OURS, GREY = BLUE[0], GREYS[0]
SHORT = {"cifar10-shifts": "CIFAR-10", "miniimagenet-shifts": "Mini-ImageNet", "digits-shifts": "digits"}


# ---- what the findings are


def regret(found: Results) -> list[Table]:
    """Of each data set whose shifts are known: methods with their mean and worst regret, the best first."""
    out = []
    for columns in (c for name in shifts.DRAWN for c in shifts.by_data(found.targets[name])):
        rows = shifts.rows_of(columns)
        acc, rivals = shifts.accuracies(columns, rows), shifts.rivals_of(rows)
        mean, worst = acc.mean((1, 2)), shifts.regrets(acc, rivals)
        own = [{"row": rows[i], "mean": float(mean[i]), "regret": float(worst[i])} for i in rivals]
        out.append({"data": columns[0]["data"], "rows": sorted(own, key=lambda r: r["regret"])})
    return out


def paper(found: Results) -> Table:
    column = full.column_of(full.with_ours(found.targets), "cifar10")
    ours, alone = full.row_of(column, "FedSelect"), full.row_of(column, "Local Only")
    beaten = full.won(column, ours, but="FedSelect")
    return {
        "ours": full.give(ours), "published": full.two(ours["paper"]), "others": beaten["others"],
        "better": len(beaten["ahead"]), "worse": len(beaten["behind"]), "gain": full.surely(full.gain(ours, alone)),
        "paper_gain": full.points(ours["paper"] - alone["paper"]),
        "panel": pictures._panel(column, ("mean", "error", "paper")),
    }  # fmt: skip


def longest(found: Results) -> Table:
    column = full.column_of(found.get("long"), "miniimagenet")
    first = full.best(column)
    return {
        "rounds": column["rounds"], "first": first["row"], "best": full.two(first["mean"]),
        "ours": full.two(full.row_of(column, "FedSelect")["mean"]),
        "alone": full.two(full.row_of(column, "Local Only")["mean"]),
    }  # fmt: skip


def movement(found: Results) -> list[Table]:
    """FedSelect less as many entries at random, by data set; of Mini-ImageNet in both views."""
    out = []
    for column in found.targets["table3"]["columns"]:
        ours, drawn = full.like_random(column), full.row_of(column, "Random")
        title = column["title"].partition(",")[0]
        for field in ("accuracy", "merged") if column["data"] == "miniimagenet" else ("accuracy",):
            gain = full.gain(ours, drawn, field)
            view = {"accuracy": "local models", "merged": "merged models"}[field]
            named = f"{title}, {view}" if column["data"] == "miniimagenet" else title
            wide = float(student.ppf(0.975, len(ours["seeds"]) - 1)) * gain["error"]
            out.append({"title": named, "mean": gain["mean"], "interval": wide})
    return out


def classes(found: Results) -> Table:
    last = [f[-1] for f in found.strays("fedavg", "crop-flip")["found"]]
    mean = {k: statistics.fmean(one[k] for one in last) for k in ("right", "right_among_own")}
    small, open_ = full.column_of(found.get("little"), "cifar10"), full.column_of(found.get("readings"), "cifar10")
    rows = {
        "FedAvg, one model": mean["right"],
        "FedAvg, answers limited to the client's classes": mean["right_among_own"],
        "trained alone": full.row_of(open_, "Local Only")["mean"],
        "FedSelect": statistics.fmean(full.row_of(small, "FedSelect of Table 1, fine-tuned")["local"]),
        "FedBABU": full.row_of(small, "FedBABU")["mean"],
    }
    said = {"right": rows["FedAvg, one model"], "own": mean["right_among_own"], "local": rows["trained alone"]}
    said["babu"] = rows["FedBABU"]
    return {**{k: f"{v:.1f}" for k, v in said.items()}, "seeds": len(last), "rows": rows}


def privacy(root: Path) -> Table:
    found = json.loads((root / "results" / "private.json").read_text(encoding="utf-8"))

    def mean(clients: int, unit: str, epsilon: float | None) -> float:
        own = [r for r in found["rows"] if (r["clients"], r["unit"], r["epsilon"]) == (clients, unit, epsilon)]
        return statistics.fmean(r["accuracy"] for r in own)

    budgets = sorted({r["epsilon"] for r in found["rows"] if r["epsilon"] is not None})
    lines = {f"{n:,} clients, each protected": [mean(n, "client", e) for e in budgets] for n in (10, 100, 1000)}
    lines["10 clients, each sample protected"] = [mean(10, "sample", e) for e in budgets]
    return {
        "ten": f"{mean(10, 'client', 8.0):.0f}", "ten_none": f"{mean(10, 'client', None):.0f}",
        "hundred": f"{mean(100, 'client', 8.0):.0f}", "hundred_none": f"{mean(100, 'client', None):.0f}",
        "samples": f"{mean(10, 'sample', 8.0):.0f}", "samples_none": f"{mean(10, 'sample', None):.0f}",
        "rounds": found["rounds"], "seeds": len(found["seeds"]), "budgets": budgets, "lines": lines,
    }  # fmt: skip


# ---- how they look


def draw_regret(panels: list[Table]) -> Figure:
    figure = Figure(figsize=(8.2, 2.9), layout="constrained")
    for ax, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        names, values = [r["row"] for r in panel["rows"]], [r["regret"] for r in panel["rows"]]
        ax.barh(names, values, color=[OURS if n == shifts.OURS else "#9ca3af" for n in names], height=0.62)
        for i, value in enumerate(values):
            ax.text(value + 0.01 * max(values), i, f"{value:.1f}", va="center", fontsize=7)
        ax.invert_yaxis()
        ax.set_title(SHORT[panel["data"]], fontsize=9)
        ax.set_xlim(0, 1.12 * max(values))
        _bare(ax)
    figure.supxlabel("worst regret, points (smaller is better)", fontsize=8)
    return figure


def draw_movement(rows: list[Table]) -> Figure:
    figure = Figure(figsize=(5.6, 0.7 + 0.34 * len(rows)), layout="constrained")
    ax = figure.subplots()
    ax.axvline(0, color=GREY, linewidth=0.8)
    for i, r in enumerate(rows):
        ax.errorbar(r["mean"], i, xerr=r["interval"], fmt="o", color=OURS, capsize=3, markersize=5)
        ax.annotate(f"{r['mean']:+.1f}", (r["mean"], i), (0, 7), textcoords="offset points", ha="center", fontsize=7)
    ax.set_yticks(range(len(rows)), [r["title"] for r in rows])
    ax.set_ylim(len(rows) - 0.5, -0.7)
    ax.set_xlabel("FedSelect minus random entries, points, with 95% intervals")
    return figure


def draw_classes(rows: dict[str, float]) -> Figure:
    figure = Figure(figsize=(5.6, 0.6 + 0.32 * len(rows)), layout="constrained")
    ax = figure.subplots()
    ax.barh([*rows], [*rows.values()], color=["#9ca3af", OURS, "#9ca3af", "#9ca3af", "#9ca3af"], height=0.62)
    for i, value in enumerate(rows.values()):
        ax.text(value + 1, i, f"{value:.1f}", va="center", fontsize=7)
    ax.invert_yaxis()
    ax.set_xlim(0, 100)
    ax.set_xlabel("accuracy on held-out images, %")
    _bare(ax)
    return figure


def draw_privacy(data: Table) -> Figure:
    figure = Figure(figsize=(5.6, 2.8), layout="constrained")
    ax = figure.subplots()
    looks = zip((LOOKS[m][0][0] for m in ("fedavg", "fedavg+ft", "fedselect", "fedrep")), "os^D", strict=True)
    for (name, values), (colour, marker) in zip(data["lines"].items(), looks, strict=True):
        ax.plot(data["budgets"], values, marker=marker, color=colour, label=name, markersize=4.5)
    ax.set_xscale("log", base=2)
    ax.set_xticks(data["budgets"], [f"{b:g}" for b in data["budgets"]])
    ax.set_ylim(0, 103)
    ax.set_xlabel("privacy budget ε (smaller is more private)")
    ax.set_ylabel("accuracy, %")
    ax.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(0.0, 0.6))
    return figure


def _bare(ax: Any) -> None:
    ax.grid(False)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)


# ---- the page


def drawings(root: Path) -> dict[str, tuple[Any, Callable[[Any], Figure]]]:
    known, differ = read(root / "results"), read(root / "results", shifts=True)
    own = privacy(root)
    return {
        "regret": (regret(differ), draw_regret),
        "paper": ([paper(known)["panel"]], pictures.accuracy),
        "movement": (movement(known), draw_movement),
        "classes": (classes(known)["rows"], draw_classes),
        "privacy": ({"budgets": own["budgets"], "lines": own["lines"]}, draw_privacy),
    }


def page(root: Path) -> str:
    known, differ = read(root / "results"), read(root / "results", shifts=True)
    panels = regret(differ)
    jinja = Environment(
        loader=FileSystemLoader(ROOT / "scripts"), undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    return jinja.get_template("results.md.j2").render(
        safest=safest(panels), behind=weak(differ), table=table(panels), paper=paper(known), long=longest(known),
        classes=classes(known), privacy=privacy(root), sources=sources(known, differ),
        short_rounds=full.column_of(known.targets["table1"], "miniimagenet")["rounds"],
    )  # fmt: skip


def safest(panels: list[Table]) -> str:
    """Where ours has the highest mean and the smallest worst regret."""
    first = []
    for panel in panels:
        best = max(panel["rows"], key=lambda r: r["mean"]), min(panel["rows"], key=lambda r: r["regret"])
        if all(r["row"] == str(shifts.OURS) for r in best):
            first.append(SHORT[panel["data"]])
    return f"{shifts.OURS} has the highest mean accuracy and the smallest worst regret on {full.listed(first)}."


def weak(found: Results) -> str:
    """Where ours is farthest behind on each data set, and how it does with natural clients."""
    said = []
    for columns in (c for name in shifts.DRAWN for c in shifts.by_data(found.targets[name])):
        rows = shifts.rows_of(columns)
        acc, ours = shifts.accuracies(columns, rows), rows.index(str(shifts.OURS))
        rivals = [i for i in shifts.rivals_of(rows) if i != ours]
        lead = acc.mean(2)[rivals] - acc.mean(2)[ours]
        i, j = divmod(int(lead.argmax()), lead.shape[1])
        data = SHORT[columns[0]["data"]]
        said.append(f"{rows[rivals[i]]} is {lead[i, j]:.1f} points better for `{columns[j]['setting']}` on {data}")
    columns = found.targets["natural"]["columns"]
    rows = shifts.rows_of(columns)
    mean = shifts.accuracies(columns, rows).mean((1, 2))
    ours = rows.index(str(shifts.OURS))
    first = max(range(len(rows)), key=lambda i: float(mean[i]))
    return (
        f"{'; '.join(said)}. With natural clients (speakers, devices, hospitals, image styles) most fine-tuned methods are "
        f"close, and {rows[first]} has a mean of {mean[first]:.1f} against {mean[ours]:.1f}."
    )


def table(panels: list[Table]) -> str:
    names = [r["row"] for r in panels[0]["rows"] if all(r["row"] in [o["row"] for o in p["rows"]] for p in panels)]
    heads = [f"{SHORT[p['data']]}: {what}" for p in panels for what in ("mean", "worst regret")]
    lines = [f"| method | {' | '.join(heads)} |", f"|---{'|--:' * len(heads)}|"]
    for name in names:
        cells = []
        for panel in panels:
            own = next(r for r in panel["rows"] if r["row"] == name)
            best = (
                own["mean"] >= max(r["mean"] for r in panel["rows"]),
                own["regret"] <= min(r["regret"] for r in panel["rows"]),
            )
            cells += [
                f"**{own[k]:.1f}**" if first else f"{own[k]:.1f}" for k, first in zip(("mean", "regret"), best, strict=True)
            ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def sources(known: Results, differ: Results) -> str:
    ours = [known.targets["table1"], known.targets["table3"], *(differ.targets[n] for n in shifts.DRAWN)]
    dates = sorted({t["date"] for t in ours})
    where = "[What was run](reproduction.md#what-was-run)"
    return f"Machines: {full.machines(ours)}; runs finished {dates[0]} to {dates[-1]}. Commits, seeds and settings: {where}."


def stale(root: Path) -> list[str]:
    found = [] if (root / PAGE).exists() and (root / PAGE).read_text(encoding="utf-8") == page(root) else [PAGE]
    for name, (data, _) in drawings(root).items():
        path = root / IMAGES / f"results-{name}.svg"
        if not path.exists() or full.identity(path.stem, data) not in path.read_text(encoding="utf-8"):
            found.append(str(path.relative_to(root)))
    return found


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--check", action="store_true")
    if asked.parse_args().check:
        behind = stale(ROOT)
        sys.exit(f"stale: {', '.join(behind)}; make it with: python scripts/results_page.py" if behind else 0)
    (ROOT / PAGE).write_text(page(ROOT), encoding="utf-8")
    for name, (data, draw) in drawings(ROOT).items():
        path = ROOT / IMAGES / f"results-{name}.svg"
        path.write_bytes(pictures.svg(draw, data, full.identity(path.stem, data)))


if __name__ == "__main__":
    main()
