"""Ditto, FedProx, FedPAC and LotteryFL once more, slowly: plain loops over clients, float64, autograd by the book.

Written from the methods' descriptions; only the order of batches is borrowed from the package. Each `*_round` changes
`server` and the clients in place.
"""

import copy
import math

import torch
import torch.nn.functional as F
from reference import batches
from scipy.optimize import minimize


class Node:
    """A client: its data, and modules by name."""

    def __init__(self, number, module, train, val):
        self.number, self.x, self.y = number, train[0].double(), train[1]
        self.val = (val[0].double(), val[1])
        self.own = copy.deepcopy(module).double()
        self.kept = {n: torch.ones_like(p, dtype=torch.bool) for n, p in self.own.named_parameters() if p.ndim > 1}

    @property
    def n(self):
        return len(self.y)


def values(module):
    """Parameters and running statistics, by name."""
    return {n: v.detach().clone() for n, v in module.state_dict().items() if v.is_floating_point()}


def head_of(module):
    return f"{len(module) - 1}."


def sgd(node, module, names, lr, round_, epochs, how, seed, extra=None, key="train", kept=None):
    """`epochs` of SGD on the named parameters, momentum fresh; `extra` adds to the loss, `kept` masks entries."""
    module.train()
    params = dict(module.named_parameters())
    speed = {n: torch.zeros_like(params[n]) for n in names}
    for epoch in range(epochs):
        for batch in batches(node.number, round_, epoch, node.n, how["batch_size"], seed, key):
            x, y = node.x[batch], node.y[batch]
            features = module[:-1](x)
            loss = F.cross_entropy(module[-1](features), y)
            if extra is not None:
                loss = loss + extra(params, features, y)
            grads = torch.autograd.grad(loss, [params[n] for n in names])
            with torch.no_grad():
                for n, g in zip(names, grads, strict=True):
                    g = g + how["weight_decay"] * params[n]
                    moved = how["momentum"] * speed[n] + g
                    where = kept[n] if kept and n in kept else torch.ones_like(g, dtype=torch.bool)
                    speed[n] = torch.where(where, moved, speed[n])
                    params[n] -= lr * torch.where(where, moved, torch.zeros_like(g))


def all_names(module):
    return [n for n, _ in module.named_parameters()]


def finetuned(node, start, lr, round_, epochs, how, seed):
    """What plain training on all of the client's data makes of a model, given by its values; the client keeps its own."""
    module = copy.deepcopy(node.own)
    module.load_state_dict(start, strict=False)
    sgd(node, module, all_names(module), lr, round_, epochs, how, seed, key="finetune")
    return values(module)


def pull(mu, anchor):
    return lambda params, features, y: 0.5 * mu * sum(((p - anchor[n]) ** 2).sum() for n, p in params.items())


def fedprox_round(server, nodes, present, round_, *, mu, lr, epochs, how, seed):
    received = {n: v.clone() for n, v in server.items()}
    for k in present:
        nodes[k].own.load_state_dict(received, strict=False)
        sgd(nodes[k], nodes[k].own, all_names(nodes[k].own), lr, round_, epochs, how, seed, pull(mu, received))
    for n in server:  # uniform, statistics included
        server[n] = sum(values(nodes[k].own)[n] for k in present) / len(present)


def ditto_round(server, nodes, present, round_, *, lam, lr, epochs, how, seed):
    received = {n: v.clone() for n, v in server.items()}
    copies = []
    for k in present:
        shared = copy.deepcopy(nodes[k].own)
        shared.load_state_dict(received, strict=False)
        sgd(nodes[k], shared, all_names(shared), lr, round_, epochs, how, seed)
        sgd(nodes[k], nodes[k].own, all_names(shared), lr, round_, epochs, how, seed, pull(lam, received))
        copies.append(values(shared))
    for n in server:
        server[n] = sum(c[n] for c in copies) / len(copies)


