"""docs/robust.md is what scripts/robust.py makes of results/robust.json, and its numbers are those of plain loops."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch

from fedselect.methods.grouping import alike

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import robust  # noqa: E402

FOUND = json.loads((ROOT / robust.RESULTS).read_text(encoding="utf-8"))
SEEDS = FOUND["seeds"]


def test_the_page_is_what_the_results_say():
    assert robust.stale(ROOT) == []


def test_every_case_ran_with_every_seed_and_ended():
    for part in ("attacked", "honest", "profiles"):
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


def test_what_the_page_says_of_fedalike_holds():
    """Flipped labels are always told apart, most other attackers are not; heads that no aggregator sees do harm."""
    rows = [r for r in FOUND["attacked"] if r["method"] == "fedalike" and r["bad"]]
    assert all((r["apart"] == r["bad"]) for r in rows if r["attack"] == "label flips")
    others = [r for r in rows if r["attack"] != "label flips"]
    assert sum(r["apart"] for r in others) < 0.2 * sum(r["bad"] for r in others)
    for d in ("clip", "median", "trimmed, 5 senders"):
        ours, plain = (
            float(robust.mean(robust.of(FOUND["attacked"], method=m, defence=d, attack="x -10", bad=2)))
            for m in ("fedalike", "fedavg+ft")
        )
        assert ours < plain - 5


def test_what_the_page_says_of_false_profiles_holds():
    rows = FOUND["profiles"]
    assert {r["groups"] for r in rows if r["attack"] == "opposite halves"} == {1}

    def accuracy(attack):
        return float(robust.mean(robust.of(rows, shift="groups", attack=attack)))

    assert max(accuracy("opposite halves"), accuracy("huge half")) < accuracy("true") - 5


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_profile_that_is_not_finite_leaves_everybody_alone(value):
    rows = torch.randn(1, 4, 3, generator=torch.Generator().manual_seed(0)).expand(5, 4, 3)
    noise = 0.01 * torch.randn(2, 5, 4, 3, generator=torch.Generator().manual_seed(1))
    first, second, has = rows + noise[0], rows + noise[1], torch.ones(5, 4, dtype=torch.bool)
    assert alike(first, second, has).tolist() == [0] * 5
    first[2] = value
    assert alike(first, second, has).tolist() == [0, 1, 2, 3, 4]


def test_methods_that_were_measured_again_are_named_with_their_commit():
    before = {k: FOUND[k] for k in ("clients", "rounds", "seeds", "commit", "machine", "date")}
    later = {"commit": "abc", "machine": "here", "date": "2030-01-02"}
    assert "again" not in robust.made(before)
    assert "FedAlike was measured again: commit abc, here, 2030-01-02." in robust.made({**before, "again": {"fedalike": later}})


def test_measuring_one_method_replaces_its_rows_alone(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("robust_benchmark", ROOT / "benchmarks" / "robust.py")
    benchmark = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "robust_benchmark", benchmark)  # dataclasses look their module up
    spec.loader.exec_module(benchmark)
    monkeypatch.setattr(benchmark, "outcomes", lambda cases, _: ({**vars(c), "accuracy": 1.0, "groups": 1} for c in cases))
    monkeypatch.setattr(benchmark.torch, "set_num_threads", lambda _: None)
    out = tmp_path / "robust.json"
    out.write_text(json.dumps(FOUND))
    monkeypatch.setattr(sys, "argv", ["robust.py", "--methods", "fedalike", "--out", str(out)])
    benchmark.main()
    made = json.loads(out.read_text())
    assert made["again"]["fedalike"].keys() == {"commit", "date", "machine"}
    assert (made["commit"], made["date"]) == (FOUND["commit"], FOUND["date"])
    for part in ("attacked", "honest"):
        new, old = ([r for r in rows if r["method"] != "fedalike"] for rows in (made[part], FOUND[part]))
        assert new == old
        assert len(made[part]) == len(FOUND[part])
        assert {r["accuracy"] for r in made[part] if r["method"] == "fedalike"} == {1.0}
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--seeds", "7"])
    with pytest.raises(SystemExit):
        benchmark.main()
    assert "other settings" in capsys.readouterr().err
