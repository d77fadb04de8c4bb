"""What a program gets of a run: predictions, models, scores, tables, bars, and copies that go on."""

import copy
import io
import pickle
import re
import sys
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
import torch
from rich.console import Console
from torch import nn

import fedselect as fs
from fedselect.results import progress

RNG = np.random.default_rng(1)
X = RNG.normal(size=(48, 4)).astype(np.float32)
WHO = np.repeat(["north", "south", "west"], 16)


def net(outputs):
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))


def three():
    """A network from a function that has a name, so that it can be pickled."""
    return net(3)


def run(y, outputs=2, method=None, **how):
    data = fs.Federation.from_arrays(X, y, WHO, val_share=0.2, seed=2)
    model = fs.Model.wrap(lambda: net(outputs))
    return fs.run(method or fs.FedAvgFT(lr=0.1), model=model, data=data, **{"rounds": 2, **how})


CLASSES = np.where(X[:, 0] > 0.3, 2, np.where(X[:, 1] > 0, 1, 0))


@pytest.fixture(scope="module")
def classes():
    return run(CLASSES, 3, metrics=["f1"])


def test_predictions_have_the_scores_of_the_run(classes):
    for i, scored in enumerate(classes.clients):
        x, y = classes.simulation.data.clients[i].test
        said = classes.predict(i, x.numpy())
        assert said.dtype == np.int64
        assert (said == y.numpy()).mean() == pytest.approx(scored["accuracy"], abs=1e-6)
        likely = classes.predict_proba(i, x)
        assert likely.shape == (len(y), 3)
        assert likely.sum(1) == pytest.approx(1, abs=1e-5)
        assert (likely.argmax(1) == said).all()
        own = -np.log(likely[np.arange(len(y)), y.numpy()]).mean()
        assert own == pytest.approx(scored["test_loss"], abs=1e-4)
    assert (classes.predict("south", X) == classes.predict(1, X.tolist())).all()
    assert (classes.predict(0, X) == classes.predict(0, pandas.DataFrame(X))).all()


def test_classes_with_names_are_predicted_by_name():
    named = run(np.array(["ham", "eggs", "spam"])[CLASSES], 3)
    assert set(named.predict(0, X)) <= {"ham", "eggs", "spam"}
    likely = named.predict_proba(0, X).argmax(1)
    assert (named.predict(0, X) == np.array(["eggs", "ham", "spam"])[likely]).all()


def test_numbers_are_predicted_in_their_own_units():
    y = 500 + 100 * X[:, 0].astype(float)
    one = run(y, 1, task="regression", rounds=5)
    x, wanted = one.simulation.data.clients[0].test
    said = one.predict(0, x)
    assert said.shape == (len(wanted),)
    assert np.abs(said - wanted.numpy()).mean() == pytest.approx(one.clients[0]["mae"], rel=1e-4)
    assert 300 < said.mean() < 700
    two = run(np.stack([y, -y], 1), 2)
    assert two.predict(2, X).shape == (48, 2)
    with pytest.raises(fs.InputError, match="the task Regression has no probabilities; use predict"):
        one.predict_proba(0, X)


def test_yes_or_no_and_several_labels():
    yes = run((CLASSES == 0).astype(int), 1, task="binary")
    assert (yes.predict(0, X) == (yes.predict_proba(0, X)[:, 1] > 0.5)).all()
    assert yes.predict_proba(0, X).shape == (48, 2)
    several = run(np.stack([CLASSES == 0, CLASSES == 1], 1), 2)
    assert several.simulation.task == fs.Multilabel()
    assert several.predict(0, X).shape == several.predict_proba(0, X).shape == (48, 2)
    assert ((several.predict_proba(0, X) > 0.5) == several.predict(0, X)).all()


def test_positions_of_sequences():
    tokens = RNG.integers(0, 5, (12, 6))
    data = fs.Federation.from_arrays(tokens, tokens, np.repeat([0, 1], 6))
    result = fs.run("fedper", model="gru", data=data, rounds=1)
    assert result.predict(0, tokens).shape == (12, 6)
    assert result.predict_proba(0, tokens).shape == (12, 6, data.classes)


def test_pictures_as_bytes_are_scaled():
    pictures = RNG.integers(0, 255, (24, 1, 8, 8), dtype=np.uint8)
    data = fs.Federation.from_arrays(pictures, np.arange(24) % 2, np.repeat([0, 1], 12), mean=(0.3,), std=(0.2,))
    result = fs.run("fedavg", model="small_cnn", data=data, rounds=1)
    plain = result.simulation.model.build()
    plain.load_state_dict(result.personal(0))
    with torch.no_grad():
        wanted = plain.eval()((torch.from_numpy(pictures) / 255 - 0.3) / 0.2).softmax(1)
    assert result.predict_proba(0, pictures) == pytest.approx(wanted.numpy(), abs=1e-5)
    with pytest.raises(fs.DataError, match="x has the type float32, but the model was trained on uint8"):
        result.predict(0, pictures / 255)


