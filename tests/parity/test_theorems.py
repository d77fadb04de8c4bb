"""The paper's two theorems, executable, in float64."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedselect as fs
from fedselect.simulate import Simulation

CLIENTS, SAMPLES, CLASSES = 4, 9, 3


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()


def simulation(method: fs.Method, momentum: float = 0.0, batch: int = SAMPLES) -> Simulation:
    g = torch.Generator().manual_seed(4)
    data = []
    for _ in range(CLIENTS):
        x = torch.randn(SAMPLES, 5, generator=g, dtype=torch.float64)
        data.append(fs.ClientData((x, torch.randint(0, CLASSES, (SAMPLES,), generator=g)), (x[:2], torch.tensor([0, 1]))))
    training = fs.Training(batch_size=batch, momentum=momentum)
    return Simulation(method, fs.Model.wrap(make()), fs.Federation(data, CLASSES), training=training)


@settings(max_examples=20)
@given(st.floats(0.01, 0.9), st.floats(0.0, 1.0))
def test_masks_converge_in_finitely_many_rounds(rate, limit):
    """Theorem 1: masks only grow and never pass limit * d; since each round adds an entry or is the last to, at most
    limit * d rounds add any, and with ceil(rate * shared) a round far fewer: (1 - rate)^t d < 1 bounds them.
    """
    sim = simulation(fs.FedSelect(rate=rate, limit=limit, epochs=1, lr=0.1, personal_lr=0.1), batch=5)
    d = sim.model.size
    bound = math.ceil(math.log(d) / -math.log1p(-rate)) + 1
    masks = torch.zeros(CLIENTS, d, dtype=torch.bool)
    shares = []
    for _ in range(min(bound, 40) + 2):
        sim.step()
        now = torch.cat([m.flatten(1) for m in sim.store.rows["mask"].values()], 1)
        assert bool((now | ~masks).all())  # nothing is ever given back
        masks = now
        shares.append(int(now.sum(1).max()))
        assert shares[-1] <= math.floor(limit * d + 1e-9)
    if bound <= 40:
        assert shares[-1] == shares[-2] == math.floor(limit * d + 1e-9)


def test_a_round_with_converged_masks_is_block_sgd():
    """Theorem 2: with one local step, a round is one step on every client's personal entries, then one on the shared
    entries, the latter scaled by N / (number of clients sharing the entry), of F = mean_k f_k.
    """
    rate, lr, own = 0.2, 0.07, 0.05
    sim = simulation(fs.FedSelect(rate=rate, limit=0.4, epochs=1, lr=lr, personal_lr=own))
    for _ in range(6):  # 0.2, 0.36, 0.4: converged by the third
        sim.step()
    before = sim.models(range(CLIENTS), "merged")
    mask = {n: m.clone() for n, m in sim.store.rows["mask"].items()}
    assert all(torch.equal(m, sim.store.rows["kept"][n]) for n, m in mask.items())
    names = list(mask)
    modules = [make() for _ in range(CLIENTS)]
    for k, module in enumerate(modules):
        module.load_state_dict({n: before[n][k] for n in names})

    def gradients() -> list[list[torch.Tensor]]:
        """dF/dtheta_k for every client k, F the mean of the clients' losses."""
        loss = sum(
            nn.functional.cross_entropy(m(c.train[0]), c.train[1]) for m, c in zip(modules, sim.data.clients, strict=True)
        )
        flat = torch.autograd.grad(loss / CLIENTS, [p for m in modules for p in m.parameters()])
        size = len(names)
        return [list(flat[k * size : (k + 1) * size]) for k in range(CLIENTS)]

    with torch.no_grad():  # V: every personal entry, at rate own * N since F is a mean
        for k, grads in enumerate(gradients_in(gradients)):
            for n, p, g in zip(names, modules[k].parameters(), grads, strict=True):
                p -= own * CLIENTS * g * mask[n][k]
    grads = gradients_in(gradients)
    with torch.no_grad():  # U: an entry is one variable of F, so its gradient is the sum over those who share it
        for at, n in enumerate(names):
            shares = ~mask[n]
            total = sum(grads[k][at] * shares[k] for k in range(CLIENTS))
            sharers = shares.sum(0).clamp_min(1)
            for k in range(CLIENTS):
                p = list(modules[k].parameters())[at]
                p -= lr * CLIENTS / sharers * total * shares[k]
    sim.step()
    after = sim.models(range(CLIENTS), "merged")
    for k, module in enumerate(modules):
        for n, p in module.named_parameters():
            torch.testing.assert_close(after[n][k], p.detach(), rtol=0, atol=1e-10)


def gradients_in(gradients):
    with torch.enable_grad():
        return gradients()
