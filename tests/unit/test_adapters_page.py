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
