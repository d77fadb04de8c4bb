"""Several inputs as a program has them at hand: arrays, lists and datasets in, predictions out, saved, loaded and pickled."""

import pickle
from collections import UserDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import fedselect as fs
from fedselect.serve.predictor import BATCH

RNG = np.random.default_rng(0)


class Both(nn.Module):
    """Words, a mask and numbers; the scores are the second thing it returns."""

    def __init__(self):
        super().__init__()
        self.embed, self.fc = nn.Embedding(10, 3), nn.Linear(3 + 2, 2)

    def forward(self, words, mask, numbers):
        seen = (self.embed(words) * mask.unsqueeze(-1)).mean(1)
        return seen, self.fc(torch.cat([seen, numbers], 1))


def arrays(n):
    words, numbers = RNG.integers(0, 10, (n, 4)), RNG.normal(size=(n, 2))
    return {"words": words, "mask": words > 1, "numbers": numbers}


def part(n):
    x = arrays(n)
    return x, (x["numbers"][:, 0] > 0).astype(int)


def tensors(x):
    return {n: torch.as_tensor(v if v.dtype.kind != "f" else v.astype(np.float32)) for n, v in x.items()}


PARTS = [(part(n), part(7)) for n in (9, 14, 6)]
MODEL = fs.Model.wrap(Both, output=1)


def federation(form=lambda x: x):
    return fs.Federation([fs.ClientData(*((form(x), y) for x, y in parts), name=f"c{i}") for i, parts in enumerate(PARTS)], 2)


def run(data, model=MODEL):
    return fs.run(fs.FedSelect(lr=0.5), model=model, data=data, rounds=3)


class Samples(Dataset):
    """One sample at a time, its inputs a dict or a tuple."""

    def __init__(self, x, y, form=dict):
        self.x, self.y, self.form = x, y, form

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        one = {n: v[i] for n, v in self.x.items()}
        return (one if self.form is dict else tuple(one.values())), int(self.y[i])


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x,
        lambda x: {n: v.tolist() for n, v in x.items()},
        lambda x: {**x, "words": torch.as_tensor(x["words"])},
        UserDict,
    ],
    ids=["arrays", "lists", "mixed", "mapping"],
)
def test_a_dict_of_whatever_there_is_becomes_tensors(form):
    data, expected = federation(form), federation(tensors)
    assert data.layout == expected.layout
    assert [f.kind for f in data.layout.fields] == ["integers", "bools", "floats"]
    for mine, theirs in zip(data.clients, expected.clients, strict=True):
        assert torch.equal(mine.train[0], theirs.train[0])
        assert torch.equal(mine.test[0], theirs.test[0])
    assert run(data).history[-1]["clients"] == run(expected).history[-1]["clients"]


def test_a_tuple_is_several_inputs_and_a_list_is_one():
    data = federation(lambda x: tuple(x.values()))
    assert not data.layout.named
    assert run(data).history[-1]["clients"] == run(federation()).history[-1]["clients"]
    rows = fs.ClientData(([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [0, 1, 0]))
    assert rows.train[0].shape == (3, 2)
    with pytest.raises(
        fs.DataError, match=r"input_0 has 2 inputs but 3 targets; .*A tuple means several inputs; a list has one row"
    ):
        fs.ClientData((([1.0, 2.0], [3.0, 4.0], [5.0, 6.0]), [0, 1, 0]))


@pytest.mark.parametrize("form", [dict, tuple])
def test_datasets_may_give_several_inputs(form):
    made = [{"train": Samples(*train, form), "test": Samples(*test, form)} for train, test in PARTS]
    data = fs.Federation.from_datasets([c["train"] for c in made], test=[c["test"] for c in made], classes=2)
    expected = federation(lambda x: x if form is dict else tuple(x.values()))
    assert data.layout == expected.layout
    for mine, theirs in zip(data.clients, expected.clients, strict=True):
        assert torch.equal(mine.train[0], theirs.train[0])


def test_samples_of_a_dataset_have_the_same_inputs():
    samples = [({"a": 1.0}, 0), ({"b": 1.0}, 1)]
    odd = type("Odd", (Dataset,), {"__len__": lambda self: 2, "__getitem__": lambda self, i: samples[i]})()
    with pytest.raises(fs.DataError, match="train has other inputs in sample 1 than in sample 0"):
        fs.ClientData(odd)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"words": [["a"] * 4] * 9}, "client Lyon: train, words has inputs that are texts"),
        ({"words": [[1], [1, 2]]}, "client Lyon: train, words has inputs of different shapes"),
        ({"words": np.zeros((8, 4), int)}, "client Lyon: train, words has 8 inputs but 9 targets"),
        ({"words": 1}, "client Lyon: train, words has no list of inputs"),
    ],
)
def test_what_is_wrong_is_said_with_the_name_of_the_input(change, said):
    with pytest.raises(fs.DataError, match=said):
        fs.ClientData(({**arrays(9), **change}, np.zeros(9, int)), name="Lyon")


