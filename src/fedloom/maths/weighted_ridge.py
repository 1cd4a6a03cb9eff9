"""The closed form with a weight for each client, and its gradient through the solve.

    W = (sum_i mu_i G_i / n_i + rho I)^-1 sum_i mu_i B_i / n_i,    mu_i = shrink * lambda_i

The gradient of a loss on the server's proxy examples along every mu_i costs one more solve.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from fedloom.core import rng, tree
from fedloom.maths.proxy_set import ProxyFeatures
from fedloom.maths.ridge import Factor, factor, from_rows, matters, pack_symmetric, with_ridge


class Solved(NamedTuple):
    """A weighted head, and what it was solved with."""

    head: Tensor  # [d, C] W = A^-1 sum_i mu_i B_i / n_i
    system: Factor  # of A = sum_i mu_i G_i / n_i + rho I


def weighted_head(rows: Tensor, mu: Tensor, ridge: Tensor | float, classes: int) -> Solved:
    """The head of clients with weights mu ``[K]``, from normalised statistics packed by ``to_rows``.

    With mu_i = n_i / N this is AFL with ridge N rho. It depends on shrink and ridge only by their quotient.
    LAW-AFL, Algorithm 3 line 17 prints W C^-1, which does not fit; it is C^-1 W.
    """
    gram, cross = from_rows(tree.mix(mu[None], rows)[0], classes)
    system = factor(with_ridge(gram, ridge), regular=matters(ridge, gram))
    return Solved(system.solve(cross), system)


class Adjoint(NamedTuple):
    """How a loss of the head changes with what the head was solved from."""

    mu: Tensor  # [K] delta_i = <Lambda, B_i / n_i> - <Lambda W', G_i / n_i>
    ridge: Tensor  # [] -<Lambda, W>


def adjoint(rows: Tensor, solved: Solved, slope: Tensor) -> Adjoint:
    """The gradient through the solve, from ``slope`` = dL/dW ``[d, C]``: Lambda = A^-1 dL/dW, one more solve."""
    adj = solved.system.solve(slope)
    outer = adj @ solved.head.mT
    # An off-diagonal entry is stored once and counts twice.
    dual = outer + outer.mT
    dual.diagonal().copy_(outer.diagonal())
    return Adjoint(inner(rows, torch.cat([-pack_symmetric(dual), adj.flatten()])), -(adj * solved.head).sum())


_BLOCK = 1 << 20  # numbers that are turned into float64 at once


def inner(rows: Tensor, direction: Tensor) -> Tensor:
    """<row, direction> for every row, in float64.  ``[K, P], [P] -> [K]``"""
    out = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    wide = max(1, _BLOCK // max(1, len(rows)))
    for some, along in zip(torch.split(rows, wide, 1), torch.split(direction, wide), strict=True):
        out += some.double() @ along.double()
    return out


class ProxyLoss(NamedTuple):
    """The loss of a head on the server's proxy examples, and its slopes."""

    value: Tensor  # []
    head: Tensor  # [d, C] dL/dW
    log_temperature: Tensor  # [] dL/dc


def cross_entropy(head: Tensor, log_temperature: Tensor, proxy: ProxyFeatures) -> ProxyLoss:
    """CE of softmax(s X W), s = e^c: dL/dW = X' s (P - Y) / n, dL/dc = s <(P - Y) / n, X W>.

    Ridge outputs are about in [0, 1]; without s the loss would favour a smaller ridge only to have larger logits.
    """
    x, y = proxy
    s = log_temperature.exp()
    scores = x @ head
    logp = log_softmax(s * scores, -1)
    right = y[:, None]
    residual = (logp.exp().scatter_add(1, right, -torch.ones_like(logp[:, :1]))) / len(y)
    return ProxyLoss(-logp.gather(1, right).mean(), s * (x.mT @ residual), s * (residual * scores).sum())


def squared_error(head: Tensor, log_temperature: Tensor, proxy: ProxyFeatures) -> ProxyLoss:
    """||X W - Y||^2 / n, which has no temperature."""
    x, y = proxy
    scores = x @ head
    residual = scores.scatter_add(1, y[:, None], -torch.ones_like(scores[:, :1]))
    slope = 2 * (x.mT @ residual) / len(y)
    return ProxyLoss(residual.square().sum() / len(y), slope, torch.zeros_like(log_temperature))


LOSSES: dict[str, Callable[[Tensor, Tensor, ProxyFeatures], ProxyLoss]] = {"ce": cross_entropy, "mse": squared_error}


def off_mean(lam: Tensor, slope: Tensor) -> Tensor:
    """d_i - sum_j lambda_j d_j: exactly 0 if all are equal, since the first is subtracted before the mean.  ``[K]``"""
    slope = slope - slope[0]
    return slope - lam @ slope


def simplex_gradient(lam: Tensor, slope: Tensor) -> Tensor:
    """The slope along the logits of lambda = softmax(a), from that along lambda.  ``[K]``"""
    return lam * off_mean(lam, slope)


class WeightedGradient(NamedTuple):
    """A proxy loss of the weighted head and all its slopes, where mu = e^b softmax(a)."""

    loss: Tensor  # []
    a: Tensor  # [K] shrink lambda_j (delta_j - sum_i lambda_i delta_i)
    b: Tensor  # [] shrink sum_i lambda_i delta_i, which is also rho <Lambda, W>
    c: Tensor  # [] along the logarithm of the temperature
    ridge: Tensor  # []
    mu: Tensor  # [K] delta


def weighted_gradient(
    rows: Tensor,
    lam: Tensor,
    shrink: Tensor,
    ridge: float,
    log_temperature: Tensor,
    proxy: ProxyFeatures,
    classes: int,
    loss: Literal["ce", "mse"] = "ce",
) -> WeightedGradient:
    """The loss of the weighted head on the proxy examples, and its gradient through the solve."""
    solved = weighted_head(rows, shrink * lam, ridge, classes)
    at = LOSSES[loss](solved.head, log_temperature, proxy)
    delta, along_ridge = adjoint(rows, solved, at.head)
    along_a, along_b = simplex_gradient(lam, shrink * delta), shrink * (lam @ delta)
    return WeightedGradient(at.value, along_a, along_b, at.log_temperature, along_ridge, delta)


def sketched(rows: Tensor, projection: Tensor, classes: int) -> Tensor:
    """The statistics of projected features, P'GP and P'B, on which weights are learned at less cost.  ``[K, ...]``"""
    each = (from_rows(row.double(), classes) for row in rows)  # one by one: unpacked they take twice the memory
    return torch.stack(
        [torch.cat([pack_symmetric(projection.mT @ g @ projection), (projection.mT @ b).flatten()]) for g, b in each]
    )


def projection(features: int, dimensions: int, seed: int) -> Tensor:
    """A random projection to fewer features that preserves norms on average, the same for the same seed.  ``[d, k]``"""
    draws = rng.stream(seed, "projection").standard_normal((features, dimensions))
    return torch.from_numpy(draws) / math.sqrt(dimensions)
