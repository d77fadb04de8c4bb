"""Pretrained weights: what fits loads, what does not is named, and nothing in a file is run."""

import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import fedselect as fs

SHAPE = SimpleNamespace(shape=(3, 32, 32), classes=7)
SHARED = Path(__file__).parents[3] / "shared" / "data" / "resnet18_pretrained.safetensors"


@pytest.fixture(scope="module")
def values():
    return fs.models.resnet18(SimpleNamespace(shape=(3, 32, 32), classes=1000)).module.state_dict()


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth"])
def test_weights_load_and_the_head_is_new(tmp_path, values, name):
    half = {n: v.half() if v.is_floating_point() else v for n, v in values.items()}
    save_file(half, tmp_path / name) if name.endswith("safetensors") else torch.save(half, tmp_path / name)
    model = fs.models.resnet18(SHAPE, weights=str(tmp_path / name))
    start = model.init(5)
    assert torch.equal(start["layer3.0.conv1.weight"], values["layer3.0.conv1.weight"].half().float())
    assert start["fc.weight"].shape == (7, 512)
    assert torch.equal(start["fc.weight"], fs.models.resnet18(SHAPE).init(5)["fc.weight"])
    assert not torch.equal(start["fc.weight"], model.init(6)["fc.weight"])
    assert torch.equal(start["conv1.weight"], model.init(6)["conv1.weight"])


def test_what_differs_is_named(tmp_path, values):
    wrong = {n: v for n, v in values.items() if n != "bn1.weight"}
    wrong["backbone.x"] = torch.zeros(1)
    wrong["conv1.weight"] = torch.zeros(64, 3, 3, 3)
    save_file(wrong, tmp_path / "w.safetensors")
    with pytest.raises(fs.InputError) as e:
        fs.models.resnet18(SHAPE, weights=str(tmp_path / "w.safetensors"))
    assert "it lacks bn1.weight; it has backbone.x; it differs in conv1.weight (64, 3, 3, 3) for (64, 3, 7, 7)." in str(e.value)


def test_values_that_are_not_finite_are_named(tmp_path, values):
    """Training would blame the learning rate."""
    save_file({**values, "bn1.weight": torch.full((64,), torch.nan)}, tmp_path / "w.safetensors")
    with pytest.raises(fs.InputError, match=r"w.safetensors has NaN or Inf in bn1.weight; use another file"):
        fs.models.resnet18(SHAPE, weights=str(tmp_path / "w.safetensors"))


class Evil:
    def __reduce__(self):
        return os.system, ("touch ran-anyway",)


@pytest.mark.parametrize(
    "content",
    [b"", b"garbage", b"Read me", b"\x89PNG\r\n\x1a\n" + bytes(99), pickle.dumps(Evil(), protocol=2)],
    ids=["empty", "garbage", "a text", "a picture", "code"],
)
@pytest.mark.parametrize("suffix", [".pth", ".png", ".safetensors"])
def test_a_file_that_is_no_weights_is_refused_and_never_run(tmp_path, monkeypatch, content, suffix):
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"w{suffix}").write_bytes(content)
    said = r"cannot be read as weights: .*; give a \.safetensors file, or a \.pth file with the state_dict of a model\.$"
    with pytest.raises(fs.InputError, match=said):
        fs.models.resnet18(SHAPE, weights=f"w{suffix}")
    assert not (tmp_path / "ran-anyway").exists()


def test_no_such_file():
    with pytest.raises(fs.InputError, match=r"there is no weights file nowhere\.pth"):
        fs.models.resnet18(SHAPE, weights="nowhere.pth")


@pytest.mark.skipif(not SHARED.exists(), reason="needs the pretrained weights of the development data")
def test_real_weights_load():
    start = fs.models.resnet18(SHAPE, weights=str(SHARED)).init(0)
    assert 0.05 < float(start["conv1.weight"].std()) < 0.5
    assert float(start["bn1.running_var"].mean()) != 1.0
