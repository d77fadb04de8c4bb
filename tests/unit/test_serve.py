"""Exported models predict from raw inputs, by themselves: tables, arrays and pictures, in every format."""

import csv
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.stats import binomtest

import fedselect as fs
from fedselect.core.errors import InputError, RunError
from fedselect.data.columns import Column, Schema
from fedselect.data.frame import Frame
from fedselect.models.networks import rebuilt
from fedselect.serve.card import interval, wilson
from fedselect.serve.module import OfRows
from fedselect.tasks import Regression

FORMATS = ["safetensors", "pt2", "onnx"]
AGES, KINDS = [31.5, None, 77.0, 40.0], ["b", "a", None, "new"]


def schema(gaps=True, variance=4.0):
    columns = (
        Column("age", "number", count=9, gaps=gaps, mean=50.0, variance=variance),
        Column("kind", "category", ("a", "b", "c"), count=9),
        Column("level", "number", count=9, gaps=False, mean=1e6, variance=9.0),
        Column("never", "number", count=0, gaps=True),
    )
    return Schema(columns, ("ill",), ("no", "yes"), rows=9)


class Plain(torch.nn.Module):
    """Hands its inputs on."""

    def forward(self, x):
        return x


def of_rows(columns):
    class Bare:
        outputs_of = staticmethod(lambda y: y)

    class Split:
        scale = shift = None

    return OfRows(columns, Bare, Plain(), Split, fs.Classification()).eval()


values = st.one_of(st.none(), st.floats(-1e9, 1e9, allow_nan=False))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(values, st.sampled_from(["a", "b", "c", None]), values), min_size=1, max_size=6),
    st.booleans(),
    st.sampled_from([0.0, 4.0]),
)
def test_a_graph_makes_the_features_that_the_schema_makes(rows, gaps, variance):
    age, kind, level = (list(column) for column in zip(*rows, strict=True))
    own = schema(gaps, variance)
    table = Frame.of({"age": np.array(age, float), "kind": kind, "level": np.array(level, float), "never": [1.0] * len(rows)})
    wanted = own.features(table)
    assert torch.allclose(of_rows(own)(own.numbers(table)), wanted, rtol=1e-6, atol=1e-6)
    back = of_rows(own)(own.numbers_of(wanted))
    assert torch.allclose(back, wanted, rtol=1e-4, atol=1e-4)


def test_numbers_are_columns_as_they_are_with_nan_for_gaps_and_unknown_categories():
    table = {"age": AGES, "kind": KINDS, "level": [1.0, 2.0, 3.0, 4.0], "never": [1.0, 2.0, 3.0, 4.0]}
    with pytest.warns(UserWarning, match="column kind is 'new' in 1 row"):
        found = schema().numbers(table)
    assert found.dtype == torch.float64
    wanted = [[31.5, 1, 1, 1], [np.nan, 0, 2, 2], [77, np.nan, 3, 3], [40, np.nan, 4, 4]]
    assert torch.equal(found.nan_to_num(-1), torch.tensor(wanted, dtype=torch.float64).nan_to_num(-1))


@pytest.mark.parametrize(("hits", "many"), [(0, 5), (5, 5), (37, 50), (1, 200)])
def test_the_interval_of_a_share_is_wilsons(hits, many):
    wanted = binomtest(hits, many).proportion_ci(0.95, method="wilson")
    assert wilson(hits, many) == pytest.approx((wanted.low, wanted.high))


