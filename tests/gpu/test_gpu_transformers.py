"""Transformers on a GPU: attention, adapters, a bf16 base and blocks computed again are those of a CPU."""

import warnings
from functools import partial

import pytest
import torch

import fedselect as fs
from fedselect.models.vit import build_vit

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

VIT = (3, [4, 4], 4, [64, 3, 2], 5)  # channels, grid, patch, sizes (width, depth, heads), classes
BUILDS = {"whole": lambda m: m, "lora": partial(fs.lora, rank=4), "norms": fs.norm_only}


def pictures():
    g = torch.Generator().manual_seed(0)

    def part(n):
        return torch.rand(n, 3, 16, 16, generator=g), torch.arange(n) % 5

    return fs.Federation([fs.ClientData(part(n), part(5)) for n in (24, 32, 24)], 5)


def trained(device, build, dropout=0.0, rounds=3, lr=0.05, **how):
    model = build(fs.Model.wrap(partial(build_vit, *VIT, [dropout, dropout]), head="head"))
    run = fs.Simulation(
        fs.FedSelect(lr=lr, personal_lr=lr), model, pictures(), training=fs.Training(batch_size=8), device=device, **how
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(slow path|one by one).*")
        return [run.step()["train_loss"] for _ in range(rounds)], run


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("build", BUILDS)
def test_a_transformer_trains_as_on_a_cpu(build, dropout, recompute):
    """Three rounds: the steps of the later ones are recorded."""
    want, _ = trained("cpu", BUILDS[build], dropout)
    got, run = trained("cuda", BUILDS[build], dropout, precision="float32", recompute=recompute)
    assert got == pytest.approx(want, rel=2e-3)
    assert run.fitted.stackable


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(("precision", "off"), [("tf32", 0.005), ("bf16", 0.02)])
def test_less_precision_leads_to_about_the_same_loss(build, precision, off):
    """At this rate, weights that are off by 0.2% change the losses by 0.001%; at a rate of 0.1 by 0.7%, more in each round."""
    want, _ = trained("cpu", BUILDS[build], lr=0.01)
    got, run = trained("cuda", BUILDS[build], lr=0.01, precision=precision)
    assert got == pytest.approx(want, rel=off)
    frozen = {p.dtype for p in run.fitted.module.parameters() if not p.requires_grad}
    assert frozen == (set() if build == "whole" else {torch.bfloat16 if precision == "bf16" else torch.float32})


def test_attention_of_text_trains_as_on_a_cpu():
    """nn.TransformerEncoderLayer with a mask for padding, and dropout in its attention."""

    class Text(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(40, 32)
            self.layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
            self.head = torch.nn.Linear(32, 3)

        def forward(self, words, mask):
            return self.head(self.layer(self.embed(words), src_key_padding_mask=~mask)[:, 0])

    g = torch.Generator().manual_seed(0)

    def part(n):
        mask = torch.arange(12) < torch.randint(3, 13, (n, 1), generator=g)
        words = torch.randint(0, 40, (n, 12), generator=g)
        return {"words": words, "mask": mask}, words[:, 0] % 3

    data = fs.Federation([fs.ClientData(part(n), part(5)) for n in (24, 32, 24)], 3)
    losses = []
    for device in ("cpu", "cuda"):
        how = {} if device == "cpu" else {"precision": "float32"}
        run = fs.Simulation(
            fs.FedPer(lr=0.1), fs.Model.wrap(Text), data, training=fs.Training(batch_size=8), device=device, **how
        )
        losses.append([run.step()["train_loss"] for _ in range(3)])
        assert run.fitted.stackable
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
