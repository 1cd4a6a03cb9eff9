"""Augmentation of image batches; every draw has an address: an example, a step, a client, a round."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.core import rng

_PAD = 4  # the usual margin of CIFAR's random crop


def augmented(x: Tensor, key: Tensor, how: str) -> Tensor:
    """Images ``[..., B, C, H, W]`` flipped and cropped at random; ``key`` [...] is the step's."""
    if how == "none":
        return x
    place = torch.arange(x.shape[-4], device=x.device)
    flip = rng.fold(key[..., None], 0, place) & 1  # [..., B]
    x = torch.where(flip.bool()[..., None, None, None], x.flip(-1), x)
    return _cropped(x, rng.fold(key[..., None], 1, place)) if how == "crop_flip" else x


def _cropped(x: Tensor, word: Tensor) -> Tensor:
    """Each image, padded by zeros, cut to its own size at an offset read off ``word``."""
    *lead, c, h, w = x.shape
    flat = torch.nn.functional.pad(x.reshape(-1, c, h, w), (_PAD, _PAD, _PAD, _PAD))
    top = (word.reshape(-1) >> 8) % (2 * _PAD + 1)
    left = (word.reshape(-1) >> 32) % (2 * _PAD + 1)
    rows = (top[:, None] + torch.arange(h, device=x.device))[:, None, :, None]
    columns = (left[:, None] + torch.arange(w, device=x.device))[:, None, None, :]
    image = torch.arange(len(flat), device=x.device)[:, None, None, None]
    channel = torch.arange(c, device=x.device)[None, :, None, None]
    return flat[image, channel, rows, columns].view(*lead, c, h, w)
