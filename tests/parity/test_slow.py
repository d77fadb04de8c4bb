"""Methods with code of their own against the slow reference: ragged clients, some away, BatchNorm."""

from dataclasses import replace

import pytest
import torch
from slow import (
    Node,
    all_names,
    apfl_round,
    ditto_round,
    fedalike_round,
    fedpac_round,
    fedprox_round,
    finetuned,
    head_of,
    lotteryfl_round,
    scaffold_round,
    values,
)
from torch import nn

import fedselect as fs
from fedselect.core import random
from fedselect.simulate import Simulation

SIZES = (7, 12, 5, 12)
SEED, CLASSES = 3, 4
TRAINING = fs.Training(batch_size=5, momentum=0.9, weight_decay=0.01)
HOW = {"batch_size": 5, "momentum": 0.9, "weight_decay": 0.01}


def net(norm: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 2, 3, padding=1), *([nn.BatchNorm2d(2)] if norm else []), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4)]
    return nn.Sequential(*layers).double()


def federation(sizes=SIZES, kinds=((0,), (0, 1, 2), (3,), (1, 2))) -> list[fs.ClientData]:
    """Client 2 alone has class 3; client 0 lacks class 1, and nobody but 1 and 3 has class 2."""
    g = torch.Generator().manual_seed(1)
    made = []
    for n, own in zip(sizes, kinds, strict=True):
        x = torch.randn(n + 6, 1, 4, 4, generator=g, dtype=torch.float64)
        y = torch.tensor(own)[torch.randint(0, len(own), (n + 6,), generator=g)]
        made.append(fs.ClientData((x[:n], y[:n]), (x[n : n + 3], y[n : n + 3]), (x[n + 3 :], y[n + 3 :])))
    return made


def start(method, norm, fraction, data=None):
    data, module = data or federation(), net(norm)
    sim = Simulation(
        method, fs.Model.wrap(module), fs.Federation(data, CLASSES), seed=SEED, training=TRAINING, fraction=fraction
    )
    nodes = [Node(i, module, c.train, c.val) for i, c in enumerate(data)]
    return sim, nodes, values(module)


def cohort(round_, fraction):
    return random.choose(SEED, torch.arange(4), max(1, round(fraction * 4)), round_, "cohort").tolist()


def assert_same(sim, nodes, server, skip=()):
    fast = sim.models(range(4), "local")
    close = {"rtol": 1e-8, "atol": 1e-9}
    for c in nodes:
        for n, v in values(c.own).items():
            torch.testing.assert_close(fast[n][c.number], v, **close, msg=lambda m, n=n, c=c: f"client {c.number} {n}: {m}")
    for n, v in server.items():
        if n not in skip:
            torch.testing.assert_close(sim.server["params"][n], v, **close, msg=lambda m, n=n: f"server {n}: {m}")


both = [pytest.mark.parametrize("norm", [False, True], ids=["", "batchnorm"]), pytest.mark.parametrize("fraction", [1.0, 0.5])]


def apply(marks):
    def decorate(test):
        for mark in marks:
            test = mark(test)
        return test

    return decorate


@apply(both)
def test_fedprox(norm, fraction):
    sim, nodes, server = start(fs.FedProx(epochs=2, lr=0.05, mu=0.3), norm, fraction)
    for r in range(4):
        sim.step()
        fedprox_round(server, nodes, cohort(r, fraction), r, mu=0.3, lr=0.05, epochs=2, how=HOW, seed=SEED)
    assert_same(sim, nodes, server)


@apply(both)
def test_ditto(norm, fraction):
    sim, nodes, server = start(fs.Ditto(epochs=2, lr=0.05, lam=0.75), norm, fraction)
    for r in range(4):
        sim.step()
        ditto_round(server, nodes, cohort(r, fraction), r, lam=0.75, lr=0.05, epochs=2, how=HOW, seed=SEED)
    assert_same(sim, nodes, server)


@apply(both)
def test_scaffold(norm, fraction):
    """Clients of unlike size take unlike numbers of steps; the server's control is the mean over all clients, some away."""
    sim, nodes, server = start(fs.Scaffold(epochs=2, lr=0.02, finetune=2), norm, fraction)
    controls = {k: {n: torch.zeros_like(server[n]) for n in all_names(nodes[k].own)} for k in range(4)}
    for r in range(4):
        sim.step()
        scaffold_round(server, controls, nodes, cohort(r, fraction), r, lr=0.02, epochs=2, how=HOW, seed=SEED)
    assert_same(sim, nodes, server)
    close = {"rtol": 1e-7, "atol": 1e-8}
    for n in controls[0]:
        own = torch.stack([controls[k][n] for k in range(4)])
        torch.testing.assert_close(sim.store.rows["control"][n], own, **close)
        torch.testing.assert_close(sim.server["control"][n], own.mean(0), **close)
    assert_fine_tuned(sim, nodes, {n: v.expand(4, *v.shape) for n, v in server.items()}, 0.02, epochs=2)


