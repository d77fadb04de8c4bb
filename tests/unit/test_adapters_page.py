"""docs/adapters.md is what scripts/adapters.py makes of results/adapters.jsonl, and its sizes are those of the code."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import fedselect as fs

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import adapters  # noqa: E402

PAGE = (ROOT / adapters.PAGE).read_text(encoding="utf-8")


def test_the_page_is_what_the_results_say():
    assert adapters.stale(ROOT) == []


def row(way, seed, rate, score, accuracy, shift=""):
    return {"place": "pacs", "shift": shift, "way": way, "seed": seed, "rate": rate, "score": score, "accuracy": accuracy,
            "up": 2500, "down": 120_000, "seconds": 1.0, "trained": 10, "frozen": 90}  # fmt: skip


def test_what_the_page_says_follows_from_the_rows():
    rows = [row("LoRA, personal", 100, r, "val", a) for r, a in ((0.01, 60.0), (0.03, None))]
    rows += [row("LoRA, shared", 100, r, "val", a) for r, a in ((0.01, 50.0), (0.03, 55.0), (0.1, 20.0))]
    rows += [row("LoRA, personal", s, 0.01, "test", a) for s, a in ((0, 60.0), (1, 66.0), (2, 63.0))]
    rows += [row("LoRA, shared", s, 0.03, "test", a) for s, a in ((0, 50.0), (1, 52.0), (2, 54.0))]
    said = adapters.lessons(rows, "pacs").splitlines()
    # 10, 14 and 9 points: mean 11, standard error sqrt(7 / 3)
    # t = 7.2 with two degrees of freedom: p = 0.019
    assert said[0].endswith("against one for all: +11.0 ± 1.5 points (significant).")
    assert said[1].endswith("smallest one tried, so a better one may lie beyond: LoRA, personal.")
    assert said[2] == "- Of 5 runs on held-out samples, 1 diverged; by rate: 0.03 (1)."


def test_several_kinds_of_shift_make_a_mean_and_a_worst_regret():
    found = {
        ("LoRA, personal", "none"): (60.0, 62.0, 61.0), ("LoRA, personal", "groups"): (80.0, 82.0, 81.0),
        ("LoRA, FedAlike", "none"): (71.0, 71.0, 71.0), ("LoRA, FedAlike", "groups"): (78.0, 78.0, 78.0),
    }  # fmt: skip
    rows = [row(way, 100, rate, "val", 50.0 - rate) for way, _ in found for rate in (0.01, 0.03)]
    rows += [row(way, seed, 0.01, "test", a, kind) for (way, kind), each in found.items() for seed, a in enumerate(each)]
    # not run to the end: no row, and no rival
    rows += [row("LoRA, shared", 100, 0.01, "val", 50.0), row("LoRA, shared", 0, 0.01, "test", 99.0, "none")]
    lines = adapters.table(rows, "pacs").splitlines()
    assert lines[0].split(" | ")[1:6] == ["none", "groups", "mean", "worst regret", "up, kB"]
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| LoRA, personal", "| LoRA, FedAlike"]
    # personal: means 61 and 81, of seeds 70, 72 and 71, with a standard error of sqrt(1 / 3); 10 below in none
    cells = lines[2].split(" | ")
    assert cells[1:4] == ["61.0 ± 0.6", "**81.0 ± 0.6**", "71.0 ± 0.6"]
    assert cells[4].startswith("10.0 ± ")
    assert cells[5:7] == ["2.5", "120"]
    # FedAlike: 74.5 with each seed; 3 below in groups
    cells = lines[3].split(" | ")
    assert cells[1:4] == ["**71.0 ± 0.0**", "78.0 ± 0.0", "**74.5 ± 0.0**"]
    assert cells[4].startswith("**3.0 ± ")
    said = adapters.lessons(rows, "pacs")
    # 71 - 60, 71 - 62, 71 - 61 in none and 78 - 80, 78 - 82, 78 - 81 in groups: 4.5, 2.5 and 3.5 by seed, t = 6.1 and p = 0.026
    gap = "+3.5 ± 0.6 points (significant); significant by kind: `none` +10.0 ± 0.6, `groups` -3.0 ± 0.6"
    assert f"- Highest mean: LoRA, FedAlike; against LoRA, personal, the next: {gap}." in said
    assert "- Smallest worst regret: LoRA, FedAlike, 3.0 points." in said
    assert f"is LoRA, FedAlike; against LoRA, personal, the best other: {gap}." in said
    assert adapters.compared(rows, ["pacs"]).splitlines()[2:] == []  # none of its pairs was run
    rows += [row("LoRA, shared + FT", 100, 0.01, "val", 50.0)]
    rows += [row("LoRA, shared + FT", s, 0.01, "test", a, k) for k, a in (("none", 71.0), ("groups", 78.0)) for s in range(3)]
    lines = adapters.compared(rows, ["pacs"]).splitlines()
    assert lines[0] == "| difference, points | PACS |"
    # 71 - 60 = 11 in none and 78 - 80 = -2 in groups, and so on: FedAlike's numbers again, the other way round
    assert "| An adapter for each client against one for all that is then fine-tuned | **-3.5 ± 0.6** |" in lines
    assert "| A head for each group of clients who are alike against one for all | +0.0 ± 0.0 |" in lines


def test_every_way_to_train_a_part_has_its_row():
    table = PAGE.split("| `--adapt` |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == list(fs.ADAPTERS)


def test_the_sizes_are_those_of_the_models():
    model = fs.models.resnet18(SimpleNamespace(shape=(3, 64, 64), classes=7))
    table = PAGE.split("| ResNet18, 7 classes |")[1].split("\n\n")[0]
    rows = {
        name: (int(size.replace(",", "")), mb)
        for name, size, mb in re.findall(r"^\| (.+?) \| ([\d,]+) \| ([\d.]+) MB \|$", table, re.M)
    }
    made = {
        "everything": model, "`lora --rank 8`": fs.lora(model, 8), "`norm`": fs.norm_only(model), "`head`": fs.head_only(model),
        '`lora --rank 8 --targets "layer4.*"`': fs.lora(model, 8, "layer4.*"),
    }  # fmt: skip
    assert {name: size for name, (size, _) in rows.items()} == {name: m.size for name, m in made.items()}
    for name, (_, mb) in rows.items():
        sent = 4e-6 * sum(v.numel() for v in made[name].init(0).values())  # with statistics
        assert abs(sent - float(mb)) <= 0.051 if sent > 2 else abs(sent - float(mb)) <= 0.0051
