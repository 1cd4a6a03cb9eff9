"""Diagnostics: what a round did, and what the theory of FedProx and of its relaxation says of it.

Each is opt-in (``evaluate.diagnostics``), costs what it says, and is recorded beside the metrics:
``updates`` (free), ``gamma`` (two full gradients of each client of the round), ``dissimilarity`` (a full
gradient of every client), ``rho`` (both of these, and the largest curvature).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, jvp

from fedloom.engine.exchange import Sound
from fedloom.engine.local import full_gradients
from fedloom.task import Batch

if TYPE_CHECKING:
    from fedloom.engine.run import Experiment

_ITERATIONS = 30  # of the power method


class Moves(NamedTuple):
    """How far each client of a round went."""

    ids: Tensor  # [K]
    dw: Tensor  # [K, P] w_k - w
    weights: Tensor  # [K]


class Watch(NamedTuple):
    """The groups of a round, as they are seen one after another."""

    parts: tuple[Any, ...] = ()

    def seen(self, part: Sound) -> Watch:
        weights = part.outcome.weights.double() * part.times.to(part.outcome.weights.device)
        return Watch((*self.parts, (part.ids, part.outcome.models, weights)))

    def closed(self, w: Tensor) -> Moves:
        """The moves from the model ``w`` that all were sent."""
        ids, models, weights = (torch.cat(column) for column in zip(*self.parts, strict=True))
        return Moves(ids, models - w, weights)


def of_updates(moves: Moves, before: Tensor, after: Tensor) -> dict[str, float]:
    """Norms and directions of the clients' moves, and the server's own step.

    ``server/effective_lr`` is the length of the server's step in units of the clients' mean move: 1 for
    FedAvg, whatever an algorithm calls its learning rate.
    """
    dw = moves.dw.double()
    norms = torch.linalg.vector_norm(dw, dim=1)
    mean = (moves.weights[:, None] * dw).sum(0) / moves.weights.sum()
    length = torch.linalg.vector_norm(mean)
    cosines = dw @ mean / (norms * length).clamp(min=1e-30)
    step = torch.linalg.vector_norm(after.double() - before.double())
    return {
        "updates/norm_mean": float(norms.mean()),
        "updates/norm_std": float(norms.std(correction=0)),
        "updates/cosine_to_mean": float(cosines.mean()),
        "server/step_norm": float(step),
        "server/mean_update_norm": float(length),
        "server/effective_lr": float(step / length.clamp(min=1e-30)),
    }


def gamma(exp: Experiment, moves: Moves, w: Tensor) -> dict[str, float]:
    """How inexactly clients solved their proximal problems: 0 exactly, 1 not at all, above 1 worse than that.

    gamma_k = ||grad F_k(w_k) + mu (w_k - w)|| / ||grad F_k(w)||; a client at a stationary point has none.
    """
    mu = exp.algorithm.proximal
    there = full_gradients(exp.task, exp.federation, moves.ids, w + moves.dw) + mu * moves.dw
    here = full_gradients(exp.task, exp.federation, moves.ids, w.expand_as(moves.dw))
    size = torch.linalg.vector_norm(here.double(), dim=1)
    values = (torch.linalg.vector_norm(there.double(), dim=1) / size)[size > 1e-12]
    if not len(values):
        return {}
    return {"gamma/mean": float(values.mean()), "gamma/max": float(values.max())}


def dissimilarity(exp: Experiment, w: Tensor) -> dict[str, float]:
    """B(w) = sqrt(sum_k p_k ||grad F_k||^2) / ||sum_k p_k grad F_k|| over all clients: 1 if they agree.

    Beside it the unweighted variance of the gradients about their weighted mean, as FedProx's code logs it.
    """
    fed, n = exp.federation, exp.federation.clients
    share = fed.train.sizes.double() / fed.train.sizes.sum()
    weighted, squares = 0.0, 0.0
    mean, total = torch.zeros(2, w.numel(), dtype=torch.float64, device=w.device)
    for ids in torch.split(torch.arange(n), exp.lanes):
        g = full_gradients(exp.task, fed, ids, w.expand(len(ids), -1)).double()
        p, size = share[ids].to(g.device), g.square().sum(1)
        weighted, squares = weighted + float(p @ size), squares + float(size.sum())
        mean, total = mean + p @ g, total + g.sum(0)
    norm = float(torch.linalg.vector_norm(mean))
    variance = squares / n - 2 * float(total @ mean) / n + norm**2
    found = {"gradients/norm": norm, "gradients/variance_unweighted": max(0.0, variance)}
    return found | ({"dissimilarity/B": math.sqrt(weighted) / norm} if norm > 1e-12 else {})


class Theory(NamedTuple):
    """The quantities of the convergence theorems."""

    mu: float
    gamma: float
    B: float
    L: float  # the largest curvature
    L_minus: float  # how far curvature goes below zero; 0 for convex losses
    K: int  # clients of a round
    alpha: float = 0.0

    @property
    def mu_bar(self) -> float:
        return self.mu - self.L_minus


def rho_paper(t: Theory) -> float | None:
    """The rate of FedProx + Relaxation's theorem; None where the theorem does not apply (mu <= L_minus)."""
    mb = t.mu_bar
    if mb <= 0:
        return None
    g, phi = 1 + t.gamma, t.K * t.alpha**2 + 4 * (1 - t.alpha) ** 2
    return (
        (1 - t.gamma * t.B) / t.mu
        - t.L * t.B * g / (t.mu * mb)
        - t.L * g**2 * t.B**2 / (2 * mb**2)
        - t.L * g**2 * t.B**2 * phi / (t.K * mb**2)
        - (2 * t.L * t.B * g / mb + 1) * math.sqrt(2) * g * t.B * math.sqrt(phi) / (math.sqrt(t.K) * mb)
    )


