"""The small convolutional nets of the federated literature: 5x5 convolutions, pooling, fully connected layers."""

from __future__ import annotations

from itertools import count
from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from fedloom.models.net import Net, NetSpec, hidden, image

Padding = Literal["valid", "same"]
BORDERS: dict[Padding, tuple[int, int]] = {"valid": (0, 0), "same": (2, 2)}


class FedAvgCNN(NetSpec):
    """The CNN of FedAvg (McMahan et al., 2017) and of FedALA and pFedALA: 32 and 64 channels, then 512 features.

    McMahan's own net pads (``same``); the personalised methods were measured with the ``valid`` one.
    """

    kind: ClassVar[str] = "cnn_fedavg"

    padding: Padding = Field("valid", description="whether a convolution keeps the size of the image")

    def build(self, shape: tuple[int, ...], classes: int) -> Net:
        borders = BORDERS[self.padding]
        return conv_net(
            self.kind, shape, classes, channels=(32, 64), borders=borders, widths=(512,), padding=self.padding
        )


class CNN64(NetSpec):
    """The CNN of FedALR, and the "LeNet" of DFedGAM: twice 64 channels, then 384 and 192 features."""

    kind: ClassVar[str] = "cnn64"

    def build(self, shape: tuple[int, ...], classes: int) -> Net:
        return conv_net(self.kind, shape, classes, channels=(64, 64), borders=(0, 0), widths=(384, 192))


class LawCNN(NetSpec):
    """The CNN of LAW-AFL: 32 and 64 channels, then 1024 features."""

    kind: ClassVar[str] = "cnn_law"

    padding: Padding = Field("same", description="whether a convolution keeps the size of the image")

    def build(self, shape: tuple[int, ...], classes: int) -> Net:
        borders = BORDERS[self.padding]
        return conv_net(
            self.kind, shape, classes, channels=(32, 64), borders=borders, widths=(1024,), padding=self.padding
        )


def conv_net(
    kind: str,
    shape: tuple[int, ...],
    classes: int,
    *,
    channels: tuple[int, ...],
    borders: tuple[int, ...],
    widths: tuple[int, ...],
    padding: Padding = "same",
) -> Net:
    """A 5x5 convolution, ReLU and 2x2 max-pooling for each of ``channels``, then ``widths``, then the head."""
    least = next(side for side in count(1) if _pooled(side, borders) >= 1)
    fix = 'padding = "same"' if padding == "valid" and min(shape[1:], default=0) >= 4 else ""
    inputs, height, width = image(kind, shape, least, fix)
    body = nn.Sequential()
    for i, (outputs, border) in enumerate(zip(channels, borders, strict=True), 1):
        convolution = nn.Conv2d(inputs, outputs, 5, padding=border)
        body.add_module(f"conv{i}", nn.Sequential(convolution, nn.ReLU(), nn.MaxPool2d(2)))
        inputs = outputs
    body.add_module("flat", nn.Flatten())
    features = inputs * _pooled(height, borders) * _pooled(width, borders)
    return Net(body, hidden(body, features, widths), classes)


def _pooled(side: int, borders: tuple[int, ...]) -> int:
    """The side of the image after the convolutions and poolings; less than 1 if the image is too small."""
    for border in borders:
        side = (side + 2 * border - 4) // 2
    return side