def test_intervals_of_accuracy_and_of_errors():
    task = fs.Classification()
    outputs, targets = torch.eye(2)[torch.tensor([0, 1] * 20)], torch.tensor([0, 1, 1, 0] * 10)
    assert interval(task.measured()[0], outputs, targets) == pytest.approx(wilson(20, 40))
    error = Regression().measured()[0]
    noise = torch.randn(400, 1, generator=torch.Generator().manual_seed(0))
    low, high = interval(error, noise, torch.zeros(400))
    spread = 1.96 * float(noise.abs().std()) / 20  # of a mean of 400, by the normal law
    assert (low, high) == pytest.approx((float(noise.abs().mean()) - spread, float(noise.abs().mean()) + spread), rel=0.03)
    assert interval(error, noise[:1], torch.zeros(1)) is None


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A table of two clients with gaps and categories, and a third file without targets."""
    place, draw = tmp_path_factory.mktemp("table"), np.random.default_rng(0)
    lines = []
    for i in range(120):
        age, kind = draw.normal(50, 10), draw.choice(["a", "b", "c"])
        ill = "yes" if age + 10 * (kind == "b") + draw.normal(0, 3) > 53 else "no"
        lines.append([f"s{i % 2}", "" if draw.random() < 0.1 else f"{age:.2f}", "" if draw.random() < 0.1 else kind, ill])
    for name, width in (("all.csv", 4), ("new.csv", 3)):
        with (place / name).open("w", newline="") as file:
            csv.writer(file).writerows([["site", "age", "kind", "ill"][:width], *(row[:width] for row in lines)])
    return place


def needs(form):
    if form == "onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")


def lines(text):
    return list(csv.DictReader(text.splitlines()))


@pytest.fixture(scope="module")
def trained(table):
    """A run on the table, made once."""
    from fedselect.runs import runner
    from fedselect.runs.config import Config

    said = {
        "data": {"name": "table", "path": str(table / "all.csv"), "client": "site", "target": "ill"},
        "method": {"name": "fedavg+ft", "lr": 0.1}, "model": {"name": "mlp"}, "rounds": 4,
    }  # fmt: skip
    runner.start(Config.from_dict(said, "test"), table / "run")
    return table / "run"


@pytest.mark.parametrize("form", FORMATS)
def test_a_model_for_tables_predicts_from_raw_rows_in_every_format(cli, table, trained, form, tmp_path):
    needs(form)
    out = tmp_path / f"m.{form}"
    assert cli("export", trained, "--client", 1, "--format", form, "--out", out).code == 0
    said = cli("predict", out, table / "new.csv", "--proba")
    assert said.code == 0, said
    found = lines(said.out)
    assert list(found[0]) == ["sample", "ill", "p(no)", "p(yes)"]
    assert len(found) == 120
    wanted = fs.load_result(trained).predict(1, table / "new.csv")
    assert [row["ill"] for row in found] == wanted.tolist()
    assert all(len(row["p(no)"]) <= 8 for row in found)  # six digits
    assert all(float(row["p(no)"]) + float(row["p(yes)"]) == pytest.approx(1, abs=1e-5) for row in found)
    model = fs.load_model(out)
    assert model.classes == ("no", "yes")
    assert model.predict({"age": [20.0, None], "kind": ["a", None]}).shape == (2,)
    card = out.with_suffix(".md").read_text()
    for part in (
        "client s1 in a federation of 2",
        "accuracy",
        "95% interval",
        "| kind | one of a, b, c |",
        "fedselect predict",
    ):
        assert part in card


def test_predictions_go_to_a_file_whole(cli, table, trained, tmp_path):
    assert cli("export", trained, "--client", 0, "--out", tmp_path / "m.safetensors").code == 0
    said = cli("predict", tmp_path / "m.safetensors", table / "new.csv", "--out", tmp_path / "p.csv")
    assert "wrote 120 predictions" in said.out
    assert len(lines((tmp_path / "p.csv").read_text())) == 120
    assert "is not a directory" in cli(
        "predict", tmp_path / "m.safetensors", table / "new.csv", "--out", tmp_path / "no" / "p.csv"
    ).sentence()  # fmt: skip


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    place, draw = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for kind, level in (("dark", 60), ("light", 190)):
        (place / kind).mkdir()
        for i in range(30):
            pixels = draw.normal(level, 30, (8, 8, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(place / kind / f"{i}.png")
    return place


def test_a_model_for_pictures_takes_files_folders_and_arrays(cli, pictures, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSELECT_DATA", str(tmp_path / "cache"))
    args = ("--data", f"folder:{pictures}", "--size", 8, "--clients", 2, "--model", "mlp", "--train", 14, "--test", 6)
    run = ("--method", "fedavg+ft", "--lr", 0.1, "--rounds", 3, "-q", "--out", tmp_path / "run")
    assert cli("run", *args, *run).code == 0
    assert cli("export", tmp_path / "run", "--client", 0, "--format", "pt2").code == 0
    model = tmp_path / "run" / "client-0.pt2"
    assert "Images, uint8 of shape (N, 3, 8, 8)." in model.with_suffix(".md").read_text()
    found = lines(cli("predict", model, pictures).out)
    assert {row["sample"].split("/")[0] for row in found} == {"dark", "light"}
    assert sum(row["prediction"] == row["sample"].split("/")[0] for row in found) > 55
    [one] = lines(cli("predict", model, pictures / "dark" / "3.png").out)
    assert one == {"sample": "3.png", "prediction": next(r["prediction"] for r in found if r["sample"] == "dark/3.png")}
    x = np.stack([np.asarray(Image.open(pictures / "light" / f"{i}.png")) for i in range(4)]).transpose(0, 3, 1, 2)
    np.savez(tmp_path / "x.npz", x=x)
    said = [r["prediction"] for r in lines(cli("predict", model, tmp_path / "x.npz").out)]
    assert said == [next(r["prediction"] for r in found if r["sample"] == f"light/{i}.png") for i in range(4)]
    (tmp_path / "a.txt").write_text("x")
    assert "is not an image" in cli("predict", model, tmp_path / "a.txt").sentence()
    np.save(tmp_path / "bad.npy", x[:, :, :4].astype(np.uint8))
    assert "the model takes (N, 3, 8, 8)" in cli("predict", model, tmp_path / "bad.npy").sentence()


def test_a_file_that_cannot_predict_says_why(cli, trained, tmp_path):
    assert cli("export", trained, "--client", 0, "--out", tmp_path / "m.safetensors").code == 0
    with pytest.raises(InputError, match=r"not an exported model; pass a file that ends in \.safetensors, \.pt2, \.onnx"):
        fs.load_model(tmp_path / "m.txt")
    with pytest.raises(InputError, match="there is no file"):
        fs.load_model(tmp_path / "other.pt2")
    for form in ("safetensors", "pt2"):
        (tmp_path / f"junk.{form}").write_bytes(b"junk" * 9)
        with pytest.raises(RunError, match="export it again"):
            fs.load_model(tmp_path / f"junk.{form}")
    assert (
        "a pt2 file must end in .pt2"
        in cli("export", trained, "--client", 0, "--format", "pt2", "--out", tmp_path / "m").sentence()
    )
    assert "there is no file" in cli("predict", tmp_path / "m.safetensors", tmp_path / "nowhere.csv").sentence()


def test_a_safetensors_file_of_a_network_of_ones_own_asks_for_it(trained, tmp_path, cli):
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    assert cli("export", trained, "--client", 0, "--out", tmp_path / "m.safetensors").code == 0
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        said = json.loads(file.metadata()["about.json"])
    other = {"about.json": json.dumps({**said, "recipe": None, "model": "Mine"})}
    save_file(load_file(tmp_path / "m.safetensors"), tmp_path / "mine.safetensors", other)
    model = fs.load_model(tmp_path / "mine.safetensors")
    assert model.schema is not None
    with pytest.raises(InputError, match=r"parameters of Mine but not its code.*model=\.\.\."):
        model.predict({"age": [1.0], "kind": ["a"]})
    ours, row = fs.load_model(tmp_path / "m.safetensors"), {"age": [1.0], "kind": ["a"]}
    net = rebuilt(said["recipe"])()
    assert fs.load_model(tmp_path / "mine.safetensors", model=net).predict(row) == ours.predict(row)
