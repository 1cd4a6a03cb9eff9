"""More noise for clients with unequal labels: factors f_i >= 1 from noised histograms (LAW-AFL, eq. 24, corrected)."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.trust import noise
from fedloom.trust.noise import Key
from fedloom.trust.privacy import SMOOTH, Privacy


def noise_factors(how: Privacy, counts: NDArray[np.float64], key: Key) -> Tensor:
    """f_i >= 1 of every client from the counts [N, C] of its labels.  ``[N]``

    A histogram is released as shares of 1. So Laplace noise of scale 1 / histogram_epsilon protects the whole client,
    not only one of its rows.
    """
    clients, classes = counts.shape
    if not how.asks_for_labels or classes < 2:
        return torch.ones(clients)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    drawn = noise.laplace(key, counts.size, "privacy/histogram").reshape(counts.shape)
    even = entropies(shares + drawn / how.histogram_epsilon)
    if how.heterogeneity == "entropy":
        return torch.from_numpy(np.clip(1 + how.slope * (1 - even), 1, how.most)).float()
    alpha = concentrations(even, classes)
    return torch.from_numpy(np.clip(how.reference / (alpha + SMOOTH), 1, how.most)).float()


def entropies(histograms: NDArray[np.float64]) -> NDArray[np.float64]:
    """The entropy of each histogram [N, C] over ln C: 1 if it is even, 0 if one class has all, or it is empty."""
    positive = np.maximum(histograms, 0)
    total = positive.sum(1, keepdims=True)
    share = np.divide(positive, total, out=np.zeros_like(positive), where=total > 0)
    logs = np.log(share, out=np.zeros_like(share), where=share > 0)
    found: NDArray[np.float64] = -(share * logs).sum(1) / math.log(histograms.shape[1])
    return found


def concentrations(even: NDArray[np.float64], classes: int) -> NDArray[np.float64]:
    """The alpha of a symmetric Dirichlet distribution whose mean entropy, over ln C, is that of each client [N]."""
    grid = np.geomspace(1e-4, 1e3, 2000)
    found: NDArray[np.float64] = np.interp(even, mean_entropy(grid, classes), grid)
    return found


def mean_entropy(alpha: NDArray[np.float64], classes: int) -> NDArray[np.float64]:
    """E[H] / ln C of shares drawn from Dir(alpha): psi(C alpha + 1) - psi(alpha + 1), which grows with alpha."""
    a = torch.from_numpy(np.asarray(alpha, dtype=np.float64))
    found: NDArray[np.float64] = (torch.digamma(classes * a + 1) - torch.digamma(a + 1)).numpy() / math.log(classes)
    return found
