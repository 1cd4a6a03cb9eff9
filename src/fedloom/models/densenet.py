"""Densely connected nets (Huang et al., 2017)."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from fedloom.models.net import GlobalMean, Net, image
from fedloom.models.resnet import StemmedSpec


class Dense(nn.Module):
    """The input with the new channels of ``path`` behind it."""

    def __init__(self, path: nn.Module) -> None:
        super().__init__()
        self.path = path

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.path(x)], 1)


class DenseNet121(StemmedSpec):
    """DenseNet-121, a backbone of LAW-AFL: blocks of 6, 12, 24 and 16 layers, 1024 features at growth 32."""

    kind: ClassVar[str] = "densenet121"

    growth: PositiveInt = 32

    def build(self, shape: tuple[int, ...], classes: int) -> Net:
        # three transitions pool by two without padding, after a stem that divides by one or four (rounded up)
        inputs, _, _ = image(self.kind, shape, least=8 if self.stem == "cifar" else 29)
        body = nn.Sequential()
        body.add_module("stem", self.entry(inputs))
        channels = 64
        for i, depth in enumerate((6, 12, 24, 16), 1):
            if i > 1:
                body.add_module(f"halve{i - 1}", nn.Sequential(self._before(channels, channels // 2), nn.AvgPool2d(2)))
                channels //= 2
            block = nn.Sequential()
            for _ in range(depth):
                narrow = 4 * self.growth
                block.append(Dense(nn.Sequential(self._before(channels, narrow), self._before(narrow, self.growth, 3))))
                channels += self.growth
            body.add_module(f"block{i}", block)
        body.add_module("last", nn.Sequential(self.normal(channels), nn.ReLU(), GlobalMean()))
        return Net(body, channels, classes)

    def _before(self, inputs: int, outputs: int, kernel: int = 1) -> nn.Sequential:
        """A convolution with normalisation and ReLU before it, not after."""
        return nn.Sequential(self.normal(inputs), nn.ReLU(), self.conv(inputs, outputs, kernel))
