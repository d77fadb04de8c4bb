"""Products of stacked clients: torch's values, and the same bits in any company, with few and many threads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedselect.training.products import bmm

SHAPES = [
    # rows, summed, columns
    (16, 64, 10),
    (16, 256, 100),  # MKL cuts 100 columns among threads
    (144, 10, 200),
    (33, 1024, 107),
    (97, 512, 64),  # and 97 rows
    (98, 2048, 72),
    (291, 144, 128),
    (3, 17, 5),
]


@pytest.fixture(params=[1, 2, 8, 32])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def factors(clients, rows, summed, columns, turned=(False, False), dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    a, b = (
        torch.randn(clients, *(reversed(shape) if turn else shape), generator=draw, dtype=dtype)
        for shape, turn in zip(((rows, summed), (summed, columns)), turned, strict=True)
    )
    return a.transpose(1, 2) if turned[0] else a, b.transpose(1, 2) if turned[1] else b


@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("threads")
def test_a_client_gets_the_bits_that_it_gets_in_any_company(shape, turned):
    a, b = factors(17, *shape, turned)
    everybody = bmm(a, b)
    for some in (slice(0, 1), slice(3, 5), slice(9, 12), slice(1, 17)):
        assert bmm(a[some], b[some]).equal(everybody[some])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("inside", [10, 24, 50, 131])
def test_products_of_any_size_have_the_bits_they_have_alone(inside, dtype):
    """Of odd sizes, matrices begin anywhere in memory, and MKL sums accordingly."""
    for rows in (1, 2, 3, 5, 9, 16, 23, 33):
        for columns in (1, 5, 8, 10, 16, 17, 33, 50):
            x, w = factors(4, rows, inside, columns, (False, True), dtype)
            w, g = w.transpose(1, 2), torch.randn(4, rows, columns, generator=torch.Generator().manual_seed(1), dtype=dtype)
            for a, b in ((x, w.transpose(1, 2)), (g, w), (g.transpose(1, 2), x)):
                together = bmm(a, b)
                torch.testing.assert_close(together, a @ b)
                for c in range(4):
                    alone = (v[c : c + 1].clone(memory_format=torch.preserve_format) for v in (a, b))
                    assert bmm(*alone)[0].equal(together[c]), (rows, columns)


@settings(max_examples=60, deadline=None)
@given(
    clients=st.integers(1, 4),
    rows=st.integers(1, 130),
    summed=st.integers(1, 40),
    columns=st.integers(1, 130),
    turned=st.tuples(st.booleans(), st.booleans()),
)
def test_a_product_is_each_clients_own(clients, rows, summed, columns, turned):
    a, b = factors(clients, rows, summed, columns, turned, torch.float64)
    got = bmm(a, b)
    assert got.shape == (clients, rows, columns)
    for c in range(clients):
        slow = (a[c].unsqueeze(-1) * b[c].unsqueeze(0)).sum(1)
        torch.testing.assert_close(got[c], slow, rtol=1e-12, atol=1e-12)
