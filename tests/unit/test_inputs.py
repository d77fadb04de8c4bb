"""Models that take several inputs or return more than a tensor: what is found, what is refused, and that runs do with them all
that they do with others."""

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fedselect as fs
from fedselect.models import Layout
from fedselect.training.fitted import Fitted

TARGETS = SimpleNamespace(shape=(4,), classes=3, target_shape=())
Named = namedtuple("Named", ["hidden", "logits"])


class Returns(nn.Module):
    """Returns what `how` makes of its scores and its inputs."""

    def __init__(self, how):
        super().__init__()
        self.how, self.fc = how, nn.Linear(4, 3)

    def forward(self, x):
        return self.how(self.fc(x), x)


def check(how, **options):
    torch.manual_seed(0)
    module = Returns(how)
    x = torch.rand(2, 4)
    out = Fitted(fs.Model.wrap(module, **options)).check(x, fs.Classification(), TARGETS)
    assert torch.equal(out, module.fc(x))


@pytest.mark.parametrize(
    "how",
    [
        lambda y, x: y,
        lambda y, x: (y, x),
        lambda y, x: [y],
        lambda y, x: {"hidden": x, "logits": y},
        lambda y, x: Named(x, y),
        lambda y, x: SimpleNamespace(loss=None, logits=y),
    ],
    ids=["tensor", "tuple", "list", "dict", "named tuple", "object"],
)
def test_logits_are_found_in_what_a_module_returns(how):
    check(how)


@pytest.mark.parametrize(
    ("output", "how"),
    [
        (1, lambda y, x: (x, y)),
        (-1, lambda y, x: [x, y]),
        ("scores", lambda y, x: {"logits": x, "scores": y}),
        ("scores", lambda y, x: SimpleNamespace(logits=x, scores=y)),
    ],
)
def test_output_says_which_it_is(output, how):
    check(how, output=output)


@pytest.mark.parametrize(
    ("how", "output", "said"),
    [
        (lambda y, x: (y.sum(), y), None, r"a tuple of Tensor, Tensor; say which .* Model\.wrap\(module, output=1\)"),
        (lambda y, x: {"a": None, "b": y}, None, r"a dict of a, b; say which holds the outputs: .*output='b'\)"),
        (lambda y, x: SimpleNamespace(out=y), None, r"a SimpleNamespace; say which .*output='out'"),
        (lambda y, x: {"loss": y.sum()}, None, "a dict of loss; wrap it in a module that returns the outputs as one tensor"),
        (lambda y, x: (), None, "a tuple; wrap it in"),
        (lambda y, x: None, None, "a NoneType; wrap it in"),
        (lambda y, x: "scores", None, "a str; wrap it in"),
        (lambda y, x: {"logits": y}, "scores", "a dict of logits and has no tensor 'scores' in it; .*output='logits'"),
        (lambda y, x: (y,), 1, r"a tuple of Tensor and has no tensor 1 in it; .*output=0"),
        (lambda y, x: y, "logits", "one tensor and has no tensor 'logits' in it; leave out output="),
        (lambda y, x: y.sum(), None, r"returns \(\) for 2 inputs; it must return one row per input"),
    ],
)
def test_what_holds_no_outputs_is_refused_with_what_to_type(how, output, said):
    with pytest.raises(fs.InputError, match=f"Returns returns .*{said}" if "for 2" not in said else said):
        check(how, output=output)


class Both(nn.Module):
    """Words and numbers."""

    def __init__(self):
        super().__init__()
        self.embed, self.fc = nn.Embedding(10, 3), nn.Linear(3 + 2, 2)

    def forward(self, words, numbers):
        return {"logits": self.fc(torch.cat([self.embed(words).mean(1), numbers], 1))}


