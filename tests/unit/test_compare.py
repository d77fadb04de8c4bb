"""fs.compare: what it finds is what each run finds alone."""

import pytest
import torch

import fedselect as fs

METHODS = {
    "a": fs.FedSelect(rate=0.2, limit=0.4),
    "b": fs.FedSelect(rate=0.1, limit=0.2, lr=0.05),
    "avg": fs.FedAvg(lr=0.1),
    "pac": fs.FedPAC(),
}


def without_time(history):
    return [{k: v for k, v in record.items() if k != "seconds"} for record in history]


def test_every_run_comes_out_as_alone(digits):
    found = fs.compare(METHODS, model=fs.models.mlp(digits, hidden=8), data=digits, rounds=3, seeds=[0, 4], eval_every=2)
    assert list(found) == [(name, seed) for name in METHODS for seed in (0, 4)]
    for (name, seed), result in found.items():
        model = fs.models.mlp(digits, hidden=8)
        alone = fs.run(METHODS[name], model=model, data=digits, rounds=3, seed=seed, eval_every=2)
        assert without_time(result.history) == without_time(alone.history)
        assert all(torch.equal(v, alone.personal(1)[n]) for n, v in result.personal(1).items())


def test_a_run_that_diverges_does_not_stop_the_others(digits):
    methods = {"fine": fs.FedAvg(lr=0.1), "wild": fs.FedAvg(lr=1e30)}
    found = fs.compare(methods, model=fs.models.mlp(digits, hidden=8), data=digits, rounds=3)
    assert len(found["fine", 0].history) == 3
    assert "is no longer finite" in str(found["wild", 0])
    assert isinstance(found["wild", 0], fs.TrainingError)


def test_nothing_can_be_run_for_no_rounds(digits):
    with pytest.raises(fs.InputError, match="rounds must be at least 1"):
        fs.compare(METHODS, model=fs.models.mlp(digits), data=digits, rounds=0)


def test_methods_have_names(digits):
    with pytest.raises(fs.InputError, match=r"""methods must be a dict .* such as {"fedavg": fs.FedAvg\(\)}, not a list"""):
        fs.compare([fs.FedAvg()], model=fs.models.mlp(digits), data=digits)


@pytest.mark.parametrize("seeds", [3, "0,1", None], ids=repr)
def test_seeds_that_are_no_list_get_a_sentence(digits, seeds):
    with pytest.raises(fs.InputError, match=r"seeds must be a list of whole numbers, such as \[0, 1, 2\], not "):
        fs.compare(METHODS, model="mlp", data=digits, rounds=1, seeds=seeds)
