"""Collect run directories into one plain structure for the page, the figures and the tables."""

import datetime
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedselect.core.errors import RunError
from fedselect.core.files import read_json
from fedselect.core.version import package_version
from fedselect.diagnosis import words
from fedselect.diagnosis.diagnosis import kinds
from fedselect.report.alone import compare_with_alone
from fedselect.report.tuned import finalists, tuning
from fedselect.runs import grouped, persistence
from fedselect.runs.labels import APART, labels, looks, same
from fedselect.runs.masks import read_lines, unpack
from fedselect.runs.rundir import (
    again,
    deployed,
    described,
    failure,
    finished,
    headline,
    measures,
    no_run,
    outcome,
    read_comparison,
    read_config,
    read_records,
    view_of,
)
from fedselect.runs.tables import DATA as SCORED
from fedselect.runs.tables import common_headline, failures
from fedselect.simulate.keeping import choices, final
from fedselect.simulate.keeping import said as kept_in_words
from fedselect.simulate.records import Record, whole
from fedselect.tasks import Measure, Spread

Data = dict[str, Any]
MOST = 200  # points on a curve
MOST_SHARES = 60  # columns of a picture of shares over rounds
AGREED = ("method", "model", "training", "aggregate", "rounds", "fraction", "secret", "private")
"""Settings that all clients of a deployment share, beside the kind of data."""


def gather(places: Sequence[Path]) -> Data:
    """The data of these runs and comparisons. Unfinished runs are included as far as they are."""
    paths = distinct(places)
    if not paths:
        raise RunError(f"{', '.join(map(str, places))}: no run has started yet; start it with: {again(places[0])}")
    configs = [read_config(p) for p in paths]
    named, failed = labels([described(p) for p in paths]), failures(paths)
    histories = [_evaluated(p) for p in paths]
    there = [i for i, h in enumerate(histories) if h and not failure(paths[i])]
    lost = [label for label, path in zip(named, paths, strict=True) if failure(path)]
    if not there and len(failed) == len(paths):
        raise RunError(f"every run diverged; {': '.join(failed[0])}")
    if not there and all(finished(p) for p in paths):
        raise RunError(
            f"{paths[0]} has a summary but no rounds; run it again with: "
            f"fedselect run --config {paths[0] / 'config.json'} --out DIR"
        )
    if not there:
        raise RunError(f"{', '.join(map(str, places))}: nothing was evaluated yet; continue with: {again(places[0])}")
    paths, configs, histories = [paths[i] for i in there], [configs[i] for i in there], [histories[i] for i in there]
    named = [named[i] for i in there]
    scored, shown = _scored(paths, configs), common_headline(paths)
    order = list(dict.fromkeys(named))
    methods = [configs[named.index(label)]["method"]["name"] for label in order]
    federations: list[Data] = []
    runs = [
        _run(path, config, history, order.index(label), federations)
        for path, config, history, label in zip(paths, configs, histories, named, strict=True)
    ]
    groups: list[Data] = [
        {
            "label": label,
            "method": method,
            "colour": colour,
            "symbol": symbol,
            "lost": lost.count(label),
            "config": _settings(paths[named.index(label)], configs[named.index(label)]),
        }
        for label, method, (colour, symbol) in zip(order, methods, looks(methods), strict=True)
    ]
    compare_with_alone(configs, groups, runs, shown)
    return {
        "title": _title(configs, order, scored),
        "scored": scored,
        "headline": _shown(shown),
        "metrics": [_shown(m) for m in {m.name: m for path in paths for m in measures(path)}.values()],
        "groups": groups,
        "runs": runs,
        "failed": failed,
        "tuning": tuning(places),
        "federations": federations,
        "environments": _distinct([s["environment"] for p in paths if (s := _summary(p))]),
        "made": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": package_version(),
    }


def distinct(places: Sequence[Path]) -> list[Path]:
    """The run directories in these places, without duplicates. Of runs with equal settings and seed, a finished one is kept."""
    paths = list(dict.fromkeys(run for place in places for run in expand(place)))
    kept: dict[str, Path] = {}
    for path in sorted(paths, key=lambda p: not finished(p)):
        first = kept.setdefault(same(described(path)), path)
        if first != path:
            warnings.warn(
                f"{path} is skipped, because {first} has the same configuration and seed.", stacklevel=1
            )  # warn only once
    return [p for p in paths if p in kept.values()]


def expand(place: Path) -> list[Path]:
    """The run directories of a run or a comparison."""
    if (place / "compare.json").exists():
        return [run for name in finalists(place) or read_comparison(place) if ((run := place / name) / "config.json").exists()]
    if (place / "config.json").exists():
        return [place]
    raise no_run(place)


