"""What a terminal shows before the first round is over."""

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

import fedselect as fs
from fedselect.aggregate import spool
from fedselect.core import doing
from fedselect.paper.progress import overall
from fedselect.runs.config import Config
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
    assert "reading data, first round" in said or "reading data, compiling" in said
    assert ("compiling kernels" in said) is gpu


def test_it_is_said_until_the_first_round_is_over(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    said = shown(overall, lambda drawn: drawn.expect(3, 30))
    assert "compiling kernels" in said.rsplit("0/3 runs", 1)[1]


def entry_by_entry(clock):
    """A fold that takes as many seconds as a clock says, in a round."""
    fold = fs.Median().fold({}, {})
    fold.add({"w": torch.zeros(2, 1000)}, {"w": True}, torch.ones(2))
    with pytest.MonkeyPatch.context() as patch, doing.within("round 3"):
        patch.setattr(spool, "ROOM", 200)  # ten parts
        patch.setattr(doing.time, "monotonic", iter(list(clock)).__next__)
        return fold.finish()


def test_a_round_that_takes_long_to_combine_says_how_far_it_is():
    told = []
    with doing.heard(lambda *said: told.append(said)):
        entry_by_entry([0.0, *(0.09 * i for i in range(1, 11))])
        assert told == []
        entry_by_entry(i / 3 for i in range(11))
    assert told == [("round 3: combining", pytest.approx(s)) for s in (0.3, 0.6, 0.9)] + [("round 3: combining", None)]


def test_a_terminal_shows_it_while_it_lasts():
    said = shown(progress, lambda drawn: (doing.tell("round 3: combining", 0.4), doing.tell("round 3: combining", None)))
    assert "round 3: combining" in said
    assert "40/100" in said
    assert "combining" not in said.rsplit("40/100", 1)[1]


RUN = {"method": {"name": "fedavg"}, "data": {"name": "digits", "clients": 4}, "device": "cpu", "rounds": 2}


def log(quiet, *runs):
    console = Console(file=io.StringIO(), width=160)
    with progress(console, quiet, [Config.from_dict({**RUN, **more}, "test") for more in runs], Path("runs/a")):
        return console.file.getvalue()


def test_a_log_begins_with_what_is_trained():
    assert log(False, {}) == "training fedavg on digits: small_cnn, 4 clients, 2 rounds, on cpu, in runs/a\n"
    seeds = [{"seed": s, "method": {"name": m}} for s in (0, 1) for m in ("fedavg", "local")]
    assert log(False, *seeds).startswith("training 4 runs of fedavg, local on digits: small_cnn, 4 clients, 2 rounds, ")
    many = [{"method": {"name": m}} for m in ("fedavg", "local", "fedper", "ditto")]
    assert log(False, *many).startswith("training 4 runs of 4 methods on digits: ")
    assert log(True, {}) == ""
