"""Where clients differ: from numbers to words, by made-up numbers and on digits; the picture."""

import json
import re

import pytest
import torch
from torch import nn

import fedselect as fs
from fedselect.diagnosis import words
from fedselect.diagnosis.diagnosis import Diagnosis
from fedselect.diagnosis.words import Profile, kind, kinds, profile, roles, sentences, short, together

ROLES = roles({"conv1.weight": 4, "norm.weight": 1, "conv2.weight": 4, "fc.weight": 2, "fc.bias": 1}, ["fc.weight", "fc.bias"])


def test_a_tensor_is_weights_or_a_vector_of_body_or_head():
    assert ROLES == {
        "conv1.weight": "body weights", "norm.weight": "body vector", "conv2.weight": "body weights",
        "fc.weight": "head weights", "fc.bias": "head vector",
    }  # fmt: skip


def test_rules_look_at_the_first_weights_and_the_head():
    found = dict(zip(ROLES, (0.1, 0.9, 0.3, 0.5, 0.7), strict=True))
    assert profile(found, ROLES) == Profile(first=0.1, head=0.5, bias=0.7)  # conv1 is the first half of two
    assert profile({"w": 0.4}, {"w": "head weights"}) == Profile(first=None, head=0.4, bias=None)


@pytest.mark.parametrize(
    ("first", "head", "bias", "said"),
    [
        (0.02, 0.02, 0.31, "none"),  # a bias alone is noisy: it has few entries
        (-0.3, -0.1, -0.2, "none"),
        (-0.3, -0.5, -0.9, "none"),  # few samples with all classes alike often
        (0.55, 0.74, 0.56, "classes"),  # as in mlp
        (0.23, 0.60, 0.43, "classes"),  # as in small_cnn
        (0.24, 0.50, -0.03, "meaning"),  # as in small_cnn
        (0.0, 0.25, None, "meaning"),  # a head without a bias
        (0.38, 0.24, -0.13, "inputs"),  # as in small_cnn
        (0.64, 0.75, 0.0, "either"),  # as in mlp
        (None, 0.4, 0.1, "either"),  # a model that is all head has no layers to tell by
    ],
)
def test_numbers_become_a_kind(first, head, bias, said):
    assert kind(Profile(first, head, bias)) == said


def test_who_is_not_tested_has_no_kind():
    assert kinds([Profile(0.6, 0.7, 0.1), None]) == ["either", "unknown"]


def test_every_kind_has_its_words():
    assert set(words.SAID) == set(words.Kind.__args__)


def test_sentences_name_the_clients_of_each_kind():
    said = sentences(["none", "classes", "meaning", "classes", "none", "none"], ["0", "1", "2", "3", "4", "5"])
    assert [s.split(":")[0] for s in said] == ["Clients 1 and 3", "Client 2", "Clients 0, 4 and 5"]
    assert sentences(["none"] * 3, ["a", "b", "c"]) == ["All clients: no difference that a shared model cannot handle."]
    assert short(["0 none", "1", "Ohio", "3rd ward"]) == ["0", "1", "Ohio", "3rd ward"]


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([0, 0, 0, 0], "All clients share one head."),
        ([0, 1, 2, 3], "Every client has a head of its own."),
        ([0, 0, 0, 3], "Clients 0, 1 and 2 share a head. Client 3 has a head of its own."),
        ([0, 1, 0, 3], "Clients 0 and 2 share a head. Clients 1 and 3 each have a head of their own."),
        ([0, 1, 1, 0], "Clients 0 and 3 share a head. Clients 1 and 2 share a head."),
        ([0, 0, None, 0], "Clients 0, 1 and 3 share a head. Client 2 is not tested yet."),
        ([None, 1, None, None], "Client 1 has a head of its own. Clients 0, 2 and 3 are not tested yet."),
    ],
)
def test_sentences_say_who_shares_a_head(groups, said):
    assert " ".join(together(groups, ["0", "1", "2", "3"])) == said


def shifted(shift, train=60):
    return fs.load("digits", shift=shift, train=train, val=0, test=10, seed=0)


