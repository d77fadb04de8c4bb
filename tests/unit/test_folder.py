"""Results in folders: what is saved comes back without pickle, data or simulation, and nothing else is overwritten."""

import json
import pickle

import numpy as np
import pandas
import pytest
import torch
from torch import nn

import fedselect as fs
from fedselect.core.files import read_json
from fedselect.runs.rundir import is_run

RNG = np.random.default_rng(3)
X = RNG.normal(size=(60, 4)).astype(np.float32)
Y = np.array(["no", "yes"])[(X[:, 0] > 0).astype(int)]
WHO = np.repeat(["a", "b", "c"], 20)
DATA = fs.Federation.from_arrays(X, Y, WHO, val_share=0.2)


class Tied(nn.Module):
    """Two layers that share a weight, a buffer that never moves, and a norm layer."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.norm, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.two.weight = self.one.weight
        self.register_buffer("count", torch.tensor(7))

    def forward(self, x):
        return self.out(self.norm(self.two(self.one(x).relu())))


def same(a, b):
    """Two results give the same numbers, models and predictions."""
    assert repr(a) == repr(b)
    assert a.history == b.history
    assert a.scores() == b.scores()
    assert a.headline == b.headline
    assert a.over_clients() == b.over_clients()
    assert (a.bytes_up, a.bytes_down) == (b.bytes_up, b.bytes_down)
    for one, other in zip(a.models(), b.models(), strict=True):
        assert list(one) == list(other)
        assert all(map(torch.equal, one.values(), other.values()))
    assert a.masks.keys() == b.masks.keys()
    assert all(torch.equal(m.cpu(), b.masks[n]) for n, m in a.masks.items())


@pytest.mark.parametrize("method", ["fedselect", "fedavg+ft", "fedbn", "local", "ditto"])
def test_what_is_saved_comes_back(tmp_path, method):
    result = fs.run(method, model="mlp", data=DATA, rounds=2, val=True)
    assert result.save(tmp_path / "run") == tmp_path / "run"
    again = fs.load_result(str(tmp_path / "run"))
    same(result, again)
    assert again.scores("val") == result.scores("val")
    for who in WHO[::20]:
        assert (again.predict(who, X) == result.predict(who, X)).all()
        assert (again.predict_proba(who, X) == result.predict_proba(who, X)).all()
    assert again.to_dataframe().equals(result.to_dataframe())
    same(pickle.loads(pickle.dumps(again)), again)
    assert not [p for p in (tmp_path / "run").iterdir() if p.suffix not in (".json", ".jsonl", ".safetensors")]


def test_a_network_of_ones_own_is_given_again(tmp_path):
    result = fs.run(fs.FedSelect(lr=0.1), model=fs.Model.wrap(Tied, head="out"), data=DATA, rounds=2)
    result.save(tmp_path / "run")
    bare = fs.load_result(tmp_path / "run")
    same(result, bare)
    with pytest.raises(fs.InputError, match=r"the parameters of Tied but not its code; pass the network: .*model=...\)"):
        bare.predict(0, X)
    for model in (Tied, Tied(), fs.Model.wrap(Tied, head="out")):
        assert (fs.load_result(tmp_path / "run", model=model).predict(0, X) == result.predict(0, X)).all()
    with pytest.raises(fs.InputError, match="this is not the network that was trained; pass that network"):
        fs.load_result(tmp_path / "run", model=nn.Linear(4, 2)).predict(0, X)


def test_groups_and_persistence_come_back(tmp_path):
    alike = fs.run(fs.FedAlike(heads="0 0 1", epochs=1), model="mlp", data=DATA, rounds=4)
    alike.save(tmp_path / "alike")
    assert fs.load_result(tmp_path / "alike").groups == alike.groups == [[0, 1], [2]]
    persist = fs.run(fs.FedPersist(window=2, epochs=1), model="mlp", data=DATA, rounds=4)
    persist.save(tmp_path / "persist")
    again = fs.load_result(tmp_path / "persist")
    for name, values in persist.persistence.items():
        assert again.persistence[name].tolist() == pytest.approx(values.tolist(), abs=1e-4)
    with pytest.raises(fs.InputError, match=r"FedPersist does not form groups"):
        again.groups  # noqa: B018
    with pytest.raises(fs.InputError, match=r"FedAlike does not measure persistence"):
        fs.load_result(tmp_path / "alike").persistence  # noqa: B018


def test_a_table_and_units_come_back(tmp_path):
    frame = pandas.DataFrame({"who": WHO, "age": 40 + 9 * X[:, 0], "sex": np.where(X[:, 1] > 0, "f", "m"), "y": 100 * X[:, 0]})
    for scale in ("client", "federation"):
        data = fs.Federation.from_frame(frame, client="who", target="y", scale=scale)
        result = fs.run(fs.FedPer(lr=0.1), model="mlp", data=data, rounds=2)
        result.save(tmp_path / scale)
        again = fs.load_result(tmp_path / scale)
        assert (again.predict("b", frame) == result.predict("b", frame)).all()


def test_pictures_come_back(tmp_path):
    pictures = RNG.integers(0, 255, (24, 3, 8, 8), dtype=np.uint8)
    data = fs.Federation.from_arrays(pictures, np.arange(24) % 2, np.repeat([0, 1], 12), mean=(0.3, 0.4, 0.5), std=(0.2,) * 3)
    result = fs.run("fedavg", model=fs.models.small_cnn(data, norm="batch"), data=data, rounds=1)
    result.save(tmp_path / "run")
    again = fs.load_result(tmp_path / "run")
    assert again.predict_proba(0, pictures) == pytest.approx(result.predict_proba(0, pictures), abs=1e-6)


def test_what_a_folder_does_not_hold_is_said(tmp_path):
    fs.run("fedavg", model="mlp", data=DATA, rounds=1).save(tmp_path / "run")
    again = fs.load_result(tmp_path / "run")
    with pytest.raises(fs.InputError, match=r"no scores on val data; score it in the run: fs.run\(..., val=True\)"):
        again.scores("val")
    with pytest.raises(fs.InputError, match="loaded from a folder, which has models and metrics but no simulation"):
        again.cross()


def test_nothing_is_overwritten_but_a_saved_result_on_request(tmp_path):
    result = fs.run("fedavg", model="mlp", data=DATA, rounds=1)
    place = result.save(tmp_path / "run")
    with pytest.raises(fs.InputError, match="already exists; choose another folder, or pass overwrite=True"):
        result.save(place)
    other = fs.run("fedper", model="mlp", data=DATA, rounds=2)
    other.save(place, overwrite=True)
    same(fs.load_result(place), other)
    (place / "thesis.txt").write_text("mine")
    with pytest.raises(fs.InputError, match="contains files that are not part of a saved result"):
        result.save(place, overwrite=True)
    assert (place / "thesis.txt").read_text() == "mine"
    (tmp_path / "mine").mkdir()
    result.save(tmp_path / "mine")  # empty
    with pytest.raises(fs.InputError, match="is not a directory; create it first"):
        result.save(tmp_path / "not" / "there")


def test_a_loaded_result_is_saved_elsewhere(tmp_path):
    place = fs.run("fedselect", model="mlp", data=DATA, rounds=1).save(tmp_path / "one")
    again = fs.load_result(place)
    again.save(tmp_path / "two")
    same(fs.load_result(tmp_path / "two"), again)


def test_a_run_without_test_data_is_saved_too(tmp_path):
    result = fs.run("fedper", model="mlp", data=fs.Federation.from_arrays(X, Y, WHO, test_share=0), rounds=1)
    again = fs.load_result(result.save(tmp_path / "run"))
    assert again.history == result.history
    assert (again.predict(0, X) == result.predict(0, X)).all()
    for one in (result, again):
        with pytest.raises(fs.InputError, match="no client has test data, so nothing was evaluated"):
            one.report(tmp_path / "page.html")


@pytest.mark.parametrize("name", ["result.json", "federation.json", "models.safetensors", "metrics.jsonl"])
def test_damage_is_said(tmp_path, name):
    place = fs.run("fedavg", model="mlp", data=DATA, rounds=1).save(tmp_path / "run")
    (place / name).write_bytes(b"{")
    with pytest.raises(fs.RunError, match=r"cannot be read|damaged"):
        fs.load_result(place).models()


def test_what_is_no_result_is_said(tmp_path):
    with pytest.raises(fs.RunError, match=r"is neither a saved result nor a run directory; pass a folder that result.save"):
        fs.load_result(tmp_path)
    place = fs.run("fedavg", model="mlp", data=DATA, rounds=1).save(tmp_path / "run")
    said = read_json(place / "result.json", "")
    (place / "result.json").write_text(json.dumps({**said, "format": 2}))
    with pytest.raises(fs.RunError, match="has format 2, but this version reads 1"):
        fs.load_result(place)


def test_commands_report_a_saved_result_and_do_not_resume_it(tmp_path, cli):
    place = fs.run(fs.FedSelect(lr=0.1), model="mlp", data=DATA, rounds=3).save(tmp_path / "run")
    assert is_run(place)
    assert cli("report", place).code == 0
    assert "fedselect on arrays" in (place / "report.html").read_text()
    for command in (("resume", place), ("export", place, "--client", 0)):
        said = cli(*command).sentence()
        assert f"saved from Python without its data and model; open it in Python with: fs.load_result('{place}')" in said


def test_the_report_of_a_result_in_memory(tmp_path, monkeypatch):
    result = fs.run(fs.FedSelect(lr=0.1), model="mlp", data=DATA, rounds=2)
    page = result.report(tmp_path / "page.html").read_text()
    assert "fedselect on arrays" in page
    assert '"path":"in memory"' in page
    monkeypatch.chdir(tmp_path)
    assert str(result.report()) == "report.html"
    again = fs.load_result(result.save(tmp_path / "run"))
    assert "fedselect on arrays" in again.report(tmp_path / "again.html").read_text()
    with pytest.raises(fs.InputError, match=r"the report is an .html page, not 'page.pdf'"):
        result.report("page.pdf")


def test_a_run_directory_of_the_command_line_is_loaded(tmp_path, cli):
    out = tmp_path / "run"
    small = ("--data", "digits", "--clients", 3, "--train", 20, "--test", 10)
    done = cli("run", *small, "--method", "fedper", "--rounds", 2, "--out", out)
    assert done.code == 0, done.err
    result = fs.load_result(out)
    assert [r["round"] for r in result.history] == [1, 2]
    x, y = result.simulation.data.clients[0].test
    assert (result.predict(0, x) == y.numpy()).mean() == pytest.approx(result.scores()[0]["accuracy"], abs=1e-6)
