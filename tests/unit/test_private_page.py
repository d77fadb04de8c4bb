"""docs/private.md is what scripts/private.py makes of results/private.json, and what it says of the code holds."""

import json
import re
import statistics
import sys
import warnings
from pathlib import Path

import pytest

import fedselect as fs
from fedselect.core.options import options
from fedselect.methods import METHODS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import private  # noqa: E402

FOUND = json.loads((ROOT / private.RESULTS).read_text(encoding="utf-8"))
PAGE = (ROOT / private.PAGE).read_text(encoding="utf-8")


def test_the_page_is_what_the_results_say():
    assert private.stale(ROOT) == []


def test_every_cell_has_every_seed_and_kept_its_budget():
    cells = {}
    for r in FOUND["rows"]:
        cells.setdefault((r["data"], r["clients"], r["unit"], r["epsilon"]), []).append(r["seed"])
        if r["epsilon"] is not None:
            assert 0.97 * r["epsilon"] < r["spent"] <= r["epsilon"]
    assert all(sorted(seeds) == FOUND["seeds"] for seeds in cells.values())
    assert len(cells) == 5 * 6


def test_a_cell_is_the_mean_of_a_plain_loop():
    own = [r["accuracy"] for r in FOUND["rows"] if (r["clients"], r["unit"], r["epsilon"]) == (100, "client", 2.0)]
    line = next(li for li in private.table(FOUND["rows"], "client").splitlines() if li.startswith("| 2 |"))
    assert line.split("|")[3].strip() == f"{sum(own) / 3:.1f} ± {statistics.stdev(own):.1f}"


def test_what_the_page_says_of_the_numbers_holds():
    def mean(**wanted):
        return statistics.fmean(r["accuracy"] for r in private.of(FOUND["rows"], **wanted))

    lost = {
        n: mean(unit="client", clients=n, epsilon=None) - mean(unit="client", clients=n, epsilon=4.0) for n in (10, 100, 1000)
    }
    assert lost[10] > 60
    assert lost[100] < 4
    assert lost[1000] < 1
    assert mean(data="spoken digits", unit="sample", epsilon=8.0) > 90


def test_the_options_are_those_of_the_code():
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.+) \|$", PAGE.split("## Options")[1].split("##")[0], re.M)
    known = options(fs.Private)
    assert [name for name, _, _ in rows] == list(known)
    for name, default, meaning in rows:
        option = known[name]
        assert meaning == option.meaning
        assert name == "epsilon" or default.replace("\\|", "|") == option.describe().partition("=")[2]


@pytest.mark.full
@pytest.mark.parametrize("unit", ["client", "sample"])
def test_the_methods_that_are_refused_are_those_that_the_page_names(unit):
    data = fs.load("digits", clients=3, classes_per_client=3, train=20, test=10, val=5, seed=0)
    refused = set()
    for name in METHODS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fs.Simulation(name, "mlp", data, rounds=2, private=f"epsilon=inf,unit={unit}", device="cpu").step()
        except fs.InputError:
            refused.add(name)
    refused.discard("layers")  # names layers of another network
    text = PAGE.split("Methods that send")[1].split("FedSelect's masks")[0]
    own = text.split("With `unit=sample`")[unit == "sample"]
    assert refused == set(re.findall(r"`([a-z+-]+)`", own)) - {"unit=client", "finetune=0"}
