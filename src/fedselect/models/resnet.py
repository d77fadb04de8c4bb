"""ResNet18 and ResNet50, with torchvision's names and initialization."""

from functools import partial
from pathlib import Path
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from fedselect.core.errors import InputError
from fedselect.core.tree import Tree
from fedselect.models.model import Model
from fedselect.models.shapes import Shaped, image_shape
from fedselect.models.steps import Steps
from fedselect.models.weights import read_weights

Stem = Literal["imagenet", "small"]


def resnet18(data: Shaped, stem: Stem = "imagenet", weights: str | None = None, *, outputs: int | None = None) -> Model:
    """ResNet18 with torchvision's names and initialization; stem is imagenet (7x7, stride 2, pooling) or small (3x3).

    weights: a .safetensors or .pth file with torchvision's names to start from; the head is always new.
    """
    return _model("resnet18", data, stem, weights, outputs)


def resnet50(data: Shaped, stem: Stem = "imagenet", weights: str | None = None, *, outputs: int | None = None) -> Model:
    """ResNet50 with torchvision's names and initialization; stem is imagenet (7x7, stride 2, pooling) or small (3x3).

    weights: a .safetensors or .pth file with torchvision's names to start from; the head is always new.
    """
    return _model("resnet50", data, stem, weights, outputs)


def _model(name: str, data: Shaped, stem: str, weights: str | None, outputs: int | None) -> Model:
    channels, _, _ = image_shape(data)
    if stem not in ("imagenet", "small"):
        raise InputError(f"stem must be imagenet or small, not {stem!r}.")
    build = {"resnet18": build_resnet18, "resnet50": build_resnet50}[name]
    classes = outputs or data.classes
    start = {} if weights is None else read_weights(Path(weights), build(channels, stem, classes), head="fc")
    return Model(partial(build, channels, stem, classes, start=start), name=name)


def build_resnet18(channels: int, stem: str, classes: int, start: Tree | None = None) -> nn.Module:
    return _started(_ResNet(_BasicBlock, (2, 2, 2, 2), channels, stem, classes), start)


def build_resnet50(channels: int, stem: str, classes: int, start: Tree | None = None) -> nn.Module:
    return _started(_ResNet(_Bottleneck, (3, 4, 6, 3), channels, stem, classes), start)


def _started(net: nn.Module, start: Tree | None) -> nn.Module:
    net.load_state_dict(start or {}, strict=False)  # checked before; the head keeps its random values
    return net


class _BasicBlock(nn.Module):
    widens = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _downsample(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(x)) + skip)


class _Bottleneck(nn.Module):
    widens = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = _downsample(inputs, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return F.relu(self.bn3(self.conv3(x)) + skip)


def _downsample(inputs: int, outputs: int, stride: int) -> nn.Module | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class _ResNet(Steps):
    order = (("stem", "conv1", "bn1", "maxpool"), ("layer1",), ("layer2",), ("layer3",), ("layer4",), ("pool",), ("fc",))

    def __init__(
        self,
        block: type[_BasicBlock] | type[_Bottleneck],
        depths: tuple[int, int, int, int],
        channels: int,
        stem: str,
        classes: int,
    ) -> None:
        super().__init__()
        self.conv1 = (
            nn.Conv2d(channels, 64, 7, 2, 3, bias=False) if stem == "imagenet" else nn.Conv2d(channels, 64, 3, 1, 1, bias=False)
        )
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if stem == "imagenet" else nn.Identity()
        wide = block.widens
        self.layer1 = _stage(block, 64, 64, depths[0], stride=1)
        self.layer2 = _stage(block, 64 * wide, 128, depths[1], stride=2)
        self.layer3 = _stage(block, 128 * wide, 256, depths[2], stride=2)
        self.layer4 = _stage(block, 256 * wide, 512, depths[3], stride=2)
        self.fc = nn.Linear(512 * wide, classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def stem(self, x: Tensor) -> Tensor:
        return self.maxpool(F.relu(self.bn1(self.conv1(x))))  # type: ignore[no-any-return]

    def pool(self, x: Tensor) -> Tensor:
        return x.mean((-2, -1))


def _stage(block: type[_BasicBlock] | type[_Bottleneck], inputs: int, width: int, depth: int, *, stride: int) -> nn.Sequential:
    first = block(inputs, width, stride)
    return nn.Sequential(first, *(block(width * block.widens, width, 1) for _ in range(depth - 1)))
