"""A net that takes raw data: the preparation of inputs before training is its first layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class FillAndScale(nn.Module):
    """Numbers of a table: a missing one (NaN) is filled, and each has mean 0 and std 1, as in training."""

    fill: Tensor
    mean: Tensor
    std: Tensor
    varies: Tensor

    def __init__(self, fill: Sequence[float], mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        spread = torch.tensor(std, dtype=torch.float64)
        self.register_buffer("fill", torch.tensor(fill, dtype=torch.float32))
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float64))
        self.register_buffer("std", torch.where(spread == 0, 1.0, spread))
        self.register_buffer("varies", (spread != 0).double())

    def forward(self, x: Tensor) -> Tensor:
        whole = torch.where(torch.isnan(x), self.fill, x.to(torch.float32))
        return (self.varies * ((whole.double() - self.mean) / self.std)).float()


class Rescale(nn.Module):
    """Pixels, or raw numbers: ``x * scale - shift`` for each channel."""

    scale: Tensor
    shift: Tensor

    def __init__(self, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.float32) * self.scale - self.shift


class ReadyNet(nn.Module):
    """``net`` behind the preparation of its inputs: rows of a table as numbers, or images of 0 to 255.

    ``unit``: the mean and deviation of a regression target, in whose unit outputs are returned.
    """

    def __init__(self, prepare: nn.Module, net: nn.Module, unit: tuple[float, float] | None = None) -> None:
        super().__init__()
        self.prepare, self.net, self.unit = prepare, net, unit

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.net(self.prepare(x))
        return outputs if self.unit is None else outputs * self.unit[1] + self.unit[0]
