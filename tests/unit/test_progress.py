"""What a terminal shows before the first round is over."""

import io

import pytest
import torch
from rich.console import Console

from fedselect.paper.progress import overall
from fedselect.runs.progress import progress


def shown(display, then=lambda drawn: None):
    console = Console(force_terminal=True, file=io.StringIO(), width=160)
    with display(console, False) as drawn:
        then(drawn)
    return console.file.getvalue()


@pytest.mark.parametrize("display", [progress, overall])
@pytest.mark.parametrize("gpu", [False, True])
def test_a_gpu_that_compiles_says_so(monkeypatch, display, gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    said = shown(display)
    assert "reading data" in said
    assert ("compiling kernels" in said) is gpu


def test_it_is_said_until_the_first_round_is_over(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    said = shown(overall, lambda drawn: drawn.expect(3, 30))
    assert "compiling kernels" in said.rsplit("0/3 runs", 1)[1]