@apply(both)
def test_apfl(norm, fraction):
    """v by the gradient of the mixture's loss, alpha by its derivative; some alphas reach their bound and others do not."""
    options = {"epochs": 2, "lr": 0.05, "alpha_lr": 0.5}
    sim, nodes, server = start(fs.APFL(alpha=torch.tensor([0.3, 0.5, 0.5, 0.9]), **options), norm, fraction)
    alphas = dict(enumerate([0.3, 0.5, 0.5, 0.9]))
    personal = {k: {n: server[n].clone() for n in all_names(nodes[k].own)} for k in range(4)}
    for r in range(4):
        sim.step()
        apfl_round(server, personal, alphas, nodes, cohort(r, fraction), r, how=HOW, seed=SEED, **options)
    assert_same(sim, nodes, server)
    assert min(alphas.values()) == 0.05 < max(alphas.values()) < 1.0
    found = sim.store.rows["share"]["alpha"]
    torch.testing.assert_close(found, torch.tensor(list(alphas.values()), dtype=found.dtype), rtol=1e-7, atol=1e-8)
    merged = sim.models(range(4), "merged")
    for k, own in personal.items():
        for n, v in own.items():
            torch.testing.assert_close(sim.store.rows["own"][n][k], v, rtol=1e-7, atol=1e-8)
            torch.testing.assert_close(merged[n][k], alphas[k] * v + (1 - alphas[k]) * server[n], rtol=1e-7, atol=1e-8)


@apply(both)
@pytest.mark.parametrize("rates", [{}, {"personal_lr": 0.08}, {"personal_lr": 0.08, "finetune_lr": 0.02}], ids=str)
def test_ditto_fine_tuned(norm, fraction, rates):
    """The personal model trained on, with no pull; rounds are those of Ditto without it."""
    method = fs.Ditto(epochs=2, lr=0.05, lam=0.75, finetune=2, **rates)
    sim, nodes, _ = start(method, norm, fraction)
    plain, _, _ = start(replace(method, finetune=0, finetune_lr=None), norm, fraction)
    for _ in range(3):
        sim.step(), plain.step()
    assert_same_rounds(sim, plain)
    own, lr = plain.models(range(4), "merged"), list({"lr": 0.05, **rates}.values())[-1]
    assert all(torch.equal(v, own[n]) for n, v in plain.models(range(4), "local").items())
    assert_fine_tuned(sim, nodes, own, lr, epochs=2)


@apply(both)
@pytest.mark.parametrize("rates", [{}, {"finetune_lr": 0.02}], ids=str)
def test_fedpac_fine_tuned(norm, fraction, rates):
    """The merged model trained on, body and head; rounds are those of FedPAC without it."""
    method = fs.FedPAC(epochs=2, lr=0.05, head_lr=0.1, finetune=2, view="merged", **rates)
    sim, nodes, _ = start(method, norm, fraction)
    plain, _, _ = start(replace(method, finetune=0, finetune_lr=None), norm, fraction)
    for _ in range(3):
        sim.step(), plain.step()
    assert_same_rounds(sim, plain)
    assert_fine_tuned(sim, nodes, plain.models(range(4), "merged"), rates.get("finetune_lr", 0.05), epochs=2)


def assert_same_rounds(a, b):
    """To the bit: the server's state, and clients' models as local training left them."""
    for k, tree in a.server.items():
        assert all(torch.equal(v, b.server[k][n]) for n, v in tree.items()), k
    own, other = a.models(range(4), "local"), b.models(range(4), "local")
    assert all(torch.equal(v, other[n]) for n, v in own.items())


def assert_fine_tuned(sim, nodes, before, lr, epochs):
    """The model that is reported is `before` after plain training, client by client."""
    after = sim.models(range(4))
    for c in nodes:
        begin = {n: v[c.number] for n, v in before.items()}
        for n, v in finetuned(c, begin, lr, sim.round - 1, epochs, HOW, SEED).items():
            close = {"rtol": 1e-8, "atol": 1e-9, "msg": lambda m, n=n, c=c: f"client {c.number} {n}: {m}"}
            torch.testing.assert_close(after[n][c.number], v, **close)
            assert not torch.equal(v, begin[n])


