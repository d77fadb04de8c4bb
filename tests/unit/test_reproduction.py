"""docs/reproduction.md, its figures and the README's table are what scripts/reproduction.py makes of results/."""

import gzip
import json
import random
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import reproduction
from children import call
from reproduction_results import RUNS, collect, read, restore, runs

from fedselect.paper.outcome import Block, Entry, Seed, _ranked
from fedselect.paper.plan import How, cells, name_of
from fedselect.paper.protocol import targets
from fedselect.paper.write import as_json, lean
from fedselect.runs.config import Config

ROOT = Path(__file__).parents[2]
SEEDS = (0, 1, 2)
WHERE = {"device": "a GPU", "torch": "3.0", "precision": "tf32", "commit": "abc"}
MORE = {
    "local": 61.0,
    "merged": 62.0,
    "share": 0.3,
    "share_live": 0.6,
    "bytes_up": 4e7,
    "bytes_down": 3e7,
    "date": "2026-01-02",
    "environment": WHERE,
}
CLASSES = [["cat", "dog"], ["dog", "frog"], ["frog", "ship"], ["ship", "truck"]]


def made_up(name, on=None, base=60.0, **how):
    """A target's file with numbers drawn at random: as `fedselect reproduce` writes it, and nothing was run."""
    draw = random.Random(name)
    (target,) = targets(name)
    target = replace(target, on=tuple(c for c in target.on if c in (on or ("cifar10", "cifar10c", "miniimagenet"))))
    chosen = How(seeds=SEEDS, **how)
    found = {}
    for cell in cells(target, replace(chosen, seeds=SEEDS[:1]), {}):
        found.setdefault((cell.column, cell.setting.name), {}).setdefault(cell.row.name, cell)
    columns = []
    for key, rows in found.items():
        entries = []
        for row, cell in rows.items():
            config, middle = cell.config.to_json(), base + draw.uniform(-10, 15)
            rounds = tuple(range(5, config["rounds"] + 1, 5))
            seeds = []
            for seed in SEEDS:
                curve = tuple(middle * (1 - 0.6 / r) + draw.gauss(0, 1) for r in rounds)
                clients = tuple(curve[-1] + draw.gauss(0, 5) for _ in range(4))
                seeds.append(Seed(seed, curve[-1], sum(curve[-10:]) / 10, clients, rounds=rounds, curve=curve, **MORE))
            entries.append(Entry(row, tuple(seeds), config, runs=("run",) * 3, paper=middle - draw.gauss(0, 3)))
        columns.append(Block(*key, tuple(_ranked(target, entries))))
    data = as_json(target, columns, chosen, {})
    if name == "fig-iou":
        iou = [[None if i == j else round(draw.random(), 4) for j in range(4)] for i in range(4)]
        rows = [e.row for e in columns[0].entries]
        clients = [f"{i}: {' '.join(c)}" for i, c in enumerate(CLASSES)]
        data["overlap"] = [
            {"row": r, "seed": 0, "layer": "fc.weight", "clients": clients, "classes": CLASSES, "iou": iou} for r in rows
        ]
    return data


@pytest.fixture
def drawn(tmp_path):
    """A checkout with nothing in results/."""
    for folder in ("docs/img", "results"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "README.md").write_text("above\n<!-- results -->\nold\n<!-- /results -->\nbelow\n")
    return tmp_path


@pytest.fixture
def site(drawn, monkeypatch):
    """The same for those who read: its figures are not drawn, which takes most of the time, but carry what they are of."""
    monkeypatch.setattr(reproduction.pictures, "svg", lambda draw, data, identity: identity.encode())
    return drawn


def put(site, *files):
    for data in files:
        (site / "results" / f"{data['target']}-{data['how']['rates']}.json").write_text(lean(data))


def make(site):
    reproduction.write(read(site / "results"), site)
    assert reproduction.stale(read(site / "results"), site) == []
    return (site / "docs" / "reproduction.md").read_text()


# ---- the repository's own


