"""docs/robust.md is what scripts/robust.py makes of results/robust.json, and its numbers are those of plain loops."""

import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import robust  # noqa: E402

FOUND = json.loads((ROOT / robust.RESULTS).read_text(encoding="utf-8"))
SEEDS = FOUND["seeds"]


def test_the_page_is_what_the_results_say():
    assert robust.stale(ROOT) == []


def test_every_case_ran_with_every_seed_and_ended():
    for part in ("attacked", "honest"):
        cases = {}
        for r in FOUND[part]:
            key = tuple(r.get(k) for k in ("method", "defence", "shift", "attack", "bad"))
            cases.setdefault(key, []).append(r["seed"])
            assert r["accuracy"] is not None
        assert all(sorted(seeds) == SEEDS for seeds in cases.values())


def test_a_cell_is_the_mean_of_a_plain_loop():
    rows = FOUND["attacked"]
    own = [
        r["accuracy"]
        for r in rows
        if (r["method"], r["defence"], r.get("attack"), r["bad"]) == ("fedselect", "clip", "x 50", 2)
    ]
    line = next(li for li in robust.attacked(rows, "fedselect", "accuracy").splitlines() if li.startswith("| clip |"))
    assert line.split("|")[5].strip().split(" / ")[1] == f"{sum(own) / len(own):.1f}"


def test_a_difference_is_by_seed_and_equal_means_the_same_bits():
    base = {s: {"accuracy": 50.0 + s, "shared": "a"} for s in (0, 1, 2)}
    own = {s: {"accuracy": 51.0 + 2 * s, "shared": "b"} for s in (0, 1, 2)}
    # 1, 2 and 3: mean 2, standard deviation 1
    assert robust.less(own, base) == f"+2.0 ± {1 / math.sqrt(3):.1f}"
    assert robust.less({s: {**r, "shared": "a"} for s, r in base.items()}, base) == "="
    assert robust.less({s: {**r, "shared": "b"} for s, r in base.items()}, base) == "+0.0 ± 0.0"


def test_what_the_page_says_of_the_default_holds():
    """That clip gives the same bits as the mean, but where sizes are very uneven, and costs less than half a point there."""
    rows = FOUND["honest"]
    for method in robust.order(rows, "method"):
        for kind in robust.order(rows, "shift"):
            base, own = (robust.of(rows, method=method, shift=kind, defence=d) for d in ("mean", "clip"))
            if kind == "sizes":
                apart = [own[s]["accuracy"] - base[s]["accuracy"] for s in SEEDS]
                assert abs(sum(apart) / len(apart)) < 0.5
            else:
                assert robust.less(own, base) == "=", (method, kind)


def test_what_the_page_says_of_what_clip_does_not_stop_holds():
    rows = FOUND["attacked"]
    for attack in ("sign flip", "label flips", "small steps"):
        for method in ("fedavg", "fedavg+ft"):
            mean, clip = (
                robust.mean(robust.of(rows, method=method, defence=d, attack=attack, bad=1)) for d in ("mean", "clip")
            )
            assert mean == clip
    for d in ("median", "trimmed, 5 senders"):
        worse = [
            float(robust.mean(robust.of(rows, method="fedavg", defence=x, attack="sign flip", bad=1))) for x in (d, "mean")
        ]
        assert worse[0] < worse[1]
