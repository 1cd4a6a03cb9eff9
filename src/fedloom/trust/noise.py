"""Noise for privacy: drawn at an address from a secret key.

``rng`` is for simulation: its seed is public, and anyone who knows it can draw the same numbers. Noise for privacy
must be secret, or it can be subtracted. Here, too, an address always gives the same numbers, so that a resumed run
adds what it would have added; but the numbers are those of SHAKE-256 over a key of 256 random bits and the address.
Without the key they cannot be distinguished from random numbers.

They are floating-point numbers, by the method of Box and Muller, and not hardened against attacks on their last bits.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import secrets
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

SIMULATED = "simulated: reproducible noise gives no privacy"  # shown with every epsilon of a public seed
_BYTES = 32
_BLOCK = 1 << 20  # numbers that are drawn at once


@dataclass(frozen=True)
class Key:
    """What the noise of a run is drawn from; it never prints itself."""

    secret: bytes = field(repr=False)
    public: bool = False  # derived from the seed: anyone who knows that can subtract the noise
    by_content: bool = False  # noise depends on what it is added to as well, not only on its address

    def number(self, name: str) -> int:
        """256 bits, as the seed of other secret randomness."""
        return int.from_bytes(_stream(self, _BYTES, name), "big")


def fresh_key() -> Key:
    """A new secret key, from the operating system."""
    return Key(secrets.token_bytes(_BYTES))


def seeded(seed: int) -> Key:
    """The key of a public seed, for a simulation that can be repeated: it hides nothing."""
    return Key(hashlib.sha256(f"fedloom noise of seed {seed}".encode()).digest(), public=True)


def for_content(key: Key, content: bytes) -> Key:
    """A key of its own for this content: the same content has the same noise, and any other has independent noise."""
    return Key(hmac.digest(key.secret, content, "sha256"))


def as_text(key: Key) -> str:
    """A key as text for a run folder."""
    return key.secret.hex() + "\n"


def from_text(text: str) -> Key:
    """The key in such a text."""
    secret = bytes.fromhex(text.strip())
    if len(secret) != _BYTES:
        raise ValueError(f"a key has {_BYTES} bytes, but this has {len(secret)}")
    return Key(secret)


def normals(key: Key, count: int, name: str, *path: int) -> NDArray[np.float64]:
    """Independent standard normal numbers at one address.  ``[count]``"""
    half = (count + 1) // 2
    u = uniforms(key, 2 * half, name, *path)
    length, angle = np.sqrt(-2 * np.log(u[:half])), 2 * math.pi * u[half:]
    return np.concatenate([length * np.cos(angle), length * np.sin(angle)])[:count]


def laplace(key: Key, count: int, name: str, *path: int) -> NDArray[np.float64]:
    """Numbers from the Laplace distribution of scale 1.  ``[count]``"""
    u = uniforms(key, count, name, *path) - 0.5
    found: NDArray[np.float64] = -np.sign(u) * np.log1p(-2 * np.abs(u))
    return found


def uniforms(key: Key, count: int, name: str, *path: int) -> NDArray[np.float64]:
    """Numbers strictly between 0 and 1, of 52 random bits each.  ``[count]``"""
    found = np.empty(count)
    for block, start in enumerate(range(0, count, _BLOCK)):
        some = min(_BLOCK, count - start)
        words = np.frombuffer(_stream(key, 8 * some, name, *path, block), dtype="<u8")
        found[start : start + some] = ((words >> 12).astype(np.float64) + 0.5) * 2.0**-52
    return found


def _stream(key: Key, count: int, name: str, *path: int) -> bytes:
    """Bytes at one address."""
    return hashlib.shake_256(key.secret + json.dumps([name, *path]).encode()).digest(count)
