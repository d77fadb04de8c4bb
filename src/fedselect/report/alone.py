"""Choose the run of `local` (training alone) that each run is compared with."""

import json
import statistics
from collections.abc import Sequence
from typing import Any

from fedselect.runs.labels import flat, settings
from fedselect.tasks import Measure

Data = dict[str, Any]
NONE = "Run the method local with the same seeds to see which clients gain from federation."


def compare_with_alone(configs: Sequence[Data], groups: list[Data], runs: list[Data], headline: Measure) -> None:
    """Set "alone" of each run to the index of the run of local that it is compared with, or None.

    That run has the same configuration (except method, aggregator and execution), seed, number of clients and last round.
    With several groups of local, the best is used for all methods with that configuration. "alone" of each group is the
    index of the group it is compared with, or None; "why" explains which runs are not compared.
    """
    kinds = [json.dumps(_setting(c), sort_keys=True) for c in configs]
    solo = [groups[r["group"]]["method"] == "local" for r in runs]
    pairs = {
        (i, runs[j]["group"]): j
        for i in range(len(runs)) if not solo[i]
        for j in range(len(runs)) if solo[j] and kinds[i] == kinds[j] and _comparable(runs[i], runs[j])
    }  # fmt: skip
    best = {kind: _best([(g, runs[j]) for (i, g), j in pairs.items() if kinds[i] == kind], headline) for kind in kinds}
    for i, run in enumerate(runs):
        run["alone"] = pairs.get((i, best[kinds[i]]))
    for g, group in enumerate(groups):
        own = [i for i, r in enumerate(runs) if r["group"] == g]
        group["alone"] = next((runs[j]["group"] for i in own if (j := runs[i]["alone"]) is not None), None)
        group["why"] = "" if group["method"] == "local" else _why(own, configs, groups, runs, kinds, solo)


def gains(data: Data, group: int) -> list[float]:
    """The gains of a group's clients over training alone, for every run that is compared."""
    sign = 1 if data["headline"]["more_is_better"] else -1
    return [
        sign * (own - other)
        for run in data["runs"] if run["group"] == group and run["alone"] is not None
        for own, other in zip(run["last"]["value"], data["runs"][run["alone"]]["last"]["value"], strict=True)
        if own is not None and other is not None
    ]  # fmt: skip


def _setting(config: Data) -> Data:
    return {k: v for k, v in settings(config).items() if k not in ("method", "aggregate")}


def _comparable(run: Data, other: Data) -> bool:
    return (
        run["seed"] == other["seed"]
        and len(run["last"]["value"]) == len(other["last"]["value"])
        and ((run["finished"] and other["finished"]) or run["round"][-1] == other["round"][-1])
    )


def _best(partners: list[tuple[int, Data]], headline: Measure) -> int | None:
    """The group of local with the best mean over the seeds of the comparison."""
    by: dict[int, dict[int, float]] = {}
    for group, run in partners:
        by.setdefault(group, {})[run["seed"]] = run["value"][-1]
    means = {group: statistics.fmean(values.values()) for group, values in by.items()}
    return next((g for g, mean in means.items() if mean == headline.best(means.values())), None)


def _why(
    own: list[int], configs: Sequence[Data], groups: list[Data], runs: list[Data], kinds: list[str], solo: list[bool]
) -> str:
    """A sentence on why runs of a group are not compared, empty if all are."""
    without = [i for i in own if runs[i]["alone"] is None]
    if not without:
        return ""
    if not any(solo):
        return NONE
    label, first = groups[runs[own[0]]["group"]]["label"], without[0]
    if not any(s and kind == kinds[first] for s, kind in zip(solo, kinds, strict=True)):
        here = flat(_setting(configs[first]))
        others = [flat(_setting(c)) for c, s in zip(configs, solo, strict=True) if s]
        apart = min(([k for k in {**here, **o} if here.get(k) != o.get(k)] for o in others), key=len)
        return (
            f"{label} is not compared with training alone, because the runs of local have other values of {', '.join(apart)}."
        )
    seeds = ", ".join(str(runs[i]["seed"]) for i in without)
    whose = next((groups[runs[j]["group"]]["label"] for i in own if (j := runs[i]["alone"]) is not None), "local")
    return (
        f"{label} is not compared with training alone on seed {seeds}, because {whose} has no run that reached the same round."
    )
