"""Data, partitions and distances for tests of ridge regression from sums."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits

from fedloom.core import rng, tree
from fedloom.maths import analytic

C = 5


@cache
def examples(n=400, d=12, classes=C, seed=0):
    """Overlapping classes in float64."""
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    x = torch.randn(n, d, generator=g, dtype=torch.float64)
    x[torch.arange(n), y % d] += 1.5
    return x, y


def vec(*values):
    return torch.tensor(values, dtype=torch.float64)


def of_clients(x, y, owner, classes=C, clients=None):
    """The stacked statistics of clients, row i being that of client ``owner[i]``."""
    clients = int(owner.max()) + 1 if clients is None else clients
    return tree.stack([analytic.statistics(x[owner == k], y[owner == k], classes) for k in range(clients)])


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


def dirichlet(y, clients, alpha, seed=0):
    """Each class is dealt to the clients in proportions drawn from Dir(alpha); some clients may have nothing."""
    r = np.random.default_rng(seed)
    owner = torch.zeros(len(y), dtype=torch.int64)
    for c in y.unique():
        rows = torch.where(y == c)[0]
        owner[rows] = torch.from_numpy(r.choice(clients, len(rows), p=r.dirichlet(np.full(clients, alpha))))
    return owner


@cache
def digits(features=96):
    """The digits in fixed random features, a fifth of them for the test."""
    data = load_digits()
    x = analytic.relu_features(torch.from_numpy(data.data).float() / 16, analytic.random_features(64, features, seed=0))
    order = torch.from_numpy(rng.stream(0, "deal").permutation(len(x)))
    x, y = x.double()[order], torch.from_numpy(data.target)[order]
    return x[360:], y[360:], x[:360], y[:360]


@cache
def weighted_world(clients=7):
    """Normalised rows of unequal clients, their shares, and proxy examples."""
    x, y = examples()
    stacked = of_clients(x, y, dirichlet(y, clients, 0.5, seed=3), clients=clients)
    proxy = examples(n=50, seed=9)
    return analytic.to_rows(analytic.normalised(stacked)), stacked.examples / 400, proxy
