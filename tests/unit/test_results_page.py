"""docs/results.md and its pictures are what scripts/results_page.py makes of results/; its numbers are those of plain loops."""

import json
import re
import statistics
from pathlib import Path

import pytest
import results_page

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / results_page.PAGE).read_text(encoding="utf-8")
NAMES = {
    "CIFAR-10": "shifts-cifar10-shifts",
    "Mini-ImageNet": "shifts-miniimagenet-shifts",
    "digits": "shifts-digits-digits-shifts",
}


def test_the_page_and_its_pictures_are_what_the_results_say():
    assert results_page.stale(ROOT) == []


@pytest.mark.parametrize("data", NAMES)
def test_mean_and_worst_regret_are_those_of_a_plain_loop(data):
    columns = json.loads((ROOT / "results" / f"{NAMES[data]}.json").read_text(encoding="utf-8"))["columns"]
    by_kind = [
        {r["row"]: statistics.fmean(r["accuracy"]) for r in c["rows"] if r["row"] != "told who is alike"} for c in columns
    ]
    head, *rows = [
        [c.strip(" *") for c in line.split("|")[1:-1]] for line in PAGE.splitlines() if re.match(r"\| (method|\w.* \|)", line)
    ]
    at = head.index(f"{data}: mean")
    told = {row[0]: row[at : at + 2] for row in rows}
    assert len(told) == 9
    for name, (mean, regret) in told.items():
        found = [kind[name] for kind in by_kind]
        below = [max(kind.values()) - kind[name] for kind in by_kind]
        assert (mean, regret) == (f"{statistics.fmean(found):.1f}", f"{max(below):.1f}"), name