def test_from_arrays_divides_all_inputs_alike():
    x, y = part(60)
    who = np.repeat(["north", "south", "west"], 20)
    data = fs.Federation.from_arrays(x, np.where(y > 0, "ill", "well"), who, test_share=0.25, seed=1)
    alone = fs.Federation.from_arrays(x["numbers"], y, who, test_share=0.25, seed=1)
    for mine, theirs in zip(data.clients, alone.clients, strict=True):
        assert torch.equal(data.layout.parts(mine.train[0])[2], theirs.train[0])
    assert set(run(data).predict("south", x)) <= {"ill", "well"}
    with pytest.raises(fs.DataError, match="x, words, has 5 rows and y has 60"):
        fs.Federation.from_arrays({**x, "words": x["words"][:5]}, y, who)


@pytest.mark.parametrize("by_name", [True, False])
def test_predictions_are_those_of_the_plain_module(by_name):
    result = run(federation() if by_name else federation(lambda x: tuple(x.values())))
    x = arrays(BATCH + 5)
    given = x if by_name else tuple(x.values())
    for i in range(3):
        plain = Both().eval()
        plain.load_state_dict(result.personal(i))
        with torch.no_grad():
            scores = plain(**tensors(x))[1]
        assert result.predict(i, given).tolist() == scores.argmax(1).tolist()
        np.testing.assert_allclose(result.predict_proba(f"c{i}", given), scores.softmax(1).numpy(), rtol=1e-5, atol=1e-6)


def test_predictions_on_inputs_as_the_federation_holds_them():
    result = run(federation())
    assert result.predict(1, result.simulation.data.clients[1].test[0]).tolist() == result.predict(1, PARTS[1][1][0]).tolist()


@pytest.mark.parametrize(
    ("x", "said"),
    [
        ({"words": np.zeros((2, 4), int)}, "are a dict of words; the first client trains on a dict of words, mask, numbers"),
        (np.zeros((2, 3)), "are a Tensor; the first client trains on a dict"),
        (
            {**arrays(2), "mask": np.zeros((2, 4))},
            r"mask: samples are floats of shape \(4,\); the first client trains on bools",
        ),
        ({**arrays(2), "numbers": np.zeros((3, 2))}, "have 2 rows of words but 3 of numbers"),
    ],
)
def test_predictions_on_other_inputs_are_refused(x, said):
    with pytest.raises(fs.DataError, match=said):
        run(federation()).predict(0, x)


def test_a_model_of_one_input_is_given_one():
    x = RNG.normal(size=(20, 3))
    data = fs.Federation.from_arrays(x, np.arange(20) % 2, np.arange(20) // 10)
    with pytest.raises(fs.DataError, match="x is a dict, but the model takes one input"):
        run(data, "mlp").predict(0, {"x": x})


def test_a_saved_result_predicts(tmp_path):
    result = run(federation())
    again = fs.load_result(result.save(tmp_path / "result"), model=Both)
    x = arrays(20)
    for i in range(3):
        assert again.predict(i, x).tolist() == result.predict(i, x).tolist()
        assert again.predict_proba(i, x).tolist() == result.predict_proba(i, x).tolist()
    with pytest.raises(fs.DataError, match="the first client trains on a dict of words, mask, numbers"):
        again.predict(0, (x["words"],))


def test_data_models_simulations_and_results_can_be_pickled():
    data, model = pickle.loads(pickle.dumps((federation(), MODEL)))
    assert data.layout == federation().layout
    assert model.output == 1
    result = run(federation())
    assert run(data, model).history[-1]["clients"] == result.history[-1]["clients"]
    again = pickle.loads(pickle.dumps(result))
    x = arrays(20)
    assert again.predict(2, x).tolist() == result.predict(2, x).tolist()
    assert again.simulation.step()["clients"] == result.simulation.step()["clients"]


def test_a_client_is_pickled_without_the_rows_of_others():
    whole = torch.zeros(100_000, 4)
    client = fs.ClientData(({"numbers": whole[:10]}, torch.zeros(10, dtype=torch.int64)))
    stored = pickle.dumps(client)
    assert len(stored) < 10_000
    assert pickle.loads(stored).train[0]["numbers"].shape == (10, 4)
