"""Models with several inputs against plain PyTorch: one client after the other, in float64, called as their authors would."""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from reference import batches
from torch import Tensor, nn

import fedselect as fs
from fedselect.training import recorded

SIZES = (7, 12, 5, 12)  # with batches of 5: one short batch, three full ones, one exactly
SEED = 3
EXACT = {"rtol": 1e-9, "atol": 1e-11}


@dataclass
class Scores:
    """What Hugging Face's modules return, in small."""

    loss: Tensor | None = None
    logits: Tensor | None = None


class Mixed(nn.Module):
    """Whole numbers, a picture of floats, a mask of bools, and one number a sample."""

    def __init__(self):
        super().__init__()
        self.embed, self.conv, self.out = nn.Embedding(9, 4), nn.Conv2d(1, 2, 3, padding=1), nn.Linear(4 + 2 + 1, 3)

    def forward(self, tokens, picture=None, *, keep, age):
        words = (self.embed(tokens) * keep.unsqueeze(-1)).sum(1) / keep.sum(1, keepdim=True).clamp_min(1)
        seen = torch.relu(self.conv(picture)).mean((-2, -1))
        return Scores(logits=self.out(torch.cat([words, seen, age.unsqueeze(-1)], 1)))


class Words(nn.Module):
    """Whole numbers alone, in their order."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, tokens, keep):
        return self.out((self.embed(tokens) * keep.unsqueeze(-1)).sum(1)), tokens


def mixed(n, g):
    return {
        "age": torch.randn(n, generator=g, dtype=torch.float64),
        "keep": torch.rand(n, 6, generator=g) < 0.7,
        "picture": torch.randn(n, 1, 4, 4, generator=g, dtype=torch.float64),
        "tokens": torch.randint(0, 9, (n, 6), generator=g),
    }


def words(n, g):
    return torch.randint(0, 9, (n, 6), generator=g), torch.randint(0, 2, (n, 6), generator=g).int()


KINDS = {"dict": (Mixed, mixed), "tuple": (Words, words)}


def called(module, inputs, rows=slice(None)):
    """The module as its author calls it, and its logits."""
    if isinstance(inputs, dict):
        return module(**{n: v[rows] for n, v in inputs.items()}).logits
    return module(*(v[rows] for v in inputs))[0]


def clients(make):
    g = torch.Generator().manual_seed(1)
    return [((make(n, g), torch.randint(0, 3, (n,), generator=g)), (make(4, g), torch.arange(4) % 3)) for n in SIZES]


def alone(module, data, rounds, shared):
    """SGD with momentum, client by client; `shared`: with the mean over clients, weighted by samples, after each round."""
    modules = [copy.deepcopy(module).train() for _ in data]
    for r in range(rounds):
        for i, ((x, y), _) in enumerate(data):
            sgd = torch.optim.SGD(modules[i].parameters(), lr=0.2, momentum=0.9)
            for epoch in range(2):
                for batch in batches(i, r, epoch, len(y), 5, SEED):
                    sgd.zero_grad()
                    F.cross_entropy(called(modules[i], x, batch), y[batch]).backward()
                    sgd.step()
        if shared:
            trained = [m.state_dict() for m in modules]
            mean = {n: sum(s * t[n] for s, t in zip(SIZES, trained, strict=True)) / sum(SIZES) for n in trained[0]}
            for m in modules:
                m.load_state_dict(mean)
    return modules


@pytest.mark.parametrize("how", ["stacked", "in chunks", "recorded"])
@pytest.mark.parametrize("shared", [False, True], ids=["local", "fedavg"])
@pytest.mark.parametrize("kind", KINDS)
def test_several_inputs_train_as_in_plain_pytorch(kind, shared, how, monkeypatch):
    net, make = KINDS[kind]
    monkeypatch.setitem(recorded.RECORD_AFTER, "cpu", 2 if how == "recorded" else 1000)
    torch.manual_seed(0)
    module, data = net().double(), clients(make)
    method = fs.FedAvg(lr=0.2, epochs=2, weight="samples", view="merged") if shared else fs.Local(lr=0.2, epochs=2)
    result = fs.run(
        method, model=fs.Model.wrap(module), data=[fs.ClientData(*pairs) for pairs in data], rounds=3, seed=SEED,
        training=fs.Training(batch_size=5, momentum=0.9), chunk=2 if how == "in chunks" else "auto",
    )  # fmt: skip
    assert result.simulation.fitted.stackable
    assert bool(result.simulation._programs._recorded) == (how == "recorded")
    right = []
    for i, expected in enumerate(alone(module, data, 3, shared)):
        plain = net().double()
        plain.load_state_dict(result.personal(i))
        for n, v in plain.state_dict().items():
            torch.testing.assert_close(v, expected.state_dict()[n], **EXACT)
        x, y = data[i][1]
        right.append(float((called(expected.eval(), x).argmax(1) == y).double().mean()))
    assert result.accuracy == pytest.approx(sum(right) / len(right), abs=1e-6)


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, first, second=None):
        return self.net(first if second is None else torch.cat([first, second], 1))


def test_several_inputs_are_those_that_a_module_joins_itself():
    """To the bit: the columns are the same numbers in the same order."""
    g = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(n, 5, generator=g), torch.arange(n) % 2) for n in SIZES]
    one = [fs.ClientData(p, p) for p in pairs]
    apart = [(((x[:, :2], x[:, 2:]), y)) for x, y in pairs]
    two = [fs.ClientData(p, p) for p in apart]
    how = {"model": fs.Model.wrap(Joined), "rounds": 3, "seed": 1}
    results = [fs.run(fs.FedSelect(lr=0.1), data=data, **how) for data in (one, two)]
    assert results[0].history[-1]["train_loss"] == results[1].history[-1]["train_loss"]
    for n, v in results[0].personal(2).items():
        assert torch.equal(v, results[1].personal(2)[n])
