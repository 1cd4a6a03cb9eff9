"""A net whose body is drawn once and never trained."""

from __future__ import annotations

from math import prod, sqrt
from typing import ClassVar

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from fedloom.maths.analytic import RandomFeatures, random_features, relu_features
from fedloom.models.net import Model, Net


class RandomReLU(nn.Module):
    """max(0, x W + b) with fixed W and b.

    They are parameters without a gradient: not trained, not sent, but saved with the net. The product is taken in
    float64 and then rounded, so that the features of an example do not depend on which others are in its batch.
    """

    def __init__(self, maps: RandomFeatures) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(maps.weight.shape), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(maps.bias.shape), requires_grad=False)
        self.weight.copy_(maps.weight)
        self.bias.copy_(maps.bias)

    def forward(self, x: Tensor) -> Tensor:
        return relu_features(x.double(), RandomFeatures(self.weight, self.bias)).to(x.dtype)


class RandomFeatureNet(Model):
    """A linear layer on random ReLU features of the flattened input (Rahimi and Recht, 2007); only it is trained.

    All that know the seed have the same features, and more of them begin with the fewer. Inputs are standardised
    here, so that x W + b has a deviation of about ``scale``.
    """

    kind: ClassVar[str] = "random_features"

    width: PositiveInt = Field(512, description="how many features")
    seed: NonNegativeInt = Field(0, lt=1 << 63, description="of the features, which are the same for every run's seed")
    scale: PositiveFloat = Field(1.0, description="deviation of x W, for standardised inputs x")
    offset: NonNegativeFloat = Field(0.3, description="deviation of b")

    def build(self, shape: tuple[int, ...], classes: int) -> Net:
        inputs = prod(shape)
        std = self.scale / sqrt(inputs)
        maps = random_features(inputs, self.width, self.seed, weight_std=std, bias_std=self.offset)
        return Net(RandomReLU(maps), self.width, classes)
