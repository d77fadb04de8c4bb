"""Models and tokenizers from Hugging Face folders, small and with random values; skipped without transformers."""

import json
import sys
import warnings

import pytest
import torch

import fedselect as fs
from fedselect.models.networks import rebuilt, recipe

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own parts, about themselves
    transformers = pytest.importorskip("transformers", reason="needs transformers (pip install 'fedselect[hf]')")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "bad", "day", "it", "was"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=12, **SMALL)
    transformers.BertModel(config).save_pretrained(folder)
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vit")
    config = transformers.ViTConfig(image_size=16, patch_size=4, num_channels=1, num_labels=7, **SMALL)
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "texts.csv"
    said = [("good", "yes", 1.5), ("bad", "no", 0.5)]
    lines = [
        f"{'abc'[i % 3]},it was a {word} day,{label},{score}" for i in range(48) for word, label, score in [said[i // 3 % 2]]
    ]
    path.write_text("\n".join(["who,text,label,score", *lines]))
    return path


def load(rows, bert, **options):
    return fs.load("text", path=str(rows), client="who", tokenizer=str(bert), length=8, **options)


def test_texts_become_tokens_with_a_mask(rows, bert):
    data = load(rows, bert)
    assert [c.name for c in data.clients] == ["a", "b", "c"]
    assert (data.class_names, data.layout.names) == (("no", "yes"), ["input_ids", "attention_mask"])
    x, y = data.clients[0].train
    named = data.layout.unpack(x)[1]
    words = [[WORDS[i] for i in row] for row in named["input_ids"]]
    assert words[0] == ["[CLS]", "it", "was", "a", {1: "good", 0: "bad"}[int(y[0])], "day", "[SEP]", "[PAD]"]
    assert named["attention_mask"][0].tolist() == [1] * 7 + [0]


@pytest.mark.parametrize("target", ["label", "score"])
def test_a_folders_model_learns_the_texts(rows, bert, target):
    data = load(rows, bert, target=target)
    result = fs.run(
        fs.FedAvg(lr=0.01), model=f"hf:{bert}", data=data, rounds=8, training=fs.Training(batch_size=8, optimizer="adam"),
        task=None if target == "label" else "regression",
    )  # fmt: skip
    assert result.simulation.fitted.stackable
    assert result.history[-1]["train_loss"] < 0.6 * result.history[0]["train_loss"]
    if target == "label":
        assert result.accuracy > 0.9


def test_its_values_are_the_folders_and_the_head_is_new(rows, bert):
    model = fs.models.hf(load(rows, bert), str(bert), outputs=2)
    whole = transformers.BertModel.from_pretrained(bert).state_dict()
    for seed in (0, 1):
        start = model.init(seed)
        for n, v in whole.items():
            assert torch.equal(start[f"bert.{n}"], v), n
    assert model.head == "classifier"
    assert not torch.equal(model.init(0)["classifier.weight"], start["classifier.weight"])


def test_what_a_folder_lacks_is_said_and_drawn_by_the_seed(rows, bert, tmp_path):
    config = transformers.BertConfig.from_pretrained(bert)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)  # has no pooler
    data = load(rows, bert)
    with pytest.warns(UserWarning, match="has no values for bert.pooler.dense.bias"):
        one, two = (fs.lora(fs.models.hf(data, str(tmp_path), outputs=2), 2, "*attention*") for _ in range(2))
    assert one.base == two.base
    assert {"bert.pooler.dense.weight", "bert.pooler.dense.bias"} <= set(one.params)  # or they would stay random


def test_images_of_another_size_and_number_of_classes(vit):
    g = torch.Generator().manual_seed(0)

    def part(n):
        return torch.rand(n, 1, 8, 12, generator=g), torch.arange(n) % 3

    data = fs.Federation([fs.ClientData(part(n), part(5)) for n in (9, 16)], 3)
    result = fs.run(fs.FedAvg(lr=0.05), model=f"hf:{vit}", data=data, rounds=2)
    assert result.simulation.fitted.stackable
    plain = transformers.ViTForImageClassification.from_pretrained(vit, num_labels=3, ignore_mismatched_sizes=True).eval()
    plain.load_state_dict(result.personal(0))
    x = data.clients[0].test[0]
    got = result.simulation.fitted.apply(result.personal(0), x).logits
    torch.testing.assert_close(got, plain(x, interpolate_pos_encoding=True).logits, rtol=1e-4, atol=1e-5)


def test_classes_for_each_token_and_the_next_token(tmp_path):
    """Targets by position get a head by position; where classes are the vocabulary it is the pretrained model's own."""
    config = transformers.GPT2Config(
        vocab_size=12, n_embd=16, n_layer=2, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    x = torch.arange(60).view(10, 6) % 12

    def made(classes):
        return fs.Federation([fs.ClientData((x, (x + 1) % classes), (x, (x + 1) % classes)) for _ in range(2)], classes)

    next_token = fs.run(fs.FedAvg(lr=0.1), model=f"hf:{tmp_path}", data=made(12), rounds=1, task="sequences")
    assert type(next_token.simulation.fitted.module).__name__ == "GPT2LMHeadModel"
    assert next_token.simulation.model.head is None  # it is the embeddings
    tags = fs.run(fs.FedAvg(lr=0.1), model=f"hf:{tmp_path}", data=made(4), rounds=1, task="sequences")
    assert type(tags.simulation.fitted.module).__name__ == "GPT2ForTokenClassification"


def test_it_is_built_again_from_its_recipe(rows, bert):
    model = fs.models.hf(load(rows, bert), str(bert), outputs=2)
    said = json.loads(json.dumps(recipe(model)))
    net = rebuilt(said)()
    net.load_state_dict(model.state_dict(model.init(0)))


def folder(tmp_path, config):
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "config.json").write_text(config)
    return tmp_path


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (lambda p, bert: p / "nowhere", "there is no folder .*nowhere; give one that save_pretrained wrote"),
        (lambda p, bert: p, "has no config.json; give a folder that save_pretrained wrote"),
        (lambda p, bert: folder(p, '{"model_type": "foo"}'), "its architecture, 'foo', is unknown to transformers"),
        (lambda p, bert: folder(p, "no json"), "cannot be used: "),
        (lambda p, bert: folder(p, (bert / "config.json").read_text()), "has no model.safetensors"),
    ],
    ids=["no folder", "no config", "unknown", "damaged", "no weights"],
)
def test_a_folder_that_cannot_be_used_is_refused(tmp_path, rows, bert, place, said):
    with pytest.raises(fs.InputError, match=said):
        fs.models.hf(load(rows, bert), str(place(tmp_path, bert)), outputs=2)


