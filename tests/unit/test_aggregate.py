"""Aggregators: which numbers they give, what they remember, and what they refuse."""

import gc
import math
import os
import statistics
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedselect as fs
from fedselect.aggregate import spool
from fedselect.core.tree import merge
from fedselect.simulate import ranks

ENTRIES = 5


@st.composite
def uploads(draw):
    """Values with many ties, and a mask for each client."""
    clients = draw(st.integers(1, 7))
    rows = st.lists(st.integers(-3, 3), min_size=ENTRIES, max_size=ENTRIES)
    marks = st.lists(st.booleans(), min_size=ENTRIES, max_size=ENTRIES)
    values = draw(st.lists(rows, min_size=clients, max_size=clients))
    sent = draw(st.lists(marks, min_size=clients, max_size=clients))
    return torch.tensor(values) / 8, torch.tensor(sent)


def median(values, sent, chunks=1):
    fold = fs.Median().fold({}, {})
    for part in torch.arange(len(values)).chunk(chunks):
        fold.add({"a": values[part]}, {"a": sent[part]}, torch.full((len(part),), 7.0))
    middle, heard, memory = fold.finish()
    assert memory == {}
    return middle["a"], heard["a"]


@given(uploads())
def test_the_median_is_that_of_a_plain_loop(upload):
    values, sent = upload
    middle, heard = median(*upload)
    assert middle.dtype == values.dtype
    for e in range(ENTRIES):
        senders = [float(values[c, e]) for c in range(len(values)) if sent[c, e]]
        assert bool(heard[e]) == bool(senders)
        assert float(middle[e]) == (statistics.median(senders) if senders else 0.0)