def test_rows_of_a_table_go_through_the_clients_schema():
    frame = pandas.DataFrame({"who": WHO, "age": 40 + 9 * X[:, 0], "sex": np.where(X[:, 1] > 0, "f", "m"), "ill": X[:, 0] > 0})
    data = fs.Federation.from_frame(frame, client="who", target="ill", scale="client")
    result = fs.run(fs.FedPer(lr=0.1), model="mlp", data=data, rounds=3)
    schema = data.clients[1].schema
    by_hand = result.predict(1, schema.features(frame))
    assert (result.predict(1, frame.drop(columns=["who", "ill"])) == by_hand).all()
    assert by_hand.dtype == bool
    assert ((by_hand == frame["ill"])[WHO == "south"]).mean() > 0.5
    with pytest.raises(fs.FedselectError, match="there is no column 'age'"):
        result.predict(1, frame[["sex"]])


@pytest.mark.parametrize(
    ("client", "x", "said"),
    [
        (0, X[0], r"x is a single sample of shape \(4,\); pass one row per sample, \(N, 4\), such as x\[None\]"),
        (0, X[:, :3], r"x has the shape \(48, 3\), but the model takes \(N, 4\)"),
        (0, 1.0, r"x has the shape \(\)"),
        (0, [["a"] * 4], "x has inputs that are texts"),
        (3, X, "there is no client 3; choose one of 0 to 2"),
        (None, X, "there is no client None"),
        ("east", X, "there is no client 'east'; did you mean 'west'?"),
        ("Q", X, "there is no client 'Q'; choose one of north, south, west"),
    ],
)
def test_what_cannot_be_predicted_is_said(classes, client, x, said):
    with pytest.raises(fs.FedselectError, match=said):
        classes.predict(client, x)


def test_models_are_merged_and_tuned_once(monkeypatch, tmp_path):
    result = run(CLASSES, 3)
    asked, models = [], result.simulation.models
    monkeypatch.setattr(result.simulation, "models", lambda ids: asked.extend(ids.tolist()) or models(ids))
    first = result.personal(1)
    every = result.models()
    assert result.models()[1].keys() == first.keys()
    result.predict("west", X)
    result.scores("val")
    result.save(tmp_path / "run")
    assert sorted(asked) == [0, 1, 2]
    assert all(map(torch.equal, every[1].values(), first.values()))
    every[1]["0.weight"].zero_()  # a copy: what is kept stays
    assert torch.equal(result.personal(1)["0.weight"], first["0.weight"])
    result.simulation.step()
    assert not torch.equal(result.personal(1)["0.weight"], first["0.weight"])


def test_scores_are_rows_for_a_table(classes):
    rows = classes.scores()
    assert list(rows[0]) == ["client", "accuracy", "f1", "test_loss"]
    assert pandas.DataFrame(rows)["accuracy"].tolist() == classes.history[-1]["clients"]["accuracy"]
    whole = run(CLASSES, 3, metrics=["f1"], val=True)
    assert classes.scores("val") == whole.scores("val")  # found from the models, or by the run itself
    assert list(whole.scores("val")[0]) == ["client", "accuracy", "f1", "val_loss"]
    x, y = classes.simulation.data.clients[0].train
    assert classes.scores("train")[0]["accuracy"] == pytest.approx((classes.predict(0, x) == y.numpy()).mean(), abs=1e-6)
    with pytest.raises(fs.InputError, match="part must be train or val or test, not 'dev'"):
        classes.scores("dev")
    data = fs.Federation.from_arrays(X, CLASSES, WHO)
    bare = fs.run("local", model=net(3), data=data, rounds=1)
    with pytest.raises(fs.InputError, match=r"no client has validation data; pass fs.ClientData\(val=...\)"):
        bare.scores("val")


def test_a_result_is_shown_as_a_table(classes):
    lines = repr(classes).splitlines()
    assert lines[0] == "Result of FedAvgFT(lr=0.1): 3 clients, 2 rounds, own test data after round 2"
    assert re.fullmatch(r"client +accuracy % +f1 % +test_loss", lines[1])
    accuracy, f1, loss = (classes.clients[0][n] for n in ("accuracy", "f1", "test_loss"))
    assert lines[3].split() == ["north", f"{100 * accuracy:.2f}", f"{100 * f1:.2f}", f"{loss:.4f}"]
    assert lines[-2].split()[:2] == ["mean", f"{100 * classes.accuracy:.2f}"]
    assert lines[-1].split()[2] == f"{100 * classes.over_clients().worst_tenth:.2f}"