def inputs(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {"words": torch.randint(0, 10, (n, 4), generator=g), "numbers": torch.randn(n, 2, generator=g)}


def client(n, seed=0, **more):
    return fs.ClientData((inputs(n, seed), torch.arange(n) % 2), (inputs(4, seed + 50), torch.arange(4) % 2), **more)


def federation():
    return fs.Federation([client(n, seed) for seed, n in enumerate((9, 14, 6))], 2)


def test_a_federation_lays_several_inputs_side_by_side_and_gives_them_back():
    data = federation()
    assert data.shape == (6,)
    assert repr(data) == "Federation('tensors': 3 clients, 2 classes, inputs words (4,), numbers (2,))"
    for part in ("train", "test"):
        x, _ = getattr(data.clients[1], part)
        assert x.dtype == torch.float32
        args, named = data.layout.unpack(x)
        given = getattr(client(14, 1), part)[0]
        assert args == ()
        assert named.keys() == given.keys()
        for n, v in given.items():
            assert torch.equal(named[n], v)
            assert named[n].dtype == v.dtype


def test_clients_of_a_federation_may_be_taken_into_another():
    data = federation()
    fewer = fs.Federation(data.clients[1:], 2)
    assert fewer.layout == data.layout
    assert torch.equal(fewer.clients[0].train[0], data.clients[1].train[0])
    with_others = fs.Federation([*fewer.clients, client(9, 7)], 2)
    assert len({c.train[0].shape[1] for c in with_others.clients}) == 1
    by_place = [((x["words"], x["numbers"]), y) for x, y in (client(9).train, client(9).test)]
    strange = fs.Federation([fs.ClientData(*by_place)], 2)
    with pytest.raises(
        fs.DataError, match=r"client 2 has the inputs input_0 \(4,\), input_1 \(2,\); the first client has words"
    ):
        fs.Federation([*fewer.clients, *strange.clients], 2)
    x = torch.zeros(9, 6), torch.arange(9) % 2
    with pytest.raises(fs.DataError, match="training inputs of client 0 are one tensor, and those of others are several"):
        fs.Federation([fs.ClientData(x, x), client(9)], 2)


def test_whole_numbers_and_bools_stay_whole_numbers():
    parts = torch.tensor([[2**40, -1]]), torch.tensor([True]), torch.tensor([[7]], dtype=torch.int16)
    layout = Layout.of(parts, "inputs")
    packed = layout.pack(parts)
    assert packed.tolist() == [[2**40, -1, 1, 7]]
    assert packed.dtype == torch.int64
    (a, b, c), named = layout.unpack(packed)
    assert (a.tolist(), b.tolist(), c.tolist()) == ([[2**40, -1]], [True], [[7]])
    assert (b.dtype, c.dtype, named) == (torch.bool, torch.int64, {})
    assert Layout.from_json(layout.to_json()) == layout


def test_whole_numbers_beside_floats_are_exact_in_any_model():
    x = {"words": torch.tensor([[2**24 - 1]] * 2), "numbers": torch.zeros(2, 1)}
    data = fs.Federation([fs.ClientData((x, torch.arange(2)), (x, torch.arange(2)))], 2)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        words, numbers = data.layout.parts(data.split("train", dtype).x, dtype)
        assert words.tolist() == [[2**24 - 1]] * 2
        assert numbers.dtype == dtype
    x["words"][0] = 2**24
    with pytest.raises(fs.DataError, match=r"training inputs of client 0, words: integers .* than 16777216 .*, not 16777216"):
        fs.Federation([fs.ClientData((x, torch.arange(2)), (x, torch.arange(2)))], 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"words": torch.zeros(5, 4).long()}, "client Lyon: train, words has 5 inputs but 9 targets"),
        ({"words": torch.zeros(9, 3).long()}, r"client Lyon, words: samples are integers of shape \(3,\); .* of shape \(4,\)"),
        ({"words": torch.zeros(9, 4)}, "words: samples are floats of shape .*; the first client trains on integers"),
        ({"words": None}, "client Lyon: train, words has no list of inputs but 9 targets"),
        ({"words": torch.tensor(1)}, "client Lyon: train, words has no list of inputs"),
        ({"more": torch.zeros(9)}, "are a dict of words, numbers, more; the first client trains on a dict of words, numbers"),
        ({"numbers": torch.full((9, 2), torch.nan)}, "client Lyon has NaN or Inf in its training inputs"),
        ({"words": torch.zeros(9, 4, dtype=torch.uint8)}, "words: give floats, int64 or bools, not torch.uint8"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change, said):
    with pytest.raises(fs.DataError, match=said):
        fs.Federation([client(9), fs.ClientData(({**inputs(9), **change}, torch.arange(9) % 2), name="Lyon")], 2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"words": torch.zeros(9, 4).long()}, "are a dict of words; the first client trains on a dict of words, numbers"),
        ((torch.zeros(9, 4), torch.zeros(9, 2)), "are a tuple of 2; the first"),
        (torch.zeros(9, 6), "are a Tensor; the first"),
    ],
)
def test_all_clients_have_the_same_inputs(given, said):
    with pytest.raises(fs.DataError, match=f"the training inputs of client 1 {said}"):
        fs.Federation([client(9), fs.ClientData((given, torch.arange(9) % 2), (inputs(4), torch.arange(4) % 2))], 2)