def found(shift, train=60):
    data = shifted(shift, train)
    return fs.diagnose(data, model=fs.models.mlp(data), training=fs.Training(batch_size=16))


def test_known_differences_of_digits_are_found():
    motley, own = found("motley"), found("labels")
    assert motley.kinds[8:] == ["classes"] * 2  # the two with classes of their own
    assert motley.kinds[2:8] == ["either"] * 6  # other labels, other cameras: in an mlp they show alike
    assert found("none", train=120).kinds.count("none") >= 8
    assert own.kinds == ["classes"] * 10
    assert own.sentences == ["All clients: different classes or class frequencies (persistent in the head and its bias)."]


@pytest.fixture(scope="module")
def motley():
    return found("motley")


def test_a_diagnosis_is_a_table_and_a_few_lines(motley):
    assert list(motley.table) == ["1.weight", "1.bias", "3.weight", "3.bias"]
    assert all(len(column) == 10 for column in motley.table.values())
    assert (
        repr(motley).splitlines()[0]
        == "Clients 8 and 9: different classes or class frequencies (persistent in the head and its bias)."
    )
    assert re.search(r"FedPersist would make [\d.]+% of the parameters personal in every client\.", repr(motley))
    assert "FedAlike would use 7 heads, one per group. Clients 0, 1, 8 and 9 share a head. " in repr(motley)
    assert motley.methods == ["fedalike", "fedavg+ft"]
    assert motley.advice.startswith("Try fedalike first, and compare it with fedavg+ft: ")
    assert motley.rounds == 10
    assert motley._repr_html_().count("<tr>") == 11
    written = json.loads(json.dumps(motley.to_json()))
    assert (written["persistence"], written["groups"]) == (motley.persistence, motley.groups)


def test_it_measures_what_a_run_of_fedpersist_measures(motley):
    data = shifted("motley")
    training = fs.Training(batch_size=16)
    result = fs.run(fs.FedPersist(), model=fs.models.mlp(data), data=data, rounds=12, training=training)
    for name, values in motley.persistence.items():
        assert values == pytest.approx(result.persistence[name].tolist(), abs=1e-4)
    kept = sum(m.flatten(1).sum(1) for m in result.masks.values()) / result.simulation.model.size
    assert motley.share == pytest.approx(kept.tolist(), abs=1e-6)


def test_who_is_alike_is_what_a_run_of_fedalike_finds():
    """Two groups that name classes the other way round: exactly found here, and as a run of FedAlike finds them."""
    data = fs.load("digits", shift="groups", train=120, val=0, test=10, seed=2)
    how = {"model": fs.models.mlp(data), "training": fs.Training(batch_size=16)}
    found = fs.diagnose(data, seed=2, **how)
    assert found.groups == [0] * 5 + [5] * 5
    assert found.heads.endswith("Clients 0, 1, 2, 3 and 4 share a head. Clients 5, 6, 7, 8 and 9 share a head.")
    run = fs.run(fs.FedAlike(), data=data, seed=2, rounds=10, **how)
    assert run.groups == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_a_client_of_one_sample_has_no_say_in_who_is_alike(digits):
    x, y = digits.clients[0].train
    data = fs.Federation([*digits.clients, fs.ClientData(train=(x[:1], y[:1]), test=(x, y))], classes=digits.classes)
    assert len(fs.diagnose(data, model=fs.models.mlp(data, hidden=4), rounds=3).groups) == 4


def test_persistence_is_not_known_before_the_window_is_over_nor_of_other_methods(digits):
    how = {"model": fs.models.mlp(digits, hidden=4), "data": digits}
    assert all(v.isnan().all() for v in fs.run(fs.FedPersist(window=4), rounds=3, **how).persistence.values())
    with pytest.raises(fs.InputError, match=r"does not measure persistence; use fs.FedPersist\(\)"):
        _ = fs.run(fs.FedAvg(), rounds=1, **how).persistence
    late = fs.run(fs.FedPersist(window=2), rounds=4, late=(1, 4), **how).persistence["1.weight"]
    assert late.isnan().tolist() == [False, False, True]


