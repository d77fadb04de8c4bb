"""Hugging Face's modules as they are, small and with random values; skipped where transformers is not installed."""

import warnings

import pytest
import torch
from torch import nn

import fedselect as fs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own parts, about themselves
    transformers = pytest.importorskip("transformers")
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        BertModel,
        DistilBertConfig,
        DistilBertForSequenceClassification,
        GPT2Config,
        GPT2ForSequenceClassification,
        ViTConfig,
        ViTForImageClassification,
    )

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "num_labels": 3}
TEXT = {"vocab_size": 50, "max_position_embeddings": 16}


def bert(**more):
    return BertForSequenceClassification(BertConfig(**SMALL, **TEXT, **more))


def distilbert():
    sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "num_labels": 3}
    return DistilBertForSequenceClassification(DistilBertConfig(**TEXT, **sizes))


def gpt2():
    ends = {"pad_token_id": 49, "bos_token_id": 48, "eos_token_id": 48, "num_labels": 3}
    return GPT2ForSequenceClassification(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16, **ends))


def vit():
    return ViTForImageClassification(ViTConfig(**SMALL, image_size=8, patch_size=4, num_channels=1))


def texts():
    g = torch.Generator().manual_seed(0)

    def part(n):
        words = torch.randint(0, 48, (n, 8), generator=g)
        mask = torch.arange(8) < torch.randint(3, 9, (n, 1), generator=g)
        return {"input_ids": words, "attention_mask": mask.long()}, words[:, 0] % 3

    return fs.Federation([fs.ClientData(part(n), part(5)) for n in (9, 20, 13)], 3)


def pictures():
    g = torch.Generator().manual_seed(0)

    def part(n):
        x = torch.rand(n, 1, 8, 8, generator=g)
        return x, torch.arange(n) % 3

    return fs.Federation([fs.ClientData(part(n), part(5)) for n in (9, 20, 13)], 3)


NETS = {
    "bert": (bert, None, texts),
    "distilbert": (distilbert, None, texts),
    "gpt2": (gpt2, "score", texts),
    "vit": (vit, None, pictures),
}


def stacked_and_alone(build, head, data):
    """Two runs that differ in how clients are run alone: to show that, the second is told that it cannot stack."""
    runs = []
    for stackable in (True, False):
        run = fs.Simulation(fs.FedSelect(lr=0.1), fs.Model.wrap(build, head=head), data, training=fs.Training(batch_size=8))
        assert run.fitted.stackable
        run.fitted.stackable = stackable
        runs.append((run, [run.step() for _ in range(2)]))
    return runs


@pytest.mark.parametrize("name", NETS)
def test_a_module_trains_stacked_as_client_by_client(name, recwarn):
    """With its own dropout, of attention too, as it comes from its configuration."""
    build, head, data = NETS[name]
    (stacked, records), (alone, others) = stacked_and_alone(build, head, data())
    for a, b in zip(records, others, strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], abs=1e-4)
    for n, v in stacked.models(range(3)).items():
        torch.testing.assert_close(v, alone.models(range(3))[n], rtol=1e-3, atol=1e-4)
    assert not [w for w in recwarn if "one by one" in str(w.message) or "slow path" in str(w.message)]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_clients_model_is_the_plain_modules(attention):
    data = texts()
    result = fs.run(fs.FedSelect(lr=0.1), model=fs.Model.wrap(lambda: bert(attn_implementation=attention)), data=data, rounds=3)
    assert result.simulation.fitted.stackable
    plain = bert(attn_implementation=attention)
    plain.load_state_dict(result.personal(1))
    x, y = data.clients[1].test
    with torch.no_grad():
        right = plain.eval()(**data.layout.unpack(x)[1]).logits.argmax(1) == y
    assert result.clients[1]["accuracy"] == pytest.approx(float(right.double().mean()))


def test_a_module_without_a_head_is_told_what_to_type():
    data = texts()
    with pytest.raises(fs.InputError, match=r"of last_hidden_state, pooler_output; say which .*output='last_hidden_state'"):
        fs.run(fs.FedAvg(), model=BertModel(BertConfig(**SMALL, **TEXT)), data=data, rounds=1)
    pooled = fs.Model.wrap(nn.Sequential(gpt2()), head="0.score")
    with pytest.raises(fs.InputError, match=r"cannot take inputs input_ids \(8,\), attention_mask \(8,\)"):
        fs.run(fs.FedAvg(), model=pooled, data=data, rounds=1)
