"""What results/ holds: read, taken over from a folder of `fedselect reproduce`, and put back into one."""

import gzip
import json
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedselect.core.errors import DataError, InputError
from fedselect.core.files import read_json
from fedselect.data.places import find
from fedselect.paper.outcome import ranks
from fedselect.paper.plan import FILES, name_of, named
from fedselect.paper.protocol import COLUMNS, OWN, SHIFTS, TARGETS, read_target
from fedselect.paper.write import lean
from fedselect.runs.config import Config

RUNS = "runs.jsonl.gz"
AGAIN = "make it again with: fedselect reproduce"
FILED = ("data", "model")  # parts of a configuration that may name files
Table = dict[str, Any]


@dataclass(frozen=True)
class Results:
    """What results/ holds: targets by name, those with the paper's rates apart, and what tuning tried."""

    targets: dict[str, Table]
    published: dict[str, Table]
    tuned: Table
    explored: list[Table]  # looks at many readings, on held-out data
    pooled: Table  # one network on everybody's images
    stray: Table  # answers that are no class of the client's

    @property
    def all(self) -> list[Table]:
        found = [*self.targets.values(), *self.published.values()]
        return sorted(found, key=lambda t: [*TARGETS, *OWN].index(t["target"]))

    def get(self, name: str) -> Table | None:
        return self.targets.get(name)

    def strays(self, method: str, augment: str) -> Table:
        """What was counted of a method."""
        return next(dict(r) for r in self.stray["rows"] if (r["method"]["name"], r["augment"]) == (method, augment))

    def find(self, targets: list[str], data: str, row: str) -> Table | None:
        """A row of the first of these targets that has it on a data set, without further settings."""
        for name in targets:
            for column in self.targets.get(name, {}).get("columns", ()):
                for r in column["rows"]:
                    if (column["data"], column["setting"], r["row"]) == (data, None, row) and r["mean"] is not None:
                        return dict(r)
        return None


def with_ours(targets: dict[str, Table]) -> Table:
    """Table 1 with our reading of FedSelect below the paper's, where that was run; ranked anew."""
    more = {(c["data"], c["note"]): c["rows"] for c in targets.get("beyond", {}).get("columns", ())}

    def joined(column: Table) -> Table:
        there = {r["row"] for r in column["rows"]}
        rows = [*column["rows"], *(r for r in more.get((column["data"], column["note"]), ()) if r["row"] not in there)]
        found = ranks({r["row"]: r["mean"] for r in rows if r["mean"] is not None})
        return {**column, "rows": [{**r, "rank": found.get(r["row"])} for r in rows]}

    return {**targets["table1"], "columns": [joined(c) for c in targets["table1"]["columns"]]}


def read(folder: Path, shifts: bool = False) -> Results:
    """What is about the paper, or about shifts. Files of one target that differ in their columns are put together.

    A column knows how and when it was made.
    """
    elsewhere = {column for name in SHIFTS for column in read_target(name).on}
    apart = {name: folder / f"{name}.json" for name in ("tuned", "explored", "pooled", "stray")}
    more = {name: json.loads(p.read_text(encoding="utf-8")) if p.exists() else None for name, p in apart.items()}
    tuned = {k: v for k, v in (more["tuned"] or {}).items() if (_column(k) in elsewhere) == shifts}
    found = Results({}, {}, tuned, more["explored"] or [], more["pooled"] or {}, more["stray"] or {})
    for path in sorted(folder.glob("*.json")):
        if path in apart.values():
            continue
        own = json.loads(path.read_text(encoding="utf-8"))
        if "target" not in own or (own["target"] in SHIFTS) != shifts:  # made by a benchmark, or for another page
            continue
        own["columns"] = [{**c, **{k: own[k] for k in ("how", "date", "note")}} for c in own["columns"]]
        kept = found.published if own["how"]["rates"] == "paper" else found.targets
        known = kept.setdefault(own["target"], own)
        if known is not own:
            there = {(c["data"], c["setting"]) for c in known["columns"]}
            if any((c["data"], c["setting"]) in there for c in own["columns"]):
                sys.exit(f"{path.name}: another file has {own['target']} too, with a column in common.")
            known["columns"] = sorted([*known["columns"], *own["columns"]], key=lambda c: COLUMNS.index(c["data"]))
            known["environments"] += [e for e in own["environments"] if e not in known["environments"]]
            known["tuned"] |= own["tuned"]
            known["date"] = max(known["date"], own["date"])
    return found