def test_it_does_not_depend_on_how_many_clients_run_at_once(digits):
    how = {"model": fs.models.mlp(digits, hidden=4), "data": digits, "rounds": 3}
    plain = fs.run(fs.FedPersist(window=2), **how).persistence
    other = fs.run(fs.FedPersist(window=2), chunk=2, **how).persistence
    assert all(torch.equal(plain[n], other[n]) for n in plain)


def test_it_does_not_depend_on_what_is_stored_of_a_client(digits):
    how = {"model": fs.models.mlp(digits, hidden=4), "rounds": 2}
    assert fs.diagnose(digits, rows="personal", **how).to_json() == fs.diagnose(digits, **how).to_json()


def test_nothing_to_keep_means_one_shared_model():
    quiet = Diagnosis(
        ["a", "b"], [500, 500], {"fc.weight": [0.01, 0.0]}, {"fc.weight": "head weights"}, [0.0, 0.0], [2.0, 1.0], [0, 0]
    )
    assert quiet.sentences == ["All clients: no difference that a shared model cannot handle."]
    assert quiet.methods == ["fedavg+ft"]
    assert quiet.heads == "FedAlike would use one head for all clients."
    assert quiet.advice == "Try fedavg+ft first: one shared model, fine-tuned by each client."
    assert quiet.limits.startswith("Limits: 2 rounds are few")


def test_it_says_where_its_numbers_are_worth_little():
    poor = Diagnosis(
        ["a", "b"], [20, 30], {"fc.weight": [0.6, 0.5]}, {"fc.weight": "head weights"}, [0.1, 0.0], [2.3, 2.2], [0, 1]
    )
    assert poor.limits.startswith("The loss hardly fell (2.30 to 2.20)")
    assert "With 25 samples per client, differences may go unnoticed." in poor.limits
    assert poor.methods == ["fedalike", "fedavg+ft"]
    assert poor.heads == "FedAlike would use a separate head for every client."
    assert poor.keeps == "FedPersist would make 10% of the parameters personal in 1 of 2 clients."


def test_of_a_deep_model_the_table_shows_parts_and_the_head(digits):
    names = fs.models.resnet18(digits).params
    deep = Diagnosis(
        ["a"], [100], {n: [0.5 if n == "layer3.1.bn2.bias" else 0.1] for n in names},
        roles(dict.fromkeys(names, 2), ["fc.weight", "fc.bias"]), [0.0], [1.0], [0],
    )  # fmt: skip
    assert list(deep.table) == ["conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "fc.weight", "fc.bias"]
    assert deep.table["layer3"] == [0.5]


@pytest.mark.parametrize(("clients", "tensors"), [(3, 4), (60, 62)])
def test_the_picture_is_a_file(tmp_path, clients, tensors):
    drawn = Diagnosis(
        [str(i) for i in range(clients)], [1], {f"t{k}": [None, *[0.3] * (clients - 1)] for k in range(tensors)}, {}, [], [], []
    )
    path = drawn.save(tmp_path / "new" / "d.png")
    assert path.read_bytes()[:4] == b"\x89PNG"
    axes = drawn.figure().axes[0]
    assert [t.get_text() for t in axes.get_xticklabels()] == [f"t{k}" for k in range(tensors)]
    assert len(axes.get_yticklabels()) == clients
    with pytest.raises(fs.InputError, match=r"must end in .png, .pdf or .svg, unlike 'd.txt'"):
        drawn.save(tmp_path / "d.txt")


def test_wrong_inputs_are_told_before_anything_trains(digits):
    mlp = fs.models.mlp(digits)
    with pytest.raises(fs.InputError, match="a diagnosis needs at least 2 rounds, one for each half of the samples, not 1"):
        fs.diagnose(digits, model=mlp, rounds=1)
    headless = fs.Model(lambda: nn.Sequential(nn.Conv2d(1, 10, 8), nn.Flatten()), name="bare")
    with pytest.raises(fs.InputError, match="a diagnosis needs the model's head, and bare has no Linear"):
        fs.diagnose(digits, model=headless)