def test_many_clients_are_cut_and_names_escaped():
    g = torch.Generator().manual_seed(0)
    part = (torch.randn(4, 2, generator=g), torch.tensor([0, 1, 0, 1]))
    data = [fs.ClientData(part, part, name=f"<{i}>") for i in range(25)]
    result = fs.run(fs.FedPer(), model=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), data=data, rounds=1)
    lines = repr(result).splitlines()
    assert len(lines) == 2 + 1 + 10 + 1 + 2
    assert "... 16 more" in lines
    assert lines[3].endswith("50.0")  # the head, 6 of 12 parameters
    html = result._repr_html_()
    assert "&lt;0&gt;" in html
    assert "<0>" not in html
    assert html.count("<tr>") == 1 + 10 + 2


def test_what_was_not_tested_shows_its_losses():
    data = fs.Federation.from_arrays(X, CLASSES, WHO, test_share=0)
    result = fs.run("fedavg", model=net(3), data=data, rounds=1)
    assert "nothing was tested" in repr(result)
    assert "train_loss" in repr(result)
    assert repr(fs.Result(fs.Simulation("fedavg", net(3), data), [])).splitlines()[0].endswith("3 clients, 0 rounds")


def test_a_copy_of_a_result_goes_on_to_the_same_bits():
    data = fs.Federation.from_arrays(X, X[:, 0], WHO)
    first = fs.run(fs.FedSelect(epochs=1), model="mlp", data=data, rounds=2, fraction=0.7, metrics=["test_loss"])
    copies = [pickle.loads(pickle.dumps(first)), copy.deepcopy(first)]
    for again in copies:
        assert repr(again) == repr(first)
        assert again.history == first.history
        assert (again.predict(0, X) == first.predict(0, X)).all()
    records = [r.simulation.step() for r in (first, *copies)]
    assert records[0]["clients"] == records[1]["clients"] == records[2]["clients"]


def test_clients_in_packed_rows_and_late_ones_are_pickled_too():
    data = fs.Federation.from_arrays(X, CLASSES, WHO)
    simulation = fs.Simulation("fedavg+ft", fs.Model.wrap(three), data, late=(1, 2), rows="personal", chunk=1)
    simulation.step()
    again = pickle.loads(pickle.dumps(simulation))
    a, b = simulation.step(), again.step()
    assert a["clients"] == b["clients"]
    assert again.store.kind == simulation.store.kind


def test_a_model_from_a_lambda_is_copied_and_says_why_it_is_not_pickled():
    model = fs.Model.wrap(lambda: net(3))
    assert repr(copy.deepcopy(model)) == repr(model)
    with pytest.raises(fs.InputError, match=r"the function that creates .* cannot be pickled .*MyNet\(\)\)"):
        pickle.dumps(model)
    again = pickle.loads(pickle.dumps(fs.Model.wrap(three)))
    assert all(map(torch.equal, again.init(4).values(), fs.Model.wrap(three).init(4).values()))
    module = pickle.loads(pickle.dumps(fs.Model.wrap(net(3))))
    assert module.size == again.size


def quick(**how):
    return fs.run(fs.FedAvg(), model=net(3), data=fs.Federation.from_arrays(X, CLASSES, WHO), rounds=3, **how)


def test_no_bar_is_shown_unless_asked_for(capsys):
    quick()
    assert capsys.readouterr() == ("", "")


def test_where_there_is_no_terminal_the_end_is_a_line(capsys):
    quick(progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"FedAvg  3/3  accuracy [\d.]+%  loss [\d.]+\n", err)


def test_a_terminal_has_a_bar(monkeypatch):
    screen = Console(force_terminal=True, file=io.StringIO(), width=120)
    monkeypatch.setattr(progress, "Console", lambda stderr: screen)
    data = fs.Federation.from_arrays(X, CLASSES, WHO)
    fs.compare({"a": fs.FedAvg(), "b": fs.FedPer()}, model=net(3), data=data, rounds=2, progress=True)
    assert "4/4" in screen.file.getvalue()
    assert "b seed 0" in screen.file.getvalue()


def test_a_notebook_has_one_output_that_changes(monkeypatch):
    shown = []
    handle = SimpleNamespace(update=lambda what, raw: shown.append(what))

    def display(what, raw, display_id):
        shown.append(what)
        return handle

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    monkeypatch.setattr(progress, "Console", lambda stderr: SimpleNamespace(is_jupyter=True))
    monkeypatch.setattr(progress, "OFTEN", 0.0)
    quick(progress=True)
    assert len(shown) == 3
    assert shown[-1]["text/plain"].startswith("FedAvg 3/3  accuracy")
    assert '<progress value="3" max="3">' in shown[-1]["text/html"]
