"""What the convergence theorems of FedProx and of its relaxation predict for a round."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from fedloom.engine.clock import accepts
from fedloom.engine.curvature import curvature, smoothness
from fedloom.engine.state import Experiment


class Theory(NamedTuple):
    """The quantities of the convergence theorems."""

    mu: float
    gamma: float
    B: float
    L: float  # the largest curvature of any client's loss, or an estimate of it
    L_minus: float  # bound on negative curvature; 0 for convex losses
    K: int  # draws of a round: a client that is drawn twice counts twice
    alpha: float = 0.0

    @property
    def mu_bar(self) -> float:
        return self.mu - self.L_minus


def rho_paper(t: Theory) -> float | None:
    """The rate of FedProx + Relaxation's theorem; None if the theorem does not apply (mu <= L_minus)."""
    mb = t.mu_bar
    if not mb > 0:  # nor a number: the loss has overflowed
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
    if not mb > 0:  # nor a number: the loss has overflowed
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
    if not mb > 0:  # nor a number: the loss has overflowed
        return None
    g = 1 + t.gamma
    A = (1 - t.gamma * t.B) / t.mu - t.L * t.B * g / (t.mu * mb)
    C = t.L * g**2 * t.B**2 / (2 * mb**2)
    return (1 - t.alpha) * A - (1 - t.alpha) ** 2 * C * (1 + 1 / t.K)


def is_stated(exp: Experiment) -> bool:
    """Whether the theorems apply to this run: the mean step, over all draws, is the full sum_k p_k (w_k - w).

    p_k = n_k / n, as in B. This holds if clients are drawn by p_k with equal weights, as in the theorems; if all take
    part with weights p_k, without sampling; and if all clients have equally much data.
    """
    alg, sampling, sizes = exp.algorithm, exp.cohort.sampling, exp.federation.train.sizes
    plain = exp.guard is None and exp.aggregation.rule == "mean" and not exp.bad
    plain = plain and exp.system.deadline is None and exp.system.dropout == 0
    plain = plain and (exp.system.stragglers == 0 or accepts(exp.system, partial=alg.traits.partial_work))
    if not plain or alg.traits.server_lr != 1:
        return False
    alike = bool((sizes == sizes[0]).all()) and sampling in ("uniform", "proportional", "all")
    return alike or (sampling == "all" if alg.traits.weighs_examples else sampling == "proportional")


def rates(exp: Experiment, w: Tensor, found: dict[str, float], draws: int) -> dict[str, float]:
    """The theorems' rates if they apply; otherwise that they do not, and what shows why."""
    bound = smoothness(exp)
    L, L_minus = (bound, 0.0) if bound is not None else curvature(exp, w)
    known = {"theory/L": L} if bound is not None else {"theory/L_estimate": L, "theory/L_minus_estimate": L_minus}
    mu, B, g = exp.algorithm.traits.proximal, found.get("dissimilarity/B"), found.get("gamma/max")
    rates: dict[str, float | None] = {}
    if mu and B is not None and g is not None and is_stated(exp):
        theory = Theory(mu, g, B, L, L_minus, draws, exp.algorithm.traits.relaxation)
        rates = {"theory/rho": rho_paper(theory), "theory/rho_direct": rho_direct(theory)}
        rates["theory/rho_fedprox"] = rho_fedprox(theory)
    applying = {name: value for name, value in rates.items() if value is not None}
    return known | {"theory/applies": float(bool(applying))} | applying
