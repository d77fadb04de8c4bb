"""Methods with code of their own once more, slowly: plain loops over clients, float64, autograd by the book.

Written from the methods' descriptions; only the order of batches is borrowed from the package. Each `*_round` changes
`server` and the clients in place.
"""

import copy
import math

import torch
import torch.nn.functional as F
from reference import batches
from scipy.optimize import minimize

from fedselect.core import random


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


def sgd(node, module, names, lr, round_, epochs, how, seed, extra=None, key="train", kept=None, samples=None, shift=None):
    """`epochs` of SGD on the named parameters, momentum fresh; `extra` adds to the loss, `kept` masks entries.

    `samples`: the numbers of those it walks over, as many as the client has, in place of all. `shift`: what is added to the
    gradients. Returns the gradients of all steps without it, weight decay included.
    """
    seen = []
    samples = list(range(node.n)) if samples is None else samples
    module.train()
    params = dict(module.named_parameters())
    speed = {n: torch.zeros_like(params[n]) for n in names}
    for epoch in range(epochs):
        for batch in batches(node.number, round_, epoch, node.n, how["batch_size"], seed, key):
            batch = [samples[i] for i in batch]
            x, y = node.x[batch], node.y[batch]
            features = module[:-1](x)
            loss = F.cross_entropy(module[-1](features), y)
            if extra is not None:
                loss = loss + extra(params, features, y)
            grads = torch.autograd.grad(loss, [params[n] for n in names])
            with torch.no_grad():
                seen.append({n: g + how["weight_decay"] * params[n] for n, g in zip(names, grads, strict=True)})
                for n, g in seen[-1].items():
                    moved = how["momentum"] * speed[n] + (g + shift[n] if shift else g)
                    where = kept[n] if kept and n in kept else torch.ones_like(g, dtype=torch.bool)
                    speed[n] = torch.where(where, moved, speed[n])
                    params[n] -= lr * torch.where(where, moved, torch.zeros_like(g))
    return seen


def mean_gradient(seen, momentum):
    """The mean over K steps; momentum m takes the k-th again in later ones: it counts 1 + m + m^2 + ..., K - k + 1 terms."""
    times = [sum(momentum**j for j in range(len(seen) - k)) for k in range(len(seen))]
    return {n: sum(t * g[n] for t, g in zip(times, seen, strict=True)) / sum(times) for n in seen[0]}


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


def scaffold_round(server, controls, nodes, present, round_, *, lr, epochs, how, seed):
    """`controls`: {client: {name: value}} of all clients, whose mean is the server's."""
    received = {n: v.clone() for n, v in server.items()}
    common = {n: sum(c[n] for c in controls.values()) / len(controls) for n in controls[0]}
    for k in present:
        c = nodes[k]
        c.own.load_state_dict(received, strict=False)
        shift = {n: common[n] - v for n, v in controls[k].items()}
        seen = sgd(c, c.own, all_names(c.own), lr, round_, epochs, how, seed, shift=shift)
        controls[k] = mean_gradient(seen, how["momentum"])
    for n in server:
        server[n] = sum(values(nodes[k].own)[n] for k in present) / len(present)


def apfl_round(server, personal, alphas, nodes, present, round_, *, alpha_lr, lr, epochs, how, seed):
    """`personal`: {client: {name: v}}, `alphas`: {client: number}; a node's own module is its mixture, with its statistics."""
    received, copies = {n: v.clone() for n, v in server.items()}, []
    for k in present:
        c, alpha = nodes[k], alphas[k]
        shared = copy.deepcopy(c.own)
        shared.load_state_dict(received, strict=False)
        sgd(c, shared, all_names(shared), lr, round_, epochs, how, seed)
        copies.append(values(shared))
        w = {n: p.detach() for n, p in shared.named_parameters()}
        begin, v = personal[k], {n: p.clone().requires_grad_() for n, p in personal[k].items()}
        speed, slopes = {n: torch.zeros_like(p) for n, p in v.items()}, []
        c.own.train()
        for epoch in range(epochs):
            for batch in batches(c.number, round_, epoch, c.n, how["batch_size"], seed, "train"):
                share = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
                mixed = {n: share * v[n] + (1 - share) * w[n] for n in v}
                loss = F.cross_entropy(torch.func.functional_call(c.own, mixed, (c.x[batch],)), c.y[batch])
                loss = loss + 0.5 * how["weight_decay"] * sum((m**2).sum() for m in mixed.values())
                slopes.append(
                    {
                        n: g.detach()
                        for n, g in zip(v, torch.autograd.grad(loss, mixed.values(), retain_graph=True), strict=True)
                    }
                )
                for n, g in zip(v, torch.autograd.grad(loss, v.values()), strict=True):
                    speed[n] = how["momentum"] * speed[n] + g
                    v[n] = (v[n] - lr * speed[n]).detach().requires_grad_()
        c.own.load_state_dict({n: alpha * v[n].detach() + (1 - alpha) * w[n] for n in v}, strict=False)
        slope = mean_gradient(slopes, how["momentum"])
        down = sum(float((slope[n] * (begin[n] - w[n])).sum()) for n in v)
        personal[k] = {n: p.detach() for n, p in v.items()}
        alphas[k] = min(1.0, max(0.05, alpha - alpha_lr * down))
    for n in server:
        server[n] = sum(s[n] for s in copies) / len(copies)


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


