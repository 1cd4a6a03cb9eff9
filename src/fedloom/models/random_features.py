"""A net whose body is drawn once and never trained."""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from fedloom.core import rng
from fedloom.models.net import Net, NetSpec


class RandomFeatures(NamedTuple):
    """The weights of fixed random features max(0, x W + b)."""

    weight: Tensor  # [D, d]
    bias: Tensor  # [d]


def random_features(
    inputs: int, features: int, seed: int, *, weight_std: float | None = None, bias_std: float = 0.3
) -> RandomFeatures:
    """W ~ N(0, weight_std^2) and b ~ N(0, 0.09), the same for the same seed; fewer features are a prefix of more.

    Unset, weight_std is 2.8 / sqrt(D), so that x W keeps its scale whatever the number D of inputs: 0.1 for the
    784 pixels of MNIST. It is meant for inputs in [0, 1]; for standardised ones, which are longer, use less.
    """
    std = 2.8 / math.sqrt(inputs) if weight_std is None else weight_std
    draws = torch.from_numpy(rng.stream(seed, "random_features").standard_normal((features, inputs + 1)))
    return RandomFeatures(std * draws[:, :-1].T, bias_std * draws[:, -1])


def relu_features(x: Tensor, maps: RandomFeatures) -> Tensor:
    """max(0, x W + b), in the precision of ``x``.  ``[B, ...] -> [B, d]``"""
    return torch.addmm(maps.bias.to(x), x.flatten(1), maps.weight.to(x)).relu()


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


class RandomFeatureNet(NetSpec):
    """A linear layer on random ReLU features of the flattened input (Rahimi and Recht, 2007); only it is trained.

    The seed determines the features, and fewer features are a prefix of more. Inputs are standardised here, so that
    x W + b has a deviation of about ``scale``.
    """

    kind: ClassVar[str] = "random_features"

    width: PositiveInt = Field(512, description="how many features")
    seed: NonNegativeInt = Field(0, lt=1 << 63, description="of the features; independent of the run's seed")
    scale: PositiveFloat = Field(1.0, description="deviation of x W, for standardised inputs x")
    offset: NonNegativeFloat = Field(0.3, description="deviation of b")

    def build(self, shape: tuple[int, ...], classes: int) -> Net:
        inputs = math.prod(shape)
        std = self.scale / math.sqrt(inputs)
        maps = random_features(inputs, self.width, self.seed, weight_std=std, bias_std=self.offset)
        return Net(RandomReLU(maps), self.width, classes)
