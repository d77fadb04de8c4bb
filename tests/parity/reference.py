"""FedSelect and its relatives once more, slowly: one client after another, plain loops, float64, torch's own optimizer.

Written from the paper's pseudo-code, not from the package; all it borrows is the order of batches, so that both walk
the same data.
"""

import copy
import math

import torch
import torch.nn.functional as F

from fedselect.core import random


def batches(client, round_, epoch, n, size, seed, key="train"):
    """The sample numbers of every batch: the keyed shuffle, the last batch filled from its beginning."""
    k = random.fold(random.client_keys(seed, torch.tensor([client]), round_, key), epoch)
    order = random.permutations(k, torch.tensor([n]), n)[0].tolist()
    size = min(size, n)
    return [[order[i % n] for i in range(s * size, (s + 1) * size)] for s in range(math.ceil(n / size))]


class Client:
    """A module, its data, and a mask of personal entries as sets of (name, flat index)."""

    def __init__(self, number, module, x, y):
        self.number, self.module, self.x, self.y = number, copy.deepcopy(module).double(), x.double(), y
        self.personal = set()  # trained as personal this round
        self.kept = set()  # personal when it last trained: what aggregation leaves alone
        self.anchor = None

    def values(self):
        return {n: p.detach().clone() for n, p in self.module.named_parameters()}

    def write(self, name, index, value):
        with torch.no_grad():
            dict(self.module.named_parameters())[name].view(-1)[index] = value


def all_entries(module):
    return [(n, i) for n, p in module.named_parameters() for i in range(p.numel())]


def walk(client, optimizer_state, entries, lr, round_, epoch, how, seed):
    """One pass of SGD over the client's data, written entry by entry: only `entries` have any rule applied to them."""
    params = dict(client.module.named_parameters())
    chosen = {}
    for n, i in entries:
        chosen.setdefault(n, []).append(i)
    client.module.train()
    for batch in batches(client.number, round_, epoch, len(client.y), how["batch_size"], seed):
        client.module.zero_grad()
        loss = F.cross_entropy(client.module(client.x[batch]), client.y[batch])
        loss.backward()
        with torch.no_grad():
            grads = {n: params[n].grad.view(-1)[torch.tensor(idx)] for n, idx in chosen.items()}
            if how["clip"] is not None:
                norm = math.sqrt(sum(float((g**2).sum()) for g in grads.values()))
                grads = {n: g * min(1.0, how["clip"] / (norm + 1e-6)) for n, g in grads.items()}
            for n, idx in chosen.items():
                at = torch.tensor(idx)
                flat = params[n].view(-1)
                g = grads[n] + how["weight_decay"] * flat[at]
                speed = optimizer_state.setdefault(n, torch.zeros_like(flat))
                speed[at] = how["momentum"] * speed[at] + g
                flat[at] = flat[at] - lr * speed[at]


def fedselect_round(
    server, clients, present, round_, *, rate, limit, lr, personal_lr, epochs, how, seed, weights,
    order="alternate", decay=1.0, server_momentum=0.0, velocity=None, frozen=None,
):  # fmt: skip
    """Algorithm 1 for one round, on the clients in `present`; `server` maps names to tensors.

    Beyond the paper: both parts together, rates that fall from round to round, an aggregate that goes on moving, and tensors
    whose names begin with `frozen` that are not trained.
    """
    lr, personal_lr = lr * decay**round_, personal_lr * decay**round_
    d = len(all_entries(clients[0].module))
    sums = {n: torch.zeros_like(v) for n, v in server.items()}
    counts = {n: torch.zeros_like(v) for n, v in server.items()}
    for k in present:
        c = clients[k]
        for n, i in all_entries(c.module):  # theta <- aggregate where the mask it last trained with is 0
            if (n, i) not in c.kept:
                c.write(n, i, server[n].view(-1)[i])
        before = c.values()
        shared = [e for e in all_entries(c.module) if e not in c.personal]
        moving = [e for e in all_entries(c.module) if frozen is None or not e[0].startswith(frozen)]
        personal = [e for e in moving if e in c.personal]
        state = {}
        for epoch in range(epochs if order == "joint" else 0):
            walk(c, state, moving, lr, round_, epoch, how, seed)
        for epoch in range(0 if order == "joint" else epochs):  # LocalAlt
            if personal:
                walk(c, state, personal, personal_lr, round_, epoch, how, seed)
            if any(e not in c.personal for e in moving):
                walk(c, state, [e for e in moving if e not in c.personal], lr, round_, epoch, how, seed)
        after = c.values()
        for n, i in shared:
            sums[n].view(-1)[i] += weights[k] * after[n].view(-1)[i]
            counts[n].view(-1)[i] += weights[k]
        c.kept = set(c.personal)
        room = math.floor(limit * d + 1e-9) - len(c.personal)
        if room > 0:  # GradSelect
            move = sorted(shared, key=lambda e: -abs(float(after[e[0]].view(-1)[e[1]] - before[e[0]].view(-1)[e[1]])))
            c.personal |= set(move[: min(room, math.ceil(rate * len(shared) - 1e-9))])
    for n in server:
        heard = counts[n] > 0
        new = torch.where(heard, sums[n] / counts[n].clamp_min(1e-300), server[n])
        if velocity is not None:
            velocity[n] = server_momentum * velocity.get(n, torch.zeros_like(new)) + new - server[n]
            new = torch.where(heard, server[n] + velocity[n], server[n])
        server[n] = new


def partial_round(server, clients, present, round_, *, is_personal, phases, lr, how, seed, weights):
    """A method with fixed personal tensors: phases are ('personal' | 'shared' | 'all', epochs)."""
    sums = {n: torch.zeros_like(v) for n, v in server.items()}
    total = sum(weights[k] for k in present)
    for k in present:
        c = clients[k]
        for n, i in all_entries(c.module):
            if not is_personal(n):
                c.write(n, i, server[n].view(-1)[i])
        parts = {
            "all": all_entries(c.module),
            "personal": [e for e in all_entries(c.module) if is_personal(e[0])],
            "shared": [e for e in all_entries(c.module) if not is_personal(e[0])],
        }
        state, walked = {}, dict.fromkeys(parts, 0)
        for part, epochs in phases:
            for _ in range(epochs):
                if parts[part]:
                    walk(c, state, parts[part], lr, round_, walked[part], how, seed)
                walked[part] += 1
        for n, v in c.values().items():
            sums[n] += weights[k] * v
    for n in server:
        if not is_personal(n):
            server[n] = sums[n] / total