def rho_fedprox(t: Theory) -> float | None:
    """The rate of FedProx's theorem 4."""
    mb = t.mu_bar
    if mb <= 0:
        return None
    g = 1 + t.gamma
    return (
        (1 - t.gamma * t.B) / t.mu
        - math.sqrt(2) * t.B * g / (mb * math.sqrt(t.K))
        - t.L * t.B * g / (mb * t.mu)
        - t.L * g**2 * t.B**2 / (2 * mb**2)
        - t.L * t.B**2 * g**2 * (2 * math.sqrt(2 * t.K) + 2) / (mb**2 * t.K)
    )


def rho_direct(t: Theory) -> float | None:
    """A sharper rate: with unbiased sampling the linear term of the relaxed step vanishes in the mean."""
    mb = t.mu_bar
    if mb <= 0:
        return None
    g = 1 + t.gamma
    A = (1 - t.gamma * t.B) / t.mu - t.L * t.B * g / (t.mu * mb)
    C = t.L * g**2 * t.B**2 / (2 * mb**2)
    return (1 - t.alpha) * A - (1 - t.alpha) ** 2 * C * (1 + 1 / t.K)


def curvature(exp: Experiment, w: Tensor) -> tuple[float, float]:
    """Estimates of the largest eigenvalue of the training loss's Hessian at ``w``, and of minus the smallest.

    By the power method on Hessian-vector products over all training rows; from a fixed start.
    """
    chunks = list(_chunks(exp))

    def product(v: Tensor) -> Tensor:
        parts = [share * jvp(partial(grad(exp.task.loss), batch=batch), (w,), (v,))[1] for batch, share in chunks]
        return torch.stack(parts).sum(0)

    top = _largest(product, w)
    low = _largest(lambda v: product(v) - top * v, w) + top  # of H - top I, the one farthest from zero is the lowest
    return max(top, low, 0.0), max(0.0, -min(top, low))


def _largest(product: Any, w: Tensor) -> float:
    v = torch.randn(w.shape, generator=torch.Generator().manual_seed(0)).to(w)
    value = 0.0
    for _ in range(_ITERATIONS):
        v = v / torch.linalg.vector_norm(v)
        after = product(v)
        value = float(v @ after)
        v = after
        if float(torch.linalg.vector_norm(v)) < 1e-20:
            return 0.0
    return value


def _chunks(exp: Experiment) -> Iterator[tuple[Batch, float]]:
    rows = exp.federation.train.rows.to(exp.device)
    for part in torch.split(rows, 2048):
        x, y = exp.federation.examples(part)
        zero = torch.zeros((), device=x.device)
        batch = Batch(x, y, torch.ones(len(y), device=x.device), zero.long(), zero, zero, exp.task.buffers0)
        yield batch, len(part) / len(rows)


def diagnose(exp: Experiment, moves: Moves, before: Any, heard: Any, after: Any) -> dict[str, float]:
    """The diagnostics that were asked for: of the clients' ``moves``, and of the server's step."""
    wanted = exp.evaluate.diagnostics
    w = exp.algorithm.send(before).w
    found: dict[str, float] = {}
    if "updates" in wanted:
        found |= of_updates(moves, w, exp.algorithm.send(after).w)
        found |= {name: float(value) for name, value in exp.algorithm.told(before, heard, after).items()}
    if "gamma" in wanted or "rho" in wanted:
        found |= gamma(exp, moves, w)
    if "dissimilarity" in wanted or "rho" in wanted:
        found |= dissimilarity(exp, w)
    if "rho" in wanted:
        found |= _rho(exp, w, found, len(moves.ids))
    return found


def _rho(exp: Experiment, w: Tensor, found: dict[str, float], cohort: int) -> dict[str, float]:
    """The theorems' rates where they apply; where they do not, only what would be needed to see why."""
    L, L_minus = curvature(exp, w)
    known = {"theory/L_estimate": L, "theory/L_minus_estimate": L_minus}
    mu, B, g = exp.algorithm.proximal, found.get("dissimilarity/B"), found.get("gamma/max")
    if not mu or B is None or g is None:
        return known
    theory = Theory(mu, g, B, L, L_minus, cohort, float(getattr(exp.algorithm, "alpha", 0.0)))
    rates = {"theory/rho": rho_paper(theory), "theory/rho_direct": rho_direct(theory)}
    rates["theory/rho_fedprox"] = rho_fedprox(theory)
    return known | {name: value for name, value in rates.items() if value is not None}
