"""The random generators that code may draw from without being given one: no run may depend on their state."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def from_a_seed(number: int, *, with_torch: bool = True) -> Iterator[None]:
    """Within this block these generators begin from a number; afterwards they are what they were.

    ``with_torch``: torch's, too; initial models draw from it by the run's seed in any case.
    """
    numpys, pythons = np.random.get_state(), random.getstate()
    np.random.seed(number % 2**32)
    random.seed(number)
    try:
        with torch.random.fork_rng(devices=[], enabled=with_torch):
            if with_torch:
                torch.manual_seed(number % 2**63)
            yield
    finally:
        np.random.set_state(numpys)
        random.setstate(pythons)


def seed_of(generator: np.random.Generator) -> int:
    """A number that belongs to this generator, without drawing from it."""
    sequence = generator.bit_generator.seed_seq
    return int(sequence.generate_state(1)[0]) if isinstance(sequence, np.random.SeedSequence) else 0


def hidden_generators(device: torch.device) -> dict[str, Any]:
    """The state of each, by the owner that a message names."""
    found: dict[str, Any] = {"torch's": torch.get_rng_state().numpy().tobytes()}
    if device.type == "cuda":
        found["torch's CUDA"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    name, words, *rest = np.random.get_state(legacy=True)
    return found | {"NumPy's": (name, np.asarray(words).tobytes(), *rest), "Python's": random.getstate()}
