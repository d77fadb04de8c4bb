"""docs/shifts.md is what scripts/shifts.py makes of results/, and its numbers are those of plain loops."""

import json
import random
import statistics
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import shifts  # noqa: E402

OURS, TOLD = "FedAlike", "told who is alike"
KINDS, ROWS, SEEDS = ("none", "labels", "camera"), (OURS, "B", "C", TOLD), (5, 6, 7)
RIVALS = ROWS[:3]
TRAINED = {
    OURS: {"method": "fedalike", "options": {"epochs": 2, "heads": "find"}},
    "B": {"method": "ditto", "options": {"epochs": 2}},
    "C": {"method": "fedpac", "options": {"epochs": 2, "head_epochs": 1}},
    TOLD: {"method": "fedalike", "options": {"epochs": 2, "heads": "0 0 1"}},
}


def made_up(kinds=KINDS):
    """A target as `fedselect reproduce` writes it: accuracies of four rows, three seeds and kinds, twelve clients each."""
    draw = random.Random(0)
    columns = []
    for kind in kinds:
        rows = []
        for row in ROWS:
            clients = [[round(draw.uniform(40, 90), 4) for _ in range(12)] for _ in SEEDS]
            rows.append(
                {"row": row, "accuracy": [statistics.fmean(c) for c in clients], "clients": clients, "seeds": list(SEEDS),
                 "bytes_up": [12e6] * 3, "bytes_down": [24e6] * 3, **TRAINED[row]}
            )  # fmt: skip
        common = {"model": {"name": "mlp"}}
        columns.append(
            {"data": "digits-shifts", "setting": kind, "title": f"digits {kind}", "rows": rows, "clients": 12, "rounds": 30,
             "common": common}
        )  # fmt: skip
    return {
        "target": "shifts-digits", "title": "small clients", "columns": columns, "date": "2026-11-18", "note": None,
        "environments": [{"device": "CPU"}], "how": {"rates": "tuned"}, "tuned": {},
    }  # fmt: skip


def test_the_page_the_picture_and_the_readme_are_what_the_results_say():
    assert shifts.stale(ROOT) == []


def test_mean_and_worst_regret_are_those_of_plain_loops():
    """The row that is told who is alike is nobody's rival, and a row above all rivals has no regret."""
    columns = made_up()["columns"]
    acc = shifts.accuracies(columns, list(ROWS))
    means = {row: [statistics.fmean(c["rows"][i]["accuracy"]) for c in columns] for i, row in enumerate(ROWS)}
    found = shifts.regrets(acc, shifts.rivals_of(list(ROWS)))
    for i, row in enumerate(ROWS):
        worst = max(max(0.0, max(means[other][k] for other in RIVALS) - means[row][k]) for k in range(len(KINDS)))
        assert found[i] == pytest.approx(worst)
        assert acc[i].mean() == pytest.approx(statistics.fmean(means[row]))


def test_the_error_of_the_mean_is_that_of_seeds_drawn_anew():
    """Of one column, drawing seeds anew gives the standard error of n - 1 seeds' spread times sqrt((n - 1) / n)."""
    acc = shifts.accuracies(made_up()["columns"][:1], list(ROWS))
    error, _ = shifts.spread(acc, shifts.rivals_of(list(ROWS)))
    for i in range(len(ROWS)):
        plain = statistics.pstdev(acc[i][0]) / len(SEEDS) ** 0.5
        assert error[i] == pytest.approx(plain, rel=0.1)


def test_the_worst_tenth_is_a_client_of_twelve():
    columns = made_up()["columns"]
    lows = [min(clients) for c in columns for clients in c["rows"][1]["clients"]]
    assert shifts.worst_tenth(columns, "B") == pytest.approx(statistics.fmean(lows))


