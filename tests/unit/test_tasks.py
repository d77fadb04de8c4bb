"""Tasks: which one data is for, what they find out of the data, how they train and what a run records of them."""

import numpy as np
import pytest
import torch
from local import QUICK, Room
from sklearn.utils.class_weight import compute_class_weight
from torch import nn

import fedselect as fs
from fedselect.cli.flags import configure
from fedselect.models.networks import gru
from fedselect.network.assignment import Assignment
from fedselect.network.plan import Plan, Shape
from fedselect.network.server import Server
from fedselect.network.vault import Vault
from fedselect.runs.config import Config
from fedselect.runs.rundir import identity
from fedselect.simulate.checkpoint import as_first_written
from fedselect.tasks import TASKS, suited

TEXT = ["the cat sat on the mat. ", "a dog ran in the fog. "]


def federation(make, clients=3, rows=40, seed=0):
    """Clients with inputs (rows, 4) and the targets that `make` gives them: (inputs, number of the client) -> targets."""
    g = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(rows, 4, generator=g) for _ in range(clients)]
    parts = [(x, make(x, i)) for i, x in enumerate(inputs)]
    return fs.Federation([fs.ClientData((x[:24], y[:24]), (x[24:], y[24:])) for x, y in parts])


def numbers(x, i):
    return 100 + 20 * (x.sum(1) + i)


def two_numbers(x, i):
    return torch.stack([numbers(x, i), x[:, 0] / 1000], 1)


def labels(x, i):
    return (x[:, :3] > 0).float()


def kinds(x, i):
    return (x[:, 0] > 0).long()


def characters(length=6, clients=2):
    """Each client's text in rows: every character's next one is to be predicted."""
    known = sorted(set("".join(TEXT)))
    made = []
    for text in (TEXT * clients)[:clients]:
        codes = torch.tensor([known.index(c) for c in text * 4])
        x, y = codes[:-1].unfold(0, length, 2), codes[1:].unfold(0, length, 2)
        made.append(fs.ClientData((x[::2], y[::2]), (x[1::2], y[1::2])))
    return fs.Federation(made, classes=len(known))


def wide(outputs):
    return fs.Model.wrap(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs)))


DATA = {
    "classification": (lambda: federation(kinds), 2),
    "binary": (lambda: federation(kinds), 1),
    "multilabel": (lambda: federation(labels), 3),
    "regression": (lambda: federation(two_numbers), 2),
    "sequences": (characters, None),
}


def case(name):
    data, outputs = DATA[name]
    made = data()
    return made, wide(outputs) if outputs else gru(made, width=8)


@pytest.mark.parametrize(
    ("make", "task"),
    [
        (kinds, "classification"),
        (numbers, "regression"),
        (two_numbers, "regression"),
        (labels, "multilabel"),
        (lambda x, i: labels(x, i).long(), "multilabel"),
        (lambda x, i: labels(x, i).bool(), "multilabel"),
        (lambda x, i: (2 * x[:, :3]).round().long().abs(), "sequences"),
        (lambda x, i: labels(x, i).long() - 100 * (x[:, :1] > 1), "sequences"),  # 0, 1, and positions that do not count
        (lambda x, i: x.view(-1, 2, 2), None),
    ],
)
def test_the_task_is_chosen_from_the_data_where_it_is_clear(make, task):
    assert suited(federation(make)) == task


def test_classes_are_found_in_rows_of_whole_numbers_too():
    assert characters().classes == len(set("".join(TEXT)))
    rows = federation(lambda x, i: (10 * x[:, :3]).round().long().clamp(-1, 4))  # below 0: none
    assert rows.classes == 5
    assert rows.labels(0) == []
    assert federation(lambda x, i: labels(x, i).long()).classes == 0
    with pytest.raises(fs.DataError, match="has the training label 4; labels must lie in 0 to 2"):
        fs.Federation(rows.clients, classes=3)