def _run(path: Path, config: Data, history: list[Record], group: int, federations: list[Data]) -> Data:
    first = headline(path).name
    summary, last = _summary(path), final(history, first) or history[-1]
    kept = _thin(history, MOST)
    lines = read_lines(path / "masks.jsonl")
    iou = [[line["round"], line["iou"]] for line in lines if "iou" in line]
    at = _federation(path, last, federations)
    return {
        "group": group,
        "path": str(path),
        "seed": config["seed"],
        "rounds": config["rounds"],
        "finished": finished(path),
        "deployed": deployed(path),
        "federation": at,
        "round": [r["round"] for r in kept],
        "value": [_short(r[first]) for r in kept],
        "share": [_short(r["share"]) for r in kept],
        "up": [r["sent"]["up"] for r in kept],
        "clients": {
            "value": [[_short(v) for v in r["clients"][first]] for r in kept],
            "up": [r["sent"]["clients"]["bytes_up"] for r in kept],
            "down": last["sent"]["clients"]["bytes_down"],
        },
        "last": {
            "value": last["clients"][first],
            "local": last["clients"][f"{first}_local"],
            "merged": last["clients"][f"{first}_merged"],
            "share": last["clients"]["share"],
        },
        "metrics": _metrics(path, summary, last, federations[at]),
        "view": view_of(summary, last["clients"], first),
        "down": last["sent"]["down"],
        "seconds": last["sent"]["seconds"],
        "shares": [[line["round"], line["share"]] for line in _thin(lines, MOST_SHARES)],
        "iou": iou,
        "paired": _paired(len(unpack(iou[-1][1])) // (1 + len(federations[at]["layers"]))) if iou else 0,
        "persistence": _persistence(path, federations[at]),
        "heads": _heads(path, federations[at]),
        "cross": summary.get("cross"),
        "epsilon": last.get("epsilon"),  # privacy budget spent so far
        "chosen": summary.get("chosen") or choices(last),  # each client's choice of model, with --view best
        "kept": kept_in_words(last) if last.get("kept") is not None else None,
        "stopped": bool(last.get("stopped")),
        "missed": summary.get("missed"),  # deployed runs only: {client: rounds}
        "rejected": summary.get("rejected", []),
        "set_back": summary.get("set_back", []),  # clients whose vault had lost a round
        "absent": summary.get("absent", {}),  # clients without a final model, and why
    }


def _shown(measure: Measure) -> Data:
    return {**measure.to_json(), "percent": measure.percent}


def _metrics(path: Path, summary: Data, last: Record, federation: Data) -> Data:
    """Every metric in the last round, by client and over clients."""
    tested = [c.get("test") for c in federation["clients"]]
    found = {}
    for m in measures(path):
        over = summary.get("over_clients", {}).get(m.name) or Spread.of(m, last["clients"][m.name], tested).to_json()
        found[m.name] = {**over, "values": last["clients"][m.name]}
    return found


def _persistence(path: Path, federation: Data) -> Data | None:
    """Persistence by tensor, and in words; None if the method does not measure it."""
    found = persistence.read(path)
    if found is None:
        return None
    return {
        "tensors": list(found["persistence"]),
        "values": list(found["persistence"].values()),
        "sentences": words.sentences(kinds(found["persistence"], found["roles"]), _names(federation)),
    }


def _heads(path: Path, federation: Data) -> Data | None:
    """The clients that share a head, as groups and in words; None if the method does not form groups."""
    found = grouped.read(path)
    return None if found is None else {"groups": found, "sentences": words.together(found, _names(federation))}


def _names(federation: Data) -> list[str]:
    return words.short([c["name"] for c in federation["clients"]])


def _settings(path: Path, config: Data) -> Data:
    """A run's settings without its seed. For a deployed run, only those that the server knows."""
    if deployed(path):
        return {**{k: config[k] for k in AGREED if config.get(k)}, "data": {"name": config["data"]["name"]}}
    return {k: v for k, v in config.items() if k not in APART}


def _evaluated(path: Path) -> list[Record]:
    """The evaluated rounds, each with its cumulative traffic under "sent"."""
    found = [{**r, "clients": whole(r)} for r in read_records(path / "metrics.jsonl", growing=not finished(path))]
    up = down = 0
    seconds = 0.0
    own = {way: [0] * len(found[0]["clients"][way]) if found else [] for way in ("bytes_up", "bytes_down")}
    for r in found:
        up, down, seconds = up + r["bytes_up"], down + r["bytes_down"], seconds + r["seconds"]
        own = {way: [a + (b or 0) for a, b in zip(own[way], r["clients"][way], strict=True)] for way in own}
        r["sent"] = {"up": up, "down": down, "seconds": round(seconds, 2), "clients": own}
    return [r for r in found if r[headline(path).name] is not None]


def _federation(path: Path, last: Record, federations: list[Data]) -> int:
    """The index of a run's federation, shared by runs with the same data and model. Old runs only number their clients."""
    if (path / "federation.json").exists():
        own = read_json(path / "federation.json", "delete it; clients are then listed by number.")
    else:
        own = {"clients": [{"name": str(i), "classes": []} for i in range(len(last["clients"]["share"]))], "layers": {}}
    if own not in federations:
        federations.append(own)
    return federations.index(own)


def _paired(pairs: int) -> int:
    """The number of clients with this many pairs."""
    return (1 + math.isqrt(1 + 8 * pairs)) // 2


def _summary(path: Path) -> Data:
    return outcome(path) if finished(path) else {}


def _scored(paths: Sequence[Path], configs: Sequence[Data]) -> str:
    """The data that runs are scored on, which must be the same for all."""
    by = {SCORED[c.get("score", "test")]: path for path, c in zip(paths, configs, strict=True)}
    if len(by) > 1:
        (one, first), (other, second) = by.items()
        raise RunError(f"{first} is scored on {one} data, but {second} on {other} data; write a separate report for each.")
    return next(iter(by))


def _title(configs: Sequence[Data], order: Sequence[str], scored: str) -> str:
    data = sorted({c["data"]["name"] for c in configs})
    methods = len({c["method"]["name"] for c in configs})
    many = f"{len(order)} methods" if methods == len(order) else f"{len(order)} settings"
    held = " (validation data)" if scored == "validation" else ""
    return f"{order[0] if len(order) == 1 else many} on {', '.join(data)}{held}"


def _thin(items: list[Any], most: int) -> list[Any]:
    """At most `most` items, evenly spaced, including the first and the last."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _distinct(found: list[Data]) -> list[Data]:
    return [e for i, e in enumerate(found) if e not in found[:i]]
