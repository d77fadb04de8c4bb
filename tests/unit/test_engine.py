"""What the engine refuses, and what it gives out."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import fedselect as fs
from fedselect.simulate import Simulation, ranks
from fedselect.simulate.inputs import pick_device
from fedselect.training.fitted import Fitted


def test_numbers_that_explode_in_fine_tuning_stop_the_run(digits):
    with pytest.raises(fs.TrainingError, match=r"client \d, round 1: .* is no longer finite"):
        fs.run(fs.FedAvgFT(finetune_lr=1e30, lr=0.1), model=fs.models.mlp(digits), data=digits, rounds=2)


def test_a_client_that_has_not_joined_has_no_model(digits):
    sim = Simulation(fs.FedSelect(), fs.models.mlp(digits), digits, late=(1, 5))
    sim.step()
    with pytest.raises(fs.InputError, match="client 2 has not joined yet"):
        fs.Result(sim, []).personal(2)


@pytest.mark.parametrize(
    ("late", "said"),
    [
        ((3, 2), "late: 3 of 3 clients cannot join late"),
        ((1, -5), "rounds are counted from 1, so no client can join in round -5"),
        ((1, 50), "a client that joins in round 50 of 2 never takes part"),
    ],
)
def test_a_client_that_could_never_join_is_refused(digits, late, said):
    with pytest.raises(fs.InputError, match=said):
        fs.run(fs.FedAvg(), model=fs.models.mlp(digits), data=digits, rounds=2, late=late)


def test_models_that_are_not_kept_are_not_handed_out(digits):
    how = {"model": fs.models.mlp(digits), "data": digits, "rounds": 1, "rows": "personal"}
    forgotten = fs.run(fs.FedSelect(), **how)
    for ask in (lambda: forgotten.personal(0), forgotten.cross, lambda: forgotten.simulation.models([0], "local")):
        with pytest.raises(fs.InputError, match=r"rows=personal .* use view='merged' or rows=all"):
            ask()
    assert forgotten.simulation.models([0], "merged")
    whole = fs.run(fs.FedSelect(), **{**how, "rows": "all"})
    merged = fs.run(fs.FedSelect(view="merged"), **how).personal(0)
    assert all(torch.equal(v[0], merged[n]) for n, v in whole.simulation.models([0], "merged").items())
    assert fs.run(fs.Ditto(), **how).personal(0)  # the whole personal model is carried


def test_what_is_handed_out_is_a_copy(digits):
    result = fs.run(fs.FedSelect(lr=0.1), model=fs.models.mlp(digits), data=digits, rounds=1)
    before = result.personal(0)
    result.masks["1.weight"].fill_(True)
    for v in result.simulation.models(range(3), "local").values():
        v.fill_(7.0)
    assert not bool(result.masks["1.weight"].all())
    assert all(torch.equal(v, before[n]) for n, v in result.personal(0).items())


def test_a_plain_module_and_a_lone_client_will_do(digits):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    result = fs.run(fs.Local(lr=0.1), model=net, data=fs.Federation([digits.clients[0]], 10), rounds=1)
    assert len(result.clients) == 1


@pytest.mark.parametrize("wrong", [{"method": fs.FedAvg}, {"method": 3}, {"data": [(1, 2)]}], ids=["class", "number", "tuples"])
def test_other_things_are_refused_in_words(digits, wrong):
    given = {"method": fs.FedAvg(), "data": digits, **wrong}
    with pytest.raises(fs.InputError, match="must be a"):
        fs.run(given["method"], model=fs.models.mlp(digits), data=given["data"], rounds=1)


@pytest.mark.parametrize(
    ("wrong", "said"), [({"lr": "0.1"}, "lr"), ({"limit": [0.1, 0.3]}, "limit"), ({"server_average": None}, "server_average")]
)
def test_an_option_that_is_no_number_is_refused_by_its_name(wrong, said):
    with pytest.raises(fs.InputError, match=f"{said} must be a number, or a tensor with one per client, not "):
        fs.FedSelect(**wrong)


def test_a_method_that_is_not_all_there_hears_what_to_say(digits):
    plain = type("Plain", (fs.Method,), dict.fromkeys(fs.Method.__abstractmethods__, lambda *_: None))
    with pytest.raises(fs.InputError, match=r"Plain must be a dataclass.*@dataclass\(frozen=True\)"):
        Simulation(plain(), fs.models.mlp(digits), digits)
    with pytest.raises(fs.InputError, match=r"Plain does not say which model it reports; add view = 'local'"):
        Simulation(dataclass(frozen=True)(plain)(), fs.models.mlp(digits), digits)


def test_a_model_of_other_classes_hears_what_to_say(digits):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 12))
    with pytest.raises(
        fs.InputError, match=r"labels from 0 to 9 need \(2, 10\); change the model, or give the number of classes"
    ):
        fs.run(fs.FedAvg(), model=net, data=digits, rounds=1)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (nn.BatchNorm1d(8, track_running_stats=False), "BatchNorm without running statistics"),
        (nn.BatchNorm1d(8, momentum=None), "counts batches"),
        (nn.LazyLinear(8), "the model has lazy layers"),
    ],
    ids=["no statistics", "no momentum", "lazy"],
)
def test_layers_that_cannot_be_a_clients_own(layer, said):
    with pytest.raises(fs.InputError, match=said):
        fs.Model.wrap(lambda: nn.Sequential(nn.Linear(4, 8), layer, nn.Linear(8, 3)))


def test_batch_norm_with_one_sample_is_refused_stacked_or_not(digits, monkeypatch):
    """Before any round, and the client is named, wherever it stands."""
    x, y = digits.clients[1].train
    one = fs.Federation([digits.clients[0], fs.ClientData((x[:1], y[:1]), (x, y), name="Ada"), *digits.clients[2:]], 10)
    model = fs.Model.wrap(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 10)))
    for stackable in (True, False):
        monkeypatch.setattr(Fitted, "stackable", stackable)
        with pytest.raises(
            fs.InputError, match=r"client Ada, with one sample per step: BatchNorm needs more .* leave out clients"
        ):
            Simulation(fs.FedAvg(), model, one)
        with pytest.raises(fs.InputError, match=r"client 0, with one sample per step: .* raise batch_size"):
            Simulation(fs.FedAvg(), model, digits, training=fs.Training(batch_size=1))


def test_floats_are_augmented_too():
    x = torch.rand(12, 1, 8, 8)
    made = [fs.ClientData((x, torch.arange(12) % 2), (x, torch.arange(12) % 2))]
    ends = []
    for augment in ("none", "crop-flip"):
        data = fs.Federation(made, 2, augment=augment)
        ends.append(fs.run(fs.Local(lr=0.1), model=fs.models.mlp(data, hidden=4), data=data, rounds=1).personal(0))
    assert not torch.equal(ends[0]["1.weight"], ends[1]["1.weight"])


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_whole_numbers_reach_an_embedding_as_they_are(kind):
    """The same numbers as from floats that the model turns back, which is what one had to do otherwise."""

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(40, 6, padding_idx=0), nn.Linear(6, 2)

        def forward(self, x):
            assert x.dtype in (torch.int64, torch.float32)
            return self.out(self.embed(x.long()).mean(1))

    g = torch.Generator().manual_seed(0)
    words, labels = torch.randint(0, 40, (3, 20, 5), generator=g), torch.arange(20) % 2
    ends = []
    for as_given in (kind, torch.float32):
        given = [(x.to(as_given), n) for x, n in zip(words, (20, 7, 1), strict=True)]
        clients = [fs.ClientData((x[:n], labels[:n]), (x, labels)) for x, n in given]
        ends.append(fs.run(fs.FedSelect(lr=0.1), model=fs.Model.wrap(Words), data=clients, rounds=3).personal(1))
    assert all(torch.equal(v, ends[1][n]) for n, v in ends[0].items())


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_word_beyond_the_embedding_is_said_with_its_client(part):
    x, y = torch.arange(12).view(6, 2), torch.arange(6) % 2
    good, bad = {"train": (x, y), "test": (x, y)}, {"train": (x, y), "test": (x, y), part: (x + 9, y), "name": "Lyon"}
    clients = [fs.ClientData(**good), fs.ClientData(**bad), fs.ClientData(**good)]
    model = fs.Model.wrap(lambda: nn.Sequential(nn.Embedding(12, 4), nn.Flatten(), nn.Linear(8, 2)))
    with pytest.raises(
        fs.InputError, match=r"no row for one of its inputs, which range from 0 \(client 0\) to 20 \(client Lyon\)"
    ):
        fs.run(fs.FedAvg(), model=model, data=clients, rounds=1)


def test_pictures_and_numbers_are_not_mixed():
    x = torch.zeros(4, 1, 8, 8, dtype=torch.uint8)
    y = torch.arange(4) % 2
    with pytest.raises(fs.DataError, match=r"test inputs of type torch.float32; the first client trains on torch.uint8"):
        fs.Federation([fs.ClientData((x, y), (x.float() / 255, y))], 2)


def test_a_model_that_draws_is_refused_in_one_sentence(digits, recwarn):
    """With no word before it of clients one by one, which do not run either."""
    model = fs.Model.wrap(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.RReLU(), nn.Linear(16, 10)))
    with pytest.raises(fs.InputError, match=r"draws random numbers during training in a way that cannot be keyed by client"):
        Simulation(fs.FedAvg(), model, digits)
    assert not [w for w in recwarn if "one by one" in str(w.message)]


class Follows(nn.Module):
    """Takes the mean of what it has seen away, and keeps that in a buffer in one of several ways."""

    def __init__(self, how):
        super().__init__()
        self.how, self.first, self.out = how, nn.Linear(64, 6), nn.Linear(6, 10)
        self.register_buffer("mean", torch.zeros(6), persistent=how != "not persistent")
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x):
        h = self.first(x.flatten(1))
        now = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        if self.training and self.how == "replaced":
            self.mean = now
        elif self.training:
            self.mean.copy_(now)
        if self.training and self.how == "counted":
            self.seen += 1
        return self.out(h - self.mean)


@pytest.mark.parametrize("stackable", [True, False])
def test_statistics_may_be_replaced_or_written_to(digits, monkeypatch, stackable):
    monkeypatch.setattr(Fitted, "stackable", stackable)
    ends = []
    for how in ("written", "replaced"):
        model = fs.Model.wrap(lambda how=how: Follows(how))
        ends.append(fs.run(fs.FedSelect(), model=model, data=digits, rounds=3).personal(1))
    assert bool((ends[0]["mean"] != 0).all())
    for n, v in ends[0].items():
        assert torch.equal(v, ends[1][n]), n


@pytest.mark.parametrize(("how", "buffer"), [("counted", "seen"), ("not persistent", "mean")])
def test_a_buffer_that_clients_would_share_is_refused(digits, how, buffer):
    with pytest.raises(
        fs.InputError, match=rf"writes to its buffer '{buffer}' during training.* a persistent buffer of floats"
    ):
        Simulation(fs.FedAvg(), fs.Model.wrap(lambda: Follows(how)), digits)


def test_runs_that_share_a_model_share_nothing_of_it(digits):
    """What a run learns of a model, and the module its clients pass through, are that run's own."""
    model = fs.models.small_cnn(digits, width=2, norm="batch")
    before = {n: v.clone() for n, v in model.module.state_dict().items()}
    first, second = (Simulation(fs.FedAvg(), model, digits) for _ in range(2))
    first.step()
    first.fitted.stackable = False
    assert second.fitted.stackable
    assert first.fitted.module is not second.fitted.module is not model.module
    assert all(torch.equal(v, before[n]) for n, v in model.module.state_dict().items())
    assert not model.module._forward_hooks


