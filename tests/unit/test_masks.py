"""What a run keeps of its masks."""

import json

import numpy as np
import pytest
import torch

import fedselect as fs
from fedselect.runs.masks import NONE, MaskLog, federation, overlap, pack, read_lines, shares, unpack
from fedselect.simulate import Simulation


@pytest.fixture
def simulation(digits):
    made = Simulation(fs.FedSelect(rate=0.3, limit=0.6, lr=0.1), fs.models.mlp(digits, hidden=4), digits)
    made.step()
    return made


def test_shares_are_the_means_of_the_masks(simulation):
    masks = fs.Result(simulation, []).masks
    found = shares(simulation.method.mask(simulation.model, simulation.store.rows), simulation)
    for at, name in enumerate(simulation.model.params):
        assert torch.equal(found[at], masks[name].flatten(1).double().mean(1))


def test_overlap_is_intersection_over_union_by_hand(simulation):
    masks = fs.Result(simulation, []).masks
    found = overlap(simulation.method.mask(simulation.model, simulation.store.rows), simulation)
    layers = [torch.cat([m.flatten(1) for m in masks.values()], 1), *(m.flatten(1) for m in masks.values())]
    for k, layer in enumerate(layers):  # all parameters together come first
        for pair, (i, j) in enumerate(((0, 1), (0, 2), (1, 2))):
            both, either = (layer[i] & layer[j]).sum(), (layer[i] | layer[j]).sum()
            assert found[k, pair] == int(both) / int(either)


def test_overlap_does_not_depend_on_how_many_entries_are_counted_at_once(simulation, monkeypatch):
    mask = simulation.method.mask(simulation.model, simulation.store.rows)
    whole = overlap(mask, simulation)
    monkeypatch.setattr("fedselect.runs.masks.COLUMNS", 7)
    assert torch.equal(overlap(mask, simulation), whole)


def test_who_has_not_joined_has_no_mask(digits):
    s = Simulation(fs.FedSelect(lr=0.1), fs.models.mlp(digits), digits, late=(1, 5))
    s.step()
    mask = s.method.mask(s.model, s.store.rows)
    assert shares(mask, s)[:, 2].isnan().all()
    assert not shares(mask, s)[:, :2].isnan().any()
    assert overlap(mask, s)[0].isnan().tolist() == [False, True, True]  # (0, 1), (0, 2), (1, 2)


def test_nothing_kept_is_no_overlap(digits):
    s = Simulation(fs.FedSelect(limit=0.0, lr=0.1), fs.models.mlp(digits), digits)
    s.step()
    assert overlap(s.method.mask(s.model, s.store.rows), s).isnan().all()


def test_packing_keeps_four_digits_and_what_is_missing():
    values = torch.tensor([0.0, 1.0, 0.12344, float("nan")], dtype=torch.float64)
    assert unpack(pack(values))[:3].tolist() == [0.0, 1.0, 0.1234]
    assert np.isnan(unpack(pack(values))[3])
    assert NONE > 10_000


def log(tmp_path, simulation, rounds):
    for _ in range(rounds):
        simulation.step()
        MaskLog(tmp_path, rounds, simulation).add()  # opened anew each time, as a resumed run does
    return read_lines(tmp_path / "masks.jsonl")


def test_a_line_stands_for_every_change_and_overlap_for_ever_rarer_rounds(tmp_path, digits):
    fast = fs.FedSelect(rate=0.2, limit=0.5, lr=0.1)  # by 20% of what is shared: 0.2, 0.36, 0.488, then the limit
    lines = log(tmp_path, Simulation(fast, fs.models.mlp(digits, hidden=4), digits), 12)
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 6, 10, 12]
    assert [line["round"] for line in lines if "iou" in line] == [1, 2, 3, 4, 6, 10, 12]
    assert lines[3]["share"] == lines[-1]["share"]


def test_a_mask_that_is_the_same_for_all_is_written_once(tmp_path, digits):
    (line,) = log(tmp_path, Simulation(fs.FedPer(lr=0.1), fs.models.mlp(digits), digits), 5)
    assert unpack(line["share"]).reshape(4, 3).tolist() == [[0.0] * 3, [0.0] * 3, [1.0] * 3, [1.0] * 3]
    assert "iou" not in line


def test_what_was_written_after_the_checkpoint_is_dropped_half_a_line_too(tmp_path, simulation):
    path = tmp_path / "masks.jsonl"
    first = {"round": 1, "share": "AAA="}
    path.write_text(json.dumps(first) + "\n" + json.dumps({"round": 2, "share": "AAA="}) + '\n{"round": 3, "sha')
    MaskLog(tmp_path, 5, simulation)
    assert read_lines(path) == [first]


def test_a_damaged_file_is_named(tmp_path, simulation):
    (tmp_path / "masks.jsonl").write_text('{"round": 1, "sh\n{}\n')
    with pytest.raises(fs.RunError, match=r"masks\.jsonl is damaged"):
        MaskLog(tmp_path, 5, simulation)


def test_the_federation_says_who_has_what(simulation, digits):
    said = federation(simulation)
    assert [c["classes"] for c in said["clients"]] == [[str(c) for c in digits.labels(i)] for i in range(3)]
    assert [(c["train"], c["test"]) for c in said["clients"]] == [(20, 10)] * 3
    assert said["layers"] == {"1.weight": 256, "1.bias": 4, "3.weight": 40, "3.bias": 10}
