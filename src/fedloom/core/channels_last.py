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
    for parent in net.modules():
        if type(parent) is nn.Sequential:
            parent.__class__ = PoolFirst


class PoolFirst(nn.Sequential):
    """Layers one after another, but each max-pooling before the ReLU in front of it.

    The layers stay where they are: a net may also call some of them, or a part of them, by itself.
    """

    only_calls_layers = True

    def forward(self, input: Tensor) -> Tensor:
        layers = list(self)
        for k, (relu, pool) in enumerate(pairwise(layers)):
            if type(relu) is nn.ReLU and type(pool) is nn.MaxPool2d and not pool.return_indices:
                layers[k : k + 2] = pool, relu
        for layer in layers:
            input = layer(input)
        return input


def _laid_out(images: Tensor) -> Tensor:
    if images.ndim != 4:
        return images
    try:
        return images.contiguous(memory_format=torch.channels_last)
    except RuntimeError:  # vmap knows no memory formats; then the order is as it is
        return images