@pytest.mark.parametrize("name", TASKS)
def test_a_task_learns_and_is_stacked_as_alone(name):
    data, model = case(name)
    task = TASKS[name]()
    asked = [m.name for m in task.more]
    how = {"model": model, "data": data, "rounds": 8, "task": task, "metrics": asked}
    method = fs.FedAvgFT(lr=0.1 if name == "regression" else 1.0)
    result = fs.run(method, **how)
    assert result.history[-1]["test_loss"] < 0.8 * result.history[0]["test_loss"]
    assert set(asked) <= result.history[0].keys()
    alone = fs.run(method, **how, chunk=1)
    assert [r["clients"] for r in alone.history] == [r["clients"] for r in result.history]


@pytest.mark.parametrize("name", [name for name in TASKS if name != "classification"])
@pytest.mark.parametrize("method", [fs.FedPAC(), fs.FedAvg(answers="own")])
def test_methods_that_need_classes_say_so(name, method):
    data, model = case(name)
    with pytest.raises(fs.InputError, match="this method needs classes; use it with the task classification"):
        fs.run(method, model=model, data=data, rounds=1, task=TASKS[name]())


def test_fedalike_needs_no_classes():
    data = federation(lambda x, i: x.sum(1) * (1 if i % 2 else -1), clients=4)
    result = fs.run(fs.FedAlike(lr=0.01), model=wide(1), data=data, rounds=3)
    assert all(len({i % 2 for i in group}) == 1 for group in result.groups)  # nobody is with those who want the opposite


@pytest.mark.parametrize(
    ("task", "make", "outputs", "said"),
    [
        (fs.Binary(), numbers, 1, "the task binary needs one integer target per sample, 0 or 1"),
        (fs.Binary(), kinds, 2, "the task binary needs one number per sample"),
        (fs.Multilabel(), numbers, 3, "the task multilabel needs targets of shape"),
        (fs.Multilabel(), two_numbers, 2, "the task multilabel needs targets of shape"),
        (fs.Multilabel(), labels, 2, "one number per label, that is 3"),
        (
            fs.Sequences(),
            lambda x, i: x[:, :3].long().clamp_min(-1),
            3,
            "the target -1 is not a class; .* --ignore",
        ),
        (fs.Sequences(), kinds, 2, "the task sequences needs integer targets"),
        (fs.Regression(), two_numbers, 1, "needs one number per target, that is 2"),
        (fs.Regression(target_mean="1", target_scale="2"), two_numbers, 2, "each sample has 2 targets"),
        (fs.Classification(class_weights="1 2 3"), kinds, 2, "there are 2 classes; give class_weights one number each"),
        (fs.Classification(), labels, 3, "classification needs one integer class per sample"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(task, make, outputs, said):
    with pytest.raises(fs.InputError, match=said):
        fs.Simulation(fs.FedAvg(), wide(outputs), federation(make), task=task)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: fs.Regression(target_mean="1"), "target_mean and target_scale belong together"),
        (lambda: fs.Regression(target_mean="1", target_scale="0"), "scales must be positive"),
        (lambda: fs.Regression(target_mean="one", target_scale="1"), "target_mean must be numbers separated by spaces"),
        (lambda: fs.Classification(class_weights="heavy"), "class_weights must be numbers separated by spaces"),
        (lambda: fs.Classification(class_weights="-1 2"), "class_weights must be balanced or one number per class"),
        (lambda: fs.Classification(label_smoothing=1.0), r"label_smoothing must lie in \[0, 1\)"),
    ],
)
def test_options_that_make_no_sense_are_refused(make, said):
    with pytest.raises(fs.InputError, match=said):
        make()


# what a task finds out of the data


def test_targets_are_standardised_over_the_federation():
    data = federation(two_numbers)
    simulation = fs.Simulation(fs.FedAvg(), wide(2), data)
    every = torch.cat([c.train[1] for c in data.clients]).double().numpy()
    scale, mean = simulation.task.units
    assert mean == pytest.approx(np.mean(every, 0))
    assert scale == pytest.approx(np.std(every, 0))
    late = fs.Simulation(fs.FedAvg(), wide(2), data, late=(1, 3))  # who comes later is not known at first
    assert late.task.units[1] == pytest.approx(torch.cat([c.train[1] for c in data.clients[:2]]).double().mean(0).tolist())


