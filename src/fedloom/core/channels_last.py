"""Convolutions of one net at a time: with the channels of a pixel side by side, and the maximum before the ReLU.

Both compute the same function. A max-pooling compares pixels of one channel; with channels side by side it compares
those of many at once. A ReLU after the pooling, instead of before it, has fewer pixels left: it keeps the order of
numbers, so that the largest is the same, and so are the places where no gradient passes.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


class ChannelsLastConv2d(nn.Conv2d):
    """A convolution that lays out its images channels last; its parameters stay as they are."""

    only_calls_layers = True

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = super()._conv_forward(_laid_out(input), weight, bias)
        return _laid_out(out)  # for an image with one channel, both ways are the same, and torch prefers the other


def channels_last(net: nn.Module) -> None:
    """Let the plain convolutions of a net work channels last; parameters and names do not change."""
    for layer in net.modules():
        if type(layer) is nn.Conv2d:
            layer.__class__ = ChannelsLastConv2d
    for parent in list(net.modules()):
        if type(parent) is nn.Sequential:
            _pool_first(parent)


def _pool_first(layers: nn.Sequential) -> None:
    """Exchange each ReLU and the max-pooling right after it; neither has parameters."""
    names = list(layers._modules)
    for one, two in pairwise(names):
        relu, pool = layers._modules[one], layers._modules[two]
        if type(relu) is nn.ReLU and type(pool) is nn.MaxPool2d and not pool.return_indices:
            layers._modules.update({one: pool, two: relu})


def _laid_out(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last) if images.ndim == 4 else images