def test_epochs_count_second_models_and_heads():
    columns = made_up()["columns"]  # 30 rounds of 2 epochs; two models; an epoch of the head more
    assert [shifts.epochs(columns, row) for row in ROWS] == [2 * 30, 2 * 2 * 30, 3 * 30, 2 * 30]


def test_a_table_has_every_row_and_marks_the_best_rival(tmp_path):
    (tmp_path / "shifts-digits.json").write_text(json.dumps(made_up()), encoding="utf-8")
    lines = [line for line in shifts.page(tmp_path).splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in lines] == ["accuracy, %", "---", *RIVALS, f"*{TOLD}*"]
    assert len({line.count("|") for line in lines}) == 1
    assert all(" 3.00 |" in line for line in lines[2:])  # (12 + 24) MB over 12 clients
    for column in range(2, 2 + len(KINDS) + 2):
        assert sum("**" in line.split("|")[column] for line in lines[2:5]) == 1
    assert "**" not in lines[5]


def test_a_row_that_a_kind_lacks_is_left_out():
    target = made_up()
    target["columns"][1]["rows"] = target["columns"][1]["rows"][:2]
    assert shifts.rows_of(target["columns"]) == [OURS, "B"]


def test_a_run_that_diverged_is_named_and_its_seed_stands_at_the_mean_of_the_others():
    columns = made_up()["columns"]
    row = columns[1]["rows"][2]
    for name in ("accuracy", "clients", "seeds"):
        del row[name][1]
    assert shifts.diverged(columns) == ""
    row["failed"] = ["client 0, round 8: conv1.weight is no longer finite"]
    assert shifts.diverged(columns) == "Runs that diverged are left out of the means: 1 of C in `labels`."
    acc = shifts.accuracies(columns, list(ROWS))[2][1]
    assert acc.tolist() == pytest.approx([row["accuracy"][0], statistics.fmean(row["accuracy"]), row["accuracy"][1]])


def test_data_sets_of_one_target_have_a_table_each(tmp_path):
    other = [{**c, "data": "cifar10-shifts", "title": f"pictures {c['setting']}"} for c in made_up()["columns"]]
    target = made_up()
    target["columns"] += other
    assert [[c["data"] for c in own] for own in shifts.by_data(target)] == [["digits-shifts"] * 3, ["cifar10-shifts"] * 3]
    heads = [line for line in shifts.section(target) if line.startswith("## ")]
    assert heads == ["## digits", "## pictures"]


def test_ours_is_compared_with_the_best_others_seed_by_seed():
    columns = made_up()["columns"]
    for k, column in enumerate(columns):  # C has the highest mean of the others; B falls less far below the best
        column["rows"][0]["accuracy"] = [80.0, 81.0, 82.0]
        column["rows"][1]["accuracy"] = [75.0, 75.0, 75.0]
        column["rows"][2]["accuracy"] = [[60.0, 60.0, 60.0], [90.0, 90.0, 90.0], [90.0, 90.0, 90.0]][k]
    said = shifts.leaders(columns)
    # by seed (80 - 80), (81 - 80), (82 - 80): mean 1, error 1 / sqrt(3); C's regret is 81 - 60, B's 90 - 75, ours 90 - 81
    assert said.startswith(f"{OURS} minus C, the highest mean of the others: +1.0 ± 0.6 points. ")
    assert f"Worst regret, {OURS} minus B, the smallest of the others: -6.0 ± " in said
    assert said.endswith("it is behind in: labels (C +9.0 ± 0.6), camera (C +9.0 ± 0.6).")


def test_the_picture_orders_methods_by_their_worst_regret(tmp_path):
    for name in ("shifts", "shifts-digits"):
        (tmp_path / f"{name}.json").write_text(json.dumps({**made_up(), "target": name}), encoding="utf-8")
    for panel in shifts.drawn(tmp_path):
        worst = [max(row) for row in panel["regret"]]
        assert sorted(panel["rows"]) == sorted(RIVALS)
        assert worst == sorted(worst)