def test_training_does_not_depend_on_the_units_of_targets():
    plain = fs.run(fs.FedAvgFT(lr=0.1), model=wide(1), data=federation(numbers), rounds=3)
    other = fs.run(fs.FedAvgFT(lr=0.1), model=wide(1), data=federation(lambda x, i: 32 * numbers(x, i) - 4096), rounds=3)
    for mine, theirs in zip(plain.clients, other.clients, strict=True):
        assert theirs["mae"] == pytest.approx(32 * mine["mae"], rel=1e-3)
        assert theirs["r2"] == pytest.approx(mine["r2"], abs=1e-3)
        assert theirs["test_loss"] == pytest.approx(mine["test_loss"], rel=1e-3)


def test_predictions_are_in_the_units_of_targets():
    data = federation(numbers)
    result = fs.run(fs.FedPer(lr=0.1), model=wide(1), data=data, rounds=3)
    net = wide(1).build()
    net.load_state_dict(result.personal(1))
    x, y = data.clients[1].test
    with torch.no_grad():
        said = result.simulation.task.predicted(net(x)).squeeze(1)
    assert float((said - y).abs().mean()) == pytest.approx(result.clients[1]["mae"], rel=1e-5)
    assert result.clients[1]["mae"] < 60  # targets lie about 120, with a deviation of 40


def test_balanced_weights_are_those_of_scikit_learn():
    data = federation(lambda x, i: (x[:, 0] > 0.8 - i).long() + (x[:, 0] > 1.5).long())
    task = fs.Simulation(fs.FedAvg(), wide(3), data, task=fs.Classification(class_weights="balanced")).task
    every = torch.cat([c.train[1] for c in data.clients]).numpy()
    wanted = compute_class_weight("balanced", classes=np.arange(3), y=every)
    assert [float(w) for w in task.class_weights.split()] == pytest.approx(list(wanted))


# over a network


def deployed(name, tmp_path, task=None, **more):
    data, model = case(name)
    method, task = fs.FedAvgFT(lr=0.1), task or TASKS[name]()
    assigned = Assignment(method, model, fs.Training(), task, data, seed=0, clients=len(data.clients), **more)
    room = Room(assigned, data, tmp_path)
    return data, fs.Simulation(method, model, data, task=task, metrics=list(assigned.asked)), assigned, room


@pytest.mark.parametrize("name", ["binary", "multilabel", "regression", "sequences"])
def test_over_messages_it_is_the_simulation(name, tmp_path):
    data, simulation, assigned, room = deployed(name, tmp_path, asked=("auroc",) if name != "regression" else ())
    server = Server(assigned, QUICK, tmp_path / "masks")
    for _ in range(2):
        record = simulation.step()
        assert server.step(room).rejected == {}
    measured = server.close(room).measured
    for metric in (m.name for m in simulation.metrics):
        assert [measured[i][metric] for i in range(len(data.clients))] == pytest.approx(record["clients"][metric], abs=2e-6)
    assert server.tested == [len(c.test[1]) for c in data.clients]


def test_only_means_and_variances_of_targets_travel(tmp_path):
    data, simulation, assigned, room = deployed("regression", tmp_path)
    sent = []
    room.spoil = lambda i, letter: sent.append((i, letter)) or letter
    server = Server(assigned, QUICK, tmp_path / "masks")
    server.step(room)
    hellos = {i: letter.head["statistics"] for i, letter in sent if letter.head["kind"] == "hello"}
    for i, client in enumerate(data.clients):
        y = client.train[1].double()
        assert hellos[i] == pytest.approx([*y.mean(0).tolist(), *y.var(0, correction=0).tolist()])
    assert server.task["target_mean"] == simulation.task.target_mean
    assert all(letter.head.get("task") == server.task for _, letter in room.asked if letter.head["kind"] != "hello")


def test_the_scale_is_that_of_the_clients_that_were_there_at_first(tmp_path):
    data, _, assigned, room = deployed("regression", tmp_path)
    room.here = [0, 1]
    server = Server(assigned, QUICK, tmp_path / "masks")
    server.step(room)
    first, room.here = dict(server.task), [0, 1, 2]
    vault = Vault(tmp_path / "state")
    server.save(vault, {})
    again = Server(assigned, QUICK, tmp_path / "masks")
    again.load(vault, 1)
    again.step(room)
    assert again.task == first
    every = torch.cat([c.train[1] for c in data.clients[:2]]).double()
    assert [float(v) for v in first["target_mean"].split()] == pytest.approx(every.mean(0).tolist())


