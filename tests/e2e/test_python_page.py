"""docs/python.md: its examples run, one after the other."""

import re
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

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


def test_arrays_and_datasets_become_tensors():
    scope: dict = {}
    exec(BLOCKS[0], scope)
    x, y = scope["tensors"](torch.rand(3, 2).double().numpy(), torch.arange(3).int().numpy())
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    again = scope["samples"](TensorDataset(x, y))
    assert all(map(torch.equal, again, (x, y)))