def _column(key: str) -> str:
    """Of "fedavg on cifar10 (30 rounds)" the data set."""
    return key.partition(" on ")[2].partition(" ")[0]


# ---- outcomes of single runs


def collect(made: Path, results: Path) -> int:
    """Take over a folder of `fedselect reproduce`: its tables, and of each finished run what it was and what came out."""
    with tempfile.TemporaryDirectory() as room:
        fresh = Path(room) / "results"
        shutil.copytree(results, fresh)
        count = _take_over(made, fresh)
        for shifts in (False, True):
            read(fresh, shifts)  # files that do not go together show before anything is replaced
        shutil.copytree(fresh, results, dirs_exist_ok=True)
    return count


def _take_over(made: Path, results: Path) -> int:
    for path in made.glob("*.json"):
        own = read_json(path, AGAIN)
        if path.name == "tuned.json":  # it may have been made for other targets
            there = results / path.name
            known = json.loads(there.read_text(encoding="utf-8")) if there.exists() else {}
            there.write_text(lean(known | own), encoding="utf-8")
            continue
        for data in dict.fromkeys(c["data"] for c in own["columns"]):  # a file each, for they may be made apart
            part = {**own, "columns": [c for c in own["columns"] if c["data"] == data]}
            part["tuned"] = {k: v for k, v in own["tuned"].items() if k.endswith(f" on {data}")}
            (results / f"{path.stem}-{data}.json").write_text(lean(part), encoding="utf-8")
    _rename(results)
    known = runs(results)
    for place in made.glob("cells/*/summary.json"):
        config = read_json(place.parent / "config.json", AGAIN)
        config |= {part: named(config[part]) for part in FILED}
        known[place.parent.name] = {"config": config, "summary": read_json(place, AGAIN)}
    lines = [json.dumps({"cell": name, **known[name]}, sort_keys=True) + "\n" for name in sorted(known)]
    (results / RUNS).write_bytes(gzip.compress("".join(lines).encode(), mtime=0))
    return len(known)


def runs(results: Path) -> dict[str, Table]:
    """What is kept of single runs, by the names that their cells have now."""
    return dict(_completed(**line) for line in _lines(results))


def _lines(results: Path) -> list[Table]:
    path = results / RUNS
    return list(map(json.loads, gzip.decompress(path.read_bytes()).decode().splitlines())) if path.exists() else []


def _rename(results: Path) -> None:
    """Tables name their runs as `runs` does."""
    now = {line["cell"]: _completed(**line)[0] for line in _lines(results)}
    for path in results.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(r'(?<=")[0-9a-f]{16}(?=")', lambda m: now.get(m[0], m[0]), text), encoding="utf-8")


def _completed(cell: str, **run: Table) -> tuple[str, Table]:
    """A run under the name its cell has now: an option that came later has the default that the run was made with."""
    config = run["config"]
    try:
        here = {part: {k: str(find([v], None)) if k in FILES and v else v for k, v in config[part].items()} for part in FILED}
        now = Config.from_dict({**config, **here}, cell)
    except (DataError, InputError):  # made from files that are not on this machine, or with an option that is gone
        return cell, run
    return name_of(now), {**run, "config": now.to_json() | {part: named(getattr(now, part)) for part in FILED}}


def restore(results: Path, out: Path) -> int:
    """The other way: every run as a cell that is finished."""
    found = runs(results)
    for name, run in found.items():
        place = out / "cells" / name
        place.mkdir(parents=True, exist_ok=True)
        for part in ("config", "summary"):
            (place / f"{part}.json").write_text(json.dumps(run[part]), encoding="utf-8")
    return len(found)
