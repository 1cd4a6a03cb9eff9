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
from torch.nn.utils.rnn import pad_sequence

from fedloom.core import rng, tree
from fedloom.maths.proxy_set import ProxyFeatures
from fedloom.maths.ridge import Factors, factors, features_in_upload, from_rows, pack_symmetric


class Solved(NamedTuple):
    """Weighted heads, and what they were solved with."""

    head: Tensor  # [..., d, C] W = A^-1 sum_i mu_i B_i / n_i
    system: Factors  # of A = sum_i mu_i G_i / n_i + rho I


def weighted_head(rows: Tensor, mu: Tensor, ridge: Tensor | float, classes: int) -> Solved:
    """The head of clients with weights mu ``[..., K]``, from normalised statistics packed by ``to_rows``.

    With mu_i = n_i / N this is AFL with ridge N rho. It depends on shrink and ridge only by their quotient.
    LAW-AFL, Algorithm 3 line 17 prints W C^-1, which does not fit; it is C^-1 W.
    """
    mixed = tree.mix(mu.reshape(-1, len(rows)), rows).view(*mu.shape[:-1], -1)
    return solved(*from_rows(mixed, classes), ridge)


def solved(gram: Tensor, cross: Tensor, ridge: Tensor | float, *, checked: bool = True) -> Solved:
    """The head of each of these sums ``[..., d, d]`` and ``[..., d, C]``."""
    system = factors(gram, ridge, checked=checked)
    return Solved(system.solve(cross), system)


class Sums(NamedTuple):
    """The normalised statistics of clients, unpacked: what is read in every step of learning their weights."""

    gram: Tensor  # [K, d, d] G_i / n_i
    cross: Tensor  # [K, d, C] B_i / n_i


def unpacked_sums(rows: Tensor, classes: int) -> Sums:
    """The sums in these rows of ``to_rows``; one client at a time, since all at once take three times the memory."""
    d = features_in_upload(rows.shape[1], classes)
    sums = Sums(rows.new_empty(len(rows), d, d), rows.new_empty(len(rows), d, classes))
    for row, gram, cross in zip(rows, *sums, strict=True):
        for place, part in zip((gram, cross), from_rows(row, classes), strict=True):
            place.copy_(part)
    return sums


class Adjoint(NamedTuple):
    """How a loss of the head changes with what the head was solved from."""

    mu: Tensor  # [..., K] delta_i = <Lambda, B_i / n_i> - <Lambda W', G_i / n_i>
    ridge: Tensor  # [...] -<Lambda, W>


def adjoint(sums: Sums, at: Solved, slope: Tensor) -> Adjoint:
    """The gradient through the solve, from ``slope`` = dL/dW ``[..., d, C]``: Lambda = A^-1 dL/dW, one more solve."""
    adj = at.system.solve(slope)
    outer = adj @ at.head.mT
    delta = inner(sums.cross.flatten(1), adj.flatten(-2)) - inner(sums.gram.flatten(1), outer.flatten(-2))
    return Adjoint(delta, -(adj * at.head).sum((-2, -1)))


_BLOCK = 1 << 20  # numbers that are turned into float64 at once