@given(uploads(), st.data())
def test_neither_order_nor_chunks_nor_how_much_is_read_at_a_time_show_in_the_median(upload, data):
    middle, heard = median(*upload)
    order = torch.tensor(data.draw(st.permutations(range(len(upload[0])))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spool, "ROOM", data.draw(st.integers(1, 20)))
        again, heard_again = median(*(part[order] for part in upload), chunks=data.draw(st.integers(1, len(order))))
    assert middle.equal(again)
    assert heard.equal(heard_again)


@given(uploads())
def test_nan_in_what_was_not_sent_does_not_reach_the_median(upload):
    values, sent = upload
    assert median(torch.where(sent, values, torch.nan), sent)[0].equal(median(*upload)[0])


def test_the_median_of_tensors_of_many_shapes_types_and_ways_to_send():
    g = torch.Generator().manual_seed(0)
    values = {
        "whole": torch.randn(5, 3, 2, generator=g),
        "number": torch.randn(5, generator=g),
        "half": torch.randn(5, 3, generator=g).bfloat16(),
        "partly": torch.randn(5, 7, generator=g, dtype=torch.float64),
        "kept": torch.randn(5, 2, generator=g),
    }
    marks = torch.ones(5, 7, dtype=torch.bool)
    marks[:2, 3] = False
    fold = fs.Median().fold({}, {})
    for rows in (slice(0, 3), slice(3, 5)):
        sent = {"whole": True, "number": True, "half": True, "partly": marks[rows], "kept": False}
        fold.add({n: v[rows] for n, v in values.items()}, sent, torch.ones(5)[rows])
    middle, heard, _ = fold.finish()
    assert middle.keys() == heard.keys() == {"whole", "number", "half", "partly"}
    for n, v in middle.items():
        expected = values[n].median(0).values  # of five, the third
        if n == "partly":
            expected[3] = values[n][2:, 3].median()
        assert v.equal(expected), n
        assert heard[n].shape == v.shape
        assert heard[n].all()


def spooled(folder: Path) -> list[int]:
    """Sizes of the files of this process that lie in a folder, also of those without a name."""
    gc.collect()
    sizes = []
    for handle in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(handle).startswith(f"{folder}/"):
                sizes.append(handle.stat().st_size)
        except OSError:  # the one that lists them
            continue
    return sizes


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("finished", [True, False])
def test_nothing_is_left_of_the_spool_whether_a_round_ends_or_is_given_up(folder, finished):
    fold = fs.Median().fold({}, {})
    rows = torch.ones(4, 4096)
    fold.add({"a": rows}, {"a": True}, torch.ones(4))
    assert len(spooled(folder)) == 1
    assert sum(spooled(folder)) >= rows.nbytes / 2  # some may wait in a buffer: it is not in memory
    if finished:
        fold.finish()
    else:
        del fold
    assert spooled(folder) == []
    assert list(folder.iterdir()) == []


def test_a_run_that_fails_in_a_round_leaves_no_spool(folder, digits, monkeypatch):
    run = fs.Simulation(fs.FedAvg(), fs.models.mlp(digits, hidden=8), digits, chunk=1, aggregator=fs.Median())
    run.step()
    put, calls = run.store.put, []

    def breaks(*args):
        calls.append(len(spooled(folder)))
        if len(calls) == 2:
            raise ValueError("broken")
        put(*args)

    monkeypatch.setattr(run.store, "put", breaks)
    with pytest.raises(ValueError, match="broken"):
        run.step()
    assert calls == [1, 1]
    assert spooled(folder) == []


def test_a_spool_that_cannot_be_written_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(fs.RunError, match="missing cannot be written"):
        fs.Median().fold({}, {})


# ---- server momentum


def test_momentum_is_to_the_bit_what_fedselect_did_with_its_own():
    """Parameters go on by their velocity where anybody sent them; statistics are averaged; what nobody sent stays."""
    g = torch.Generator().manual_seed(3)
    like = {"w": (6,), "unsent": (2,), "mean": (4,)}
    params = {n: torch.randn(shape, generator=g) for n, shape in like.items()}
    aggregator = fs.Mean(server_momentum=0.9)
    state = aggregator.start({n: params[n] for n in ("w", "unsent")})
    velocity = {n: torch.zeros(like[n]) for n in ("w", "unsent")}
    for _ in range(4):
        values = {n: torch.randn((3, *like[n]), generator=g) for n in ("w", "mean")}
        sent = {"w": torch.rand(3, 6, generator=g) < 0.4, "mean": True}
        folds = [a.fold(s, params) for a, s in ((fs.Mean(), {}), (aggregator, state))]
        for fold in folds:
            fold.add(values, sent, torch.ones(3))
        mean, heard, nothing = folds[0].finish()
        assert nothing == {}
        ahead, heard_again, state = folds[1].finish()
        assert ahead.keys() == mean.keys() == heard_again.keys()
        new = merge(heard, mean, params)
        velocity = {n: 0.9 * v + new[n] - params[n] for n, v in velocity.items()}
        expected = {**new, "w": torch.where(heard["w"], params["w"] + velocity["w"], params["w"])}
        params = merge(heard_again, ahead, params)
        assert all(v.equal(expected[n]) for n, v in params.items())
        assert all(v.equal(velocity[n]) for n, v in state["velocity"].items())
    assert not velocity["w"].equal(torch.zeros(6))


def test_momentum_moves_what_is_shared_and_without_it_nothing_is_remembered(digits):
    runs = [
        fs.Simulation(fs.FedPer(lr=0.1), fs.models.mlp(digits, hidden=8), digits, aggregator=fs.Mean(m)) for m in (0.0, 0.9)
    ]
    for _ in range(2):
        for run in runs:
            run.step()
    assert runs[0].memory == {}
    assert set(runs[1].memory) == {"velocity"}
    plain, ahead = (run.server["params"] for run in runs)
    assert {n for n in plain if not plain[n].equal(ahead[n])} == {"1.weight", "1.bias"}  # the head is personal


def test_adam_at_the_server_is_the_rule_entry_by_entry():
    """Plain numbers; an entry that nobody sent keeps its value and its memory, statistics are averaged."""
    g = torch.Generator().manual_seed(5)
    params = {n: torch.randn(size, generator=g, dtype=torch.float64) for n, size in (("w", 6), ("unsent", 2), ("mean", 4))}
    adam = fs.FedAdam(server_lr=0.1, server_beta1=0.8, server_beta2=0.9, server_eps=0.01)
    state = adam.start({n: params[n] for n in ("w", "unsent")})
    entries = [[value, 0.0, 0.01**2] for value in params["w"].tolist()]  # with its mean update, and the mean of its squares
    silent = 0
    for _ in range(5):
        values = {n: torch.randn(3, len(params[n]), generator=g, dtype=torch.float64) for n in ("w", "mean")}
        sent, weight = torch.rand(3, 6, generator=g) < 0.3, torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
        fold = adam.fold(state, params)
        fold.add(values, {"w": sent, "mean": True}, weight)
        result, heard, state = fold.finish()
        assert result.keys() == heard.keys() == {"w", "mean"}
        params = merge(heard, result, params)
        for i, entry in enumerate(entries):
            who = [c for c in range(3) if sent[c, i]]
            silent += not who
            if who:
                value, m, v = entry
                update = sum(float(weight[c] * values["w"][c, i]) for c in who) / sum(float(weight[c]) for c in who) - value
                m, v = 0.8 * m + 0.2 * update, 0.9 * v + 0.1 * update**2
                entry[:] = value + 0.1 * m / (math.sqrt(v) + 0.01), m, v
        found = torch.stack([params["w"], state["mean"]["w"], state["square"]["w"]], 1)
        torch.testing.assert_close(found, torch.tensor(entries, dtype=torch.float64), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(params["mean"], (weight.view(-1, 1) * values["mean"]).sum(0) / 8)
    assert silent
    assert state["mean"]["unsent"].tolist() == [0.0, 0.0]


# ---- what is refused


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"server_lr": 0.0}, "server_lr must be positive, not 0.0"),
        ({"server_eps": -1.0}, "server_eps must be positive"),
        ({"server_beta1": 1.0}, r"server_beta1 must be in \[0, 1\), not 1.0"),
        ({"server_beta2": float("nan")}, r"server_beta2 must be in \[0, 1\)"),
        ({"server_lr": torch.full((3,), 0.1)}, "server_lr is an option of the server; give one number"),
    ],
    ids=str,
)
def test_an_adam_that_cannot_be_is_refused(wrong, said):
    with pytest.raises(fs.InputError, match=said):
        fs.FedAdam(**wrong)


