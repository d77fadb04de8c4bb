"""Presets, and every client's model on every other client's data."""

from pathlib import Path

import pytest
import torch

import fedselect as fs
from fedselect.core.files import read_json
from fedselect.methods import METHODS
from fedselect.paper.protocol import targets
from fedselect.runs.config import Config
from fedselect.runs.presets import AUTHORS, PAPER_RATES

ROOT = Path(__file__).resolve().parents[2]
TINY = ("--model", "mlp", "--clients", 3, "--train", 20, "--test", 10, "-q")


def config(method, preset, data="digits", **options):
    return Config.from_dict({"method": {"name": method, **options}, "data": {"name": data}, "preset": preset}, "test")


@pytest.mark.parametrize("method", METHODS)
def test_the_papers_protocol(method):
    made = config(method, "paper").method
    assert made["epochs"] == 3
    assert made["lr"] == (0.001 if method in ("fedselect", "layers") else 0.01)
    if method == "fedselect":
        assert (made["rate"], made["limit"], made["personal_lr"]) == (0.05, 0.30, 0.1)
    if method == "ditto":
        assert made["lam"] == 0.75


def test_the_papers_rates_follow_the_data():
    assert PAPER_RATES == {"cifar10": 0.01, "cifar10c": 0.01, "miniimagenet": 0.001, "officehome": 0.001}


@pytest.mark.parametrize("method", AUTHORS)
def test_the_authors_values_fit_their_methods(method):
    made = config(method, "authors")
    for table in ("method", "training"):
        for name, value in AUTHORS[method].get(table, {}).items():
            assert getattr(made, table)[name] == value


def test_what_suits_the_data_is_filled_in_where_nothing_is_said():
    assert config("fedavg", None).method["lr"] == 0.1
    assert config("fedselect", None).method["personal_lr"] == 0.1
    assert config("fedbabu", None).method["finetune_lr"] == 0.01
    assert config("fedavg", None).training["batch_size"] == 16
    assert config("fedavg", None, lr=0.5).method["lr"] == 0.5
    assert config("fedavg", None, data="cifar10").method["lr"] == 0.01
    assert config("fedselect", None, data="domains").method["lr"] == 0.01


def test_our_own_values_are_those_that_the_table_beyond_has():
    made, (target,) = config("fedselect", "ours").method, targets("beyond")
    tuned = read_json(ROOT / "results" / "tuned.json", "")
    rates = [tuned[f"fedbabu on {column}"]["chosen"] for column in ("cifar10", "cifar10c", "pacs")]
    for values in (target.rows[0].options, *rates):
        assert {k: made[k] for k in values} == values
    assert config("fedselect", "ours").training["batch_size"] == 16  # what suits digits


def test_what_is_said_beats_a_preset():
    assert config("fedpac", "authors", lr=0.5).method["lr"] == 0.5
    assert config("fedpac", "authors", lr=0.5).method["head_lr"] == 0.1


@pytest.mark.parametrize("data", ["digits", "domains"])
def test_a_personal_rate_follows_the_rate_where_a_method_has_none_of_its_own(data):
    for method in ("ditto", "fedper", "fedrep"):
        assert config(method, None, data, lr=0.003).method["personal_lr"] is None
    assert config("fedselect", None, data, lr=0.003).method["personal_lr"] == config(method, None, data).method["lr"]


def test_a_preset_is_saved_and_replays(cli, tmp_path):
    assert cli("run", *TINY, "--method", "fedrep", "--preset", "authors", "--rounds", 1, "--out", tmp_path / "a").code == 0
    saved = read_json(tmp_path / "a" / "config.json", "")
    assert saved["preset"] == "authors"
    assert saved["method"]["head_epochs"] == 10
    assert saved["training"]["momentum"] == 0.5
    assert cli("run", "--config", tmp_path / "a" / "config.json", "-q", "--out", tmp_path / "b").code == 0
    assert read_json(tmp_path / "b" / "config.json", "") == saved


def test_presets_are_shown(cli):
    said = cli("methods", "fedpac").out
    assert "--preset paper    epochs=3, lr=0.01" in said
    assert "head_lr=0.1" in said
    assert "scope=tensor, weights_only=yes, strict=no" in " ".join(cli("methods", "fedselect").out.split())
    assert "--preset authors  none" in cli("methods", "local").out


