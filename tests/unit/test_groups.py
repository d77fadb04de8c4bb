"""Who shares with whom: what a method says of it, a simulation and its result."""

import pytest
import torch

import fedselect as fs
from fedselect.methods import METHODS
from fedselect.methods.groups import members

TOLD = fs.FedAlike(heads="0 1 0")


def how(digits):
    return {"model": fs.models.mlp(digits, hidden=4), "data": digits}


def test_members_are_in_the_order_of_the_first():
    assert members([0, 1, 0, None, 1, 5]) == [[0, 2], [1, 4], [5]]
    assert members([None, None]) == []


def test_groups_that_are_told_are_known_at_once(digits):
    result = fs.run(TOLD, rounds=1, **how(digits))
    assert result.simulation.groups() == [0, 1, 0]
    assert result.groups == [[0, 2], [1]]


def test_groups_are_found_in_the_first_round_and_who_comes_late_is_in_none_yet(digits):
    simulation = fs.Simulation(fs.FedAlike(), late=(1, 2), **how(digits))
    assert simulation.groups() == [None, None, None]
    simulation.step()
    assert [g is None for g in simulation.groups()] == [False, False, True]
    simulation.step()
    assert None not in simulation.groups()


def test_other_methods_make_no_groups(digits):
    result = fs.run(fs.FedPersist(window=2), rounds=1, **how(digits))
    assert result.simulation.groups() is None
    with pytest.raises(fs.InputError, match=r"does not form groups; use fs.FedAlike\(\) or fs.diagnose\(data\)"):
        _ = result.groups


def test_a_method_of_ones_own_says_its_groups(digits):
    class Paired(fs.Partial):
        def groups(self, server):
            return torch.tensor([0, 0, -1])

    plain = fs.FedAvg()
    assert fs.run(Paired(plain.select, plain.phases), rounds=1, **how(digits)).groups == [[0, 1]]


def test_fedalike_alone_has_the_hook():
    assert {name for name, made in METHODS.items() if isinstance(made, type) and "groups" in vars(made)} == {"fedalike"}