@pytest.mark.parametrize(
    ("momentum", "said"),
    [
        (1.5, r"server_momentum is a share and must be in \[0, 1\], not 1.5"),
        (float("nan"), "server_momentum is a share"),
        (torch.full((3,), 0.5), "server_momentum is an option of the server; give one number"),
        ("0.5", "server_momentum is an option of the server; give one number"),
    ],
)
def test_a_momentum_that_is_none_is_refused(momentum, said):
    with pytest.raises(fs.InputError, match=said):
        fs.Mean(server_momentum=momentum)


class Bare(fs.Aggregator):
    def fold(self, state, params):
        raise AssertionError("it is refused before")


@pytest.mark.parametrize(
    ("aggregator", "said"),
    [
        (3, "aggregator must be an aggregator such as fs.Mean.., not 3"),
        ("medean", "there is no aggregator 'medean'; did you mean 'median'"),
        (fs.Median, "aggregator must be an aggregator"),
        (Bare(), "Bare must be a dataclass"),
    ],
    ids=["number", "name", "class", "not a dataclass"],
)
def test_what_is_no_aggregator_is_refused(digits, aggregator, said):
    with pytest.raises(fs.InputError, match=said):
        fs.run(fs.FedAvg(), model=fs.models.mlp(digits), data=digits, rounds=1, aggregator=aggregator)


def test_several_processes_refuse_an_aggregator_that_needs_every_upload(digits, monkeypatch):
    monkeypatch.setattr(ranks, "world", lambda: 2)
    fs.Simulation(fs.FedAvg(), fs.models.mlp(digits), digits, aggregator=fs.Mean(0.5))
    with pytest.raises(fs.InputError, match="the aggregator Median needs every upload in one process, and this run has 2"):
        fs.Simulation(fs.FedAvg(), fs.models.mlp(digits), digits, aggregator=fs.Median())
