"""Write docs/reproduction.md, its figures and the README's table from results/*.json; --check says what is stale instead.

--collect DIR first takes over what `fedselect reproduce --out DIR` made; --restore DIR puts the outcomes of all runs there, so
that `fedselect reproduce --out DIR` runs only what is missing, on any machine.
"""

import argparse
import hashlib
import json
import re
import statistics
import sys
from functools import cache
from pathlib import Path
from typing import Any

import reproduction_figures as pictures
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from reproduction_results import RUNS, Results, Table, collect, read, restore, with_ours

from fedselect.core.options import options
from fedselect.methods import METHODS
from fedselect.paper.numbers import PUBLISHED
from fedselect.simulate.checkpoint import GONE

ROOT = Path(__file__).resolve().parents[1]
PAGE, README, IMAGES = "docs/reproduction.md", "README.md", "docs/img"
BLOCK = re.compile(r"(<!-- results -->\n).*?(<!-- /results -->)", re.S)
ORDER = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


# ---- what the template asks for


def two(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def points(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"


def give(row: Table, bold: bool = False) -> str:
    """Mean and standard error, or why there is none."""
    if row["mean"] is None:
        return "diverged" if row["failed"] else "-"
    said = two(row["mean"]) + ("" if row["error"] is None else f" ± {two(row['error'])}")
    return f"**{said}**" if bold else said


def p_value(value: float) -> str:
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def published(table: str, row: str, data: str, setting: str | None = None) -> float | None:
    """What the paper has in a cell of one of its tables."""
    return PUBLISHED[table].value(row, data, setting)


def percent(values: list[float | None]) -> str:
    there = [v for v in values if v is not None]
    return f"{100 * statistics.fmean(there):.1f}%" if there else "-"


def peak(row: Table) -> Table:
    """The evaluated round at which a row was best, its mean over seeds."""
    means = [statistics.fmean(at) for at in zip(*row["curve"], strict=True)]
    return {"mean": max(means), "round": row["rounds"][means.index(max(means))]}


def back_then(row: Table | None, round: int, seeds: list[int]) -> Table | None:
    """A row as it stood after an earlier round, over some of its seeds."""
    if row is None or round not in row["rounds"]:
        return None
    at = row["rounds"].index(round)
    then = {s: curve[at] for s, curve in zip(row["seeds"], row["curve"], strict=True) if s in seeds}
    if not then:
        return None
    found = list(then.values())
    error = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else None
    return {**row, "seeds": list(then), "accuracy": found, "mean": statistics.fmean(found), "error": error}


def rise(row: Table, since: int) -> float:
    """Points gained since an earlier round, the mean over seeds."""
    then = back_then(row, since, row["seeds"])
    if then is None:
        sys.exit(f"the page speaks of round {since} of {row['row']}, which was not evaluated.")
    return row["mean"] - then["mean"]


def over_all(target: Table, row: str, but: str | None = None) -> Table:
    """A row's mean over the settings of a target, seed by seed; `but`: without that one."""
    rows = [row_of(c, row) for c in target["columns"] if c["setting"] != but]
    each = [statistics.fmean(at) for at in zip(*(r["accuracy"] for r in rows), strict=True)]
    return {"row": row, "seeds": rows[0]["seeds"], "accuracy": each, "mean": statistics.fmean(each)}


def by_quarter(a: Table, b: Table) -> list[float]:
    """How far one row is from another in each quarter of the evaluated rounds, the mean over seeds."""
    off = [
        x - y for x, y in zip(*([statistics.fmean(at) for at in zip(*r["curve"], strict=True)] for r in (a, b)), strict=True)
    ]
    k = len(off) // 4
    return [statistics.fmean(off[i * k : (i + 1) * k if i < 3 else None]) for i in range(4)]


def views(row: Table) -> str:
    """Accuracy as local training leaves the models, and merged; bold: what is reported."""
    if row["local"] is None or row["merged"] is None:
        return "-"
    found = {v: two(statistics.fmean(row[v])) for v in ("local", "merged")}
    reported = "local" if row["accuracy"] == row["local"] else "merged"
    return ", ".join(f"**{value}**" if v == reported else value for v, value in found.items())


def wobble(row: Table) -> float:
    """How far the evaluated rounds of the last quarter lie apart: their standard deviation, the mean over seeds."""
    tails = [curve[-max(2, len(curve) // 4) :] for curve in row["curve"]]
    return statistics.fmean(map(statistics.stdev, tails))


def megabytes(row: Table, way: str, clients: int) -> str:
    """A round and client, mean over rounds and seeds."""
    return f"{statistics.fmean(row[way]) / clients / 1e6:.2f}" if row[way] else "-"


def gain(ours: Table | None, row: Table, field: str = "accuracy") -> Table | None:
    """Our row less another, seed by seed."""
    return None if ours is None or ours["row"] == row["row"] else paired(ours, row, field)


def paired(a: Table, b: Table, field: str = "accuracy", other: str | None = None) -> Table | None:
    """One row less another over the seeds that both have, or two figures of one: the mean, its standard error, Student's p."""
    from scipy.stats import t

    own = dict(zip(a["seeds"], a[field], strict=True))
    off = [own[s] - v for s, v in zip(b["seeds"], b[other or field], strict=True) if s in own]
    if not off:
        return None
    mean = statistics.fmean(off)
    error = statistics.stdev(off) / len(off) ** 0.5 if len(off) > 1 else None
    p = None if error is None else 2 * float(t.sf(abs(mean) / error, len(off) - 1)) if error else float(mean == 0)
    return {"mean": mean, "error": error, "p": p, "sure": p is not None and p < 0.05}


def surely(found: Table | None) -> str:
    """A gain, bold where it is more than chance."""
    if found is None:
        return "-"
    said = points(found["mean"]) + ("" if found["error"] is None else f" ± {two(found['error'])}")
    return f"**{said}**" if found["sure"] else said


def won(column: Table, ours: Table, field: str = "accuracy", but: str | None = None) -> dict[str, Any]:
    """How many others there are, and which ours is ahead of and behind with p < 0.05; `but`: without those called so."""
    others = [r for r in column["rows"] if not (but and r["row"].startswith(but))]
    found = {r["row"]: g for r in others if (g := gain(ours, r, field)) is not None}
    return {
        "others": len(found),
        "ahead": [name for name, g in found.items() if g["sure"] and g["mean"] > 0],
        "behind": [name for name, g in found.items() if g["sure"] and g["mean"] < 0],
    }


def rows_of(columns: list[Table]) -> list[str]:
    return list(dict.fromkeys(r["row"] for c in columns for r in c["rows"]))


def named_row(column: Table, name: str) -> Table | None:
    return next((r for r in column["rows"] if r["row"] == name), None)


def row_of(column: Table, name: str | None) -> Table | None:
    """A row that has a number."""
    return next((r for r in column["rows"] if r["row"] == name and r["mean"] is not None), None)


def column_of(table: Table | None, data: str, setting: str | None = None) -> Table | None:
    """The column of a data set, without further settings or with this one."""
    columns = table["columns"] if table else []
    return next((c for c in columns if (c["data"], c["setting"]) == (data, setting)), None)


def like_random(column: Table) -> Table | None:
    """FedSelect's row of Table 3 with as many personal entries as there are at random."""
    drawn = row_of(column, "Random")
    return row_of(column, f"FedSelect (α={drawn['options']['limit']:.2f})") if drawn else None


def best(column: Table) -> Table | None:
    return min((r for r in column["rows"] if r["rank"]), key=lambda r: r["rank"], default=None)


def place(rank: int) -> str:
    return ORDER[rank - 1] if rank <= len(ORDER) else f"{rank}th"


def agreement(column: Table, field: str = "mean", but: str | None = None) -> float | None:
    """Spearman's correlation of our order of the rows, all or all but one, with the paper's."""
    from scipy.stats import spearmanr

    rows = [r for r in column["rows"] if r["row"] != but and r["mean"] is not None and r["paper"] is not None]
    return float(spearmanr([(r[field], r["paper"]) for r in rows]).statistic) if len(rows) > 2 else None


def pairs(one: Table) -> Table:
    """Mean overlap of clients that share a class, and of those that share none."""
    n, found = len(one["iou"]), {True: [], False: []}
    for i in range(n):
        for j in range(i):
            if one["iou"][i][j] is not None:
                found[bool({*one["classes"][i]} & {*one["classes"][j]})].append(one["iou"][i][j])
    return {"alike": found[True], "apart": found[False]}


def listed(items: list[str]) -> str:
    """a, b and c."""
    once = list(dict.fromkeys(items))
    return once[0] if len(once) == 1 else f"{', '.join(once[:-1])} and {once[-1]}" if once else "nothing"


def machines(tables: list[Table]) -> str:
    found: dict[str, list[str]] = {}
    for e in (e for t in tables for e in t["environments"]):
        found.setdefault(f"{e['device']}, PyTorch {e['torch']}", []).append(e["precision"])
    return "; ".join(f"{name}, {listed(precisions)}" for name, precisions in found.items()) or listed([])


def commits(tables: list[Table]) -> str:
    return listed([f"`{e['commit']}`" if e["commit"] else "unknown" for t in tables for e in t["environments"]])


def chosen(tuned: Table) -> tuple[list[str], dict[str, dict[str, str]]]:
    """What tuning chose: data sets, and by method what is said of each."""
    columns: list[str] = []
    out: dict[str, dict[str, str]] = {}
    for name, entry in tuned.items():
        method, _, column = name.partition(" on ")
        if column not in columns:
            columns.append(column)
        out.setdefault(method, {})[column] = ", ".join(f"{k} {v:g}" for k, v in entry["chosen"].items())
    return columns, out


def how_tuned(tuned: Table) -> dict[str, list[str]]:
    """How rates were judged, and on which data sets in this way."""
    out: dict[str, list[str]] = {}
    for name, entry in tuned.items():
        seeds = ", ".join(map(str, entry["seeds"]))
        said = f"{entry['rounds']} rounds, seed {seeds}, judged on {entry['scored_on']}."
        out.setdefault(said, []).append(name.partition(" on ")[2])
    return out


def notes(table: Table) -> list[str]:
    """What of a table is not the paper's size."""
    said = {c["title"].removesuffix(f" {c['setting']}"): c["note"] for c in table["columns"] if c["note"]}
    return [f"{name}: {note}" for name, note in said.items()]


def tried(look: Table) -> list[Table]:
    """What was tried, the best first: the method with the options that are not its usual ones, and its lead over the best of
    Local, where that was tried too."""
    rows = [
        {**r, "mean": statistics.fmean(r["tail"]), "said": spelled(r["method"], r.get("training", {}))} for r in look["rows"]
    ]
    alone = max((r["mean"] for r in rows if r["method"]["name"] == "local"), default=None)
    for r in rows:
        r["lead"] = None if alone is None else r["mean"] - alone
    return sorted(rows, key=lambda r: -r["mean"])


def spelled(method: Table, training: Table) -> str:
    """A method with the options that are not its usual ones, also those that it no longer has."""
    usual = {**GONE.get(method["name"], {}), **{n: o.default for n, o in options(METHODS[method["name"]]).items()}}
    own = {k: v for k, v in method.items() if k != "name" and v != usual.get(k)} | training
    return f"`{' '.join([method['name'], *(f'{k}={v:g}' if isinstance(v, float) else f'{k}={v}' for k, v in own.items())])}`"


def repeats(drawn: Table, column: Table) -> Table:
    """How far runs that were made twice are apart at most, in points: after the last round, and in the tail."""
    found = {}
    for name, field in (("final", "accuracy"), ("tail", "tail")):
        found[name] = max(
            abs(r[field][0] - other[field][other["seeds"].index(r["seeds"][0])])
            for r in drawn["rows"]
            if (other := named_row(column, r["row"]))
        )
    return found


def farthest(a: Table, b: Table) -> Table:
    """How far two rows are apart at most on one seed, in points: after the last round, and in the tail."""
    fields = {"final": "accuracy", "tail": "tail"}
    return {name: max(abs(x - y) for x, y in zip(a[f], b[f], strict=True)) for name, f in fields.items()}


def by_said(look: Table, said: str) -> Table:
    """The one line of a look that says this."""
    found = [r for r in tried(look) if r["said"] == f"`{said}`"]
    if len(found) != 1:
        sys.exit(f"the page speaks of one line of explored.json, but {len(found)} say: {said}")
    return found[0]


def apart(ours: list[float], others: list[float]) -> str:
    """Accuracies less others, partition by partition: the mean and its standard error."""
    off = [a - b for a, b in zip(ours, others, strict=True)]
    return f"{statistics.fmean(off):+.2f} ± {statistics.stdev(off) / len(off) ** 0.5:.2f}"


def render(results: Results, name: str, figures: list[str]) -> str:
    text = _jinja().get_template(name).render(
        results=results, get=results.get, strays=results.strays, figures=figures,
        all_ours=with_ours(results.targets) if results.get("table1") else None,
    )  # fmt: skip
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


@cache
def _jinja() -> Environment:
    jinja = Environment(
        loader=FileSystemLoader(ROOT / "scripts"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    asked = (
        two, points, give, p_value, percent, peak, megabytes, gain, row_of, column_of, best, place, agreement, pairs, listed,
        machines, commits, chosen, how_tuned, notes, surely, won, rows_of, named_row, tried, by_said, apart, repeats,
        farthest, spelled, paired, published, wobble, views, back_then, like_random, over_all, by_quarter,
    )  # fmt: skip
    jinja.globals.update({f.__name__: f for f in asked})
    jinja.filters.update(average=statistics.fmean, wobbles=wobble, rise=rise)
    jinja.tests.update(starting=str.startswith, ending=str.endswith)
    return jinja


# ---- what is written


def texts(results: Results, root: Path, figures: list[str]) -> dict[Path, str]:
    """The page and the README as they should be."""
    readme = (root / README).read_text(encoding="utf-8")
    if not BLOCK.search(readme):
        sys.exit(f"{README} has no <!-- results --> block.")
    block = render(results, "headline.md.j2", figures)
    return {
        root / PAGE: render(results, "reproduction.md.j2", figures),
        root / README: BLOCK.sub(lambda m: m[1] + block + m[2], readme),
    }


def identity(name: str, data: Any) -> str:
    """What a figure carries, so that it is known to be of this data whatever drew it."""
    return hashlib.sha256(json.dumps([name, data], sort_keys=True).encode()).hexdigest()


def stale(results: Results, root: Path) -> list[Path]:
    """What is not as the results say."""
    drawn = pictures.drawings(results.targets)
    found = [
        p for p, text in texts(results, root, list(drawn)).items() if not p.exists() or p.read_text(encoding="utf-8") != text
    ]
    for path, (data, _) in _places(drawn, root).items():
        if not path.exists() or identity(path.stem, data) not in path.read_text(encoding="utf-8"):
            found.append(path)
    return [*found, *_left_over(drawn, root)]


def write(results: Results, root: Path) -> list[Path]:
    """Bring everything up to date; returns what was not."""
    drawn = pictures.drawings(results.targets)
    behind = stale(results, root)
    for path, text in texts(results, root, list(drawn)).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for path, (data, draw) in _places(drawn, root).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pictures.svg(draw, data, identity(path.stem, data)))
    for path in _left_over(drawn, root):
        path.unlink()
    return behind


def _places(drawn: pictures.Drawings, root: Path) -> dict[Path, tuple[Any, Any]]:
    return {root / IMAGES / f"reproduction-{name}.svg": own for name, own in drawn.items()}


def _left_over(drawn: pictures.Drawings, root: Path) -> list[Path]:
    """Figures of results that are gone."""
    return sorted(p for p in (root / IMAGES).glob("reproduction-*.svg") if p.stem.partition("-")[2] not in drawn)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 and name what is stale")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to write to")
    parser.add_argument("--results", type=Path, help="where the files are (default: results/ there)")
    parser.add_argument("--collect", type=Path, metavar="DIR", help="take over what `fedselect reproduce --out DIR` made")
    parser.add_argument("--restore", type=Path, metavar="DIR", help="put the outcomes of all runs into DIR; nothing else")
    given = parser.parse_args()
    folder = given.results or given.root / "results"
    if given.check and (given.collect or given.restore):
        parser.error("--check writes nothing and goes without --collect and --restore")
    if given.collect and not given.collect.is_dir():
        parser.error(f"there is no folder {given.collect}")
    if given.restore and given.restore.is_file():
        parser.error(f"{given.restore} is a file; the runs go into a folder")
    if given.restore:
        print(f"{restore(folder, given.restore)} runs in {given.restore}")
        return 0
    if given.collect:
        print(f"{collect(given.collect, folder)} runs in {folder / RUNS}")
    results = read(folder)
    found = stale(results, given.root) if given.check else write(results, given.root)
    for path in found:
        print(f"{'stale' if given.check else 'wrote'}: {path.relative_to(given.root)}")
    if given.check and found:
        print("bring it up to date with: python scripts/reproduction.py")
    return 1 if given.check and found else 0


if __name__ == "__main__":
    sys.exit(main())
