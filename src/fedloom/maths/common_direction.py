"""Weights under which the weighted sum of some vectors is as short as possible: FedMGDA+'s quadratic program.

    lambda* = argmin 1/2 lambda' P lambda
              over  sum_k lambda_k = 1,  |lambda_k - share_k| <= epsilon,  0 <= lambda_k <= 1

with the products P of the vectors. It is solved in float64 by accelerated projected gradients (FISTA), until the
Frank-Wolfe gap, a certificate, is at most ``tolerance``. On a GPU one kernel does it
(``common_direction_kernel``), so that nobody waits for the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Solver: TypeAlias = "Callable[[Tensor, Tensor, Tensor, Limits], Tensor]"  # of products, counts, norms

_MOST = 64  # clients for which the kernel's matrices fit a multiprocessor


class Limits(NamedTuple):
    """How far weights may be from the shares, and when the solver stops."""

    epsilon: float
    tolerance: float
    max_iter: int


def least_norm_weights(P: Tensor, counts: Tensor, norms: Tensor, limits: Limits) -> Tensor:
    """The weights, for vectors with products ``P`` [K, K] and shares like ``counts``; 0 where a norm is 0.  ``[K]``"""
    kernel = _kernel(P.device, side_of(len(P))) if P.device.type == "cuda" and len(P) <= _MOST else None
    return (kernel or _on_cpu)(P, counts, norms, limits)


def side_of(clients: int) -> int:
    """The side of the kernel's matrices: a power of two."""
    return max(16, 1 << (clients - 1).bit_length())


@cache
def _kernel(device: torch.device, side: int) -> Solver | None:
    """The kernel, if it can be compiled for this GPU and computes what is expected.

    Triton may be missing, or its C compiler, or the GPU may have too little shared memory.
    """
    if find_spec("triton") is None:
        return None
    from fedloom.maths.common_direction_kernel import least_norm_queued

    return least_norm_queued if is_right(least_norm_queued, device, side) else None


def is_right(solver: Solver, device: torch.device, clients: int) -> bool:
    """Whether a solver on this device finds the weights of a program with bounds that are reached."""
    one = torch.ones(clients, dtype=torch.float64)
    given = (one.cumsum(0).diag() / clients + 0.3, one.cumsum(0), one)
    limits = Limits(0.5 / clients, 1e-12, 40)
    try:
        P, counts, norms = (x.to(device) for x in given)
        found = solver(P, counts, norms, limits).cpu()
    except torch.OutOfMemoryError:
        raise
    except Exception:  # any error of the compiler
        return False
    return torch.allclose(found, _on_cpu(*given, limits), rtol=0, atol=1e-9)


def _on_cpu(P: Tensor, counts: Tensor, norms: Tensor, limits: Limits) -> Tensor:
    known = torch.cat([P, counts[:, None], norms[:, None]], dim=1).cpu().numpy()  # one copy: each waits for a GPU
    products, share, moved = known[:, :-2], known[:, -2], known[:, -1] > 0
    if not np.isfinite(known).all():  # of a round that is checked afterwards
        return torch.full_like(norms, torch.nan)
    weights = np.zeros(len(moved))
    if moved.any():
        share = share[moved] / share[moved].sum()
        weights[moved] = least_norm(products[moved][:, moved], share, *limits)
    return torch.from_numpy(weights).to(P.device)


def least_norm(P: Floats, share: Floats, epsilon: float, tolerance: float, max_iter: int) -> Floats:
    """The weights of least ``lambda' P lambda`` in the box around ``share``, by FISTA.  ``[K]``"""
    low, high = np.maximum(share - epsilon, 0), np.minimum(share + epsilon, 1)
    # Weights that sum to one never move along the all-ones direction, so curvature along it must not shorten the step.
    centred = P - P.mean(0) - P.mean(1, keepdims=True) + P.mean()
    step = 1.0 / max(np.linalg.eigvalsh(centred)[-1], 1e-300)
    x = y = share
    t = 1.0
    for turn in range(max_iter):
        if turn % 10 == 0 and gap(P, x, low, high) <= tolerance:
            break
        after = project(y - step * (P @ y), low, high)
        t_after = (1 + (1 + 4 * t * t) ** 0.5) / 2
        y, x, t = after + (t - 1) / t_after * (after - x), after, t_after
    return x


def gap(P: Floats, x: Floats, low: Floats, high: Floats) -> float:
    """The Frank-Wolfe gap, the largest decrease of the linearised objective in the box: 0 only at the optimum."""
    slope = P @ x
    order = slope.argsort()
    room = (high - low)[order]
    left = np.maximum(1 - low.sum() - (room.cumsum() - room), 0)  # fill the cheapest first
    best = low @ slope + np.minimum(room, left) @ slope[order]
    return float(x @ slope - best)


def project(v: Floats, low: Floats, high: Floats) -> Floats:
    """The nearest point of the box whose entries sum to one.

    It is clip(v - s) for the shift s at which the sum is one; the sum falls along straight pieces between
    the shifts at which an entry reaches its bound, so s is on the one piece that crosses one.
    """
    edges = np.sort(np.concatenate([v - low, v - high]))
    sums = np.minimum(np.maximum(v - edges[:, None], low), high).sum(1)  # falling
    after = min(max(int((sums > 1).sum()), 1), len(edges) - 1)
    left, right = edges[after - 1], edges[after]
    fall = max(sums[after - 1] - sums[after], 1e-300)
    s = left + (right - left) * min(max((sums[after - 1] - 1) / fall, 0.0), 1.0)
    inside: Floats = np.minimum(np.maximum(v - s, low), high)
    return inside
