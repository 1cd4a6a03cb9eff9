"""Diagnostics: what a round did, and what the theory of FedProx and of its relaxation predicts for it.

Each is opt-in (``evaluate.diagnostics``), has the stated cost, and is recorded with the metrics:
``updates`` (free), ``gamma`` (two full gradients of each client of the round), ``dissimilarity`` (a full
gradient of every client), ``rho`` (both of these, and the largest curvature: bounded once for softmax
regression, estimated each time for other nets), ``hessian`` (up to 60 Hessian-vector products over the proxy or all
training rows), ``hessian_weights`` (one such product for each client of the round, and one more), ``variance`` (a full
gradient of each client of the round), ``weights`` (free).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedloom.algorithm.capabilities import contributions_of, diagnostics_of, phases_of, trains_in
from fedloom.engine.curvature import Moves, hessian, hessian_weights
from fedloom.engine.local import full_gradients
from fedloom.engine.state import Experiment
from fedloom.engine.theory import rates
from fedloom.maths.learned_weights import Weighing

# What each diagnostic may record, in addition to what an algorithm itself reports with ``updates``.
RECORDED: Mapping[str, tuple[str, ...]] = {
    "updates": (
        *("updates/norm_mean", "updates/norm_std", "updates/cosine_to_mean"),
        *("server/step_norm", "server/mean_update_norm", "server/effective_lr"),
    ),
    "gamma": ("gamma/mean", "gamma/max"),
    "dissimilarity": ("gradients/norm", "gradients/variance_unweighted", "dissimilarity/B"),
    "hessian": ("hessian/top", "hessian/error", "hessian/iterations", "hessian/rows"),
    "hessian_weights": ("hessian/weights_top",),
    "variance": ("gradients/gvar_total", "gradients/gvar_coord", "gradients/gvar_rel"),
    "weights": ("weights/variance", "weights/effective", "weights/entropy", "weights/largest"),
    "rho": (
        *("gamma/mean", "gamma/max", "gradients/norm", "gradients/variance_unweighted", "dissimilarity/B"),
        *("theory/L", "theory/L_estimate", "theory/L_minus_estimate"),
        *("theory/applies", "theory/rho", "theory/rho_direct", "theory/rho_fedprox"),
    ),
}


def of_updates(moves: Moves, before: Tensor, after: Tensor) -> dict[str, float]:
    """Norms and directions of the clients' updates, and the server's own step.

    ``server/effective_lr`` is the length of the server's step in units of the clients' mean update: 1 for
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
    mu = exp.algorithm.traits.proximal
    there = full_gradients(exp.task, exp.federation, moves.ids, w + moves.dw) + mu * moves.dw
    here = full_gradients(exp.task, exp.federation, moves.ids, w.expand_as(moves.dw))
    size = torch.linalg.vector_norm(here.double(), dim=1)
    values = (torch.linalg.vector_norm(there.double(), dim=1) / size)[size > 1e-12]
    if not len(values):
        return {}
    return {"gamma/mean": float(values.mean()), "gamma/max": float(values.max())}


def dissimilarity(exp: Experiment, w: Tensor) -> dict[str, float]:
    """B(w) = sqrt(sum_k p_k ||grad F_k||^2) / ||sum_k p_k grad F_k|| over all clients: 1 if they agree.

    Also the unweighted variance of the gradients about their weighted mean, as FedProx's code logs it.
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


def variance(exp: Experiment, ids: Tensor, w: Tensor) -> dict[str, float]:
    """The variance of the full gradients of these clients at ``w``: mean ||g_i - g||^2 about their plain mean g.

    In total, per parameter, and in units of ||g||^2, which is undefined at a stationary point.
    """
    fed, m = exp.federation, len(ids)
    total, squares = torch.zeros(w.numel(), dtype=torch.float64, device=w.device), 0.0
    first: Tensor | None = None
    for part in torch.split(ids, exp.lanes):
        g = full_gradients(exp.task, fed, part, w.expand(len(part), -1)).double()
        first = g[0] if first is None else first
        g = g - first  # relative to one of them, so that gradients that agree lose no digits
        total, squares = total + g.sum(0), squares + float(g.square().sum())
    assert first is not None
    mean = total / m
    spread = max(0.0, squares / m - float(mean.square().sum()))
    size = float((first + mean).square().sum())
    found = {"gradients/gvar_total": spread, "gradients/gvar_coord": spread / w.numel()}
    return found | ({"gradients/gvar_rel": spread / size} if size > 1e-24 else {})


def of_weights(weights: Tensor) -> dict[str, float]:
    """How unequal the weights of a round's clients were: variance, 1 / sum of squares, entropy of weights with sum 1.

    Empty if no client had a weight.
    """
    if not bool(weights.sum() > 0):
        return {}
    p = weights.double() / weights.double().sum()
    return {
        "weights/variance": float(p.var(correction=0)),
        "weights/effective": float(1 / p.square().sum()),
        "weights/entropy": float(-torch.special.xlogy(p, p).sum()),
        "weights/largest": float(p.max()),
    }


def diagnose(
    exp: Experiment, moves: Moves, before: Any, received: Any, after: Any, buffers: Tensor | None = None
) -> dict[str, float]:
    """The requested diagnostics: of the clients' ``moves``, and of the server's step.

    ``buffers``: the running statistics after the round.
    """
    alg, wanted = exp.algorithm, set(exp.evaluate.diagnostics)
    w, statistics = alg.send(before).w, exp.task.buffers0 if buffers is None else buffers
    found: dict[str, float] = {}
    if "updates" in wanted:
        found |= of_updates(moves, w, alg.send(after).w)
        found |= {name: float(value) for name, value in diagnostics_of(alg, before, received, after).items()}
    if wanted & {"gamma", "rho"}:
        found |= gamma(exp, moves, w)
    if wanted & {"dissimilarity", "rho"}:
        found |= dissimilarity(exp, w)
    if "rho" in wanted:
        found |= rates(exp, w, found, int(received.senders))
    if "variance" in wanted:
        found |= variance(exp, moves.ids, w)
    if "hessian" in wanted:
        found |= hessian(exp, alg.global_model(after), statistics)
    weights = contributions_of(alg, before, received, after) if wanted & {"weights", "hessian_weights"} else None
    if "weights" in wanted and weights is not None:
        found |= of_weights(weights)
    if "hessian_weights" in wanted and weights is not None:
        shrink = diagnostics_of(alg, before, received, after).get("weights/shrink", torch.ones(()))
        found |= _along_weights(exp, moves, w, received, weights, shrink, statistics)
    return found


def _along_weights(
    exp: Experiment, moves: Moves, w: Tensor, received: Any, weights: Tensor, shrink: Tensor, statistics: Tensor
) -> dict[str, float]:
    """The Hessian along the weights of clients; empty if no client trains or has a weight."""
    trains = bool(phases_of(exp.algorithm)) and trains_in(exp.algorithm, received.address[1])
    if not trains or not bool(weights.sum() > 0):
        return {}
    here = weights[torch.searchsorted(received.clients, moves.ids.to(received.clients.device))].to(w.device)
    return hessian_weights(exp, moves, w, Weighing(here / here.sum(), shrink.to(here)), statistics)
