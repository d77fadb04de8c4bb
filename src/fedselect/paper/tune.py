"""Choose rates on validation images. Nothing here reads runs scored on test images."""

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedselect.core.errors import RunError
from fedselect.core.files import locked, read_json, write_json
from fedselect.paper.outcome import read_summary
from fedselect.paper.plan import How, in_tuning, name_of, trials
from fedselect.paper.protocol import Target, read_tuning
from fedselect.runs.config import Config
from fedselect.runs.rundir import finished

Key = tuple[str, str]
"""Data set and method."""


def needed(targets: Iterable[Target], how: How) -> list[Key]:
    """What these targets need tuned."""
    tuned = [t for t in targets if how.on(t).rates == "tuned"]
    return list(dict.fromkeys((column, row.tuned_as) for t in tuned for column in t.on for row in t.rows))


def runs(keys: Iterable[Key], how: How) -> list[Config]:
    return [config for column, method in keys for _, _, config in trials(column, method, how)]


def judged(keys: Iterable[Key], how: How, cells: Path) -> dict[Key, dict[str, Any]]:
    """The trials, their scores and the choice for each key. Keys with missing trials are omitted."""
    out = {}
    for column, method in keys:
        tried: dict[str, dict[str, Any]] = {}
        for options, _, config in trials(column, method, how):
            place = cells / name_of(config)
            entry = tried.setdefault(repr(options), {"options": options, "runs": [], "accuracy": []})
            entry["runs"].append(place.name)
            entry["accuracy"].append(_accuracy(place))
        if any(a is None for t in tried.values() for a in t["accuracy"]):
            continue
        for t in tried.values():
            t["accuracy"] = statistics.fmean(t["accuracy"]) if min(t["accuracy"]) >= 0 else -1.0
        best = max(tried.values(), key=lambda t: t["accuracy"])
        if best["accuracy"] < 0:
            raise RunError(
                f"every trial of {method} on {column} diverged, so no rate can be chosen; add smaller rates to tuning.toml."
            )
        for t in tried.values():
            t["accuracy"] = None if t["accuracy"] < 0 else round(t["accuracy"], 6)
        one = trials(column, method, how)[0][2]
        held, rounds = one.data["val"], one.rounds
        out[column, method] = {
            "chosen": best["options"],
            "trials": list(tried.values()),
            "scored_on": f"{held} images a client, held out of its training data: mean over the last quarter of the rounds",
            "rounds": rounds,
            "seeds": list(read_tuning().seeds),
            "note": in_tuning(column, how).mark or None,
        }
    return out


def save(found: dict[Key, dict[str, Any]], out: Path) -> None:
    """Add these choices to tuned.json, which several processes may write."""
    path = out / "tuned.json"
    with locked(out, wait=True):
        known = read_json(path, "it must list tuned rates.") if path.exists() else {}
        fresh = {f"{method} on {column}" + (f" ({e['note']})" if e["note"] else ""): e for (column, method), e in found.items()}
        if {**known, **fresh} != known:
            write_json(path, {**known, **fresh})


def _accuracy(place: Path) -> float | None:
    """Accuracy over the last quarter on validation images; -1 if the run diverged, None if it is missing."""
    if (place / "failed.json").exists():
        return -1.0
    if not finished(place):
        return None
    summary = read_summary(place)
    if summary["score"] != "val":
        raise RunError(f"{place} was scored on test images, which must not be used to choose rates; remove it.")
    return float(summary["accuracy_tail"])
