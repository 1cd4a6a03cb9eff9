"""Synthetic(a, b): each device draws its own linear model, and inputs around its own centre.

The recipe of FedProx (Li et al., MLSys 2020), for device k of N, with d features and C classes:

    n_k    = floor(lognormal(4, 2)) + 50      or, as ``pareto``,  min(floor(50 / U), 5000)
    u_k    ~ N(0, a),   B_k ~ N(0, b),   v_k ~ N(B_k, 1) in R^d
    W_k    ~ N(u_k, 1) in R^{C x d},   b_k ~ N(u_k, 1) in R^C
    x      ~ N(v_k, diag(j^-1.2)),     y = argmax(W_k x + b_k)

As published, ``a`` has no effect: u_k adds the same u_k (1 + sum_j x_j) to every score of x, and the largest stays
the largest. The devices' models still differ, since each draws its own W_k. Two other readings of u give ``a`` an
effect:

    per_class    u_k in R^C, one number for each row of W_k and entry of b_k
    shared_plus  W_k = W_0 + a Z_k,  b_k = b_0 + a z_k:  one model for all, and ``a`` times a device's own

Each group of draws has its own address (sizes; u; B; v; then W, b, x of each device; then its shuffle), so
``a`` and ``b`` only scale the draws, and fewer devices are a prefix of more.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedloom.core import rng
from fedloom.data.arrays import Ints
from fedloom.data.files import Rows

Floats: TypeAlias = NDArray[np.float64]
Sizes = Literal["lognormal", "pareto"]
Shift = Literal["scalar", "per_class", "shared_plus"]

LEAST, MOST = 50, 5000  # rows of a device; only the Pareto sizes have an upper end
NAME = "synthetic"
SIZES, U, CENTRE, MEANS, DEVICE, SHUFFLE, SHARED = range(7)  # the addresses below ``NAME``


class Device(NamedTuple):
    """What one device draws from."""

    W: Floats  # [C, d]
    b: Floats  # [C]
    mean: Floats  # [d]


class Shape(NamedTuple):
    """The dimensions of the data."""

    devices: int
    features: int
    classes: int


def device_sizes(devices: int, law: Sizes, seed: int) -> Ints:
    """The number of rows of each device: most have few, few have many."""
    chance = rng.stream(seed, NAME, SIZES)
    if law == "pareto":
        # a power law of exponent 2; 1 - U is in (0, 1], so there is no division by zero
        return np.minimum(np.floor(LEAST / (1.0 - chance.random(devices))), MOST).astype(np.int64)
    return chance.lognormal(4.0, 2.0, devices).astype(np.int64) + LEAST


def variances(features: int) -> Floats:
    """The diagonal of the inputs' covariance; the other entries are zero."""
    return np.arange(1, features + 1, dtype=np.float64) ** -1.2


def draw_examples(
    shape: Shape, *, a: float, b: float, sizes: Sizes, u_mode: Shift, iid: bool, split: float, seed: int
) -> Rows:
    """The rows of all devices, one device after another, its training rows first; ``a``, ``b`` are deviations."""
    count = device_sizes(shape.devices, sizes, seed)
    per = shape.classes if u_mode == "per_class" else 1
    u = a * rng.stream(seed, NAME, U).standard_normal((shape.devices, per))
    centre = b * rng.stream(seed, NAME, CENTRE).standard_normal(shape.devices)
    means = centre[:, None] + rng.stream(seed, NAME, MEANS).standard_normal((shape.devices, shape.features))
    W_0, b_0 = _model(shape, rng.stream(seed, NAME, SHARED))
    deviation = np.sqrt(variances(shape.features))
    x = np.empty((count.sum(), shape.features), np.float32)
    y = np.empty(count.sum(), np.int64)
    first = 0
    for k, n in enumerate(count.tolist()):
        chance = rng.stream(seed, NAME, DEVICE, k)
        W, bias = _model(shape, chance)
        if iid:
            mine = Device(W_0, b_0, np.zeros(shape.features))
        elif u_mode == "shared_plus":
            mine = Device(W_0 + a * W, b_0 + a * bias, means[k])
        else:
            mine = Device(W + u[k][:, None], bias + u[k], means[k])
        rows = mine.mean + deviation * chance.standard_normal((n, shape.features))
        order = rng.stream(seed, NAME, SHUFFLE, k).permutation(n)
        x[first : first + n] = rows[order]
        y[first : first + n] = labels(mine, rows)[order]
        first += n
    train = np.maximum(np.floor(split * count + 1e-9).astype(np.int64), 1)
    place = np.arange(len(y)) - np.repeat(np.cumsum(count) - count, count)
    names = tuple(str(c) for c in range(shape.classes))
    return Rows(x, y, names, place >= np.repeat(train, count), np.repeat(np.arange(shape.devices), count))


def labels(device: Device, x: Floats) -> Ints:
    """The class of the largest score; the softmax of the papers does not change it."""
    best: Ints = np.argmax(x @ device.W.T + device.b, axis=1).astype(np.int64)
    return best


def _model(shape: Shape, chance: np.random.Generator) -> tuple[Floats, Floats]:
    return chance.standard_normal((shape.classes, shape.features)), chance.standard_normal(shape.classes)
