"""Export: a client's model in a file, that the printed snippet loads, as accurate as the run said."""

import json
import sys

import numpy as np
import pytest
import torch
from children import call
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

import fedselect as fs
from fedselect.core.files import read_json
from fedselect.runs.config import Config

TINY = ("--clients", 3, "--rounds", 2, "-q")
KINDS = {  # merged with the aggregate or not, fine-tuned, with statistics of its own
    "fedselect": ("--method", "fedselect", "--model", "small_cnn", "--norm", "batch"),
    "fedavg+ft": ("--method", "fedavg+ft", "--model", "mlp"),
}
FORMATS = ["safetensors", "pt2", "onnx"]


def snippet(said):
    return said.out.split("\n", 2)[2]


def logits(code, x):
    scope = {"x": x}
    exec(code, scope)
    return torch.as_tensor(scope["logits"])


def check(cli, run, form, client=1):
    """Export, run what was printed on the client's test data, and compare with what the run recorded."""
    if form == "onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    said = cli("export", run, "--client", client, "--format", form)
    assert said.code == 0, said
    x, y = Config.from_dict(read_json(run / "config.json", ""), "test").make_data().clients[client].test
    out = logits(snippet(said), x.numpy() if form == "onnx" else x)
    assert out.shape == (len(y), int(out.shape[1]))
    recorded = read_json(run / "summary.json", "")["clients"][client]
    assert float((out.argmax(1) == y).double().mean()) == pytest.approx(recorded, abs=1e-6)
    assert f"accuracy {100 * recorded:.2f}%" in said.out
    assert logits(snippet(said), (x[:1]).numpy() if form == "onnx" else x[:1]).shape[0] == 1  # any number of inputs
    return out


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Coloured noise in two classes, told apart by their mean: uint8 pictures, with means and deviations of their own."""
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for kind, level in (("dark", 80), ("light", 150), ("middle", 115)):
        (root / kind).mkdir()
        for i in range(40):
            pixels = rng.normal(level, 60, (8, 8, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / kind / f"{i}.png")
    return root


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_as_accurate_as_the_run(cli, tmp_path, kind, form):
    assert cli("run", *TINY, *KINDS[kind], "--train", 20, "--test", 40, "--lr", 0.1, "--out", tmp_path / "a").code == 0
    check(cli, tmp_path / "a", form)


@pytest.mark.parametrize("form", FORMATS)
def test_pictures_are_made_into_numbers_as_in_the_run(cli, tmp_path, pictures, form, monkeypatch):
    monkeypatch.setenv("FEDSELECT_DATA", str(tmp_path / "cache"))
    args = ("--data", f"folder:{pictures}", "--size", 8, "--classes-per-client", 2, "--model", "small_cnn", "--lr", 0.1)
    said = cli("run", *TINY, *args, "--train", 15, "--test", 10, "--out", tmp_path / "a")
    assert said.code == 0, said
    out = check(cli, tmp_path / "a", form)
    assert out.abs().max() < 50  # pixels up to 255 that nobody scaled give logits far beyond


def test_which_logit_is_which_class_is_said(cli, tmp_path, pictures, monkeypatch):
    monkeypatch.setenv("FEDSELECT_DATA", str(tmp_path / "cache"))
    args = (
        "--data",
        f"folder:{pictures}",
        "--size",
        8,
        "--classes-per-client",
        2,
        "--model",
        "mlp",
        "--train",
        15,
        "--test",
        10,
    )
    assert cli("run", *TINY, *args, "--out", tmp_path / "a").code == 0
    assert "classes = ['dark', 'light', 'middle']  # in the order" in cli("export", tmp_path / "a", "--client", 1).out
    with safe_open(tmp_path / "a" / "client-1.safetensors", "pt") as file:
        assert json.loads(file.metadata()["classes"]) == ["dark", "light", "middle"]


def test_pt2_needs_nothing_but_torch(cli, tmp_path):
    assert cli("run", *TINY, "--model", "mlp", "--train", 20, "--test", 10, "--out", tmp_path / "a").code == 0
    said = cli("export", tmp_path / "a", "--client", 0, "--format", "pt2", "--out", tmp_path / "m.pt2")
    before, after = "import torch\nx = torch.zeros(2, 1, 8, 8)", "import sys\nprint(*logits.shape, 'fedselect' in sys.modules)"
    code = f"{before}\n{snippet(said)}\n{after}"
    done = call(sys.executable, "-c", code)
    assert done.stdout.strip() == "2 10 False", done.stderr


def test_what_is_said_loads_a_network_whose_weights_decide_its_form(cli, tmp_path):
    """Here how large its patches are, which nobody asked for."""
    data = fs.load("digits", clients=2, train=10, test=5, seed=0)
    save_file(fs.models.vit_tiny(data, patch=8).init(0), tmp_path / "vit.safetensors")
    few = ("--data", "digits", "--clients", 2, "--train", 10, "--test", 5)
    cli(
        "run",
        *few,
        "--model",
        "vit_tiny",
        "--weights",
        tmp_path / "vit.safetensors",
        "--rounds",
        1,
        "--out",
        tmp_path / "r",
        "-q",
    )
    check(cli, tmp_path / "r", "safetensors")


def test_a_run_under_way_is_exported_as_far_as_it_is(cli, tmp_path):
    assert cli("run", *TINY, "--model", "mlp", "--train", 20, "--test", 10, "--out", tmp_path / "a").code == 0
    (tmp_path / "a" / "summary.json").unlink()
    (tmp_path / "a" / "checkpoint" / "000002").rename(tmp_path / "away")
    said = cli("export", tmp_path / "a", "--client", 0)
    assert "client-0.safetensors, round 1 of 2: accuracy" in said.out


def test_bad_input_gets_one_sentence(cli, tmp_path, monkeypatch):
    assert cli("run", *TINY, "--model", "mlp", "--train", 20, "--test", 10, "--out", tmp_path / "a").code == 0
    run = tmp_path / "a"
    with monkeypatch.context() as patch:
        patch.setattr("fedselect.runs.export.reopen", lambda run: pytest.fail("the data need not be read to say this"))
        assert "there is no client 3; choose one of 0 to 2" in cli("export", run, "--client", 3).sentence()
    assert (
        "--format must be safetensors, pt2, onnx, not 'tflite'"
        in cli("export", run, "--client", 0, "--format", "tflite").sentence()
    )
    assert "is not a run directory" in cli("export", tmp_path, "--client", 0).sentence()
    (tmp_path / "compare.json").write_text(json.dumps({"a": read_json(run / "config.json", "")}))
    assert f"pass one of its runs, such as {run}" in cli("export", tmp_path, "--client", 0).sentence()
    assert (
        f"{tmp_path / 'no'} is not a directory" in cli("export", run, "--client", 0, "--out", tmp_path / "no" / "m").sentence()
    )


def test_a_file_that_does_not_hold_the_model_is_noticed(cli, tmp_path, monkeypatch):
    from fedselect.core import tensors

    assert cli("run", *TINY, "--model", "mlp", "--train", 20, "--test", 10, "--out", tmp_path / "a").code == 0
    right = tensors.to_bytes
    monkeypatch.setattr(tensors, "to_bytes", lambda values, notes: right({n: 1.1 * v for n, v in values.items()}, notes))
    assert "differ from those of the model" in cli("export", tmp_path / "a", "--client", 0).sentence()


def test_a_missing_package_is_named(cli, tmp_path, monkeypatch):
    assert cli("run", *TINY, "--model", "mlp", "--train", 20, "--test", 10, "--out", tmp_path / "a").code == 0
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    said = cli("export", tmp_path / "a", "--client", 0, "--format", "onnx").sentence()
    assert "onnx needs onnxscript; install it with: pip install 'fedselect[onnx]'" in said
