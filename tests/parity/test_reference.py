"""The engine against the slow reference: ragged clients, partial participation, BatchNorm, momentum, decay, clipping."""

import pytest
import torch
from reference import Client, fedselect_round, partial_round
from torch import nn

import fedselect as fs
from fedselect.core import random
from fedselect.core.options import call
from fedselect.simulate import Simulation

SIZES = (7, 12, 5, 12)  # with batches of 5: one short batch, three full ones, one exactly
SEED = 3
FROZEN = {"freeze": "head", "finetune": 1, "view": "merged"}  # fine-tuning is forgotten again: rounds do not see it


def net(norm: bool) -> nn.Module:
    layers = [nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2)] if norm else [nn.Conv2d(1, 2, 3, padding=1)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)).double()


def federation() -> list[fs.ClientData]:
    g = torch.Generator().manual_seed(1)
    made = []
    for n in SIZES:
        x, y = torch.randn(n, 1, 4, 4, generator=g, dtype=torch.float64), torch.randint(0, 3, (n,), generator=g)
        made.append(fs.ClientData((x, y), (x[:4], y[:4])))
    return made


TRAININGS = {
    "plain": fs.Training(batch_size=5, momentum=0.0),
    "momentum": fs.Training(batch_size=5, momentum=0.9, weight_decay=0.01),
    "clipped": fs.Training(batch_size=5, momentum=0.5, clip=0.3),
}


FALLING = fs.Training(batch_size=5, momentum=0.9, weight_decay=0.01, schedule="step", decay=0.7)


def both(method, training, norm, fraction, slow_round, aggregator=None):
    """Run four rounds fast and slowly; return the two sets of client values, the masks and the simulation."""
    torch.manual_seed(0)
    module = net(norm)
    data = federation()
    how = {"seed": SEED, "training": training, "fraction": fraction, "aggregator": aggregator}
    sim = Simulation(method, fs.Model.wrap(module), fs.Federation(data, 3), **how)
    clients = [Client(i, module, *c.train) for i, c in enumerate(data)]
    server = {n: p.detach().clone() for n, p in module.double().named_parameters()}
    how = {k: getattr(training, k) for k in ("batch_size", "momentum", "weight_decay", "clip")}
    for r in range(4):
        sim.step()
        present = random.choose(SEED, torch.arange(4), max(1, round(fraction * 4)), r, "cohort").tolist()
        slow_round(server, clients, present, r, how=how, seed=SEED)
    return sim, clients, server


def assert_same(sim, clients, server):
    fast = sim.models(range(4), "local")
    for c in clients:
        for n, v in c.module.state_dict().items():
            if n in fast:  # running statistics included
                torch.testing.assert_close(
                    fast[n][c.number], v, rtol=1e-9, atol=1e-10, msg=lambda m, n=n, c=c: f"{c.number} {n}: {m}"
                )
    for n, v in server.items():
        torch.testing.assert_close(sim.server["params"][n], v, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("norm", [False, True], ids=["", "batchnorm"])
@pytest.mark.parametrize("training", TRAININGS)
def test_fedselect(training, norm, fraction):
    options = {"rate": 0.2, "limit": 0.45, "lr": 0.05, "personal_lr": 0.1, "epochs": 2}

    def slow(*args, **kw):
        fedselect_round(*args, **kw, **options, weights=[1.0] * 4)

    sim, clients, server = both(call(fs.FedSelect, **options), TRAININGS[training], norm, fraction, slow)
    assert_same(sim, clients, server)
    assert_same_masks(sim, clients)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("norm", [False, True], ids=["", "batchnorm"])
@pytest.mark.parametrize(
    "more",
    [
        {"decay": 0.7},
        {"server_momentum": 0.6},
        {"order": "joint", "personal_lr": 0.05},
        {"decay": 0.7, "server_momentum": 0.6},
        FROZEN,
        {**FROZEN, "order": "joint", "personal_lr": 0.05},
    ],
    ids=str,
)
def test_fedselect_beyond_the_paper(more, norm, fraction):
    options = {"rate": 0.2, "limit": 0.45, "lr": 0.05, "personal_lr": 0.1, "epochs": 2, **more}
    momentum = options.get("server_momentum", 0.0)
    method = call(fs.FedSelect, **{k: v for k, v in options.items() if k not in ("decay", "server_momentum")})
    training = FALLING if "decay" in more else TRAININGS["momentum"]
    velocity = {} if momentum else None
    frozen = ("4." if norm else "3.") if "freeze" in more else None
    options = {k: v for k, v in options.items() if k not in FROZEN}

    def slow(*args, **kw):
        fedselect_round(*args, **kw, **options, weights=[1.0] * 4, velocity=velocity, frozen=frozen)

    sim, clients, server = both(method, training, norm, fraction, slow, fs.Mean(momentum))
    assert_same(sim, clients, server)
    assert_same_masks(sim, clients)


def assert_same_masks(sim, clients):
    masks = fs.Result(sim, []).masks
    for c in clients:
        got = {(n, i) for n, m in masks.items() for i in m[c.number].flatten().nonzero().flatten().tolist()}
        assert got == c.personal


@pytest.mark.parametrize("norm", [False, True], ids=["", "batchnorm"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize(
    ("method", "is_head_personal", "phases", "samples"),
    [
        (fs.FedAvg(epochs=2, lr=0.05, norm_stats="local"), None, (("all", 2),), False),
        (fs.FedAvg(epochs=2, lr=0.05, norm_stats="local", weight="samples"), None, (("all", 2),), True),
        (fs.FedPer(epochs=2, lr=0.05), True, (("all", 2),), False),
        (fs.FedRep(epochs=1, head_epochs=2, lr=0.05), True, (("personal", 2), ("shared", 1)), False),
        (fs.FedBABU(epochs=2, lr=0.05), True, (("shared", 2),), False),
        (fs.LGFedAvg(epochs=2, lr=0.05), False, (("all", 2),), False),
    ],
    ids=["fedavg", "fedavg-by-samples", "fedper", "fedrep", "fedbabu", "lg-fedavg"],
)
def test_fixed_masks(method, is_head_personal, phases, samples, norm, fraction):
    head = "4." if norm else "3."

    def personal(name):
        return is_head_personal is not None and name.startswith(head) == is_head_personal

    def slow(*args, **kw):
        weights = SIZES if samples else [1.0] * 4
        partial_round(*args, **kw, is_personal=personal, phases=phases, lr=0.05, weights=weights)

    assert_same(*both(method, TRAININGS["momentum"], norm, fraction, slow))