@apply(both)
def test_lotteryfl(norm, fraction):
    options = {"rate": 0.3, "floor": 0.4, "above": 0.2, "lr": 0.05, "epochs": 2}
    sim, nodes, server = start(fs.LotteryFL(**options), norm, fraction)
    initial = {n: v.clone() for n, v in server.items()}
    for r in range(4):
        sim.step()
        lotteryfl_round(server, nodes, cohort(r, fraction), r, initial=initial, how=HOW, seed=SEED, **options)
    assert_same(sim, nodes, server)
    kept = sim.store.rows["kept"]
    assert any(not bool(m.all()) for m in kept.values())  # somebody pruned
    for c in nodes:
        assert all(torch.equal(kept[n][c.number], m) for n, m in c.kept.items())


@apply(both)
def test_fedpac(norm, fraction):
    options = {"lr": 0.05, "head_lr": 0.1, "lam": 0.7, "epochs": 2}
    sim, nodes, server = start(fs.FedPAC(head_epochs=1, **options), norm, fraction)
    head = head_of(nodes[0].own)
    heads = {k: {n: v.clone() for n, v in server.items() if n.startswith(head)} for k in range(4)}
    prototypes: dict[int, torch.Tensor] = {}
    for r in range(4):
        sim.step()
        fedpac_round(server, heads, prototypes, nodes, cohort(r, fraction), r, classes=CLASSES, how=HOW, seed=SEED, **options)
    unused = {n for n in server if n.startswith(head) or "running" in n}  # heads have rows of their own, statistics stay
    fast = sim.models(range(4), "local")
    for c in nodes:
        for n, v in values(c.own).items():
            # the mixtures come from two solvers: equal to about 1e-7, and heads follow them
            torch.testing.assert_close(
                fast[n][c.number], v, rtol=1e-5, atol=1e-6, msg=lambda m, n=n, c=c: f"{c.number} {n}: {m}"
            )
    for n in server.keys() - unused:
        torch.testing.assert_close(sim.server["params"][n], server[n], rtol=1e-5, atol=1e-6)
    for k in range(4):
        for n, v in heads[k].items():
            torch.testing.assert_close(sim.server["heads"][n][k], v, rtol=1e-5, atol=1e-6)
    known = {y for y in range(CLASSES) if sim.server["prototypes"]["count"][y] > 0}
    assert known == set(prototypes)


def reversed_in_the_last(data):
    """A pixel for each class is bright in its pictures; the last client has the labels the other way round."""
    for client in data:
        for x, y in (client.train, client.test, client.val):
            x.flatten(1)[torch.arange(len(y)), y] += 3.0
    x, y = data[-1].train
    return [*data[:-1], replace(data[-1], train=(x, CLASSES - 1 - y))]


@apply(both)
def test_fedalike(norm, fraction):
    """With somebody who has one sample; where half take part, some are known before the others."""
    options = {"lr": 0.1, "epochs": 2}
    data = reversed_in_the_last(federation((9, 24, 1, 24), ((0, 1), *[(0, 1, 2, 3)] * 3)))
    sim, nodes, server = start(fs.FedAlike(finetune=2, finetune_lr=0.02, **options), norm, fraction, data)
    head, body = head_of(nodes[0].own), net(norm)[:-1].eval()
    heads = {k: {n: v.clone() for n, v in server.items() if n.startswith(head)} for k in range(4)}
    profiles: dict[int, tuple] = {}
    groups: list[list[int]] = []
    seen = set()
    for r in range(4 if fraction == 1.0 else 9):
        sim.step()
        how = {"how": HOW, "seed": SEED, "classes": CLASSES, "body": body, **options}
        fedalike_round(server, heads, profiles, groups, nodes, cohort(r, fraction), r, **how)
        named = {k: g[0] for g in groups for k in g}
        assert sim.method.groups(sim.server).tolist() == [named.get(k, -1) for k in range(4)], r
        seen.add(len(named))
    assert seen == {4} if fraction == 1.0 else len(seen) > 1
    assert 1 < len(groups) < 4  # neither FedAvg nor FedPer
    assert_same(sim, nodes, server, skip={n for n in server if n.startswith(head) or "running" in n})
    for k in range(4):
        for n, v in heads[k].items():
            torch.testing.assert_close(sim.server["heads"][n][k], v, rtol=1e-8, atol=1e-9)
    own = {n: v for n, v in sim.models(range(4), "local").items() if "running" in n}
    body = {n: torch.stack([v] * 4) for n, v in server.items() if n not in own}
    merged = {**body, **own, **{n: torch.stack([heads[k][n] for k in range(4)]) for n in heads[0]}}
    assert_fine_tuned(sim, nodes, merged, 0.02, epochs=2)
