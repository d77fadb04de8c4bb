"""The data of a search for the page: scores of settings over rounds spent, and when settings were dropped."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedselect.core.errors import RunError
from fedselect.core.files import read_json
from fedselect.runs.labels import looks

Data = dict[str, Any]
NAME = "outcome.json"
MOST = 12  # settings of an unfinished search whose runs are shown in full


def finalists(place: Path) -> list[str] | None:
    """The directories of the runs of a search that trained longest; None if this is not a search."""
    if not (place / NAME).exists():
        return None
    found = _read(place)
    best = [row["name"] for row in found["ranking"] if row["rounds"] == found["ranking"][0]["rounds"]]
    return [f"{name}-seed{seed}" for name in best[:MOST] for seed in found["seeds"]]


def tuning(places: Sequence[Path]) -> Data | None:
    """The data of a search, if the page shows only that search."""
    if len(places) != 1 or not (places[0] / NAME).exists():
        return None
    found = _read(places[0])
    stages, seeds = found["stages"], len(found["seeds"])
    ends, spent, before = [], [0], 0
    for stage in stages:
        spent.append(spent[-1] + seeds * len(stage["scores"]) * (stage["until"] - before))
        before = stage["until"]
        ends.append({"x": spent[-1], "round": before, "of": len(stage["scores"]), "kept": len(stage["kept"])})
    marks = [0, *(stage["until"] for stage in stages)]
    methods = list(dict.fromkeys(found["methods"].values()))
    paint = dict(zip(methods, looks(methods), strict=True))
    return {
        "chosen": found["chosen"],
        "judged_by": found["judged_by"],
        "seeds": found["seeds"],
        "rounds": found["rounds"],
        "ends": ends,
        "settings": [
            {
                "name": row["name"],
                "method": found["methods"][row["name"]],
                "colour": paint[found["methods"][row["name"]]][0],
                "symbol": paint[found["methods"][row["name"]]][1],
                "points": _placed(found["curves"][row["name"]], marks, spent),
                **{
                    key: row[key]
                    for key in ("rounds", "score", "error", "behind", "behind_error", "chance", "bytes", "seconds")
                },
            }
            for row in found["ranking"]
        ],
        "test": found["test"],
    }


def _placed(curve: Sequence[Sequence[float]], marks: Sequence[int], spent: Sequence[float]) -> list[list[float]]:
    """A curve over the total rounds of all settings so far: [x, score, round]."""
    out = []
    for round_, score in curve:
        rung = next((i for i, end in enumerate(marks[1:]) if round_ <= end), None)
        if rung is None:  # an unfinished rung
            break
        part = (round_ - marks[rung]) / (marks[rung + 1] - marks[rung])
        out.append([round(spent[rung] + part * (spent[rung + 1] - spent[rung]), 1), score, round_])
    return out


def _read(place: Path) -> Data:
    mend = f"delete it, then: fedselect resume {place}"
    found = read_json(place / NAME, mend)
    lacking = {"ranking", "seeds", "stages", "methods", "chosen", "judged_by", "curves", "rounds", "test"} - found.keys()
    if lacking or not found["ranking"]:
        raise RunError(f"{place / NAME} is not the outcome of a search; {mend}")
    return found