@pytest.mark.parametrize("statistics", [None, [1.0], [1.0, 1.0, float("nan"), 1.0], ["1", "1", "1", "1"]])
def test_statistics_that_cannot_be_are_turned_away(statistics, tmp_path):
    _, _, assigned, room = deployed("regression", tmp_path)

    def spoil(i, letter):
        if i == 1 and letter.head["kind"] == "hello":
            letter.head["statistics"] = statistics
        return letter

    room.spoil = spoil
    server = Server(assigned, QUICK, tmp_path / "masks")
    outcome = server.step(room)
    assert "but the task needs 4 statistics of its targets" in next(iter(outcome.rejected.values()))
    assert sorted(outcome.uploads) == [0, 2]


def test_a_client_that_is_told_nothing_or_nonsense_says_so(tmp_path):
    _, _, assigned, room = deployed("regression", tmp_path)
    server = Server(assigned, QUICK, tmp_path / "masks")
    server.task = {"colour": "red"}  # so that nothing is found out
    with pytest.raises(fs.RunError, match=r"the server sent .*'colour': 'red'.* for the task, which has no such options"):
        server.step(room)


def test_a_site_knows_what_its_targets_are_for():
    data = characters()
    shape = Shape.of(data)
    assert (shape.task, shape.whole, shape.target_shape, shape.classes) == ("sequences", True, (6,), data.classes)
    assert Shape.of(federation(two_numbers)).task == "regression"
    config = Config.from_dict({"model": {"name": "gru"}, "task": {"name": "sequences"}, "metrics": ["auroc", "f1"]}, "test")
    plan = Plan(config, "f", "r", 2, shape)
    again = Plan.from_flat(plan.to_flat(), "r")
    assert again.digest() == plan.digest()
    assert (again.data.whole, again.config.metrics) == (True, ["auroc", "f1"])
    assert again.assignment("cpu").rehearse() is not None


# what a run records


def test_without_asking_a_record_is_what_it_was():
    record = fs.Simulation(fs.FedAvg(), wide(2), federation(kinds)).step()
    assert list(record) == [
        "round", "seconds", "accuracy", "accuracy_local", "accuracy_merged", "test_loss", "train_loss", "share", "bytes_up",
        "bytes_down", "clients",
    ]  # fmt: skip


def test_a_headline_may_be_a_metric_that_is_computed_on_demand():
    result = fs.run(fs.FedAvg(), model=wide(2), data=federation(kinds), rounds=1, headline="auroc")
    assert [m.name for m in result.simulation.metrics] == ["auroc", "accuracy", "test_loss"]
    assert result.headline == pytest.approx(sum(c["auroc"] for c in result.clients) / 3, abs=1e-6)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"metrics": "auroc"}, r"metrics must be a list of names, such as \['auroc', 'f1'\], not 'auroc'"),
        ({"metrics": ["auc"]}, "this task has no metric 'auc'; choose from accuracy, balanced_accuracy, f1, auroc"),
        ({"headline": "r2"}, "this task has no metric 'r2'"),
    ],
)
def test_metrics_that_are_not_there_are_refused(how, said):
    with pytest.raises(fs.InputError, match=said):
        fs.Simulation(fs.FedAvg(), wide(2), federation(kinds), **how)


def test_a_metric_that_a_client_has_not_is_blank_and_counted():
    data = federation(lambda x, i: (x[:, 0] > 0).long() if i else torch.ones(len(x), dtype=torch.int64))
    result = fs.run(fs.FedAvg(), model=wide(2), data=data, rounds=1, metrics=["auroc", "f1"])
    values = [c["auroc"] for c in result.clients]
    assert values[0] is None
    spread = result.over_clients("auroc")
    assert (spread.defined, spread.clients) == (2, 3)
    assert spread.mean == result.history[-1]["auroc"] == pytest.approx((values[1] + values[2]) / 2, abs=1e-6)
    assert spread.worst_tenth == min(values[1:])
    assert result.over_clients() == result.over_clients("accuracy")
    with pytest.raises(fs.InputError, match="did not measure 'ece', only accuracy, f1, auroc, test_loss"):
        result.over_clients("ece")


