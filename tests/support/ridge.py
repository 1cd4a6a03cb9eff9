"""Examples, partitions of them, and the statistics of clients, for tests of the closed form."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits

from fedloom.core import rng, tree
from fedloom.maths.ridge import (
    Statistics,
    solve,
    statistics,
    to_rows,
)
from fedloom.models.random_features import random_features, relu_features

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


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of_clients(x, y, owner, classes=C, clients=None):
    """The stacked statistics of clients, row i being that of client ``owner[i]``."""
    clients = int(owner.max()) + 1 if clients is None else clients
    return tree.stack([statistics(x[owner == k], y[owner == k], classes) for k in range(clients)])


def normalised(stats: Statistics) -> Statistics:
    """Sums divided by the number of examples: G / n, B / n and the share of each class; zeros without examples."""
    n = stats.examples.clamp(min=1)
    return Statistics(stats.gram / n[..., None, None], stats.cross / n[..., None, None], stats.counts / n[..., None])


def central(x, y, ridge, classes=C):
    onehot = torch.nn.functional.one_hot(y, classes).double()
    return torch.linalg.solve(x.T @ x + ridge * torch.eye(x.shape[1], dtype=torch.float64), x.T @ onehot)


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


def sorted_by_label(y, clients, seed=0):
    """Contiguous pieces of random size of the rows in the order of their labels: nearly every client has one class."""
    cuts = np.sort(np.random.default_rng(seed).choice(np.arange(1, len(y)), clients - 1, replace=False))
    owner = torch.empty(len(y), dtype=torch.int64)
    owner[y.argsort(stable=True)] = torch.from_numpy(np.searchsorted(cuts, np.arange(len(y)), side="right"))
    return owner


PARTITIONS = {
    "one": torch.zeros_like,
    "two": lambda y: torch.arange(len(y)) % 2,
    "iid": lambda y: torch.randperm(len(y), generator=torch.Generator().manual_seed(1)) % 100,
    "dirichlet": lambda y: dirichlet(y, 100, 0.05),
    "one class": lambda y: y,
    "sorted": lambda y: sorted_by_label(y, 100),
}


def total(stacked):
    """The sums over all stacked clients."""
    return tree.tmap(lambda x: x.sum(0), stacked)


def heads(stacked, ridge):
    """The head that each client would have by itself."""
    return torch.stack([solve(g, b, ridge) for g, b in zip(stacked.gram, stacked.cross, strict=True)])


@cache
def digits(features=96):
    """The digits in fixed random features, a fifth of them for the test."""
    data = load_digits()
    x = relu_features(torch.from_numpy(data.data).float() / 16, random_features(64, features, seed=0))
    order = torch.from_numpy(rng.stream(0, "deal").permutation(len(x)))
    x, y = x.double()[order], torch.from_numpy(data.target)[order]
    return x[360:], y[360:], x[:360], y[:360]


@cache
def weighted_world(clients=7):
    """Normalised rows of unequal clients, their shares, and proxy examples."""
    x, y = examples()
    stacked = of_clients(x, y, dirichlet(y, clients, 0.5, seed=3), clients=clients)
    proxy = examples(n=50, seed=9)
    return to_rows(normalised(stacked)), stacked.examples / 400, proxy
