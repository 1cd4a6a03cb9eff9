"""A head in closed form whose clients' weights are learned: LAW-AFL (Jiang et al.).

    W = (gamma sum_i lambda_i G_i / n_i + rho I)^-1 gamma sum_i lambda_i B_i / n_i,    logits e^c X W

lambda = softmax(a), gamma = e^b and the temperature e^c descend the loss on the server's proxy examples, through the
solve. The folds of cross-validation are passed in, or come from an address of ``rng``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedloom.core import rng
from fedloom.core.optim import Optimizer
from fedloom.core.replay import Recorder, after
from fedloom.maths.learned_weights import OF_HEADS, SERVER_ADAM, Bounds, Free, Weighing, bounded
from fedloom.maths.proxy_set import ProxyFeatures
from fedloom.maths.weighted_ridge import (
    Examples,
    Sums,
    cross_entropy,
    halves,
    one_part,
    simplex_gradient,
    unpacked_sums,
    weighted_gradient,
    weighted_head,
)


class HeadClients(NamedTuple):
    """Whose statistics the head is solved from."""

    rows: Tensor  # [K, d (d + 1) / 2 + d C] normalised statistics, as packed by ridge.to_rows
    lam0: Tensor  # [K] their weights by size or quality; sums to 1
    ridge: float
    classes: int


class WeightedSystem(NamedTuple):
    """The same clients while their weights are learned: those that have any, unpacked once for all steps."""

    sums: Sums
    lam0: Tensor  # [K]
    ridge: Tensor  # []


def system_of(clients: HeadClients) -> WeightedSystem:
    """The system of the clients with weight."""
    some = clients.lam0 > 0
    rows = clients.rows if bool(some.all()) else clients.rows[some]
    return WeightedSystem(
        unpacked_sums(rows, clients.classes), clients.lam0[some], clients.lam0.new_tensor(clients.ridge)
    )


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
    """What descends: mu = e^b softmax(a), and the temperature s = e^c of the logits.

    Of F S heads at once: one for each part of the proxy examples and each strength of the prior.
    """

    a: Tensor  # [F, S, K]
    b: Tensor  # [F, S]
    c: Tensor  # [F, S]


class LearnedHead(NamedTuple):
    """A head in closed form, with the weights it was solved from."""

    head: Tensor  # [d, C] s W, so that later training on cross-entropy sees logits
    how: Weighing
    temperature: Tensor  # [] s
    beta: float
    held_out: tuple[float, ...]  # cross-entropy of each strength in the grid, in the half it was not learned on
    reverted: bool  # a loss was not finite, so the weights are the initial ones


def kl(lam: Tensor, lam0: Tensor) -> Tensor:
    """KL(lambda || lambda0); both are 0 only together.  ``[..., K] -> [...]``"""
    return (torch.xlogy(lam, lam) - torch.xlogy(lam, lam0)).sum(-1)


def head_gradient(
    system: WeightedSystem,
    proxy: Examples,
    free: HeadFree,
    beta: Tensor,
    settings: HeadSettings = AS_LAW_AFL,
    *,
    checked: bool = True,
) -> tuple[Tensor, HeadFree]:
    """The loss CE(e^c X W) + beta KL(lambda || lambda0) + spread sum lambda^2, and its gradient; beta is ``[S]``.

    With beta = inf, lambda is lambda0 for any a. ``checked``: see ``factors``. In LAW-AFL, Algorithm 3 learns weights
    in line 13 that never reach the statistics of lines 15 to 17, and eq. 19 to 23 call an average of heads by size a
    closed form.
    """
    sums, lam0, ridge = system
    held = beta.isinf()
    lam = torch.where(held[:, None], lam0, free.a.softmax(-1))
    g = weighted_gradient(sums, lam, free.b.exp(), ridge, free.c, proxy, settings.loss, checked=checked)
    # The slope of the prior is beta (ln(lambda / lambda0) + 1); the 1 has no effect on the simplex.
    slope = beta[:, None] * (lam.log() - lam0.log()) + 2 * settings.spread * lam
    prior = beta * kl(lam, lam0) + settings.spread * lam.square().sum(-1)
    along = torch.where(held[:, None], 0.0, g.a + simplex_gradient(lam, slope))
    return g.loss + torch.where(held, 0.0, prior), HeadFree(along, g.b, g.c)


class LearnedHeads(NamedTuple):
    """Heads in closed form, one for each part of the proxy examples and each strength of the prior."""

    head: Tensor  # [F, S, d, C] s W
    how: Weighing  # of [F, S, K] and [F, S]
    temperature: Tensor  # [F, S]
    reverted: Tensor  # [F, S] whether a loss was not finite


def learn_heads(
    clients: HeadClients,
    proxy: Examples,
    betas: Sequence[float],
    settings: HeadSettings = AS_LAW_AFL,
    offsets: Tensor | None = None,
    steps: int | None = None,
    recorder: Recorder | None = None,
) -> LearnedHeads:
    """Learn lambda, gamma and the temperature through the solve, for all strengths and parts side by side.

    ``offsets`` ``[K]`` is the initial a minus ln lambda0; ``steps``, if given, replaces that of the settings.
    """
    steps = settings.steps if steps is None else steps
    counts, some = clients.lam0 > 0, system_of(clients)
    a = some.lam0.log() if offsets is None else some.lam0.log() + offsets[counts]
    beta, none = a.new_tensor(betas), a.new_zeros(len(proxy.x), len(betas))
    first = HeadFree(a.expand(*none.shape, -1), none, none + math.log(settings.temperature))
    start = _HeadsAt(first, settings.optimizer.init(first), none == 0)
    fixed = some, proxy, beta, a.new_tensor(settings.lr)
    key = "heads", settings, none.shape
    at = after(partial(_step, settings, False), fixed, start, [()] * steps, recorder, key)
    if not bool(at.finite.all()):  # perhaps because of a system that Cholesky cannot factorise
        at = after(partial(_step, settings, True), fixed, start, [()] * steps)
    free = at.free
    finite = at.finite & free.a.isfinite().all(-1) & free.b.isfinite() & free.c.isfinite()
    free = _where(finite, free, first)
    learned = finite & ~beta.isinf() & (free.a != some.lam0.log()).any(-1)
    found = torch.zeros_like(clients.lam0).expand(*none.shape, -1).masked_scatter(counts, free.a.softmax(-1))
    how = Weighing(torch.where(learned[..., None], found, clients.lam0), free.b.exp())
    head = weighted_head(clients.rows, how.shrink[..., None] * how.lam, clients.ridge, clients.classes).head
    return LearnedHeads(free.c.exp()[..., None, None] * head, how, free.c.exp(), ~finite)


class _HeadsAt(NamedTuple):
    """Where the learning of heads is."""

    free: HeadFree
    memory: Any  # of the optimizer
    finite: Tensor  # [F, S] whether all losses so far were finite


def _step(
    settings: HeadSettings,
    checked: bool,
    fixed: tuple[WeightedSystem, Examples, Tensor, Tensor],
    at: _HeadsAt,
    _: tuple[()],
) -> _HeadsAt:
    """One step of all heads."""
    system, proxy, beta, lr = fixed
    loss, along = head_gradient(system, proxy, at.free, beta, settings, checked=checked)
    finite = at.finite & loss.isfinite()
    moved, memory = settings.optimizer.update(along, at.memory, at.free, lr)
    moved = HeadFree(*bounded("exp", Free(moved.a, moved.b), settings.bounds), moved.c)
    return _HeadsAt(_where(finite, moved, at.free), memory, finite)


def _where(here: Tensor, one: HeadFree, other: HeadFree) -> HeadFree:
    """``one`` for the heads that are ``here`` ``[F, S]``, else ``other``."""
    a = torch.where(here[..., None], one.a, other.a)
    return HeadFree(a, torch.where(here, one.b, other.b), torch.where(here, one.c, other.c))


def learn_head(
    clients: HeadClients,
    proxy: ProxyFeatures,
    beta: float,
    settings: HeadSettings = AS_LAW_AFL,
    offsets: Tensor | None = None,
    steps: int | None = None,
    recorder: Recorder | None = None,
) -> LearnedHead:
    """One head, learned from all proxy examples at once."""
    many = learn_heads(clients, one_part(proxy), (beta,), settings, offsets, steps, recorder)
    how = Weighing(many.how.lam[0, 0], many.how.shrink[0, 0])
    return LearnedHead(many.head[0, 0], how, many.temperature[0, 0], beta, (), bool(many.reverted))


_AT_ONCE = 1 << 24  # numbers in the systems that are solved side by side


def held_out_losses(
    clients: HeadClients,
    proxy: ProxyFeatures,
    folds: Tensor,
    settings: HeadSettings,
    offsets: Tensor | None = None,
    recorder: Recorder | None = None,
) -> tuple[float, ...]:
    """For each strength of the prior, the cross-entropy of proxy examples under heads learned from the other half."""
    learned_on = halves(proxy, folds)
    judged_on = Examples(*(part.flip(0) for part in learned_on))
    several = max(1, _AT_ONCE // (2 * proxy[0].shape[1] ** 2))
    found: list[Tensor] = []
    for k in range(0, len(settings.grid), several):
        betas = settings.grid[k : k + several]
        heads = learn_heads(clients, learned_on, betas, settings, offsets, settings.cv_steps, recorder).head
        losses = cross_entropy(heads, torch.zeros_like(heads[..., 0, 0]), judged_on).value
        found.append(torch.stack([(~folds).sum(), folds.sum()]).double() @ losses / len(folds))
    return tuple(torch.cat(found).tolist())


def head_cross_entropy(head: Tensor, proxy: ProxyFeatures) -> Tensor:
    """The cross-entropy of the logits X W, of one head or of several.  ``[..., d, C] -> [...]``"""
    heads = head.reshape(1, -1, *head.shape[-2:])
    return cross_entropy(heads, torch.zeros_like(heads[..., 0, 0]), one_part(proxy)).value.view(head.shape[:-2])


def strongest_best(grid: Sequence[float], losses: Sequence[float]) -> float:
    """The strength of least loss, the largest of ties: if learned weights do not help, they stay lambda0."""
    known = [loss if math.isfinite(loss) else math.inf for loss in losses]
    return max(beta for beta, loss in zip(grid, known, strict=True) if loss <= min(known) + 1e-9)


def cross_validated_head(
    clients: HeadClients,
    proxy: ProxyFeatures,
    folds: Tensor,
    settings: HeadSettings = AS_LAW_AFL,
    offsets: Tensor | None = None,
    recorder: Recorder | None = None,
) -> LearnedHead:
    """The head learned from all proxy examples, under the strength of the prior that two folds of them choose.

    With beta = inf it is AFL except for a learned ridge and temperature: so nothing is lost with clean clients.
    """
    losses = held_out_losses(clients, proxy, folds, settings, offsets, recorder)
    best = strongest_best(settings.grid, losses)
    learned = learn_head(clients, proxy, best, settings, offsets, recorder=recorder)
    return learned._replace(held_out=losses)


def two_folds(y: Tensor, seed: int, *path: int) -> Tensor:
    """Which examples are in the first half, drawn at this address; halves have the same classes up to one.  ``[n]``"""
    drawn = torch.from_numpy(rng.stream(seed, "proxy_folds", *path).permutation(len(y))).to(y.device)
    by_class = drawn[y[drawn].argsort(stable=True)]
    first = torch.zeros(len(y), dtype=torch.bool, device=y.device)
    first[by_class[::2]] = True
    return first


# -- which head is used ----------------------------------------------------------------------------
def better(candidate: float, before: float) -> bool:
    """Whether a head whose loss in two folds is ``candidate`` replaces one of loss ``before``."""
    return candidate < before - 1e-4


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
    kappas = sorted(grid)
    heads = torch.stack([(1 - kappa) * aggregate + kappa * analytic for kappa in kappas])
    losses = head_cross_entropy(heads, proxy).tolist()
    best = min(range(len(kappas)), key=lambda k: (not math.isfinite(losses[k]), losses[k]))
    return Blend(heads[best], kappas[best], losses[best])