def test_no_such_preset(cli, tmp_path):
    said = cli("run", *TINY, "--preset", "papers", "--out", tmp_path / "a").sentence()
    assert "there is no preset 'papers'; did you mean 'paper'" in said
    said = cli("run", *TINY, "--method", "local", "--preset", "authors", "--out", tmp_path / "a").sentence()
    assert "the preset authors does not cover local" in said
    said = cli("run", *TINY, "--method", "fedavg", "--preset", "ours", "--out", tmp_path / "a").sentence()
    assert "the preset ours does not cover fedavg; it covers fedselect" in said


def test_cross_is_every_model_on_every_clients_data(digits):
    result = fs.run(fs.FedSelect(lr=0.1), model=fs.models.mlp(digits), data=digits, rounds=3)
    cross = result.cross()
    module = fs.models.mlp(digits).module.eval()
    for i in range(3):
        module.load_state_dict(result.personal(i))
        for j, client in enumerate(digits.clients):
            x, y = client.test
            assert float((module(x).argmax(1) == y).double().mean()) == pytest.approx(float(cross[i, j]))
    assert cross.diagonal().tolist() == pytest.approx([c["accuracy"] for c in result.clients], abs=1e-6)


def test_cross_of_one_global_model_has_equal_rows(digits):
    cross = fs.run(fs.FedAvg(lr=0.1), model=fs.models.mlp(digits), data=digits, rounds=2).cross()
    assert torch.equal(cross, cross[:1].expand_as(cross))


def test_cross_is_written_and_shown(cli, tmp_path):
    assert cli("run", *TINY, "--rounds", 1, "--cross", "--out", tmp_path / "a").code == 0
    matrix = read_json(tmp_path / "a" / "summary.json", "")["cross"]
    assert [len(row) for row in matrix] == [3, 3, 3]
    said = cli("compare", *TINY, "--methods", "local,fedavg", "--rounds", 1, "--cross", "--out", tmp_path / "c").out
    assert "others %" in said


def test_a_model_without_a_head_for_a_method_that_needs_one(digits):
    convolutional = fs.Model.wrap(lambda: torch.nn.Sequential(torch.nn.Conv2d(1, 10, 8), torch.nn.Flatten()))
    for method in (fs.FedPer(), fs.LGFedAvg(), fs.FedPAC()):
        with pytest.raises(fs.InputError, match="needs the model's head"):
            fs.run(method, model=convolutional, data=digits, rounds=1)


def test_fedpac_wants_features_that_are_a_vector(digits):
    class PerPixel(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(8, 10)

        def forward(self, x):
            return self.fc(x.squeeze(1)).mean(1)

    with pytest.raises(fs.InputError, match=r"feature vectors, but the head of PerPixel gets inputs of shape \(8, 8\)"):
        fs.run(fs.FedPAC(), model=fs.Model.wrap(PerPixel, head="fc"), data=digits, rounds=1)


def test_a_preset_comes_over_a_saved_configuration(cli, tmp_path):
    assert cli("run", *TINY, "--rounds", 1, "--lr", 0.3, "--out", tmp_path / "a").code == 0
    saved = tmp_path / "a" / "config.json"
    assert cli("run", "--config", saved, "--preset", "authors", "--every", 2, "-q", "--out", tmp_path / "b").code == 0
    made = read_json(tmp_path / "b" / "config.json", "")["method"]
    assert (made["lr"], made["scope"], made["every"]) == (0.05, "tensor", 2)
    other = ("--config", tmp_path / "b" / "config.json", "--method", "fedavg")
    assert cli("run", *other, "-q", "--out", tmp_path / "c").code == 0  # the preset was the other method's


def test_a_comparison_that_cannot_be_finished_is_not_begun(cli, tmp_path):
    said = cli("compare", *TINY, "--methods", "fedavg,lotteryfl", "--val", 0, "--rounds", 1, "--out", tmp_path / "c").sentence()
    assert "needs validation data" in said
    assert not (tmp_path / "c").exists()
    said = cli("compare", *TINY, "--methods", "fedavg,layers", "--rounds", 1, "--out", tmp_path / "c").sentence()
    assert "no parameter of mlp matches 'conv1.weight'" in said
