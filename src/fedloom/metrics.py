"""Measurements that merge: whatever way clients, batches or ranks are grouped, the result is the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


class Stat(NamedTuple):
    """A weighted sum and its weight, kept in float64: a monoid under ``merge``."""

    total: float = 0.0
    weight: float = 0.0

    def merge(self, other: Stat) -> Stat:
        return Stat(self.total + other.total, self.weight + other.weight)

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight else float("nan")


class Scores(NamedTuple):
    """How a model did on some examples, one by one."""

    correct: Tensor  # [B] 1.0 or 0.0; a row of scores that is not finite counts as wrong
    loss: Tensor  # [B]


def score(logits: Tensor, y: Tensor) -> Scores:
    """Accuracy and cross-entropy of each example."""
    right = (logits.argmax(-1) == y) & logits.isfinite().all(-1)
    loss = nn.functional.cross_entropy(logits.double(), y, reduction="none")
    return Scores(right.double(), loss)


class Spread(NamedTuple):
    """One value per client, summarised."""

    weighted: float  # mean weighted by the clients' examples
    mean: float
    std: float  # population standard deviation
    worst: float  # mean of the worst tenth of the clients (at least one of them)


def spread(values: NDArray[np.float64], weights: NDArray[np.float64], *, low_is_bad: bool) -> Spread:
    """The spread of ``values`` over the clients that have any examples."""
    values, weights = values[weights > 0], weights[weights > 0]
    if not len(values):
        nan = float("nan")
        return Spread(nan, nan, nan, nan)
    tail = max(1, len(values) // 10)
    ordered = np.sort(values) if low_is_bad else np.sort(values)[::-1]
    return Spread(
        float((values * weights).sum() / weights.sum()),
        float(values.mean()),
        float(values.std()),
        float(ordered[:tail].mean()),
    )


class Summary(NamedTuple):
    """What a run's series of one metric came to; never only its best."""

    last: float
    best: float
    mean_last_10: float


def summarise(name: str, series: Sequence[float]) -> Summary:
    """The last, best and mean of the last ten values; for a loss or a distance, best is the lowest."""
    best = min if lower_is_better(name) else max
    return Summary(series[-1], best(series), float(np.mean(series[-10:])))


def lower_is_better(name: str) -> bool:
    """Whether a smaller value of this metric is the better one."""
    leaf = name.rsplit("/", 1)[-1]
    return leaf.startswith(("loss", "distance", "up", "down", "simulated")) or leaf.endswith("_std")


def count_equal(owner: Tensor, values: Tensor, clients: int) -> NDArray[np.float64]:
    """The sum of ``values`` for each owner in 0..clients-1."""
    out = torch.zeros(clients, dtype=torch.float64, device=values.device)
    summed: NDArray[np.float64] = out.index_add_(0, owner, values.double()).cpu().numpy()
    return summed
