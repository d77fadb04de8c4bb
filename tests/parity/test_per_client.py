"""A hyper-parameter given one for each client follows the client, however cohorts are ordered, drawn or cut."""

import pytest
import torch

import fedselect as fs

SIZES = (8, 20, 33, 7)  # the engine puts larger clients first


def federation() -> fs.Federation:
    g = torch.Generator().manual_seed(0)
    made = []
    for n in SIZES:
        x = torch.randn(n, 6, generator=g)
        made.append(fs.ClientData((x, torch.randint(0, 3, (n,), generator=g)), (x[:4], torch.tensor([0, 1, 2, 0]))))
    return fs.Federation(made, 3)


def run(method, **how):
    data = federation()
    return fs.run(method, model=fs.models.mlp(data, hidden=4), data=data, rounds=2, seed=3, **how)


@pytest.mark.parametrize("how", [{}, {"chunk": 2}, {"chunk": 1}], ids=str)
def test_each_client_trains_at_its_own_rate(how):
    rates = [0.001, 0.01, 0.1, 0.2]
    mixed = run(fs.Local(lr=torch.tensor(rates)), **how)
    for i, lr in enumerate(rates):
        alone = run(fs.Local(lr=lr)).personal(i)
        for n, v in mixed.personal(i).items():
            torch.testing.assert_close(v, alone[n], rtol=1e-6, atol=1e-7)


def test_each_client_has_its_own_limit():
    result = run(fs.FedSelect(limit=torch.tensor([0.0, 0.1, 0.2, 0.3]), rate=0.5, lr=0.1), fraction=1.0)
    d = result.simulation.model.size
    held = torch.stack([m.flatten(1).sum(1) for m in result.masks.values()]).sum(0)
    assert held.tolist() == [int(limit * d + 1e-9) for limit in (0.0, 0.1, 0.2, 0.3)]


def test_cohorts_that_are_drawn_take_theirs_along():
    rates = torch.tensor([0.0001, 0.1, 0.1, 0.1])
    sim = run(fs.Local(lr=rates), fraction=0.5).simulation
    start = torch.cat([v.flatten() for v in sim.initial.values()])
    for i in range(4):
        moved = float((torch.cat([v[0].flatten() for v in sim.models([i]).values()]) - start).norm())
        assert moved < 0.01 if i == 0 else moved == 0.0 or moved > 0.01  # who was not drawn did not move at all


@pytest.mark.parametrize("method", [fs.FedAvg(lr=torch.ones(3)), fs.FedSelect(limit=torch.ones(5) / 2)], ids=["lr", "limit"])
def test_one_for_each_client_means_each(method):
    with pytest.raises(fs.InputError, match="values for 4 clients; give one number, or one per client"):
        run(method)
