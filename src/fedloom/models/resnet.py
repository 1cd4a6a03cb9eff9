"""Residual nets (He et al., 2016), with a 1x1 projection wherever a block changes the size or the channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field, PositiveInt
from torch import Tensor, nn

from fedloom.core.schema import when
from fedloom.models.net import GlobalMean, Net, NormedSpec, image

Block: TypeAlias = Callable[[NormedSpec, int, int, int], nn.Module]


class Residual(nn.Module):
    """ReLU of a path plus its shortcut."""

    def __init__(self, path: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.path = path
        self.shortcut = shortcut
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.path(x) + self.shortcut(x))
        return out


class StemmedSpec(NormedSpec):
    """A net made for ImageNet, whose first layers are a choice.

    ``cifar`` starts with one 3x3 convolution and keeps the size; ``imagenet`` divides it by four at once.
    """

    # as in Group Normalization (Wu and He, 2018)
    groups: Annotated[PositiveInt, when(norm="group")] = Field(
        32, description="most groups of a layer; it takes the most that leave two channels each"
    )
    stem: Literal["cifar", "imagenet"] = Field("cifar", description="the first layers: for small images or for large")

    def entry(self, inputs: int) -> nn.Sequential:
        """The layers before the first stage; 64 channels come out."""
        if self.stem == "cifar":
            return nn.Sequential(self.unit(inputs, 64, 3), nn.ReLU())
        return nn.Sequential(self.unit(inputs, 64, 7, stride=2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))


class ResNet20(NormedSpec):
    """ResNet-20 for small images: three stages of three basic blocks; LAW-AFL also uses ``width = 64``."""

    kind: ClassVar[str] = "resnet20"

    width: PositiveInt = Field(16, description="channels of the first stage")

    def build(self, shape: tuple[int, ...], classes: int) -> Net:
        channels, _, _ = image(self.kind, shape, least=3)
        stem = nn.Sequential(self.unit(channels, self.width, 3), nn.ReLU())
        return _residual_net(self, stem, _basic, classes, width=self.width, outputs=self.width, depths=(3, 3, 3))


class ResNet18(StemmedSpec):
    """ResNet-18, the backbone of AFL: four stages of two basic blocks, 512 features."""

    kind: ClassVar[str] = "resnet18"

    def build(self, shape: tuple[int, ...], classes: int) -> Net:
        channels, _, _ = image(self.kind, shape, least=5 if self.stem == "cifar" else 17)
        return _residual_net(self, self.entry(channels), _basic, classes, width=64, outputs=64, depths=(2, 2, 2, 2))


class ResNet50(StemmedSpec):
    """ResNet-50, the backbone of LAW-AFL: stages of 3, 4, 6 and 3 bottleneck blocks, 2048 features."""

    kind: ClassVar[str] = "resnet50"

    def build(self, shape: tuple[int, ...], classes: int) -> Net:
        channels, _, _ = image(self.kind, shape, least=5 if self.stem == "cifar" else 17)
        return _residual_net(
            self, self.entry(channels), _bottleneck, classes, width=64, outputs=256, depths=(3, 4, 6, 3)
        )


def _residual_net(
    model: NormedSpec,
    stem: nn.Module,
    block: Block,
    classes: int,
    *,
    width: int,
    outputs: int,
    depths: tuple[int, ...],
) -> Net:
    """Stages of blocks after a stem of ``width`` channels.

    The first stage makes ``outputs`` channels; each later one halves the image and doubles the channels. The least
    image sizes above are those at which every halving still finds more than one pixel.
    """
    body = nn.Sequential()
    body.add_module("stem", stem)
    inputs = width
    for i, depth in enumerate(depths, 1):
        stage = nn.Sequential()
        for j in range(depth):
            stage.append(block(model, inputs, outputs, 2 if i > 1 and j == 0 else 1))
            inputs = outputs
        body.add_module(f"stage{i}", stage)
        outputs *= 2
    body.add_module("pool", GlobalMean())
    return Net(body, inputs, classes)


def _basic(model: NormedSpec, inputs: int, outputs: int, stride: int) -> Residual:
    path = [model.unit(inputs, outputs, 3, stride), nn.ReLU(), model.unit(outputs, outputs, 3)]
    return _shortened(model, path, inputs, outputs, stride)


def _bottleneck(model: NormedSpec, inputs: int, outputs: int, stride: int) -> Residual:
    """The stride sits on the 3x3 convolution, as in torchvision, not on the first 1x1 as in the paper."""
    narrow = outputs // 4
    path = [
        *(model.unit(inputs, narrow, 1), nn.ReLU()),
        *(model.unit(narrow, narrow, 3, stride), nn.ReLU()),
        model.unit(narrow, outputs, 1),
    ]
    return _shortened(model, path, inputs, outputs, stride)


def _shortened(model: NormedSpec, path: list[nn.Module], inputs: int, outputs: int, stride: int) -> Residual:
    """The path with its shortcut: the identity, or a projection where that does not fit."""
    if model.norm == "none":  # nothing else keeps the variance from doubling with every block (Zhang et al., 2019)
        for parameter in path[-1].parameters():
            nn.init.zeros_(parameter)
    fits = stride == 1 and inputs == outputs
    return Residual(nn.Sequential(*path), nn.Identity() if fits else model.unit(inputs, outputs, 1, stride))
