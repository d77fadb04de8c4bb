"""FedPAC's head mixtures: the batched simplex QP against a general solver, and what its weights must be."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from slow import best_mixture

from fedselect.methods.fedpac import mixtures, simplex_qp


def problem(m: int, seed: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(m, 3, 5, generator=g, dtype=torch.float64) * scale
    v = torch.rand(m, generator=g, dtype=torch.float64)
    return h, v


@given(st.integers(1, 12), st.integers(0, 10_000), st.sampled_from([0.01, 0.1, 1.0, 10.0]))
def test_weights_are_the_solvers(m, seed, scale):
    h, v = problem(m, seed, scale)
    a = mixtures(h, v)
    for i in range(m):
        want = torch.tensor(best_mixture(i, list(h), v.tolist()), dtype=torch.float64)
        torch.testing.assert_close(a[i], want, rtol=0, atol=2e-4)  # the general solver stops near 1e-5


@given(st.integers(1, 20), st.integers(0, 10_000), st.sampled_from([1e-6, 1.0, 1e6]))
def test_weights_are_optimal(m, seed, scale):
    """KKT: where a weight is positive the gradient is the smallest, elsewhere it is no smaller."""
    g = torch.Generator().manual_seed(seed)
    root = torch.randn(3, m, m + 2, generator=g, dtype=torch.float64)
    p = root @ root.transpose(1, 2) * scale
    a = simplex_qp(p)
    assert bool((a >= 0).all())
    torch.testing.assert_close(a.sum(1), torch.ones(3, dtype=torch.float64))
    gradient = (p @ a.unsqueeze(-1)).squeeze(-1)
    least = gradient.amin(1, keepdim=True)
    slack = (gradient - least) / gradient.abs().amax(1, keepdim=True)
    assert float((a * slack).amax()) < 1e-7


def test_a_lone_class_group_keeps_its_own_head():
    """Clients 0 and 1 share classes, client 2 has others and is sure of them: its features are far from everybody's."""
    h = torch.zeros(3, 4, 6)
    h[0, 0], h[1, 0], h[2, 3] = 1.0, 1.1, 5.0
    a = mixtures(h, torch.tensor([0.1, 0.1, 1e-4]))
    assert a[2].tolist() == pytest.approx([0.0, 0.0, 1.0])
    assert a[0, 2] < 0.01
    assert a[0, 1] > 0.1


def test_equal_clients_share_evenly():
    a = mixtures(torch.ones(4, 2, 3), torch.full((4,), 0.5))
    torch.testing.assert_close(a, torch.full((4, 4), 0.25, dtype=torch.float64))


def test_certain_and_equal_clients_are_no_error():
    """No variance and no difference: every mixture is best; the weights are still weights."""
    a = mixtures(torch.ones(3, 2, 3), torch.zeros(3))
    torch.testing.assert_close(a.sum(1), torch.ones(3, dtype=torch.float64))
