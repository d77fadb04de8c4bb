"""docs/python.md: its examples run, one after the other."""

import re
from pathlib import Path

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "python.md").read_text(), re.S)


def test_the_page_runs_and_goes_on_where_it_left_off(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope: dict = {}
    for block in BLOCKS:
        exec(block, scope)
    assert scope["simulation"].round == len(scope["history"]) > 5
    assert scope["accuracy"] > 0.6
    again, longer = {}, {}
    for block in BLOCKS:
        exec(block, again)  # it had stopped by itself, and does so again
        exec(block.replace("< 5", "< 8"), longer)
    assert again["history"] == scope["history"]
    assert again["result"].accuracy == scope["result"].accuracy
    assert longer["history"][: len(again["history"])] == again["history"]
    assert longer["simulation"].round == len(longer["history"]) > scope["simulation"].round


def test_what_the_page_says_of_results_is_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope: dict = {}
    for block in BLOCKS[:5]:
        exec(block, scope)
    result, again, x = scope["result"], scope["again"], scope["x_new"]
    assert (again.predict(2, x) == result.predict("hospital 2", x)).all()
    assert (tmp_path / "report.html").exists()
    assert scope["same"].names == scope["data"].names
    assert not scope["same"].has("test")


def test_the_first_example_predicts_by_name():
    scope: dict = {}
    exec(BLOCKS[0], scope)
    assert set(scope["result"].predict("hospital 2", scope["x"])) == {"healthy", "ill"}
    assert "val_accuracy" in scope["result"].history[-1]
