"""Data, partitions and distances for tests of methods that solve for the head in closed form."""

from __future__ import annotations

import numpy as np

from fedloom.data.arrays import Arrays
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore
from support.blobs import blobs


def rounds(exp, count=1):
    """The state after some rounds."""
    state, store = begin(exp), RamStore(exp.federation.clients)
    for _ in range(count):
        state, _ = advance(exp, state, store)
    return state


def dealt(owner, classes=3) -> Arrays:
    """Always the same 60 training rows, of which row i belongs to client ``owner[i]``."""
    arrays = blobs((60,), features=6, classes=classes)
    client = arrays.client.copy()
    client[:60] = owner
    return arrays._replace(client=client)


def apart(a, b) -> float:
    return float((a - b).norm() / b.norm())


RANDOM = np.random.default_rng(1)


OWNERS = {
    "one": np.zeros(60, dtype=int),
    "two": np.arange(60) % 2,
    "sixty": RANDOM.permutation(60),
    "skewed": np.sort(RANDOM.geometric(0.3, 60).clip(1, 9) - 1),
    "one class each": dealt(0).y[:60],
}
