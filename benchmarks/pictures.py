"""CIFAR-10 for benchmarks/adapters.py: what a pretrained ResNet18 makes of pictures up to its last stage, and that stage.

Nothing below the last stage trains, so what it is given never changes, and is computed once for each picture.
"""

import copy
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedselect as fs
from fedselect.data.federation import Part
from fedselect.models.weights import fitting, read_tensors

CLASSES = 10
SIDE = 32  # pixels of a picture


@cache
def whole(weights: Path) -> nn.Module:
    """The pretrained network, whose head has no meaning."""
    net = fs.models.resnet18(SimpleNamespace(shape=(3, SIDE, SIDE), classes=CLASSES)).build_from()
    net.load_state_dict(fitting(read_tensors(weights), net, "fc", weights), strict=False)
    return net.eval()


class Stage(nn.Module):
    """The last stage of a ResNet18 and a new head, with the names they have in the whole."""

    def __init__(self, weights: Path) -> None:
        super().__init__()
        self.layer4 = copy.deepcopy(whole(weights).layer4).train()
        self.fc = nn.Linear(512, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer4(x).mean((-2, -1)))


def last_stage(weights: Path) -> fs.Model:
    return fs.Model(partial(Stage, weights), head="fc", name="layer4")


@torch.no_grad()
def below(data: fs.Federation, weights: Path) -> fs.Federation:
    """The same clients, with what the last stage is given in place of each picture."""
    net = whole(weights)
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (data.mean, data.std))

    def seen(pair: Part | None) -> Part | None:
        if pair is None:
            return None
        x = (pair[0].float() / 255 - mean) / std
        x = net.maxpool(F.relu(net.bn1(net.conv1(x))))
        return net.layer3(net.layer2(net.layer1(x))), pair[1]

    clients = [fs.ClientData(seen(c.train), seen(c.test), seen(c.val), name=c.name) for c in data.clients]
    return fs.Federation(clients, data.classes, data.name, data.class_names)
