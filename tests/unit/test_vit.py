"""Vision transformers: timm's names and sizes, the maths written out, weights for other image sizes, clients side by side."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedselect as fs
from fedselect.models import vit_small, vit_tiny
from fedselect.models.vit import build_vit

TINY = (3, [2, 3], 4, [16, 2, 2], 5)  # channels, grid, patch, sizes (width, depth, heads), classes
BLOCK = {"norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2"}


def shaped(*shape, classes=1000):
    return SimpleNamespace(shape=shape, classes=classes)


def test_names_are_timms():
    net = build_vit(*TINY, [0.0, 0.0])
    layers = {"patch_embed.proj", "norm", "head", *(f"blocks.{i}.{part}" for i in range(2) for part in BLOCK)}
    assert set(net.state_dict()) == {"cls_token", "pos_embed", *(f"{n}.{v}" for n in layers for v in ("weight", "bias"))}


@pytest.mark.parametrize(("make", "count"), [(vit_tiny, 5_717_416), (vit_small, 22_050_664)])
def test_sizes_are_timms(make, count):
    """timm's vit_tiny_patch16_224 has 5.72 million parameters and vit_small_patch16_224 22.05: with width w,
    12 (12 w^2 + 13 w) in blocks, 768 w + w of the patches, 197 w + w of positions and class token, 2 w, and 1000 (w + 1)."""
    w = {vit_tiny: 192, vit_small: 384}[make]
    assert 12 * (12 * w * w + 13 * w) + 769 * w + 198 * w + 2 * w + 1000 * (w + 1) == count
    model = make(shaped(3, 224, 224))
    assert (model.size, model.head) == (count, "head")


def layer_norm(x, w, b):
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / ((x - mean).pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w + b


def slow(x, p, heads, depth, patch):
    """A vision transformer for one picture, head by head."""
    cut = [x[:, i : i + patch, j : j + patch] for i in range(0, x.shape[1], patch) for j in range(0, x.shape[2], patch)]
    rows = torch.stack([torch.stack([(k * c).sum() for k in p["patch_embed.proj.weight"]]) for c in cut])
    t = torch.cat([p["cls_token"][0], rows + p["patch_embed.proj.bias"]]) + p["pos_embed"][0]
    for i in range(depth):
        b = {n.removeprefix(f"blocks.{i}."): v for n, v in p.items() if n.startswith(f"blocks.{i}.")}
        qkv = layer_norm(t, b["norm1.weight"], b["norm1.bias"]) @ b["attn.qkv.weight"].T + b["attn.qkv.bias"]
        q, k, v = qkv.chunk(3, -1)
        out = []
        for h in range(heads):
            own = slice(h * q.shape[1] // heads, (h + 1) * q.shape[1] // heads)
            scores = q[:, own] @ k[:, own].T / math.sqrt(q.shape[1] // heads)
            out.append(scores.exp() / scores.exp().sum(-1, keepdim=True) @ v[:, own])
        t = t + torch.cat(out, 1) @ b["attn.proj.weight"].T + b["attn.proj.bias"]
        y = layer_norm(t, b["norm2.weight"], b["norm2.bias"]) @ b["mlp.fc1.weight"].T + b["mlp.fc1.bias"]
        y = y * (1 + torch.erf(y / math.sqrt(2))) / 2
        t = t + y @ b["mlp.fc2.weight"].T + b["mlp.fc2.bias"]
    return layer_norm(t, p["norm.weight"], p["norm.bias"])[0] @ p["head.weight"].T + p["head.bias"]


def test_the_network_is_the_maths_written_out():
    net = build_vit(*TINY, [0.0, 0.0]).double()
    for v in net.parameters():
        nn.init.normal_(v, std=0.3)
    x = torch.randn(2, 3, 8, 12, dtype=torch.float64)
    for got, picture in zip(net(x), x, strict=True):
        torch.testing.assert_close(got, slow(picture, dict(net.state_dict()), 2, 2, 4))


def test_an_exported_transformer_takes_batches_of_any_size():
    net = build_vit(*TINY, [0.0, 0.0]).eval()
    x = torch.randn(7, 3, 8, 12)
    program = torch.export.export(net, (x[:2],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for n in (1, 7):
        torch.testing.assert_close(program.module()(x[:n]), net(x[:n]))


@pytest.mark.parametrize(
    ("shape", "patch"), [((3, 32, 32), 4), ((1, 28, 28), 4), ((3, 48, 96), 4), ((3, 96, 96), 8), ((3, 224, 224), 16)]
)
def test_patches_suit_the_images(shape, patch):
    assert vit_tiny(shaped(*shape)).module.patch_embed.proj.kernel_size == (patch, patch)


def test_weights_for_another_image_size_are_interpolated(tmp_path):
    values = vit_tiny(shaped(3, 64, 64), patch=16).init(3)
    for v in values.values():
        v.normal_()
    values["pos_embed"][0, 1:] = torch.arange(16.0).unsqueeze(1)  # rises by 4 from row to row, by 1 within
    save_file(values, tmp_path / "w.safetensors")
    model = vit_tiny(shaped(3, 32, 128, classes=7), weights=str(tmp_path / "w.safetensors"))
    got = model.init(0)
    assert got["patch_embed.proj.weight"].equal(values["patch_embed.proj.weight"])  # so its patches are the file's
    assert got["blocks.11.mlp.fc2.bias"].equal(values["blocks.11.mlp.fc2.bias"])
    assert got["head.weight"].shape == (7, 192)
    assert got["pos_embed"][:, 0].equal(values["pos_embed"][:, 0])
    grid = got["pos_embed"][0, 1:, 0].view(2, 8)
    assert ((grid[:, 1:] - grid[:, :-1]) > 0).all()
    assert ((grid[1] - grid[0]) > 4).all()
    torch.testing.assert_close(grid.mean(), torch.tensor(7.5), atol=0.01, rtol=0)
    same = vit_tiny(shaped(3, 64, 64), weights=str(tmp_path / "w.safetensors")).init(0)
    assert same["pos_embed"].equal(values["pos_embed"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"data": shaped(3, 30, 32)}, "cuts images into patches of 4x4, and 30x32 is not a multiple of that; .*--patch"),
        ({"data": shaped(64)}, r"needs inputs of shape \(channels, height, width\)"),
        ({"data": shaped(3, 32, 32), "patch": -1}, "patch must be at least 1, not -1"),
        ({"data": shaped(3, 32, 32), "drop_path": 1.0}, r"drop_path must be in \[0, 1\), not 1.0"),
    ],
)
def test_what_cannot_be_made_is_refused(options, said):
    with pytest.raises(fs.InputError, match=said):
        vit_tiny(**options)


def test_weights_of_another_patch_size_are_refused(tmp_path):
    save_file(vit_tiny(shaped(3, 32, 32), patch=8).init(0), tmp_path / "w.safetensors")
    with pytest.raises(fs.InputError, match=r"differs in .*patch_embed.proj.weight \(192, 3, 8, 8\) for \(192, 3, 4, 4\)"):
        vit_tiny(shaped(3, 32, 32), patch=4, weights=str(tmp_path / "w.safetensors"))


def pictures():
    g = torch.Generator().manual_seed(0)

    def part(n):
        return torch.rand(n, 3, 8, 12, generator=g), torch.arange(n) % 5

    return fs.Federation([fs.ClientData(part(n), part(5)) for n in (9, 20, 13)], 5)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_clients_train_stacked_as_one_by_one(dropout, recwarn):
    """Dropout and stochastic depth too; a step of one kind is recorded after some, so some of these are."""
    ends = []
    for stackable in (True, False):
        model = fs.Model.wrap(partial(build_vit, *TINY, [dropout, dropout]), head="head")
        run = fs.Simulation(fs.FedSelect(lr=0.1), model, pictures(), training=fs.Training(batch_size=8))
        assert run.fitted.stackable
        run.fitted.stackable = stackable
        losses = [run.step()["train_loss"] for _ in range(3)]
        ends.append((losses, run.models(range(3))))
    (losses, stacked), (others, alone) = ends
    assert losses == pytest.approx(others, abs=1e-5)
    for n, v in stacked.items():
        torch.testing.assert_close(v, alone[n], rtol=1e-3, atol=1e-5)
    assert not [w for w in recwarn if "one by one" in str(w.message) or "slow path" in str(w.message)]
