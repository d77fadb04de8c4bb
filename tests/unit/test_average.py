"""The moving mean of what the server holds: which numbers it has, and who gets to see them."""

import pytest
import torch

import fedselect as fs
from fedselect.methods.partial import Partial
from fedselect.simulate import Simulation

BETA = 0.7


def sim(digits: fs.Federation, method: Partial, **how) -> Simulation:
    return Simulation(method, fs.models.mlp(digits, hidden=8), digits, seed=3, **how)


@pytest.fixture(scope="module")
def digits() -> fs.Federation:
    return fs.load("digits", clients=4, classes_per_client=3, train=20, test=10, seed=2)


def test_is_the_mean_of_all_rounds_that_weighs_late_ones_more(digits):
    run = sim(digits, fs.FedSelect(server_average=BETA, view="merged", lr=0.05, personal_lr=0.1))
    seen: list[dict[str, torch.Tensor]] = []
    for _ in range(5):
        run.step()
        seen.append({n: v.double().clone() for n, v in run.server["params"].items()})
    weights = [BETA**age for age in reversed(range(len(seen)))]
    for n, v in run.server["average"].items():
        slow = sum(w * s[n] for w, s in zip(weights, seen, strict=True)) / sum(weights)
        torch.testing.assert_close(v.double(), slow, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", [fs.FedAvgFT, fs.FedBABU, fs.FedSelect])
def test_training_never_sees_it(digits, method):
    more = {"view": "merged"} if method is fs.FedSelect else {"finetune": 1}
    runs = [sim(digits, method(**more, server_average=b)) for b in (0.0, BETA)]
    last = [[run.step() for _ in range(3)][-1] for run in runs]
    assert all(torch.equal(v, runs[1].server["params"][n]) for n, v in runs[0].server["params"].items())
    assert last[0]["clients"]["accuracy_local"] == last[1]["clients"]["accuracy_local"]
    assert last[0]["bytes_up"] == last[1]["bytes_up"]
    assert last[0]["bytes_down"] < last[1]["bytes_down"]  # it travels too


def test_is_what_the_merged_view_shows(digits):
    run = sim(digits, fs.FedAvgFT(finetune=0, server_average=BETA))
    for _ in range(3):
        run.step()
    shown = run.models([0, 2])
    for n, v in run.server["average"].items():
        assert torch.equal(shown[n], v.expand(2, *v.shape))
        assert not torch.equal(v, run.server["params"][n])


def test_the_first_round_has_no_past(digits):
    run = sim(digits, fs.FedBABU(finetune=1, server_average=0.9))
    run.step()
    for n, v in run.server["average"].items():
        torch.testing.assert_close(v, run.server["params"][n])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server_average": 1.0, "view": "merged"}, "server_average must be less than 1, not 1.0"),
        ({"server_average": 1.5, "view": "merged"}, "server_average is a share"),
        ({"server_average": 0.9}, "server_average changes the merged model, which view=local does not report"),
    ],
)
def test_refuses(options, message):
    with pytest.raises(fs.InputError, match=message):
        fs.FedSelect(**options)


def test_belongs_to_the_server(digits):
    method = fs.FedSelect(server_average=torch.full((4,), 0.5), view="merged")
    with pytest.raises(fs.InputError, match="server_average is an option of the server; give one number"):
        sim(digits, method)