def lotteryfl_round(server, nodes, present, round_, *, initial, rate, floor, above, lr, epochs, how, seed):
    received = {n: v.clone() for n, v in server.items()}
    total = {n: torch.zeros_like(v) for n, v in server.items()}
    count = {n: torch.zeros_like(v) for n, v in server.items()}
    for k in present:
        c = nodes[k]
        c.own.load_state_dict({n: v * c.kept[n] if n in c.kept else v for n, v in received.items()}, strict=False)
        c.own.eval()
        right = (c.own(c.val[0]).argmax(1) == c.val[1]).double().mean()
        share = sum(int(m.sum()) for m in c.kept.values()) / sum(m.numel() for m in c.kept.values())
        pruned = False
        if right > above and share > floor:
            for n, m in c.kept.items():
                held = [i for i in range(m.numel()) if m.view(-1)[i]]
                held.sort(key=lambda i, n=n: abs(float(values(c.own)[n].view(-1)[i])))
                for i in held[: math.floor(rate * len(held) + 1e-9)]:
                    m.view(-1)[i] = False
                    pruned = True
        if pruned:
            c.own.load_state_dict({n: initial[n] for n in all_names(c.own)}, strict=False)
        with torch.no_grad():
            for n, p in c.own.named_parameters():
                if n in c.kept:
                    p *= c.kept[n]
        sgd(c, c.own, all_names(c.own), lr, round_, epochs, how, seed, kept=c.kept)
        for n, v in values(c.own).items():
            keeps = c.kept[n].double() if n in c.kept else torch.ones_like(v)
            total[n] += keeps * v
            count[n] += keeps
    for n in server:
        server[n] = torch.where(count[n] > 0, total[n] / count[n].clamp_min(1), server[n])


def moments(node, module, classes):
    """Per class: count, mean feature, mean squared norm."""
    module.eval()
    with torch.no_grad():
        f = module[:-1](node.x)
    found = {}
    for k in range(classes):
        mine = f[node.y == k]
        if len(mine):
            found[k] = (len(mine), mine.mean(0), float((mine**2).sum(1).mean()))
    return found


def best_mixture(i, h, v):
    """argmin over the simplex of a'(diag v + D)a, by a general solver."""
    m = len(h)
    d = [[float(((h[i] - h[j]) * (h[i] - h[k])).sum()) for k in range(m)] for j in range(m)]
    p = torch.tensor(d, dtype=torch.float64) + torch.diag(torch.tensor(v, dtype=torch.float64))
    p = (p / p.diagonal().mean()).numpy()
    best = minimize(
        lambda a: a @ p @ a, [1 / m] * m, jac=lambda a: 2 * p @ a, method="SLSQP", bounds=[(0, 1)] * m,
        constraints={"type": "eq", "fun": lambda a: a.sum() - 1}, options={"ftol": 1e-15, "maxiter": 1000},
    ).x  # fmt: skip
    best = [float(a) if a > 1e-3 else 0.0 for a in best]
    return [a / sum(best) for a in best]


def fedpac_round(server, heads, prototypes, nodes, present, round_, *, lam, lr, head_lr, epochs, classes, how, seed):
    """`heads`: {client: {name: value}}; `prototypes`: {class: mean} of the last round, empty in the first."""
    sent, h, v, counts = {}, {}, {}, {}
    for k in present:
        c, module = nodes[k], nodes[k].own
        is_head = head_of(module)
        body = {n: p for n, p in server.items() if not n.startswith(is_head) and "running" not in n}  # statistics stay
        module.load_state_dict({**body, **heads[k]}, strict=False)
        seen = moments(c, module, classes)
        wide = module[-1].in_features
        h[k] = torch.stack([seen[y][0] / c.n * seen[y][1] if y in seen else torch.zeros(wide).double() for y in range(classes)])
        spread = sum(n / c.n * square for n, _, square in seen.values())
        v[k] = (spread - sum(float((n / c.n * mu).pow(2).sum()) for n, mu, _ in seen.values())) / c.n
        names = all_names(module)
        sgd(c, module, [n for n in names if n.startswith(is_head)], head_lr, round_, 1, how, seed, key="head")
        points = {y: prototypes.get(y, mu) for y, (_, mu, _) in seen.items()}
        near = None
        if prototypes:
            near = lambda params, f, y, p=points: lam * ((f - torch.stack([p[int(t)] for t in y])) ** 2).mean()  # noqa: E731
        sgd(c, module, [n for n in names if not n.startswith(is_head)], lr, round_, epochs, how, seed, near)
        counts[k] = moments(c, module, classes)
        sent[k] = values(module)
    total = sum(nodes[k].n for k in present)
    is_head = head_of(nodes[0].own)
    for n in server:
        if not n.startswith(is_head) and "running" not in n:
            server[n] = sum(nodes[k].n * sent[k][n] for k in present) / total
    for k in present:
        a = best_mixture(present.index(k), [h[j] for j in present], [v[j] for j in present])
        heads[k] = {n: sum(w * sent[j][n] for w, j in zip(a, present, strict=True)) for n in heads[k]}
    prototypes.clear()
    for y in range(classes):
        have = [k for k in present if y in counts[k]]
        if have:
            prototypes[y] = sum(counts[k][y][0] * counts[k][y][1] for k in have) / sum(counts[k][y][0] for k in have)
