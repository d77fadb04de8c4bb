"""Clients of a network keep the outputs of frozen layers as a simulation does, and send what it sends."""

from dataclasses import replace

import pytest
import torch
from local import QUICK, Room, alone, assignment

import fedselect as fs
from fedselect.network.plan import Limits, Plan, Shape, plan
from fedselect.network.server import Server
from fedselect.network.vault import Vault
from fedselect.runs.config import Config
from fedselect.simulate import Simulation
from fedselect.training import prefix

METHOD, TRAINING = fs.FedAvgFT(lr=0.05), fs.Training(batch_size=8, momentum=0.9)


@pytest.fixture(scope="module")
def data():
    """Pictures as bytes; one client has more of them than fit one chunk."""
    g = torch.Generator().manual_seed(3)

    def part(n):
        y = torch.randint(0, 4, (n,), generator=g)
        return (torch.randint(0, 90, (n, 1, 8, 8), generator=g) + 50 * y.view(-1, 1, 1, 1)).to(torch.uint8), y

    return fs.Federation([fs.ClientData(part(n), part(9)) for n in (prefix.CHUNK + 5, 12, 20)], 4)


def cnn(data):
    return fs.layers_only(fs.models.small_cnn(data, norm="batch"), "hidden,fc")


def resnet(data):
    return fs.lora(fs.models.resnet18(data, stem="small"), 2, "layer4.1.*")


@pytest.mark.parametrize(("model", "before"), [(cnn, "hidden"), (resnet, "layer4.1")], ids=["cnn", "resnet"])
def test_a_deployment_equals_the_simulation_to_the_bit(model, before, data, tmp_path):
    assigned = assignment(METHOD, model, data, seed=4, training=TRAINING)
    assert assigned.prefix.before == before
    room, server = Room(assigned, data, tmp_path), Server(assigned, QUICK, tmp_path / "masks")
    simulation = Simulation(METHOD, model(data), data, seed=4, training=TRAINING)
    assert simulation.frozen.before == before
    for _ in range(2):
        server.step(room)
        simulation.step()
    for n, v in simulation.server["params"].items():
        assert torch.equal(server.state["params"][n], v)
    server.close(room)
    for i in range(3):
        node = room.node(i)
        own, part = node.assigned.split(node.data, "train"), simulation._split["train"]
        assert torch.equal(own.x, part.x[part.start[i] : part.start[i] + part.n[i]])
        for n, v in simulation.models([i], "local").items():
            assert torch.equal(node._state(2)["params"][n], v)
        kept = Vault(tmp_path / f"vault-{i}" / "run" / "model")
        found = kept.find(kept.rounds()[-1]).tensors
        assert found["model/input/scale"].shape == (1, 1, 1)  # the finished model is whole, and takes raw pictures
        whole = simulation.personal(i)
        assert all(torch.equal(found[f"model/merged/{n}"], v) for n, v in whole.items())


def test_clients_that_augment_or_lack_the_memory_run_all_layers(data, tmp_path, monkeypatch):
    assigned = assignment(METHOD, cnn, data, seed=4, training=TRAINING)
    own = alone(data, 0)
    assert Room(assigned, data, tmp_path).node(0).assigned is assigned
    moved = assigned.for_data(replace(own, augment="crop-flip"))
    assert moved.prefix is None
    assert moved.programs.model is moved.model
    assert moved.for_data(own) is moved
    monkeypatch.setattr("fedselect.network.assignment.memory", lambda device: 100)
    assert assigned.for_data(own).prefix is None


@pytest.mark.parametrize(("augment", "before"), [("none", "fc"), ("crop-flip", None)])
def test_a_plan_says_whether_samples_are_augmented(augment, before):
    asked = {"data": {"name": "cifar10", "augment": augment}, "model": {"name": "resnet18"}, "adapt": {"name": "head"}}
    config = Config.from_dict({"method": {"name": "fedavg"}, "rounds": 2, **asked}, "test")
    shape = Shape((3, 32, 32), tuple("0123456789"))
    made = Plan.from_flat(Plan(config, "site", "r", 2, shape).to_flat(), "r").assignment("cpu")
    assert (made.prefix and made.prefix.before) == before


def test_single_samples_are_private_behind_frozen_layers():
    """All of ResNet18 is too large for a gradient per sample; its head is not."""
    asked = {"data": {"name": "digits"}, "model": {"name": "resnet18"}, "private": "epsilon=8,unit=sample,delta=1e-3"}
    config = Config.from_dict({"method": {"name": "fedavg"}, "rounds": 2, **asked, "adapt": {"name": "head"}}, "test")
    shape = Shape((1, 8, 8), tuple("0123456789"))
    assert plan(config, "site", "r", 2, shape, Limits()).base
    lora = replace(config, adapt={"name": "lora", "rank": 2}).complete()
    with pytest.raises(fs.InputError, match="too large"):
        plan(lora, "site", "r", 2, shape, Limits())
