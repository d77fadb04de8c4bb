"""A client by its number or name."""

import pytest

from fedselect.core.errors import InputError
from fedselect.core.names import client_number, client_said

VILLAGES = ["Old Village", "harbor", "Harbor", "7"]


@pytest.mark.parametrize(
    ("client", "number"),
    [
        (0, 0), ("0", 0), ("2", 2),
        ("Old Village", 0), ("old village", 0), ("harbor", 1), ("Harbor", 2),
        ("7", 3),  # a name before a number
    ],
)  # fmt: skip
def test_a_client_is_found_by_number_or_name(client, number):
    assert client_number(client, VILLAGES) == number


@pytest.mark.parametrize(
    ("client", "said"),
    [
        ("old vilage", "there is no client 'old vilage'; did you mean 'Old Village'?"),
        ("x", "there is no client 'x'; choose one of Old Village, harbor, Harbor, 7."),
        ("HARBOR", "several clients are called 'HARBOR'; use their numbers."),
        ("4", "there is no client 4; choose one of 0 to 3."),
        ("-1", "there is no client '-1'; choose one of Old Village, harbor, Harbor, 7."),
        (-1, "there is no client -1; choose one of 0 to 3."),
        (1.0, "there is no client 1.0; choose one of 0 to 3."),
    ],
)
def test_another_client_is_refused(client, said):
    with pytest.raises(InputError) as refused:
        client_number(client, VILLAGES)
    assert str(refused.value) == said


def test_clients_of_one_name_are_told_apart_by_number():
    with pytest.raises(InputError, match="several clients are called 'a'; use their numbers"):
        client_number("a", ["a", "a"])
    assert client_number("1", ["a", "a"]) == 1


def test_a_client_in_words_has_its_name_and_number():
    assert client_said(1, VILLAGES) == "client harbor (number 1)"
    assert client_said(1, ["0", "1"]) == "client 1"