def test_packed_clients_keep_every_metric(tmp_path):
    how = {"model": wide(2), "data": federation(kinds, 4), "rounds": 4, "metrics": ["auroc"], "fraction": 0.5}
    whole, packed = (fs.run(fs.FedSelect(lr=0.1), **how, rows=rows, chunk=2) for rows in ("all", "personal"))
    assert [r["clients"] for r in packed.history] == [r["clients"] for r in whole.history]


def test_a_state_goes_on_with_any_headline_of_the_same_metrics(tmp_path):
    def made(**how):
        return fs.Simulation(fs.FedSelect(lr=0.1), wide(2), federation(kinds), rows="personal", **how)

    first = made(metrics=["auroc", "f1"])
    first.step()
    first.save(tmp_path)
    second = made(headline="f1", metrics=["auroc"])
    assert second.resume(tmp_path)
    assert second.step()["clients"]["auroc"] == first.step()["clients"]["auroc"]
    with pytest.raises(fs.CheckpointError, match="metrics was"):
        made().resume(tmp_path)


def test_identities_show_what_is_measured_and_the_task_only_where_it_is_not_the_first():
    plain = Config.from_dict({}, "test")
    older = {k: v for k, v in plain.to_json().items() if k != "metrics"} | {"task": {"name": "classification"}}
    assert identity(Config.from_dict(older, "older")) == identity(plain)
    assert not {"task", "metrics", "headline"} & as_first_written(plain.to_json()).keys()
    more = [
        {"metrics": ["auroc"]}, {"task": {"name": "binary"}}, {"task": {"name": "classification", "label_smoothing": 0.1}},
        {"task": {"name": "regression"}}, {"task": {"name": "regression", "target_mean": "1", "target_scale": "2"}},
    ]  # fmt: skip
    others = {identity(Config.from_dict(m, "test")) for m in more}
    assert len(others | {identity(plain)}) == 6


def test_commands_take_the_task_of_the_data(monkeypatch):
    def table(target: str = "number", seed: int = 0) -> fs.Federation:
        """Rows of numbers."""
        return federation(numbers if target == "number" else labels, seed=seed)

    monkeypatch.setitem(fs.DATA, "table", table)
    chosen = {"method": "fedavg", "data": "table", "model": "mlp", "given_flags": {}}
    assert configure({}, **chosen, headline="r2").task["name"] == "regression"
    assert configure({}, **{**chosen, "given_flags": {"target": "labels"}}).task == {"name": "multilabel"}
    given = {**chosen, "given_flags": {"target-mean": "3", "target-scale": "2"}}
    assert configure({}, **given).task == {"name": "regression", "target_mean": "3", "target_scale": "2"}
    assert configure({}, **chosen, task="classification").task["name"] == "classification"
    assert configure({"task": {"name": "binary"}}, **chosen).task["name"] == "binary"
    monkeypatch.setitem(fs.DATA, "table", lambda seed=0: federation(lambda x, i: x.view(-1, 2, 2)))
    with pytest.raises(fs.InputError, match=r"the task of .* cannot be inferred; pass --task classification or"):
        configure({}, **chosen)


# the network for sequences


def test_gru_computes_what_torchs_does():
    data = characters()
    ours = gru(data, width=8).build()
    theirs = nn.GRU(8, 8, batch_first=True)
    theirs.load_state_dict({
        "weight_ih_l0": ours.gates.weight, "bias_ih_l0": ours.gates.bias, "weight_hh_l0": ours.back.weight,
        "bias_hh_l0": ours.back.bias,
    })  # fmt: skip
    x = data.clients[0].test[0]
    with torch.no_grad():
        assert torch.allclose(ours(x), ours.fc(theirs(ours.embed(x))[0]), atol=1e-6)
    assert gru(data, width=8, tokens=50).build().embed.num_embeddings == 50
    with pytest.raises(fs.InputError, match="gru needs rows of integers"):
        gru(Shape((1, 8, 8), ("cat", "dog")))