def test_a_class_that_needs_arguments_is_not_yet_a_model(digits):
    with pytest.raises(fs.InputError, match=r"Linear needs in_features, out_features: lambda: Linear\(...\)"):
        fs.run(fs.Local(), model=nn.Linear, data=digits, rounds=1)


@dataclass(frozen=True)
class Undeployable(fs.Partial):
    """FedPer, but for what a server over a network could not check."""

    wrong: str = ""

    def client(self, work, state, down):
        state, up = super().client(work, state, down)
        if self.wrong == "weight":
            up = replace(up, weight=work.n.double().sqrt())
        return state, up

    def wants(self, model, state):
        return dict.fromkeys(model.names, True) if self.wrong == "wants" else super().wants(model, state)


@pytest.mark.parametrize(("wrong", "said"), [("weight", "weight must be 1 or its number"), ("wants", "takes other entries of")])
def test_what_a_deployment_would_refuse_is_said_in_simulation(digits, wrong, said):
    method = Undeployable(fs.Fixed(lambda model, name: model.is_head(name)), (("all", 1),), wrong=wrong)
    with pytest.raises(fs.InputError, match=said):
        Simulation(method, fs.models.mlp(digits, hidden=4), digits).step()


def test_a_checkpoint_of_packed_rows_goes_with_any_headline(digits, tmp_path):
    """Scores of models that are forgotten lie in the task's own order, whatever the run shows first."""

    def simulation(headline):
        how = {"rows": "personal", "chunk": 1, "fraction": 0.4, "headline": headline}  # one client of three trains in a round
        return Simulation(fs.FedSelect(), fs.models.mlp(digits), digits, **how)

    one, other = simulation(None), simulation("test_loss")
    one.step()
    one.save(tmp_path)
    assert other.resume(tmp_path)
    expected, found = one.step()["clients"], other.step()["clients"]
    for name in ("accuracy", "test_loss"):
        assert found[name] == expected[name]
    assert found["test_loss_local"] == expected["test_loss"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rounds": "3"}, "rounds must be a whole number, not '3'"),
        ({"rounds": 2.5}, "rounds must be a whole number, not 2.5"),
        ({"seed": 1.5}, "seed must be a whole number, not 1.5"),
        ({"fraction": "x"}, "fraction must be a number, not 'x'"),
        ({"eval_every": "1"}, "eval_every must be a whole number, not '1'"),
        ({"late": "2@1"}, r"late is how many clients join late and in which round, such as \(2, 10\), not '2@1'"),
        ({"late": (1, 1.5)}, "late is how many clients join late and in which round"),
        ({"chunk": 1.5}, "chunk must be at least 1 or auto, not 1.5"),
        ({"deterministic": "yes"}, "deterministic must be True or False, not 'yes'"),
        ({"headline": 3}, "headline must be the name of a metric, not 3"),
    ],
    ids=str,
)
def test_an_option_of_a_run_of_another_kind_is_refused(digits, wrong, said):
    with pytest.raises(fs.InputError, match=said):
        fs.run(fs.FedAvg(), model=fs.models.mlp(digits), data=digits, **{"rounds": 1, **wrong})


def test_rounds_of_a_simulation_are_whole_numbers(digits):
    with pytest.raises(fs.InputError, match="rounds must be a whole number, not '3'"):
        Simulation(fs.FedAvg(), fs.models.mlp(digits), digits, rounds="3")


def test_one_of_several_gpus_is_made_the_current_one(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert pick_device("cuda:1") == torch.device("cuda")
    assert chosen == [1]
    with pytest.raises(fs.InputError, match="there is no cuda:2 here; choose from cuda:0 to cuda:1"):
        pick_device("cuda:2")
    monkeypatch.setattr(ranks, "world", lambda: 2)
    with pytest.raises(fs.InputError, match="torchrun gives each process one GPU; use device=cuda"):
        pick_device("cuda:1")