def halves(node, seed):
    """Sample numbers of either half: shuffled once, dealt in turn, and each twice, to be as many as the whole."""
    mixed = random.permutations(
        random.client_keys(seed, torch.tensor([node.number]), 0, "halves"), torch.tensor([node.n]), node.n
    )
    mixed = mixed[0].tolist()
    dealt = (mixed[0::2], mixed[1::2]) if node.n > 1 else (mixed, mixed)
    return [[half[min(j // 2, len(half) - 1)] for j in range(node.n)] for half in dealt]


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def class_means(body, x, y):
    """{class: mean of the features of its samples}, sample by sample."""
    found = {}
    for k in sorted(set(y.tolist())):
        mine = [body(x[i : i + 1]).flatten().tolist() for i in range(len(y)) if int(y[i]) == k]
        if mine:
            found[k] = [sum(column) / len(mine) for column in zip(*mine, strict=True)]
    return found


def row_products(first, second, has):
    """Products of the rows of every two clients, and of i with itself between its halves, from lists (M, R, D) and (M, R).

    Features are divided by the root of what halves differ in there, summed over clients and rows, to which a tenth of the mean
    over features is added. Rows are less the mean of those that both clients have.
    """
    clients, rows, features = range(len(first)), range(len(has[0])), range(len(first[0][0]))
    loud = [sum((first[i][r][d] - second[i][r][d]) ** 2 for i in clients for r in rows if has[i][r]) for d in features]
    unit = [math.sqrt(v + 0.1 * sum(loud) / len(loud)) or 1e-150 for v in loud]

    def centred(rows_of, both):
        line = [[rows_of[r][d] / unit[d] for d in features] for r in both]
        mean = [sum(row[d] for row in line) / max(len(both), 1) for d in features]
        return [[row[d] - mean[d] for d in features] for row in line]

    between, own = [], []
    for i in clients:
        between.append([])
        own.append([])
        for j in clients:
            both = [r for r in rows if has[i][r] and has[j][r]]
            a, b, c, e = (centred(rows_of, both) for rows_of in (first[i], second[i], first[j], second[j]))
            mine = [[(v + w) / 2 for v, w in zip(x, y, strict=True)] for x, y in zip(a, b, strict=True)]
            theirs = [[(v + w) / 2 for v, w in zip(x, y, strict=True)] for x, y in zip(c, e, strict=True)]
            between[-1].append(sum(dot(x, y) for x, y in zip(mine, theirs, strict=True)))
            own[-1].append(sum(dot(x, y) for x, y in zip(a, b, strict=True)))
    return between, own


def groups_alike(first, second, has):
    """Who is alike, as lists of clients in order.

    From every client alone, the two groups with the most votes between them are merged, as long as these are not negative. Of
    equal ones those of most clients, and of these the first.
    """
    between, own = row_products(first, second, has)
    groups = [[i] for i in range(len(first))]

    def vote(m, n):
        common = sum(a and b for a, b in zip(has[m], has[n], strict=True))
        return between[m][n] - (own[m][n] + own[n][m]) / 4 if common > 1 else 0.0

    while len(groups) > 1:
        tried = []
        for j in range(len(groups)):
            for i in range(j):
                votes = sum(vote(m, n) for m in groups[i] for n in groups[j])
                tried.append((-round(votes, 9), -len(groups[i] + groups[j]), groups[i][0], groups[j][0], i, j))
        best = min(tried)
        if best[0] > 0:
            break
        i, j = best[-2:]
        groups = sorted([*(g for k, g in enumerate(groups) if k not in (i, j)), sorted(groups[i] + groups[j])])
    return groups


def fedalike_round(server, heads, profiles, groups, nodes, present, round_, *, body, classes, lr, epochs, how, seed):
    """`heads`: {client: {name: value}}; `profiles`: {client: (first, second, has)} of those seen; `groups`: lists of them.

    `body`: what turns inputs into features in the module that everybody started from.
    """
    is_head = head_of(nodes[0].own)
    new = [k for k in present if k not in profiles]
    for k in new:
        c = nodes[k]
        found = [class_means(body, c.x[half], c.y[half]) for half in halves(c, seed)]
        wide = len(next(iter(found[0].values())))
        has = [r in found[0] and r in found[1] and c.n > 1 for r in range(classes)]
        rows = [[f[r] if has[r] else [0.0] * wide for r in range(classes)] for f in found]
        profiles[k] = (*rows, has)
    for k in present:
        c = nodes[k]
        names = [n for n in server if not n.startswith(is_head) and "running" not in n]  # statistics stay
        c.own.load_state_dict({**{n: server[n] for n in names}, **heads[k]}, strict=False)
        sgd(c, c.own, all_names(c.own), lr, round_, epochs, how, seed)
    for n in names:
        server[n] = sum(values(nodes[k].own)[n] for k in present) / len(present)
    if new:
        known = sorted(profiles)
        groups[:] = [[known[i] for i in g] for g in groups_alike(*([profiles[k][part] for k in known] for part in range(3)))]
    unseen = [k for k in heads if k not in profiles]
    for group, senders in [*((g, [k for k in g if k in present]) for g in groups), (unseen, list(present))]:
        for n in heads[0]:
            for k in group if senders else ():
                heads[k][n] = sum(values(nodes[m].own)[n] for m in senders) / len(senders)