def inner(rows: Tensor, direction: Tensor) -> Tensor:
    """<row, direction> for every row, in float64.  ``[K, P], [..., P] -> [..., K]``"""
    out = torch.zeros(*direction.shape[:-1], len(rows), dtype=torch.float64, device=rows.device)
    wide = max(1, rows.shape[1] if rows.dtype == torch.float64 else _BLOCK // max(1, len(rows)))
    for some, along in zip(torch.split(rows, wide, 1), torch.split(direction, wide, -1), strict=True):
        out += along.double() @ some.double().mT
    return out


# -- losses on the proxy examples ------------------------------------------------------------------
class Examples(NamedTuple):
    """The server's proxy examples in F parts of equal length, on each of which S heads are judged."""

    x: Tensor  # [F, n, d] features in float64
    y: Tensor  # [F, n] labels
    share: Tensor  # [F, n] how much an example counts: sums to 1 in each part, 0 for padding


def one_part(proxy: ProxyFeatures) -> Examples:
    """All proxy examples as one part."""
    x, y = proxy
    return Examples(x[None], y[None], torch.full_like(x[None, :, 0], 1 / len(y)))


def halves(proxy: ProxyFeatures, first: Tensor) -> Examples:
    """The proxy examples in the half ``first`` ``[n]`` and those in the other; the shorter is padded."""
    x, y = proxy
    ids = [half.nonzero().squeeze(1) for half in (first, ~first)]
    rows, real = (pad_sequence(each, batch_first=True) for each in (ids, [torch.ones_like(x[k, 0]) for k in ids]))
    return Examples(x[rows], y[rows], real / real.sum(1, keepdim=True))


def scores(x: Tensor, head: Tensor) -> Tensor:
    """X W of all heads of a part in one product.  ``[F, n, d], [F, S, d, C] -> [F, n, S, C]``"""
    return (x @ head.transpose(1, 2).flatten(2)).view(*x.shape[:2], head.shape[1], head.shape[3])


def back(x: Tensor, along: Tensor) -> Tensor:
    """X' R, the slope along heads from that along their scores.  ``[F, n, d], [F, n, S, C] -> [F, S, d, C]``"""
    # (R' X)': with the long side last a CPU needs half the time.
    return (along.flatten(2).mT @ x).view(len(x), *along.shape[2:], -1).mT


class ProxyLoss(NamedTuple):
    """The loss of heads on the server's proxy examples, and its slopes."""

    value: Tensor  # [F, S]
    head: Tensor  # [F, S, d, C] dL/dW
    log_temperature: Tensor  # [F, S] dL/dc


def cross_entropy(head: Tensor, log_temperature: Tensor, proxy: Examples) -> ProxyLoss:
    """CE of softmax(s X W), s = e^c: dL/dW = X' s (P - Y) / n, dL/dc = s <(P - Y) / n, X W>.

    Ridge outputs are about in [0, 1]; without s the loss would favour a smaller ridge only to have larger logits.
    """
    x, y, share = proxy
    s, out = log_temperature.exp()[:, None, :, None], scores(x, head)
    logp = log_softmax(s * out, -1)
    right, share = y[:, :, None, None].expand_as(logp[..., :1]), share[:, :, None, None]
    residual = s * share * logp.exp().scatter_add(3, right, -torch.ones_like(logp[..., :1]))
    value = -(share * logp.gather(3, right)).sum((1, 3))
    return ProxyLoss(value, back(x, residual), (residual * out).sum((1, 3)))


def squared_error(head: Tensor, log_temperature: Tensor, proxy: Examples) -> ProxyLoss:
    """||X W - Y||^2 / n, which has no temperature."""
    x, y, share = proxy
    out = scores(x, head)
    right = y[:, :, None, None].expand_as(out[..., :1])
    missed = out.scatter_add(3, right, -torch.ones_like(out[..., :1]))
    along = share[:, :, None, None] * missed
    return ProxyLoss((along * missed).sum((1, 3)), back(x, 2 * along), torch.zeros_like(log_temperature))


LOSSES: dict[str, Callable[[Tensor, Tensor, Examples], ProxyLoss]] = {"ce": cross_entropy, "mse": squared_error}


def off_mean(lam: Tensor, slope: Tensor) -> Tensor:
    """d_i - sum_j lambda_j d_j: exactly 0 if all are equal, as the first is subtracted first.  ``[..., K]``"""
    slope = slope - slope[..., :1]
    return slope - (lam * slope).sum(-1, keepdim=True)


def simplex_gradient(lam: Tensor, slope: Tensor) -> Tensor:
    """The slope along the logits of lambda = softmax(a), from that along lambda.  ``[..., K]``"""
    return lam * off_mean(lam, slope)


class WeightedGradient(NamedTuple):
    """A proxy loss of weighted heads and all its slopes, where mu = e^b softmax(a)."""

    loss: Tensor  # [F, S]
    a: Tensor  # [F, S, K] shrink lambda_j (delta_j - sum_i lambda_i delta_i)
    b: Tensor  # [F, S] shrink sum_i lambda_i delta_i, which is also rho <Lambda, W>
    c: Tensor  # [F, S] along the logarithm of the temperature
    ridge: Tensor  # [F, S]
    mu: Tensor  # [F, S, K] delta


def weighted_gradient(
    sums: Sums,
    lam: Tensor,
    shrink: Tensor,
    ridge: Tensor | float,
    log_temperature: Tensor,
    proxy: Examples,
    loss: Literal["ce", "mse"] = "ce",
    *,
    checked: bool = True,
) -> WeightedGradient:
    """The loss of the heads with weights lam ``[F, S, K]`` on the proxy examples, and its gradient through the solve.

    All F S systems are mixed, factorised, solved and judged together: the statistics are read twice for all of them.
    ``checked``: see ``factors``.
    """
    gram, cross = tree.mix((shrink[..., None] * lam).flatten(0, 1), sums)
    each = shrink.shape
    found = solved(gram.view(*each, *gram.shape[1:]), cross.view(*each, *cross.shape[1:]), ridge, checked=checked)
    at = LOSSES[loss](found.head, log_temperature, proxy)
    delta, along_ridge = adjoint(sums, found, at.head)
    along_a, along_b = simplex_gradient(lam, shrink[..., None] * delta), shrink * (lam * delta).sum(-1)
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
