"""Randomness is an address: a seed, a name and a path, never an object that advances.

``stream`` gives a NumPy generator for a few draws; ``bits`` and ``uniform`` hash whole tensors of
addresses at once, on any device, for draws by the million. Nothing random is ever checkpointed.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor

_WORD = (1 << 64) - 1


def _signed(word: int) -> int:
    """64 bits as a signed integer, which is what tensors hold."""
    return ((word + (1 << 63)) & _WORD) - (1 << 63)


_GOLDEN, _MIX_A, _MIX_B = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def stream(seed: int, name: str, *path: int) -> np.random.Generator:
    """The generator at one address; the same address always gives the same draws."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, zlib.crc32(name.encode()), *path])))


def bits(seed: int, name: str, *path: Tensor | int) -> Tensor:
    """64 random bits for every address, where tensors in ``path`` broadcast against each other."""
    state: Tensor | int = _scramble_number(seed ^ (zlib.crc32(name.encode()) * 0x10001))
    for part in path:  # numbers are mixed as numbers: an operation on a tensor takes as long for one as for thousands
        if isinstance(state, int):
            along = _signed(state * _GOLDEN)
            if isinstance(part, Tensor):
                state = _scramble(part.to(torch.int64) + along)
            else:
                state = _scramble_number(int(part) + along)  # which may be a number of NumPy's
        else:
            state = fold(state.to(part.device) if isinstance(part, Tensor) else state, part)
    return state if isinstance(state, Tensor) else torch.tensor(_signed(state))


def uniform(seed: int, name: str, *path: Tensor | int) -> Tensor:
    """A float32 in [0, 1) for every address."""
    return unit(bits(seed, name, *path))


def unit(word: Tensor) -> Tensor:
    """64 random bits as a float32 in [0, 1)."""
    return ((word >> 40) & 0xFFFFFF).to(torch.float32) * (1.0 / (1 << 24))


def fold(key: Tensor, *path: Tensor | int) -> Tensor:
    """The address ``path`` below ``key``: how a key becomes many."""
    for part in path:
        # A number stays a number: copying it to a GPU would wait for the GPU.
        key = _scramble((part.to(key.device) if isinstance(part, Tensor) else part) + key * _GOLDEN)
    return key


def _scramble(z: Tensor) -> Tensor:
    """The finaliser of SplitMix64; int64 arithmetic wraps, and the masks make the shifts logical."""
    z = z + _GOLDEN
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _MIX_A
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _MIX_B
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def _scramble_number(z: int) -> int:
    """The same for one number, as an unsigned integer."""
    z = (z + _GOLDEN) & _WORD
    z = ((z ^ (z >> 30)) * _MIX_A) & _WORD
    z = ((z ^ (z >> 27)) * _MIX_B) & _WORD
    return z ^ (z >> 31)
