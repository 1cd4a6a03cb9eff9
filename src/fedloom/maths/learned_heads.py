"""A head in closed form whose clients' weights are learned: LAW-AFL (Jiang et al.).

    W = (gamma sum_i lambda_i G_i / n_i + rho I)^-1 gamma sum_i lambda_i B_i / n_i,    logits e^c X W

lambda = softmax(a), gamma = e^b and the temperature e^c descend the loss on the server's proxy examples, through the
solve. The folds of cross-validation are passed in, or come from an address of ``rng``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedloom.core import rng
from fedloom.core.optim import Optimizer
from fedloom.maths.learned_weights import OF_HEADS, SERVER_ADAM, Bounds, Free, Weighing, bounded
from fedloom.maths.proxy_set import ProxyFeatures
from fedloom.maths.weighted_ridge import (
    cross_entropy,
    simplex_gradient,
    weighted_gradient,
    weighted_head,
)


class HeadClients(NamedTuple):
    """Whose statistics the head is solved from."""

    rows: Tensor  # [K, d (d + 1) / 2 + d C] normalised statistics, as packed by ridge.to_rows
    lam0: Tensor  # [K] their weights by size or quality; sums to 1
    ridge: float
    classes: int


class HeadSettings(NamedTuple):
    """How the weights of statistics are learned."""

    lr: float = 0.05
    steps: int = 100
    cv_steps: int = 60  # of each fold, when the strength of the prior is chosen
    grid: tuple[float, ...] = (0.0, 0.1, 1.0, math.inf)  # strengths beta of the prior
    temperature: float = 10.0  # at the start: ridge outputs are in [0, 1]
    loss: Literal["ce", "mse"] = "ce"
    bounds: Bounds = OF_HEADS
    spread: float = 0.0  # weight of sum lambda^2, which keeps noise for privacy from being concentrated
    optimizer: Optimizer = SERVER_ADAM


AS_LAW_AFL = HeadSettings()


class HeadFree(NamedTuple):
    """What descends: mu = e^b softmax(a), and the temperature s = e^c of the logits."""

    a: Tensor  # [K]
    b: Tensor  # []
    c: Tensor  # []


class LearnedHead(NamedTuple):
    """A head in closed form, with the weights it was solved from."""

    head: Tensor  # [d, C] s W, so that later training on cross-entropy sees logits
    how: Weighing
    temperature: Tensor  # [] s
    beta: float
    held_out: tuple[float, ...]  # cross-entropy of each strength in the grid, in the half it was not learned on
    reverted: bool  # a loss was not finite, so the weights are the initial ones


def kl(lam: Tensor, lam0: Tensor) -> Tensor:
    """KL(lambda || lambda0); both are 0 only together.  ``[]``"""
    return (torch.xlogy(lam, lam) - torch.xlogy(lam, lam0)).sum()


def head_gradient(
    clients: HeadClients, proxy: ProxyFeatures, free: HeadFree, beta: float, settings: HeadSettings = AS_LAW_AFL
) -> tuple[Tensor, HeadFree]:
    """The loss CE(e^c X W) + beta KL(lambda || lambda0) + spread sum lambda^2, and its gradient.

    With beta = inf, lambda is lambda0 for any a. In LAW-AFL, Algorithm 3 learns weights in line 13 that never
    reach the statistics of lines 15 to 17, and eq. 19 to 23 call an average of heads by size a closed form.
    """
    held = math.isinf(beta)
    lam = clients.lam0 if held else free.a.softmax(0)
    g = weighted_gradient(clients.rows, lam, free.b.exp(), clients.ridge, free.c, proxy, clients.classes, settings.loss)
    if held:
        return g.loss, HeadFree(torch.zeros_like(g.a), g.b, g.c)
    # The slope of the prior is beta (ln(lambda / lambda0) + 1); the 1 has no effect on the simplex.
    prior = beta * (lam.log() - clients.lam0.log()) + 2 * settings.spread * lam
    loss = g.loss + beta * kl(lam, clients.lam0) + settings.spread * lam.square().sum()
    return loss, HeadFree(g.a + simplex_gradient(lam, prior), g.b, g.c)


def learn_head(
    clients: HeadClients,
    proxy: ProxyFeatures,
    beta: float,
    settings: HeadSettings = AS_LAW_AFL,
    offsets: Tensor | None = None,
    steps: int | None = None,
) -> LearnedHead:
    """Learn lambda, gamma and the temperature through the solve, all proxy examples at once.

    ``offsets`` ``[K]`` is the initial a minus ln lambda0; ``steps``, if given, replaces that of the settings.
    """
    counts = clients.lam0 > 0
    some = clients if bool(counts.all()) else clients._replace(rows=clients.rows[counts], lam0=clients.lam0[counts])
    a = some.lam0.log() if offsets is None else some.lam0.log() + offsets[counts]
    first = free = HeadFree(a, torch.zeros_like(a[0]), torch.full_like(a[0], math.log(settings.temperature)))
    memory = settings.optimizer.init(free)
    finite = True
    for _ in range(settings.steps if steps is None else steps):
        loss, along = head_gradient(some, proxy, free, beta, settings)
        finite = bool(loss.isfinite())
        if not finite:
            break
        free, memory = settings.optimizer.update(along, memory, free, free.b.new_tensor(settings.lr))
        free = HeadFree(*bounded("exp", Free(free.a, free.b), settings.bounds), free.c)
    finite = finite and all(bool(x.isfinite().all()) for x in free)
    free = free if finite else first
    learned = finite and not math.isinf(beta) and not torch.equal(free.a, some.lam0.log())
    lam = clients.lam0.masked_scatter(counts, free.a.softmax(0)) if learned else clients.lam0
    how = Weighing(lam, free.b.exp())
    head = free.c.exp() * weighted_head(clients.rows, how.mu, clients.ridge, clients.classes).head
    return LearnedHead(head, how, free.c.exp(), beta, (), not finite)


def held_out_losses(
    clients: HeadClients, proxy: ProxyFeatures, folds: Tensor, settings: HeadSettings, offsets: Tensor | None = None
) -> tuple[float, ...]:
    """For each strength of the prior, the cross-entropy of proxy examples under heads learned from the other half."""
    x, y = proxy

    def one(beta: float) -> float:
        missed = x.new_zeros(())
        for half in (folds, ~folds):
            learned = learn_head(clients, (x[half], y[half]), beta, settings, offsets, settings.cv_steps)
            missed = missed + head_cross_entropy(learned.head, (x[~half], y[~half])) * (~half).sum()
        return float(missed / len(y))

    return tuple(one(beta) for beta in settings.grid)


def head_cross_entropy(head: Tensor, proxy: ProxyFeatures) -> Tensor:
    """The cross-entropy of the logits X W.  ``[]``"""
    return cross_entropy(head, torch.zeros_like(head[0, 0]), proxy).value


def strongest_best(grid: Sequence[float], losses: Sequence[float], tolerance: float = 1e-9) -> float:
    """The strength of least loss, the largest of ties: if learned weights do not help, they stay lambda0."""
    known = [loss if math.isfinite(loss) else math.inf for loss in losses]
    return max(beta for beta, loss in zip(grid, known, strict=True) if loss <= min(known) + tolerance)


def cross_validated_head(
    clients: HeadClients,
    proxy: ProxyFeatures,
    folds: Tensor,
    settings: HeadSettings = AS_LAW_AFL,
    offsets: Tensor | None = None,
) -> LearnedHead:
    """The head learned from all proxy examples, under the strength of the prior that two folds of them choose.

    With beta = inf it is AFL except for a learned ridge and temperature: so nothing is lost with clean clients.
    """
    losses = held_out_losses(clients, proxy, folds, settings, offsets)
    learned = learn_head(clients, proxy, strongest_best(settings.grid, losses), settings, offsets)
    return learned._replace(held_out=losses)


def two_folds(y: Tensor, seed: int, *path: int) -> Tensor:
    """Which examples are in the first half, drawn at this address; halves have the same classes up to one.  ``[n]``"""
    drawn = torch.from_numpy(rng.stream(seed, "proxy_folds", *path).permutation(len(y))).to(y.device)
    by_class = drawn[y[drawn].argsort(stable=True)]
    first = torch.zeros(len(y), dtype=torch.bool, device=y.device)
    first[by_class[::2]] = True
    return first


# -- which head is used ----------------------------------------------------------------------------
def better(candidate: float, before: float, tolerance: float = 1e-4) -> bool:
    """Whether a head whose loss in two folds is ``candidate`` replaces one of loss ``before``."""
    return candidate < before - tolerance


class Blend(NamedTuple):
    """A head between the aggregated and the analytic one."""

    head: Tensor  # [d, C]
    kappa: float  # share of the analytic one
    loss: float  # on the proxy examples


def blended(
    aggregate: Tensor, analytic: Tensor, proxy: ProxyFeatures, grid: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0)
) -> Blend:
    """(1 - kappa) W_agg + kappa W_an with the kappa of least proxy loss, the smallest of ties.

    LAW-AFL, Algorithm 3 sets the model twice, in lines 14 and 17; here the first sets the body, and this the head.
    """
    tried = [(kappa, (1 - kappa) * aggregate + kappa * analytic) for kappa in sorted(grid)]
    losses = [float(head_cross_entropy(head, proxy)) for _, head in tried]
    best = min(range(len(tried)), key=lambda k: (not math.isfinite(losses[k]), losses[k]))
    return Blend(tried[best][1], tried[best][0], losses[best])
