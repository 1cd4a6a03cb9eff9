"""A small data set of overlapping classes."""

from __future__ import annotations

import numpy as np

from fedloom.data.arrays import Arrays


def blobs(sizes: tuple[int, ...] = (4, 12, 7), *, test: int = 20, features: int = 4, classes: int = 3) -> Arrays:
    """Overlapping classes; the rows of client i lie together and know their client."""
    rng = np.random.default_rng(0)
    client = np.concatenate([np.repeat(np.arange(len(sizes)), sizes), np.zeros(test, dtype=np.int64)])
    y = rng.integers(0, classes, len(client))
    x = rng.normal(size=(len(client), features)) + 1.5 * np.eye(classes, features)[y]
    rows = np.arange(len(client)) >= sum(sizes)
    return Arrays("blobs", x.astype(np.float32), y, rows, tuple("abcdefghij"[:classes]), client=client)
