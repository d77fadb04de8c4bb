"""adapt: what is tried for a newcomer, held-out samples, the choice, and what a run shares."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy import stats

import fedselect as fs
from fedselect.adaptation import trials
from fedselect.adaptation.adapted import Row
from fedselect.adaptation.adapting import choose
from fedselect.adaptation.bench import Bench, folds
from fedselect.adaptation.reading import few, one_client
from fedselect.adaptation.trials import Tuning, _tuned
from fedselect.methods import METHODS
from fedselect.network.shared import NAME, Shared

QUICK = {"epochs": (1, 4), "rates": (0.1,)}


def part(data, *clients):
    return dataclasses.replace(data, clients=[data.clients[i] for i in clients], pools={})


@pytest.fixture(scope="module")
def data():
    return fs.load("digits", clients=6, train=30, shift="groups", seed=0)


@pytest.fixture(scope="module")
def result(data):
    return fs.run(fs.FedAlike(), model="mlp", data=part(data, 0, 1, 2, 3, 4), rounds=4)


def test_folds_hold_every_sample_out_once_and_have_like_classes():
    few_, many = torch.tensor([3, 1, 3, 0]), torch.arange(10).repeat_interleave(5)
    assert [f.tolist() for f in folds(few_, 0)] == [[0], [1], [2], [3]]
    found = folds(many, 1)
    assert sorted(torch.cat(found).tolist()) == list(range(50))
    assert all(sorted(many[f].tolist()) == list(range(10)) for f in found)


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"lotteryfl", "layers"}))
def test_what_a_run_shares_comes_back_from_its_file(name, data, tmp_path):
    shared = fs.run(name, model="mlp", data=part(data, 0, 1, 2), rounds=1).shared()
    again = Shared.read(shared.write(tmp_path / "s.safetensors"))
    for field in ("method", "training", "task", "data", "look", "headline"):
        assert getattr(again, field) == getattr(shared, field)
    for a, b in ((again.initial, shared.initial), (again.offers.shared["params"], shared.offers.shared["params"])):
        assert all(torch.equal(a[n], v) for n, v in b.items())
    assert {k: list(t) for k, t in again.offers.rows.items()} == {k: sorted(t) for k, t in shared.offers.rows.items()}


def test_fedalike_offers_the_mean_head_and_those_of_groups_but_no_single_clients():
    heads = torch.arange(5.0).view(5, 1)
    server = {"params": {}, "heads": {"w": heads}, "who": {"group": torch.tensor([0, 1, 0, 3, 3]), "shape": torch.zeros(2)}}
    offered = fs.FedAlike().offers(server, 5).rows["heads"]["w"].flatten().tolist()
    assert offered == [2.0, 1.0, 3.5]  # of all, of clients 0 and 2, of 3 and 4; client 1 is alone


def test_a_tuning_is_plain_sgd_on_what_is_not_held_out(data, result):
    """Head alone, one epoch, against a loop in float64."""
    x, y = (v[:6] for v in data.clients[5].train)
    bench = Bench.of(result.shared(), one_client(result.shared(), (x, y)), 0, "cpu")
    model = bench.simulation.model
    only = {n: model.is_head(n) for n in model.params}
    (trial,) = _tuned(bench, [Tuning("head", "", bench.begin, only)], [1], [0.1])
    for fold in (0, 5):
        net = model.build()
        net.load_state_dict(model.state_dict({n: v[fold] for n, v in bench.begin.items()}))
        net.double()
        rest = [i for i in range(6) if i != fold]
        head = [p for n, p in net.named_parameters() if model.is_head(n)]
        loss = torch.nn.functional.cross_entropy(net(x[rest].double()), y[rest])
        for p, g in zip(head, torch.autograd.grad(loss, head), strict=True):
            p.data -= 0.1 * g
        torch.testing.assert_close(trial.outputs[fold].double(), net(x[[fold]].double())[0].detach(), rtol=1e-4, atol=1e-5)


def test_each_row_begins_with_the_offer_that_fits_its_samples(data, result):
    shared, (x, y) = result.shared(), data.clients[5].train
    bench = Bench.of(shared, one_client(shared, (x[:8], y[:8])), 0, "cpu")
    count = len(shared.offers.rows["heads"]["3.bias"])
    for row in (0, 8):
        rest = [i for i in range(8) if i != row]
        losses = []
        for k in range(count):
            net = shared.model.build()
            tree = {**shared.offers.shared["params"], **{n: v[k] for n, v in shared.offers.rows["heads"].items()}}
            net.load_state_dict(shared.model.state_dict(tree))
            losses.append(float(torch.nn.functional.cross_entropy(net(x[rest]), y[rest]).detach()))
        assert int(bench.offer[row]) == int(np.argmin(losses))


def row(kind, loss, gain=None, error=None):
    return Row(kind, kind, None, None, None, loss=loss, headline=0.5, gain=gain, error=error, test=None)


def test_the_shared_model_stays_unless_another_is_better_beyond_chance():
    rng = np.random.default_rng(0)
    for size in (3, 5, 40):
        for shift in (0.0, 0.5, 2.0):
            gains = rng.normal(shift, 1, size)
            error = gains.std(ddof=1) / size**0.5
            chosen = choose([row("shared", 1.0), row("all", 1 - gains.mean(), gains.mean(), error)], size)
            p = stats.ttest_1samp(gains, 0, alternative="greater").pvalue
            assert chosen == ("all" if p < 0.05 and gains.mean() > 0 else "shared")


def test_adapt_chooses_predicts_and_is_kept(data, result, tmp_path):
    new = data.clients[5]
    made = fs.adapt(result, new, **QUICK)
    again = fs.adapt(result, new, **QUICK)
    assert made.table == again.table  # by the seed alone
    kinds = [r["kind"] for r in made.table]
    assert kinds == ["shared", "alone", "head", "all", "disagreement", "method"]
    chosen = next(r for r in made.table if r["chosen"])
    x, y = new.test
    assert chosen["test"] == pytest.approx(float((torch.from_numpy(made.predict(x)) == y).double().mean()))
    assert float((made.model(x).argmax(1) == y).double().mean()) == pytest.approx(chosen["test"])
    out = made.save(tmp_path / "m")
    assert all(torch.equal(v, made.values[n]) for n, v in load_file(out / "model.safetensors").items())
    assert json.loads((out / "adapted.json").read_text())["chosen"] == made.chosen
    assert fs.load_model(out / "model.safetensors").predict(x).tolist() == made.predict(x).tolist()  # nothing else is needed
    with pytest.raises(fs.InputError, match="already exists"):
        made.save(tmp_path / "m")


def test_adapting_a_saved_result_is_adapting_the_result(data, result, tmp_path):
    result.save(tmp_path / "r")
    new = few(part(data, 5), 8, 0)
    assert fs.adapt(tmp_path / "r", new, **QUICK).table == fs.adapt(result, new, **QUICK).table
    (tmp_path / "r" / NAME).unlink()
    with pytest.raises(fs.RunError, match="did not store what the run shares"):
        fs.adapt(tmp_path / "r", new)


def test_a_network_with_batch_norm_gets_statistics_of_the_client():
    g = torch.Generator().manual_seed(0)

    def client(seed):
        x = torch.randn(40, 6, generator=g) * 5 + 20
        return fs.ClientData((x, (x[:, 0] > 20).long()), (x, (x[:, 0] > 20).long()))

    net = torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))
    run = fs.run(fs.FedPer(lr=0.1), model=fs.Model.wrap(net), data=[client(i) for i in range(3)], rounds=3)
    made = fs.adapt(run, client(3), **QUICK)
    mean = made.candidates["shared"]["0.running_mean"]
    assert bool((mean > 10).all())  # the run shares none, and 0 is where they began
    assert "norms" in made.candidates


def test_rows_of_a_table_go_through_the_runs_schema():
    rng = np.random.default_rng(0)
    frame = {"age": rng.normal(50, 10, 90), "kind": rng.choice(["a", "b"], 90), "site": np.repeat(["x", "y", "z"], 30)}
    frame["ill"] = np.where(frame["age"] > 50, "yes", "no")
    table = fs.Federation.from_frame(frame, client="site", target="ill")
    result = fs.run(fs.FedAvgFT(lr=0.1), model="mlp", data=table, rounds=3)
    new = {k: v[:12] for k, v in frame.items() if k != "site"}
    made = fs.adapt(result, new, **QUICK)
    assert set(made.predict({k: v for k, v in new.items() if k != "ill"})) <= {"yes", "no"}


@pytest.mark.parametrize(
    ("client", "said"),
    [
        ((torch.zeros(4, 1, 9, 9), torch.zeros(4, dtype=torch.int64)), "inputs of shape"),
        ((torch.zeros(4, 1, 8, 8), torch.full((4,), 10)), "labels must lie in 0 to 9"),
        ((torch.zeros(4, 1, 8, 8), ["cat"] * 4), "has the class 'cat'"),
        ((torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.int64)), "no training data"),
        ((torch.zeros(1, 1, 8, 8), torch.zeros(1, dtype=torch.int64)), "one sample is too few"),
        ("folder", "the client must be fs.ClientData"),
    ],
)
def test_bad_input_is_one_sentence(result, client, said):
    with pytest.raises(fs.FedselectError, match=said):
        fs.adapt(result, client)


def test_a_run_that_shares_nothing_is_refused(data):
    with pytest.raises(fs.InputError, match="shared nothing"):
        fs.adapt(fs.run("local", model="mlp", data=part(data, 0, 1), rounds=1), data.clients[5])


def test_a_finished_run_of_a_servers_folder_is_shared(tmp_path):
    """Written as a server writes it, without a network; what is offered is the state of its last round."""
    from fedselect.core.tree import flat
    from fedselect.network.drive import prepare
    from fedselect.network.plan import Shape, plan
    from fedselect.network.rounds import Limits
    from fedselect.network.shared import of_run
    from fedselect.network.vault import Vault
    from fedselect.runs.config import Config

    asked = {"name": "digits", "clients": 3, "train": 20}
    config = Config.from_dict({"method": {"name": "fedavg+ft"}, "data": asked, "model": {"name": "mlp"}, "rounds": 2}, "here")
    agreed = plan(config, "f", "r", 3, Shape.of(config.make_data()), Limits())
    prepare(tmp_path / "r", agreed)
    with pytest.raises(fs.RunError, match="is not finished; finish it first with: fedselect deploy run"):
        of_run(tmp_path / "r")
    simulation = config.simulation()
    simulation.step()
    Vault(tmp_path / "r" / "checkpoint").save(2, flat("server", simulation.server), {}, keep=set())
    (tmp_path / "r" / "summary.json").write_text("{}")
    shared = of_run(tmp_path / "r")
    assert all(torch.equal(v, simulation.server["params"][n]) for n, v in shared.offers.shared["params"].items())
    file = shared.write(tmp_path / "s.safetensors")
    assert fs.adapt(file, fs.load("digits", clients=1, train=6, seed=3), **QUICK).samples == 6


class Unrolled(torch.nn.Module):
    """An LSTM, which trains client by client."""

    def __init__(self):
        super().__init__()
        self.inner, self.fc = torch.nn.LSTM(8, 6, batch_first=True), torch.nn.Linear(6, 10)

    def forward(self, x):
        return self.fc(self.inner(x.flatten(1).view(-1, 8, 8))[0][:, -1])


@pytest.mark.filterwarnings("ignore:.*run one by one")
def test_a_model_whose_clients_train_one_by_one_is_adapted_too(data):
    run = fs.run(fs.FedAvg(lr=0.1), model=fs.Model.wrap(Unrolled), data=part(data, 0, 1), rounds=1)
    seen = []
    adapted = fs.adapt(run, data.clients[2], **QUICK, on_trial=lambda i, words: seen.append(words))
    assert seen[2:7] == ["trained alone", "head fine-tuned", "everything fine-tuned", "where it disagrees", "FedAvg"]
    assert {r["kind"] for r in adapted.table} >= {"shared", "alone", "head", "all", "disagreement"}


def test_a_model_that_diverges_on_all_samples_is_not_chosen(data, monkeypatch, tmp_path):
    """Though those of the folds may be fine."""

    def spoilt(bench, tunings, epochs, rates):
        for trial in _tuned(bench, tunings, epochs, rates):
            outputs = torch.nn.functional.one_hot(bench.targets, 10) * 50.0
            broken = {n: torch.full_like(v, 1e30) for n, v in trial.values.items()}
            yield dataclasses.replace(trial, outputs=outputs, values=broken)

    monkeypatch.setattr(trials, "_tuned", spoilt)
    run = fs.run(fs.FedAvg(lr=0.1), model="mlp", data=part(data, 0, 1), rounds=1)
    adapted = fs.adapt(run, data.clients[2], **QUICK)
    assert adapted.chosen in ("shared", "method", "disagreement")
    assert {r["words"] for r in adapted.table if r["kind"] == "all"} == {"everything fine-tuned: diverged"}