@pytest.mark.parametrize(
    ("given", "said"), [({}, "are an empty dict"), ((), "an empty tuple"), ({1: torch.zeros(9)}, "name 1")]
)
def test_inputs_have_names_and_are_there(given, said):
    with pytest.raises(fs.DataError, match=said):
        fs.Federation([fs.ClientData((given, torch.arange(9) % 2), (given, torch.arange(9) % 2))], 2)


def test_targets_are_counted_beside_several_inputs():
    with pytest.raises(fs.DataError, match="a client: train, words has 9 inputs but 8 targets"):
        fs.ClientData((inputs(9), torch.arange(8) % 2))


def test_a_model_that_takes_others_says_which_there_are():
    with pytest.raises(
        fs.InputError, match=r"Linear cannot take inputs words \(4,\), numbers \(2,\): .*unexpected keyword .*words"
    ):
        fs.run(fs.FedAvg(), model=nn.Linear(6, 2), data=federation(), rounds=1)
    few = [fs.ClientData(*((({"words": x["words"]}, y)) for x, y in (c.train, c.test))) for c in (client(9), client(9, 1))]
    with pytest.raises(fs.InputError, match=r"Both cannot take inputs words \(4,\): .*missing 1 required .*'numbers'"):
        fs.run(fs.FedAvg(), model=Both(), data=few, rounds=1)


def test_an_embedding_without_a_row_is_told_of_the_whole_numbers():
    strange = inputs(9)
    strange["words"][3, 1] = 11
    clients = [client(9), fs.ClientData((strange, torch.arange(9) % 2), (inputs(4), torch.arange(4) % 2), name="Lyon")]
    with pytest.raises(
        fs.InputError, match=r"no row for one of its inputs, which range from 0 \(client 0\) to 11 \(client Lyon\)"
    ):
        fs.run(fs.FedAvg(), model=Both(), data=clients, rounds=1)


def test_a_run_goes_on_from_where_it_was(tmp_path):
    model = fs.Model.wrap(Both)
    whole = fs.run(fs.FedSelect(lr=0.1), model=model, data=federation(), rounds=4)
    first = fs.Simulation(fs.FedSelect(lr=0.1), model, federation(), rounds=4)
    first.step()
    first.step()
    first.save(tmp_path)
    second = fs.Simulation(fs.FedSelect(lr=0.1), model, federation(), rounds=4)
    assert second.resume(tmp_path)
    second.step()
    record = second.step()
    assert record["clients"] == whole.history[-1]["clients"]


