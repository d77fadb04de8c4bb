"""Arrays, frames and torch datasets as federated data; what is wrong with them is said in a sentence."""

import copy
import pickle

import numpy as np
import pandas
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

import fedselect as fs

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 3))
Y = np.arange(24) % 2
WHO = np.repeat(["b", "a", "c"], 8)


class Pairs(Dataset):
    """Samples that are made when they are asked for."""

    def __init__(self, count, sample=lambda i: (np.full(3, i, np.float64), i % 2)):
        self.count, self.sample = count, sample

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return self.sample(i)


def test_arrays_become_tensors_once():
    got = fs.ClientData(train=(X, Y.astype(np.int8)), test=(X[:2].tolist(), [True, False]))
    assert [v.dtype for v in (*got.train, *got.test)] == [torch.float32, torch.int64, torch.float32, torch.int64]
    assert torch.equal(got.train[0], torch.from_numpy(X).float())
    assert got.test[1].tolist() == [1, 0]
    assert fs.ClientData(train=(X.astype(np.float16), Y)).train[0].dtype == torch.float16


def test_tensors_stay_as_they_are():
    x, y = torch.rand(4, 2).double(), torch.arange(4).int()
    got = fs.ClientData((x, y))
    assert got.train[0] is x
    assert got.train[1] is y


def test_pictures_stay_bytes_and_tokens_become_int64():
    pictures = RNG.integers(0, 255, (4, 1, 8, 8), dtype=np.uint8)
    assert fs.ClientData((pictures, Y[:4])).train[0].dtype == torch.uint8
    assert fs.ClientData((pictures[:, 0, 0].astype(np.int32), Y[:4])).train[0].dtype == torch.int64


def test_arrays_that_may_not_be_written_or_run_backwards_are_copied():
    x = X[::-1]
    x.flags.writeable = False
    assert torch.equal(fs.ClientData((x, Y)).train[0], torch.from_numpy(X[::-1].copy()).float())


def test_a_dataset_is_read_once():
    got = fs.ClientData(train=Pairs(5), test=TensorDataset(torch.rand(2, 3), torch.arange(2)))
    assert torch.equal(got.train[0], torch.arange(5.0).view(-1, 1).expand(5, 3))
    assert got.train[1].tolist() == [0, 1, 0, 1, 0]
    assert got.tested == 2
    numbers = fs.ClientData(Pairs(2, lambda i: (torch.zeros(3), torch.tensor(0.5)))).train[1]
    assert numbers.tolist() == [0.5, 0.5]


class Stream(IterableDataset):
    def __iter__(self):
        yield from ()


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ((X, Y[:3]), "client Lyon: train has 24 inputs but 3 targets; give one target per input, in the same order"),
        ((X, 3), "client Lyon: train has 24 inputs but no list of targets"),
        (([[1.0], [1.0, 2.0]], [0, 1]), "client Lyon: train has inputs of different shapes; pad or crop them to one shape"),
        ((X, WHO), r"client Lyon: train has targets that are texts; number the classes from 0, or let .*from_arrays"),
        ((np.array([["x"]]), [0]), r"client Lyon: train has inputs that are texts; .*fs.Federation.from_frame"),
        ((np.array([object()]), [0]), r"client Lyon: train has inputs that are not numbers \(a object\)"),
        ((X.astype(complex), Y), "client Lyon: train has inputs that are values of type complex128"),
        (Stream(), "client Lyon: train is a Stream, which has no length; give one with __len__ and __getitem__, or arrays"),
        (Pairs(2, lambda i: {"x": 1}), r"sample 0 of the train dataset is a dict; let it return a pair \(input, target\)"),
        (Pairs(2, lambda i: (torch.zeros(2 + i), 0)), r"train has inputs of the shapes \(2,\) and \(3,\); pad or crop"),
    ],
)
def test_what_cannot_be_used_is_said_at_once(train, said):
    with pytest.raises(fs.DataError, match=said):
        fs.ClientData(train=train, name="Lyon")


def test_a_dataset_of_pil_images_wants_a_transform():
    image = pytest.importorskip("PIL.Image")
    with pytest.raises(fs.DataError, match="PIL images; add a transform to tensors to the dataset"):
        fs.ClientData(Pairs(2, lambda i: (image.new("L", (2, 2)), 0)))


def test_arrays_are_divided_by_client():
    got = fs.Federation.from_arrays(X, Y, WHO, val_share=0.25, seed=3)
    assert got.names == ["a", "b", "c"]
    assert (got.classes, got.shape, got.name) == (2, (3,), "arrays")
    assert [(len(c.train[1]), len(c.val[1]), c.tested) for c in got.clients] == [(4, 2, 2)] * 3
    rows = torch.cat([p[0] for p in (got.clients[0].train, got.clients[0].val, got.clients[0].test)])
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, X[8:16].astype(np.float32).tolist()))
    again, other = (fs.Federation.from_arrays(X, Y, WHO, seed=s).clients[0].train[0] for s in (3, 4))
    assert torch.equal(again, fs.Federation.from_arrays(X, Y, WHO, seed=3).clients[0].train[0])
    assert not torch.equal(again, other)


