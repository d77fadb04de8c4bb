"""Activations whose last bit depends on where a number lies: stacked clients do not see it."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedselect as fs
from fedselect.training.stacked import Forward

ACTIVATIONS = {
    "sigmoid": torch.sigmoid,
    "Tensor.sigmoid": Tensor.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "glu": lambda x: F.glu(torch.cat([x, x.flip(-1)], -1), -1),
    "mish": F.mish,
    "softplus": lambda x: F.softplus(x, 2.0, 10.0),
    "elu": lambda x: F.elu(x, 0.7),
    "selu": F.selu,
    "celu": F.celu,
    "tanh": torch.tanh,
    "exp2": torch.exp2,
    "cosh": torch.cosh,
    "rsqrt": lambda x: (x.abs() + 0.1).rsqrt(),
    "asin": lambda x: torch.asin(x / 20),
    "acosh": lambda x: torch.acosh(x.abs() + 1.1),
    "power": lambda x: (x.abs() + 0.1) ** 1.5,
    "logaddexp": lambda x: torch.logaddexp(x, x.flip(-1)),
    "cross-entropy": lambda x: F.binary_cross_entropy_with_logits(x, (x > 0).to(x.dtype), reduction="none"),
}


def values_and_gradients(activation, x):
    leaf = x.clone().requires_grad_()
    with Forward(None, stacked=True):
        y = torch.func.vmap(activation)(leaf)
    weights = torch.linspace(1, 2, y[0].numel()).view(y.shape[1:])
    return y.detach(), torch.autograd.grad((y * weights).sum(), leaf)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5, 199), (22, 8), (3,), (64,)])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_client_has_the_same_bits_alone_and_among_others(name, shape, dtype):
    x = 3 * torch.randn(4, *shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
    together = values_and_gradients(ACTIVATIONS[name], x)
    for i in range(len(x)):
        alone = values_and_gradients(ACTIVATIONS[name], x[i : i + 1])
        for one, all_ in zip(alone, together, strict=True):
            assert torch.equal(one[0], all_[i])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_it_is_what_torch_computes(name):
    x = 3 * torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    y = torch.stack([ACTIVATIONS[name](v) for v in leaf])
    expected = y.detach(), torch.autograd.grad((y * torch.linspace(1, 2, y[0].numel()).view(y.shape[1:])).sum(), leaf)[0]
    for mine, theirs in zip(values_and_gradients(ACTIVATIONS[name], x), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("change", [torch.sigmoid_, Tensor.sigmoid_, F.elu_, nn.SiLU(inplace=True), nn.CELU(0.5, inplace=True)])
def test_in_place_is_in_place(change):
    def twice(x):
        y = x * 2
        change(y)
        return y

    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    with Forward(None, stacked=True):
        found = torch.func.vmap(twice)(x)
    torch.testing.assert_close(found, twice(x))


def test_a_run_does_not_depend_on_how_many_clients_are_stacked():
    g = torch.Generator().manual_seed(0)
    parts = [(torch.randn(41, 5, generator=g), torch.randint(3, (41,), generator=g)) for _ in range(3)]
    data = [fs.ClientData((x[:30], y[:30]), (x[30:], y[30:])) for x, y in parts]
    layers = nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 9), nn.Sigmoid(), nn.Linear(9, 11), nn.Mish(), nn.Linear(11, 3)
    how = {"model": nn.Sequential(*layers), "data": data, "rounds": 5, "training": fs.Training(batch_size=7)}
    method = fs.FedAvg(lr=0.5)
    together, alone = fs.run(method, **how), fs.run(method, **how, chunk=1)
    assert [r["clients"] for r in together.history] == [r["clients"] for r in alone.history]
    for mine, theirs in zip(together.models(), alone.models(), strict=True):
        assert all(torch.equal(mine[n], theirs[n]) for n in theirs)
