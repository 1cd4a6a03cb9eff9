"""The statistics that the server keeps of each client, and the checks that an upload must pass."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.core import tree
from fedloom.maths.ridge import Statistics, symmetrised, triangle, with_ridge

_TOLERANCE = 1e-8  # of sums in float64, relative


def statistics_faults(
    stats: Statistics,
    *,
    norm: float | None = None,
    bias: int | None = None,
    noise: float = 0.0,
) -> list[str]:
    """Why one client's statistics cannot be sums over honest examples; empty if they can.

    ``norm``: R, to which features are clipped; ``bias``: which feature is constant 1; ``noise``: the deviation of the
    noise that was added for privacy, by which every bound is widened. Flipped labels pass: they are honest sums of
    wrong examples.
    """
    if not all(bool(x.isfinite().all()) for x in stats):
        return ["not all numbers are finite"]
    slack = 6 * noise * math.sqrt(len(stats.gram) + len(stats.counts))
    near = slack + _TOLERANCE * max(float(stats.gram.trace()), 1.0)
    found = []
    if float((stats.gram - stats.gram.mT).abs().max()) > _TOLERANCE * max(1.0, float(stats.gram.abs().max())):
        found.append("G is not symmetric")
    if bool((stats.counts < -slack).any()):
        found.append("a class has a negative count")
    if norm is not None:
        found += _norm_faults(stats, norm, near, near * (len(stats.gram) if noise else 1))
    if not semidefinite(joint_gram(stats), near):
        found.append("[[G, B], [B', diag(counts)]] is not positive semidefinite")
    if bias is not None:
        found += _bias_faults(stats, bias, near)
    return found


def _norm_faults(stats: Statistics, norm: float, near: float, near_trace: float) -> list[str]:
    """Bounds that follow from features no longer than ``norm``."""
    found, most, trace = [], float(stats.counts.sum()) * norm**2, float(stats.gram.trace())
    if trace > most + near_trace:
        found.append(f"tr(G) = {trace:g} is above n R^2 = {most:g}")
    if bool((stats.cross.norm(dim=0) > stats.counts * norm + near).any()):
        found.append("a column of B is longer than count times R")
    return found


def _bias_faults(stats: Statistics, bias: int, near: float) -> list[str]:
    """What a feature that is constant 1 implies."""
    found, n, entry = [], float(stats.counts.sum()), float(stats.gram[bias, bias])
    if float((stats.gram[:, bias] - stats.cross.sum(1)).abs().max()) > near:
        found.append("the bias column of G is not the sum of the columns of B")
    if abs(entry - n) > near:
        found.append(f"the bias entry of G is {entry:g}, not n = {n:g}")
    return found


def joint_gram(stats: Statistics) -> Tensor:
    """The Gram matrix of features and one-hot labels side by side.  ``[d + C, d + C]``"""
    top = torch.cat([stats.gram, stats.cross], 1)
    return torch.cat([top, torch.cat([stats.cross.mT, stats.counts.diag()], 1)])


def semidefinite(a: Tensor, tolerance: float) -> bool:
    """Whether no eigenvalue is below -tolerance; one Cholesky instead of all eigenvalues."""
    return not bool(torch.linalg.cholesky_ex(with_ridge(symmetrised(a), tolerance)).info)


def body_fingerprint(tensors: Iterable[Tensor]) -> int:
    """A 64-bit fingerprint of a body, including its running statistics."""
    digest = hashlib.sha256()
    for x in tensors:
        digest.update(f"{x.dtype} {tuple(x.shape)}".encode())
        digest.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest()[:8], "big", signed=True)


class Registry(NamedTuple):
    """The statistics of each client that has sent them, all taken on one body."""

    body: Tensor  # [] its fingerprint
    known: Tensor  # [N] clients that have sent them
    rows: Tensor  # [N, d (d + 1) / 2 + d C] normalised
    counts: Tensor  # [N, C]


def no_registry(clients: int, features: int, classes: int, body: int, dtype: torch.dtype = torch.float64) -> Registry:
    """A registry without clients; in float32 it takes half the memory."""
    width = triangle(features) + features * classes
    return Registry(
        torch.tensor(body),
        torch.zeros(clients, dtype=torch.bool),
        torch.zeros(clients, width, dtype=dtype),
        torch.zeros(clients, classes, dtype=torch.float64),
    )


def of_body(registry: Registry, body: int) -> Registry:
    """The registry for this body: an empty one if its statistics were taken on another."""
    if body == int(registry.body):
        return registry
    return tree.tmap(torch.zeros_like, registry)._replace(body=torch.full_like(registry.body, body))


def enrolled(registry: Registry, ids: Tensor, rows: Tensor, counts: Tensor) -> Registry:
    """The registry with the normalised statistics of these distinct clients ``[K]``; known ones are not changed.

    LAW-AFL, Algorithm 3 line 15 adds every upload to the previous sum, so that a client that is drawn again counts
    twice, and features of different bodies are mixed.
    """
    new = ~registry.known[ids]
    return Registry(
        registry.body,
        registry.known.index_fill(0, ids[new], True),
        registry.rows.index_copy(0, ids[new], rows[new].to(registry.rows.dtype)),
        registry.counts.index_copy(0, ids[new], counts[new]),
    )