def test_data_that_does_not_suit_is_refused(rows, bert, vit):
    digits = fs.load("digits", clients=2)
    with pytest.raises(fs.InputError, match="no model of type 'bert' for images"):
        fs.models.hf(digits, str(bert))
    with pytest.raises(fs.InputError, match="no model of type 'vit' for classification of text"):
        fs.models.hf(load(rows, bert), str(vit), outputs=2)
    table = fs.Federation([fs.ClientData((torch.rand(4, 3), torch.arange(4) % 2))], 2)
    with pytest.raises(fs.InputError, match=r"needs images or tokenized text, .* --data text:FILE --tokenizer FOLDER"):
        fs.models.hf(table, str(bert))
    with pytest.raises(fs.InputError, match="name the tokenizer's folder: --tokenizer FOLDER"):
        fs.load("text", path=str(rows), client="who")
    with pytest.raises(fs.InputError, match=r"has no tokenizer_config\.json"):
        load(rows, vit)
    with pytest.raises(fs.DataError, match="there is no column 'labels'; did you mean 'label'"):
        load(rows, bert, target="labels")


def test_without_transformers_it_says_what_to_install(monkeypatch, rows, bert):
    data = load(rows, bert)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(fs.InputError, match=r"need transformers: pip install 'fedselect\[hf\]'"):
        fs.models.hf(data, str(bert))
