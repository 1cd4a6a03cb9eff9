"""Nets that see a flat vector: they take data of any shape."""

from __future__ import annotations

from math import prod
from typing import ClassVar

from pydantic import Field, PositiveInt
from torch import nn

from fedloom.models.net import Net, NetSpec, hidden


class Logistic(NetSpec):
    """Multinomial logistic regression: one linear layer on the flattened input, convex in its parameters."""

    kind: ClassVar[str] = "logistic"

    def build(self, shape: tuple[int, ...], classes: int) -> Net:
        return Net(nn.Flatten(), prod(shape), classes)


class MLP(NetSpec):
    """Fully connected layers with ReLU; LAW-AFL's is ``widths = [512, 256]``, FedLAW's ``[200, 200]``."""

    kind: ClassVar[str] = "mlp"

    widths: tuple[PositiveInt, ...] = Field((64,), description="of the hidden layers")

    def build(self, shape: tuple[int, ...], classes: int) -> Net:
        body = nn.Sequential(nn.Flatten())
        return Net(body, hidden(body, prod(shape), self.widths), classes)
