"""Test data is optional, validation data may be scored beside it, and what has a name may be given by it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import fedselect as fs


def client(i, *, test=True, val=True, n=24):
    g = torch.Generator().manual_seed(i)
    x = torch.randn(n, 3, generator=g)
    y = (x[:, i % 3] > 0).long()
    return fs.ClientData(
        (x[:12], y[:12]), (x[12:18], y[12:18]) if test else None, (x[18:], y[18:]) if val else None, name=f"c{i}"
    )


CLIENTS = [client(i) for i in range(3)]
MODEL = fs.Model.wrap(lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)))


def run(clients=CLIENTS, method=None, **how):
    return fs.run(method or fs.FedAvgFT(lr=0.1, epochs=1), model=MODEL, data=clients, **{"rounds": 2, **how})


def test_without_test_data_a_run_trains_and_its_metrics_are_blank():
    result = run([client(i, test=False, val=False) for i in range(3)])
    record = result.history[-1]
    assert record["train_loss"] > 0
    assert record["accuracy"] is None
    assert record["clients"]["accuracy"] == [None] * 3
    assert record["share"] is not None
    with pytest.raises(
        fs.InputError, match=r"no client has test data, so nothing was evaluated; pass fs.ClientData\(test=...\)"
    ):
        result.accuracy  # noqa: B018
    with pytest.raises(fs.InputError, match="no client has test data"):
        result.cross()


def test_training_does_not_depend_on_test_data():
    bare, whole = run([client(i, test=False) for i in range(3)]), run()
    for i in range(3):
        assert all(map(torch.equal, bare.personal(i).values(), whole.personal(i).values()))


def test_a_client_without_test_data_is_left_out_of_means():
    clients = [CLIENTS[0], client(1, test=False), CLIENTS[2]]
    result, whole = run(clients), run()
    scores = result.history[-1]["clients"]["accuracy"]
    assert scores == [v if i != 1 else None for i, v in enumerate(whole.history[-1]["clients"]["accuracy"])]
    assert result.accuracy == pytest.approx((scores[0] + scores[2]) / 2, abs=1e-6)
    assert (result.over_clients().defined, result.over_clients().clients) == (2, 3)
    assert torch.isnan(result.cross()[:, 1]).all()


@pytest.mark.parametrize("method", [fs.FedAvgFT(lr=0.1), fs.FedSelect(lr=0.1, epochs=1)], ids=["merged", "local"])
def test_validation_is_scored_beside_test_data(method):
    both, test = run(method=method, val=True, metrics=["f1"]), run(method=method, metrics=["f1"])
    val = run(fs.Federation(CLIENTS).on_validation(), method=method, metrics=["f1"])
    for a, b, c in zip(both.history, test.history, val.history, strict=True):
        assert {k: v for k, v in a["clients"].items() if not k.startswith("val_")} == b["clients"]
        for held, name in (("val_accuracy", "accuracy"), ("val_loss", "test_loss"), ("val_f1", "f1")):
            assert a["clients"][held] == c["clients"][name]
            assert a[held] == c[name]
    assert "val_accuracy" not in test.history[-1]


def test_validation_is_scored_in_comparisons_and_in_chunks():
    alone = run(val=True)
    found = fs.compare(
        {"a": fs.FedAvgFT(lr=0.1, epochs=1), "b": fs.FedAvgFT(lr=0.2, epochs=1)}, model=MODEL, data=CLIENTS, rounds=2, val=True
    )
    assert found["a", 0].history[-1]["clients"] == alone.history[-1]["clients"]
    assert run(val=True, chunk=1).history[-1]["clients"]["val_accuracy"] == alone.history[-1]["clients"]["val_accuracy"]


def test_clients_without_validation_data_are_blank_and_nobody_is_refused():
    got = run([CLIENTS[0], client(1, val=False)], val=True).history[-1]["clients"]["val_loss"]
    assert got[0] > 0
    assert got[1] is None
    with pytest.raises(fs.InputError, match=r"no client has validation data; pass fs.ClientData\(val=...\)"):
        run([client(0, val=False)], val=True)
    with pytest.raises(fs.InputError, match="val is True or False, not 1"):
        run(val=1)
    with pytest.raises(fs.InputError, match="with rows=personal clients keep what is personal"):
        run(method=fs.FedSelect(), val=True, rows="personal", chunk=1)


def test_a_method_model_task_and_aggregator_go_by_name():
    data = fs.Federation(CLIENTS)
    named = fs.run("FedAvg", model="mlp", data=data, rounds=1, task="classification", aggregator="median")
    made = fs.run(fs.FedAvg(), model=fs.models.mlp(data), data=data, rounds=1, task=fs.Classification(), aggregator=fs.Median())
    assert named.history[-1]["clients"] == made.history[-1]["clients"]
    numbers = [replace(c, train=(c.train[0], c.train[0][:, 0]), test=None, val=None) for c in CLIENTS]
    assert fs.run("fedper", model="mlp", data=numbers, rounds=1, task="regression").simulation.model.size == 4 * 64 + 64 + 1
    assert fs.run("fedavg", model=lambda: nn.Linear(3, 2), data=data, rounds=1).simulation.model.size == 8
    binary = fs.run("local", model="mlp", data=CLIENTS, rounds=1, task="binary")
    assert (binary.simulation.task, binary.simulation.model.size) == (fs.Binary(), 4 * 64 + 64 + 1)
    assert fs.Training(optimizer="Adam", schedule="Cosine") == fs.Training(optimizer="adam", schedule="cosine")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"method": "fedselct"}, "there is no method 'fedselct'; did you mean 'fedselect'"),
        ({"model": "mpl"}, "there is no model 'mpl'; did you mean 'mlp'"),
        ({"task": "regresion"}, "there is no task 'regresion'; did you mean 'regression'"),
        ({"aggregator": "meen"}, "there is no aggregator 'meen'; did you mean 'mean'"),
        ({"data": "digits"}, r"load a data set by name: fs.load\('digits'\)"),
        ({"method": fs.FedAvg}, r"call it: fs.FedAvg\(\)"),
        ({"method": 3}, r"method must be a method such as fs.FedSelect\(\), not 3"),
        ({"data": None}, r"from arrays: fs.Federation.from_arrays\(x, y, client\)"),
        ({"task": 3}, "task must be a task such as fs.Classification.*, or one of classification, binary"),
        ({"model": 3}, "model must be a module, a function that makes one, or one of conv1d"),
    ],
)
def test_names_that_are_not_there_are_answered(how, said):
    with pytest.raises(fs.InputError, match=said):
        fs.run(**{"method": fs.FedAvg(), "model": MODEL, "data": CLIENTS, "rounds": 1, **how})


def test_a_run_in_a_directory_needs_test_data(monkeypatch):
    from fedselect.runs.config import Config

    monkeypatch.setitem(fs.DATA, "bare", lambda seed=0: fs.Federation([client(0), client(1, test=False)]))
    config = Config(data={"name": "bare"}, model={"name": "mlp"}).complete()
    with pytest.raises(fs.InputError, match="client c1 has no test data, which a run in a directory needs"):
        config.make_data()


def test_a_simulation_says_what_it_is():
    simulation = fs.Simulation(fs.FedAvg(lr=0.5), MODEL, CLIENTS)
    assert repr(simulation) == "Simulation(FedAvg(lr=0.5), Model(<lambda>, 50 parameters, head='2'), 3 clients, after round 0)"