def test_arrays_are_divided_as_tables_are():
    frame = pandas.DataFrame({"who": WHO, "x": np.arange(24.0), "y": Y})
    by_frame = fs.Federation.from_frame(frame, client="who", target="y", seed=5)
    by_array = fs.Federation.from_arrays(np.arange(24.0)[:, None], Y, WHO, seed=5)
    for a, b in zip(by_frame.clients, by_array.clients, strict=True):
        assert torch.equal(a.train[1], b.train[1])
        assert torch.equal(a.test[1], b.test[1])


def test_a_split_says_which_rows_are_what_and_tests_are_optional():
    split = np.array(["train", "train", "test", "valid", "Train", "train", "train", "test"] * 3)
    split[16:] = "train"
    got = fs.Federation.from_arrays(X, Y, WHO, split=split)
    assert torch.equal(got.clients[1].test[0], torch.from_numpy(X[[2, 7]]).float())
    assert torch.equal(got.clients[1].val[0], torch.from_numpy(X[[3]]).float())
    assert (got.clients[2].test, got.clients[2].tested, got.has("test")) == (None, 0, True)
    untested = fs.Federation.from_arrays(X, Y, WHO, test_share=0)
    assert not untested.has("test")
    assert [len(c.train[1]) for c in untested.clients] == [8, 8, 8]


def test_classes_that_are_texts_are_numbered_and_keep_their_names():
    got = fs.Federation.from_arrays(X, np.where(Y == 1, "ill", "healthy"), WHO, split=["train"] * 24)
    assert (got.class_names, got.classes) == (("healthy", "ill"), 2)
    assert got.clients[0].train[1].tolist() == Y[8:16].tolist()
    series = pandas.Series(np.where(Y == 1, "ill", "healthy")).astype("category")
    assert fs.Federation.from_arrays(pandas.DataFrame(X), series, pandas.Series(WHO)).class_names == ("healthy", "ill")


def test_ids_are_sorted_as_numbers_and_floats_of_pandas_are_whole():
    ids = pandas.Series(np.repeat([10.0, 9.0, 2.0], 8))
    assert fs.Federation.from_arrays(X, Y, ids).names == ["2", "9", "10"]


def test_classes_in_a_column_are_classes():
    got = fs.Federation.from_arrays(X, Y[:, None], WHO)
    assert (got.classes, got.target_shape) == (2, ())
    assert fs.Federation.from_arrays(X, torch.from_numpy(Y)[:, None], WHO).target_shape == ()
    assert fs.Federation.from_arrays(X, X[:, :1], WHO).target_shape == (1,)


def test_measurements_that_are_whole_numbers_are_answered():
    data = fs.Federation.from_arrays(X.round().astype(int), Y, WHO)
    with pytest.raises(fs.InputError, match="whole numbers are for an embedding; give measurements as floats"):
        fs.run("fedavg", model="mlp", data=data, rounds=1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"x": np.zeros((24, 8, 8, 3), np.uint8)}, r"channels come first: x.transpose\(0, 3, 1, 2\) of an array"),
        ({"y": Y[:5]}, "x has 24 rows and y has 5; give each of them one row a sample"),
        ({"client": WHO[:5]}, "x has 24 rows and client has 5"),
        ({"split": ["train"]}, "x has 24 rows and split has 1"),
        ({"split": ["train"] * 23 + ["holdout"]}, "split says 'holdout' in row 23; it must say train, val or test"),
        ({"split": ["test"] * 8 + ["train"] * 16}, "client b has no rows whose split is train"),
        ({"client": [*WHO[:23], None]}, "row 23 has no client; say whose it is, or remove it"),
        ({"client": np.where(np.arange(24) == 4, np.nan, 1.0)}, "row 4 has no client"),
        ({"client": np.zeros((24, 1))}, r"client has the shape \(24, 1\); give one id for each row"),
        ({"y": np.array(["a"] * 23 + [None], object)}, "y is None in row 23 and a text elsewhere"),
        ({"y": np.where(Y == 1, 1, -1)}, r"client a has the train.* label -1; labels must lie in 0 to 1"),
        ({"client": np.arange(24)}, r"client 0 is too small, with 1 row\(s\) for training and testing"),
        ({"x": np.where(X[9, 0] == X, np.nan, X)}, "client a has NaN or Inf in its t"),
    ],
)
def test_what_is_wrong_with_arrays_is_said(given, said):
    with pytest.raises(fs.DataError, match=said):
        fs.Federation.from_arrays(**{"x": X, "y": Y, "client": WHO, **given})


FRAME = pandas.DataFrame({
    "hospital": WHO, "age": RNG.integers(20, 90, 24), "sex": ["f", "m"] * 12, "ward": [1, 2, 3] * 8, "id": range(24), "ill": Y,
})  # fmt: skip


