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

KINDS, ROWS, SEEDS = ("none", "labels", "camera"), ("A", "B", "C"), (5, 6, 7)


def made_up(kinds=KINDS):
    """A target as `fedselect reproduce` writes it: accuracies of three rows, seeds and kinds, twelve clients each."""
    draw = random.Random(0)
    columns = []
    for kind in kinds:
        rows = []
        for row in ROWS:
            clients = [[round(draw.uniform(40, 90), 4) for _ in range(12)] for _ in SEEDS]
            rows.append(
                {"row": row, "accuracy": [statistics.fmean(c) for c in clients], "clients": clients, "seeds": list(SEEDS),
                 "bytes_up": [12e6] * 3, "bytes_down": [24e6] * 3}
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


def test_the_page_is_what_the_results_say():
    assert (ROOT / shifts.PAGE).read_text(encoding="utf-8") == shifts.page(ROOT / "results")


def test_mean_and_worst_regret_are_those_of_plain_loops():
    columns = made_up()["columns"]
    acc = shifts.accuracies(columns, list(ROWS))
    means = {row: [statistics.fmean(c["rows"][i]["accuracy"]) for c in columns] for i, row in enumerate(ROWS)}
    for i, row in enumerate(ROWS):
        worst = max(max(means[other][k] for other in ROWS) - means[row][k] for k in range(len(KINDS)))
        assert shifts.regrets(acc)[i] == pytest.approx(worst)
        assert acc[i].mean() == pytest.approx(statistics.fmean(means[row]))


def test_the_error_of_the_mean_is_that_of_seeds_drawn_anew():
    """Of one column, drawing seeds anew gives the standard error of n - 1 seeds' spread times sqrt((n - 1) / n)."""
    acc = shifts.accuracies(made_up()["columns"][:1], list(ROWS))
    error, _ = shifts.spread(acc)
    for i in range(len(ROWS)):
        plain = statistics.pstdev(acc[i][0]) / len(SEEDS) ** 0.5
        assert error[i] == pytest.approx(plain, rel=0.1)


def test_the_worst_tenth_is_a_client_of_twelve():
    columns = made_up()["columns"]
    lows = [min(clients) for c in columns for clients in c["rows"][1]["clients"]]
    assert shifts.worst_tenth(columns, "B") == pytest.approx(statistics.fmean(lows))


def test_a_table_has_every_row_and_marks_the_best(tmp_path):
    (tmp_path / "shifts-digits.json").write_text(json.dumps(made_up()), encoding="utf-8")
    lines = [line for line in shifts.page(tmp_path).splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in lines] == ["accuracy, %", "---", *ROWS]
    assert len({line.count("|") for line in lines}) == 1
    assert all(" 3.00 |" in line for line in lines[2:])  # (12 + 24) MB over 12 clients
    for column in range(2, 2 + len(KINDS) + 2):
        assert sum("**" in line.split("|")[column] for line in lines[2:]) == 1


def test_a_row_that_a_kind_lacks_is_left_out():
    target = made_up()
    target["columns"][1]["rows"] = target["columns"][1]["rows"][:2]
    assert shifts.rows_of(target["columns"]) == ["A", "B"]


def test_leaders_are_compared_seed_by_seed():
    columns = made_up()["columns"]
    for k, column in enumerate(columns):  # C leads in the mean; A falls less far below the best in its worst kind
        column["rows"][0]["accuracy"] = [80.0, 81.0, 82.0]
        column["rows"][1]["accuracy"] = [10.0, 10.0, 10.0]
        column["rows"][2]["accuracy"] = [[70.0, 70.0, 70.0], [90.0, 90.0, 90.0], [90.0, 90.0, 90.0]][k]
    said = shifts.leaders(columns, list(KINDS))
    assert said.startswith("Highest mean: C. Smallest worst regret: A. A less C, paired by seed: ")
    assert "none +11.0 ± 0.6, labels -9.0 ± 0.6" in said  # of 10, 11, 12 the mean, and 1 / sqrt(3)
