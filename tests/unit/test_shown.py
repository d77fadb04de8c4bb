"""What a prompt shows: the call that makes a thing, without what is the default; and that things survive pickle and copies."""

import copy
import pickle
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import fedselect as fs

SHOWN = [
    (fs.FedSelect(), "FedSelect()"),
    (fs.FedSelect(limit=0.25), "FedSelect(limit=0.25)"),
    (fs.FedSelect(0.05, 0.2, select=fs.Reading(scope="tensor")), "FedSelect(limit=0.2, select=Reading(scope='tensor'))"),
    (fs.FedSelect(personal_lr=None), "FedSelect(personal_lr=None)"),
    (fs.FedAvg(lr=torch.tensor([0.1, 0.25])), "FedAvg(lr=[0.1, 0.25])"),
    (fs.FedAvg(lr=1 + torch.arange(9.0)), "FedAvg(lr=[1, 2, 3, 4, 5, 6, 7, 8, ...])"),
    (fs.Ditto(lam=0.5), "Ditto(lam=0.5)"),
    (fs.Fixed(fs.layers("fc.*")), "Fixed(personal=layers('fc.*'))"),
    (fs.Training(batch_size=8, optimizer=fs.Adam(beta1=0.5)), "Training(batch_size=8, optimizer=Adam(beta1=0.5))"),
    (fs.Regression(), "Regression()"),
    (fs.Sequences(ignore=-1), "Sequences(ignore=-1)"),
    (fs.Mean(server_momentum=0.9), "Mean(server_momentum=0.9)"),
    (fs.Disagreement(window=3), "Disagreement(window=3)"),
]  # fmt: skip


@pytest.mark.parametrize(("thing", "said"), SHOWN, ids=[said for _, said in SHOWN])
def test_only_what_is_not_the_default_is_shown(thing, said):
    assert repr(thing) == said


def test_a_changed_copy_no_longer_goes_by_the_alias():
    assert repr(replace(fs.FedAvg(), lr=1.0)).startswith("Partial(select=Fixed(personal=nothing), phases=(('all', 3),), lr=1.0")


def test_a_method_of_ones_own_is_shown_alike_and_its_own_repr_is_kept():
    @dataclass(frozen=True)
    class Mine(fs.Regression):
        more_of_it: int = 1

    @dataclass(frozen=True)
    class Other(fs.Regression):
        def __repr__(self):
            return "as I like"

    assert repr(Mine(more_of_it=2)) == f"{Mine.__name__}(more_of_it=2)"
    assert repr(Other()) == "as I like"


def test_a_model_is_shown_by_its_size_and_head():
    def small_net():
        return nn.Sequential(nn.Linear(30, 60), nn.ReLU(), nn.Linear(60, 3))

    assert repr(fs.Model.wrap(small_net)) == "Model(small_net, 2,043 parameters, head='2')"  # 30*60+60 + 60*3+3
    assert repr(fs.Model.wrap(nn.Linear(2, 3))) == "Model(Linear, 9 parameters)"


@pytest.mark.parametrize("name", [n for n in fs.METHODS if n != "layers"])
def test_methods_survive_pickle_and_copies(name):
    method = fs.METHODS[name](lr=0.05)
    for again in (pickle.loads(pickle.dumps(method)), copy.deepcopy(method)):
        assert again == method
        assert repr(again) == repr(method)
        assert "lr=0.05" in repr(again)


def test_chosen_layers_survive_pickle():
    method = fs.PersonalLayers(layers="fc.*")
    assert pickle.loads(pickle.dumps(method)) == method != fs.PersonalLayers(layers="conv1.*")
    assert pickle.loads(pickle.dumps(fs.Training(optimizer="adam", schedule="cosine"))) == fs.Training(
        optimizer="adam", schedule="cosine"
    )