def test_methods_are_compared_and_models_tried_on_others_data():
    methods = {"fedavg": fs.FedAvg(lr=0.1), "fedpac": fs.FedPAC(lr=0.1), "ditto": fs.Ditto(lr=0.1)}
    model = fs.Model.wrap(Both)
    found = fs.compare(methods, model=model, data=federation(), rounds=2)
    for name, method in methods.items():
        alone = fs.run(method, model=model, data=federation(), rounds=2)
        assert found[name, 0].history[-1]["clients"] == alone.history[-1]["clients"]
    assert found["fedavg", 0].cross().shape == (3, 3)


def test_a_diagnosis_is_made():
    assert fs.diagnose(federation(), model=fs.Model.wrap(Both), rounds=2).sentences


def test_validation_data_has_several_inputs_too():
    data = fs.Federation([client(9, i, val=(inputs(5, 90 + i), torch.arange(5) % 2)) for i in range(2)], 2).on_validation()
    result = fs.run(fs.FedAvg(lr=0.1), model=Both(), data=data, rounds=1)
    assert len(result.simulation.data.clients[0].test[1]) == 5


def test_labels_may_shift_and_several_inputs_may_not():
    data = federation()
    assert fs.shifted(data, "groups").layout == data.layout
    fs.run(fs.FedAvg(), model=Both(), data=fs.shifted(data, "groups"), rounds=1)
    for kind in ("scaled", "permuted", "noisy"):
        with pytest.raises(fs.InputError, match=rf"{kind} changes inputs that are one tensor, and these are several \(words"):
            fs.shifted(data, kind)


class Careful(Both):
    """Saves work where nothing is masked, unless it is being compiled; as Hugging Face's modules do."""

    def forward(self, words, numbers):
        if not torch.compiler.is_compiling() and bool((numbers == 0).all()):
            return {"logits": self.fc(torch.zeros(len(words), 5))}
        return super().forward(words, numbers)


class Careless(Careful):
    def forward(self, words, numbers):
        return super().forward(words, numbers) if bool((words >= 0).all()) else None


def test_a_module_that_looks_at_values_unless_it_is_compiled_runs_stacked(recwarn):
    run = fs.run(fs.FedAvg(lr=0.1), model=fs.Model.wrap(Careful), data=federation(), rounds=2)
    plain = fs.run(fs.FedAvg(lr=0.1), model=fs.Model.wrap(Both), data=federation(), rounds=2)
    assert run.history[-1]["clients"] == plain.history[-1]["clients"]
    assert run.simulation.fitted.stackable
    assert not torch.compiler.is_compiling()
    assert not recwarn.list


def test_a_module_that_looks_at_values_all_the_same_runs_client_by_client():
    with pytest.warns(UserWarning, match=r"Careless cannot run for all clients at once, .*data-dependent"):
        run = fs.run(fs.FedAvg(lr=0.1), model=fs.Model.wrap(Careless), data=federation(), rounds=2)
    plain = fs.run(fs.FedAvg(lr=0.1), model=fs.Model.wrap(Both), data=federation(), rounds=2)
    assert not run.simulation.fitted.stackable
    assert run.accuracy == pytest.approx(plain.accuracy, abs=1e-6)
    assert run.history[-1]["train_loss"] == pytest.approx(plain.history[-1]["train_loss"], abs=1e-5)


def test_a_torch_without_the_flag_runs_such_a_module_client_by_client(monkeypatch):
    monkeypatch.delattr(torch.compiler, "_is_compiling_flag")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
    with pytest.warns(UserWarning, match=r"Careful cannot run for all clients at once, .*data-dependent"):
        run = fs.run(fs.FedAvg(lr=0.1), model=fs.Model.wrap(Careful), data=federation(), rounds=1)
    assert not run.simulation.fitted.stackable
    assert not hasattr(torch.compiler, "_is_compiling_flag")


def test_the_head_may_be_called_by_name():
    class Keyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.fc = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x):
            return self.fc(input=self.body(x))

    fitted = Fitted(fs.Model.wrap(Keyword))
    assert fitted.apply(dict(fitted.module.state_dict()), torch.rand(2, 4)).features.shape == (2, 5)