def test_the_page_figures_and_readme_are_what_the_results_say():
    done = call(sys.executable, ROOT / "scripts" / "reproduction.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_runs_of_a_table_are_those_that_are_kept():
    """But those of fig-iou, which keep their masks, and those that diverged."""
    results = ROOT / "results"
    kept = {json.loads(line)["cell"] for line in gzip.decompress((results / RUNS).read_bytes()).decode().splitlines()}
    for path in results.glob("*.json"):
        table = json.loads(path.read_text())
        if isinstance(table, dict) and table.get("target", "fig-iou") != "fig-iou":
            rows = [r for c in table["columns"] for r in c["rows"] if not r["failed"]]
            assert {name for r in rows for name in r["runs"]} <= kept, path.name


def test_an_edit_by_hand_is_found(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["reproduction.py", "--check", "--root", str(tmp_path)])
    for name in ("docs/img", "results"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("docs/reproduction.md", "README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    assert (reproduction.main(), capsys.readouterr().out) == (0, "")
    page = tmp_path / "docs" / "reproduction.md"
    page.write_text(page.read_text().replace("## Table 1", "## Table I"))
    (tmp_path / "docs" / "img" / "reproduction-old.svg").write_text("<svg/>")
    assert reproduction.main() == 1
    assert re.findall(r"stale: (.*)", capsys.readouterr().out) == ["docs/reproduction.md", "docs/img/reproduction-old.svg"]


def test_a_new_number_makes_page_readme_and_figures_stale(site):
    put(site, made_up("table1"))
    make(site)
    put(site, made_up("table1", base=61.0))
    found = {p.name for p in reproduction.stale(read(site / "results"), site)}
    assert found == {"reproduction.md", "README.md", "reproduction-accuracy.svg", "reproduction-convergence.svg"}


# ---- what is made


NAMES = (
    "table1",
    "table2",
    "alpha",
    "table3",
    "p-alpha",
    "data-size",
    "fig-iou",
    "plain",
    "readings",
    "little",
    "beyond",
    "own",
    "stem",
)


def test_every_section_says_that_it_was_not_run_where_there_is_nothing(site):
    page = make(site)
    for name in NAMES:
        assert f"Not run yet: `fedselect reproduce {name}`" in page
    assert "| accuracy" not in (site / "README.md").read_text()
    assert not list((site / "docs" / "img").iterdir())


def test_all_targets_are_shown_with_their_figures(site):
    put(site, *(made_up(name) for name in NAMES), made_up("table1", rates="paper"))
    (site / "results" / "tuned.json").write_text(
        json.dumps({"local on cifar10": {"chosen": {"lr": 0.01}, "scored_on": "x", "rounds": 50, "seeds": [100]}})
    )
    page = make(site)
    assert "Not run yet" not in page
    assert "With the rates the paper prints" in page
    assert "| local | lr 0.01 |" in page
    for image in re.findall(r"!\[.+\]\((.+)\)", page):
        assert (site / "docs" / image).exists()
    assert {p.stem for p in (site / "docs" / "img").iterdir()} == {
        f"reproduction-{n}" for n in ("accuracy", "convergence", "alpha", "data-size", "overlap")
    }
    for line in page.splitlines():
        assert not line.startswith("|") or line.endswith("|")


def test_our_reading_stands_below_table_1_in_the_readme_and_is_ranked_with_it(site):
    table, more = made_up("table1", on=("cifar10",)), made_up("beyond", on=("cifar10",))
    more["columns"][0]["rows"][0] |= {"mean": 99.0, "error": 0.5}
    put(site, table, more)
    make(site)
    text = (site / "README.md").read_text()
    assert "| **FedSelect variant (ours)** | **99.00 ± 0.50**" in text
    assert len(re.findall(r"\*\*\d", text)) == 1  # no other is the best
    ranks = [r["rank"] for r in reproduction.with_ours(read(site / "results").targets)["columns"][0]["rows"]]
    assert sorted(ranks) == list(range(1, 12))
    assert ranks[-1] == 1


def test_tables_have_as_many_cells_in_every_line(site):
    put(site, *(made_up(name) for name in NAMES))
    for text in (make(site), (site / "README.md").read_text()):
        for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
            assert len({line.count("|") for line in table.splitlines()}) == 1, table


def test_a_number_of_the_page_is_that_of_the_file(site):
    data = made_up("table1", on=("cifar10",))
    put(site, data)
    page = make(site)
    for row in data["columns"][0]["rows"]:
        bold = "**" if row["rank"] == 1 else ""
        said = f"{bold}{row['mean']:.2f} ± {row['error']:.2f}{bold}"
        assert f"| {row['row']} | {said} | {row['tail_mean']:.2f} | {row['std']:.2f} | {row['paper']:.2f} |" in page
        assert f"{said} ({row['paper']:.2f}) |" in (site / "README.md").read_text()
    first = min(data["columns"][0]["rows"], key=lambda r: r["rank"])
    assert f"| CIFAR-10 | {first['row']}, {first['mean']:.2f} ± {first['error']:.2f}" in page


def test_only_the_block_of_the_readme_is_written(site):
    put(site, made_up("table1"))
    make(site)
    text = (site / "README.md").read_text()
    assert text.startswith("above\n<!-- results -->\n| accuracy")
    assert text.endswith("<!-- /results -->\nbelow\n")
    assert "seeds (3 on CIFAR-10, 3 on CIFAR10-C, 3 on Mini-ImageNet)" in text
    assert "a GPU, PyTorch 3.0, tf32, 2026-01-02" in text


def test_the_readme_leaves_out_a_data_set_on_which_our_row_was_not_run(site):
    data = made_up("table1")
    data["columns"][1]["rows"] = [r for r in data["columns"][1]["rows"] if r["row"] != "FedSelect"]
    put(site, data)
    page = make(site)
    header = (site / "README.md").read_text().splitlines()[2]
    assert header == "| accuracy, % | CIFAR-10 | Mini-ImageNet |"
    assert "### CIFAR10-C" in page
    assert "| not run |" in page.split("\n| CIFAR10-C |")[1].split("\n")[0]


def test_machines_that_differ_in_their_precision_alone_are_one():
    own = {"device": "a GPU", "torch": "3.0"}
    found = [
        {
            "environments": [{**own, "precision": p} for p in ("tf32", "bf16", "tf32")]
            + [{**own, "device": "B", "precision": "x"}]
        }
    ]
    assert reproduction.machines(found) == "a GPU, PyTorch 3.0, tf32 and bf16; B, PyTorch 3.0, x"


def test_runs_of_another_size_say_so(site):
    put(site, made_up("table1", scale=0.5))
    assert "**CIFAR-10: scaled to 0.5, not comparable.**" in make(site)
    assert "not comparable" in (site / "README.md").read_text()


def test_what_was_run_with_all_rounds_stands_below_the_table_that_was_not(site):
    longer = made_up("long")
    (column,) = longer["columns"]
    column["rows"] = [r for r in column["rows"] if r["row"] == "FedBABU"]
    column["rows"][0] |= {"mean": 63.66, "tail_mean": 64.0}
    put(site, made_up("table1", rounds=30), longer)
    page = make(site)
    assert "With all 200 rounds, one seed (`fedselect reproduce long`; other methods were not run so long)" in page
    (shown,) = re.findall(r"^\| FedBABU \| \*?\*?63\.66.*$", page, re.M)
    assert "| 64.00 |" in shown
    assert page.count("With all 200 rounds") == 1


def test_a_stem_is_compared_after_as_many_rounds(site):
    """The paper's stem may have run longer, and with more seeds."""
    row = {"row": "a", "seeds": [0, 1, 2], "rounds": [5, 10], "curve": [[1.0, 9.0], [3.0, 9.0], [50.0, 9.0]], "mean": 9.0}
    found = reproduction.back_then(row, 5, [0, 1])
    assert (found["mean"], found["error"], found["accuracy"]) == (2.0, pytest.approx(1.0), [1.0, 3.0])
    assert reproduction.back_then(row, 7, [0, 1]) is None  # not evaluated then
    assert reproduction.back_then(row, 5, [4]) is None
    assert reproduction.back_then(None, 5, [0]) is None
    table, stem = made_up("table1", on=("cifar10",)), made_up("stem", rounds=50)
    put(site, table, stem)
    alone = next(r for r in table["columns"][0]["rows"] if r["row"] == "Local Only")
    then = sum(curve[alone["rounds"].index(50)] for curve in alone["curve"]) / 3
    line = make(site).split("## A stem for small images")[1].split("| Local Only |")[1].splitlines()[0]
    assert f"{then:.2f} ±" in line.split("|")[3]


def test_entries_at_random_are_compared_with_as_many(site):
    for data, limit in (("cifar10", "0.30"), ("cifar10c", "0.50"), ("miniimagenet", "0.50")):
        (column,) = made_up("table3", on=(data,))["columns"]
        assert reproduction.like_random(column)["row"] == f"FedSelect (α={limit})"
        column["rows"] = [r for r in column["rows"] if r["row"] != "Random"]
        assert reproduction.like_random(column) is None


def test_figures_come_out_to_the_same_bytes(drawn):
    put(drawn, *(made_up(name) for name in ("table1", "alpha", "data-size", "fig-iou")))
    make(drawn)
    first = {p: p.read_bytes() for p in (drawn / "docs" / "img").iterdir()}
    assert len(first) == 5
    assert all(b"<svg" in content for content in first.values())
    make(drawn)
    assert {p: p.read_bytes() for p in (drawn / "docs" / "img").iterdir()} == first


def test_what_was_counted_besides_is_told(site):
    for name in ("explored.json", "pooled.json"):
        shutil.copy(ROOT / "results" / name, site / "results" / name)
    found = [[{"round": 60, "right": 80.0, "right_among_own": 81.0, "stray": 1.5},
              {"round": 200, "right": 70.0, "right_among_own": 80.5, "stray": 12.25}]] * 2  # fmt: skip
    kinds = (("fedavg", "crop-flip"), ("fedavg+ft", "crop-flip"), ("fedavg+ft", "none"), ("fedbabu", "none"))
    rows = [{"method": {"name": n}, "augment": a, "found": found} for n, a in kinds]
    made = {"seeds": [100, 101], "rows": rows, "environment": WHERE, "date": "2026-01-02"}
    (site / "results" / "stray.json").write_text(json.dumps(made))
    put(site, made_up("table1"), made_up("plain"))
    page = make(site)
    assert "| `fedavg+ft` | none | 200 | 70.00 | 80.50 | 12.25 |" in page
    assert "12.25% of FedAvg + FT's and 12.25% of FedBABU's after round 200, 1.50 and 1.50% after round 60" in page
    assert (
        "(rate 0.1, [held-out images](#classes-that-a-client-does-not-have), 2 partitions) is right in 70.00%, and in 80.50%"
        in page
    )
    said = page.split("**What FedAvg + FT loses late")[1].split("\n- ")[0]
    for number in ("1.50%", "12.25%", "81.00 and 80.50%", "2 partitions"):
        assert number in said


# ---- arithmetic


def test_rows_are_as_far_apart_as_on_their_farthest_seed():
    a, b = ({"accuracy": v, "tail": w} for v, w in (([1.0, 5.0], [2.0, 2.0]), ([2.0, 3.5], [2.0, 1.0])))
    assert reproduction.farthest(a, b) == {"final": 1.5, "tail": 1.0}


def test_how_smoothly_a_row_settles_is_asked_of_its_last_rounds():
    early = [0.0, 50.0] * 3
    assert reproduction.wobble({"curve": [[*early, 70.0, 72.0], [*early, 60.0, 60.0]]}) == pytest.approx(2**0.5 / 2)


def test_of_both_views_the_reported_one_is_bold():
    row = {"local": [70.0, 72.0], "merged": [60.0, 61.0]}
    assert reproduction.views({**row, "accuracy": row["local"]}) == "**71.00**, 60.50"
    assert reproduction.views({**row, "accuracy": row["merged"]}) == "71.00, **60.50**"
    assert reproduction.views({**row, "merged": None, "accuracy": row["local"]}) == "-"  # of a version that kept one


def test_a_gain_is_paired_by_seed():
    ours = {"row": "a", "seeds": [0, 1, 2], "accuracy": [11.0, 12.0, 13.0]}
    other = {"row": "b", "seeds": [2, 1], "accuracy": [10.0, 11.0]}
    found = reproduction.gain(ours, other)  # differences 3 and 1: standard deviation √2, error 1
    assert (found["mean"], found["error"], found["sure"]) == (2.0, pytest.approx(1.0), False)
    assert reproduction.gain(ours, {**other, "accuracy": [10.0, 9.1]})["sure"]  # 3 and 2.9
    assert reproduction.gain(ours, ours) is None


def test_chance_is_that_of_students_paired_test():
    from scipy.stats import ttest_rel

    ours = {
        "row": "a",
        "seeds": [0, 1, 2],
        "accuracy": [80.0, 81.0, 85.0],
        "tail": [1.0, 2.0, 4.0],
        "local": [70.0, 75.0, 71.0],
    }
    other = {"row": "b", "seeds": [0, 1, 2], "accuracy": [79.0, 79.5, 82.0], "tail": [1.0, 1.0, 1.0]}
    for field in ("accuracy", "tail"):
        found = reproduction.gain(ours, other, field)
        assert found["p"] == pytest.approx(ttest_rel(ours[field], other[field]).pvalue)
        assert found["sure"] == (found["p"] < 0.05)
    assert reproduction.paired(ours, ours, "accuracy", "local")["mean"] == 10.0
    assert reproduction.gain(ours, ours) is None


def test_pairs_of_clients_are_told_apart_by_their_classes():
    iou = [[None, 0.5, 0.1], [0.5, None, 0.2], [0.1, 0.2, None]]
    assert reproduction.pairs({"iou": iou, "classes": [["a"], ["a", "b"], ["c"]]}) == {"alike": [0.5], "apart": [0.1, 0.2]}


def test_files_of_one_target_with_other_columns_are_put_together(site):
    put(site, made_up("table1", on=("cifar10",)))
    (site / "results" / "table1-more.json").write_text(lean(made_up("table1", on=("cifar10c",))))
    found = read(site / "results").targets["table1"]
    assert {c["data"] for c in found["columns"]} == {"cifar10", "cifar10c"}
    assert len(found["environments"]) == 1
    (site / "results" / "table1-rounds.json").write_text(lean(made_up("table1", on=("miniimagenet",), rounds=60)))
    assert reproduction.notes(read(site / "results").targets["table1"]) == ["Mini-ImageNet: 60 rounds, not comparable"]
    (site / "results" / "table1-more.json").write_text(lean(made_up("table1", on=("cifar10",))))
    with pytest.raises(SystemExit, match="another file has table1 too"):
        read(site / "results")


def test_outcomes_of_single_runs_are_taken_over_and_restored(tmp_path):
    made, results, back = (tmp_path / n for n in ("made", "results", "back"))
    results.mkdir()
    summary = {"accuracy": 0.5, "curve": [[1, 0.5]]}
    for name, parts in {"a": ("config", "summary"), "b": ("config",)}.items():  # b is not finished
        (made / "cells" / name).mkdir(parents=True)
        for part in parts:
            data = {"name": "domains", "path": "/somewhere/pacs"}
            said = {"config": {"data": data, "model": {"name": "mlp"}}, "summary": summary}[part]
            (made / "cells" / name / f"{part}.json").write_text(json.dumps(said))
    (made / "table1.json").write_text(lean(made_up("table1", on=("cifar10",))))
    assert collect(made, results) == collect(made, results) == 1
    assert (results / "table1-cifar10.json").exists()
    (made / "table1-rounds-60.json").write_text(lean(made_up("table1", on=("cifar10",), rounds=60)))
    with pytest.raises(SystemExit, match="with a column in common"):
        collect(made, results)
    assert not (results / "table1-rounds-60-cifar10.json").exists()
    (made / "table1-rounds-60.json").unlink()
    assert "somewhere" not in gzip.decompress((results / RUNS).read_bytes()).decode()
    assert restore(results, back) == 1
    assert json.loads((back / "cells" / "a" / "summary.json").read_text()) == summary
    assert not (back / "cells" / "b").exists()


def test_a_run_made_before_an_option_came_is_known_again(tmp_path):
    config = Config.from_dict({"method": {"name": "fedbabu"}, "data": {"name": "digits"}, "rounds": 2}, "here")
    older = config.to_json()
    older["method"] = {k: v for k, v in older["method"].items() if k != "norm_stats"}
    line = {"cell": "0123456789abcdef", "config": older, "summary": {"accuracy": 0.5}}
    (tmp_path / RUNS).write_bytes(gzip.compress(json.dumps(line).encode()))
    assert runs(tmp_path) == {name_of(config): {"config": config.to_json(), "summary": {"accuracy": 0.5}}}
    (tmp_path / "results").mkdir()
    shutil.copy(tmp_path / RUNS, tmp_path / "results" / RUNS)
    (tmp_path / "results" / "tuned.json").write_text('{"runs": ["0123456789abcdef", "fedcba9876543210"]}')
    collect(tmp_path / "nothing", tmp_path / "results")  # tables follow
    assert (tmp_path / "results" / "tuned.json").read_text() == f'{{"runs": ["{name_of(config)}", "fedcba9876543210"]}}'
    older["method"]["gone"] = 1.0  # an option that was taken back
    (tmp_path / RUNS).write_bytes(gzip.compress(json.dumps({**line, "config": older}).encode()))
    assert runs(tmp_path) == {"0123456789abcdef": {"config": older, "summary": {"accuracy": 0.5}}}


def test_settings_that_were_tried_come_best_first_with_their_lead_over_training_alone():
    rows = [
        {"method": {"name": "local", "epochs": 3, "lr": 0.01}, "tail": [70.0, 72.0], "share": 1.0},
        {"method": {"name": "fedselect", "limit": 0.3, "lr": 0.03, "start_with": "head"}, "tail": [75.0, 74.0], "share": 0.3},
    ]
    best, last = reproduction.tried({"rows": rows})
    assert (best["said"], best["lead"]) == ("`fedselect lr=0.03 start_with=head`", 3.5)
    assert (last["said"], last["lead"]) == ("`local`", 0.0)
    assert reproduction.by_said({"rows": rows}, "local") == last
    assert reproduction.apart(best["tail"], last["tail"]) == "+3.50 ± 1.50"  # 5 and 2
    (own,) = reproduction.tried({"rows": [{**rows[1], "training": {"weight_decay": 0.002}}]})
    assert (own["said"], own["lead"]) == ("`fedselect lr=0.03 start_with=head weight_decay=0.002`", None)


def test_a_table_made_anew_for_one_data_set_leaves_the_others(tmp_path):
    made, results = tmp_path / "made", tmp_path / "results"
    made.mkdir(), results.mkdir()
    for on in (("cifar10", "cifar10c"), ("cifar10",)):
        (made / "table1.json").write_text(lean(made_up("table1", on=on, base=50.0 + len(on))))
        collect(made, results)
    assert {p.name for p in results.glob("*.json")} == {"table1-cifar10.json", "table1-cifar10c.json"}
    found = read(results).targets["table1"]
    assert [c["data"] for c in found["columns"]] == ["cifar10", "cifar10c"]
    assert found["columns"][0]["rows"] == made_up("table1", on=("cifar10",), base=51.0)["columns"][0]["rows"]