def test_a_frame_has_the_options_of_a_table(tmp_path):
    FRAME.to_csv(tmp_path / "f.csv", index=False)
    options = {"client": "hospital", "target": "ill", "drop": "id", "categories": "ward", "val_share": 0.2, "seed": 4}
    a, b = fs.load("table", path=str(tmp_path / "f.csv"), **options), fs.Federation.from_frame(FRAME, **options)
    assert a.names == b.names
    assert a.clients[0].schema.inputs == b.clients[0].schema.inputs
    for one, other in zip(a.clients, b.clients, strict=True):
        assert all(
            torch.equal(u, v) for p in ("train", "val", "test") for u, v in zip(getattr(one, p), getattr(other, p), strict=True)
        )


def test_lists_of_columns_and_pandas_categories():
    coded = FRAME.assign(ward=FRAME["ward"].astype("category"))
    got = fs.Federation.from_frame(coded, client="hospital", target=["age", "id"], drop=["ill"], test_share=0)
    assert got.clients[0].schema.inputs == ("sex=f", "sex=m", "ward=1", "ward=2", "ward=3")
    assert got.target_shape == (2,)
    assert not got.has("test")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"client": "hospitl"}, "there is no column 'hospitl'; did you mean 'hospital'"),
        ({"target": "illl"}, "there is no column 'illl'; did you mean 'ill'"),
        ({"frame": FRAME.assign(ward=["1", "2", "x"] * 8)}, "categories='ward' if these are names"),
        ({"frame": FRAME.assign(ward=pandas.Timestamp("2024-01-01"))}, "leave it out: drop='ward', or .* time='ward'"),
        ({"frame": "f.csv"}, r"a table in memory; a file is read by fs.load\('table', path='f.csv', ...\)"),
        ({"frame": FRAME.assign(hospital=[None, *WHO[1:]])}, "row 1 has no hospital; say which client it is of"),
    ],
)
def test_what_is_wrong_with_a_frame_is_said_in_terms_of_arguments(options, said):
    given = {"frame": FRAME, "client": "hospital", "target": "ill", "drop": "id", **options}
    with pytest.raises(fs.FedselectError, match=said):
        fs.Federation.from_frame(given.pop("frame"), **given)


def test_datasets_by_client():
    got = fs.Federation.from_datasets(
        {"north": Pairs(5), "south": Subset(Pairs(9), range(3))}, test={"south": Pairs(2)}, classes=4
    )
    assert (got.names, got.classes, got.name) == (["north", "south"], 4, "datasets")
    assert [(len(c.train[1]), c.tested) for c in got.clients] == [(5, 0), (3, 2)]
    assert fs.Federation.from_datasets([Pairs(4), Pairs(3)], test=[Pairs(1), Pairs(2)]).names == ["0", "1"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"train": Pairs(3)}, "give a dataset for each client, as a list or a dict by name"),
        ({"train": 3}, "train is a list of datasets, one for each client, or a dict of them by name, not a int"),
        ({"train": [Pairs(3)], "test": [Pairs(1), Pairs(1)]}, "test has a client 1 that train does not have; there are 0"),
        (
            {"train": [Pairs(3), Pairs(3)], "test": [Pairs(1)]},
            "train has 2 clients and test 1; give one dataset for",
        ),
        ({"train": {"a": Pairs(3)}, "val": {"b": Pairs(1)}}, "val has a client b that train does not have"),
        ({"train": []}, "there are no clients"),
    ],
)
def test_what_is_wrong_with_datasets_is_said(given, said):
    with pytest.raises(fs.DataError, match=said):
        fs.Federation.from_datasets(given.pop("train"), **given)


def test_a_list_of_something_else_is_no_federation():
    with pytest.raises(fs.DataError, match=r"clients must be fs.ClientData, not tuple; .*from_arrays\(x, y, client\)"):
        fs.Federation([(X, Y)])


def test_data_survives_pickle_and_copies_without_its_pools():
    x, y = torch.rand(300, 50), torch.arange(300) % 3
    cuts = [slice(at, at + 10) for at in range(0, 300, 10)]
    data = fs.Federation([fs.ClientData((x[c], y[c]), (x[c], y[c])) for c in cuts], pools={"train": (x, y)})
    kept = pickle.dumps(data)
    assert len(kept) < 2 * (x.nbytes + y.nbytes) + 30 * 3000  # each client's own samples, not the whole pool for each
    for again in (pickle.loads(kept), copy.deepcopy(data)):
        assert repr(again) == repr(data)
        for a, b in zip(again.clients, data.clients, strict=True):
            assert torch.equal(a.train[0], b.train[0])
            assert torch.equal(a.test[1], b.test[1])
            assert a.name == b.name
        assert again.split("train", torch.float32).sizes == data.split("train", torch.float32).sizes


def test_a_notebook_lists_the_clients():
    data = fs.Federation([fs.ClientData((X[:4], Y[:4]), (X[:2], Y[:2]) if i else None, name=f"<{i}>") for i in range(25)])
    html = data._repr_html_()
    assert "Federation(&#x27;tensors&#x27;: 25 clients, 2 classes, inputs (3,))" in html
    assert "<tr><td>&lt;0&gt;</td><td>4</td><td></td></tr><tr><td>&lt;1&gt;</td><td>4</td><td>2</td></tr>" in html
    assert html.count("<tr>") == 1 + 20 + 1
    assert "... 5 more" in html
