"""Diagnostics: what a round did, and what the theory of FedProx and of its relaxation says of it.

Each is opt-in (``evaluate.diagnostics``), costs what it says, and is recorded beside the metrics:
``updates`` (free), ``gamma`` (two full gradients of each client of the round), ``dissimilarity`` (a full
gradient of every client), ``rho`` (both of these, and the largest curvature: bounded once for softmax
regression, estimated each time for other nets), ``hessian`` (up to 60 Hessian-vector products over the proxy or all
training rows), ``hessian_weights`` (one such product for each client of the round, and one more), ``variance`` (a full
gradient of each client of the round), ``weights`` (free).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import grad, jvp

from fedloom.algorithm.capabilities import contributions_of, diagnostics_of, phases_of, trains_in
from fedloom.core.task import Batch, Task
from fedloom.data.federation import Federation
from fedloom.engine.clock import accepts
from fedloom.engine.local import full_gradients
from fedloom.engine.state import Experiment
from fedloom.maths.learned_weights import Weighing

_ITERATIONS = 30  # of the power method
_ROWS = 2048  # in one Hessian-vector product
_LANCZOS = 60  # steps at most
_TOLERANCE = 1e-4  # of the top eigenvalue, relative
# What was found of a run's inputs, for as long as the run is there: it is the same in every round.
_BOUNDS: WeakKeyDictionary[Task, tuple[Federation, float | None]] = WeakKeyDictionary()


# What each diagnostic may record, beside what an algorithm tells of itself with ``updates``.
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


class Moves(NamedTuple):
    """How far each client of a round went."""

    ids: Tensor  # [K]
    dw: Tensor  # [K, P] w_k - w
    weights: Tensor  # [K]

    @staticmethod
    def of(groups: Sequence[tuple[Tensor, Tensor, Tensor]], w: Tensor) -> Moves:
        """The moves from the model ``w`` that all were sent, from (ids, models, weights) of each group."""
        ids, models, weights = (torch.cat(column) for column in zip(*groups, strict=True))
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


def variance(exp: Experiment, ids: Tensor, w: Tensor) -> dict[str, float]:
    """How far the full gradients of these clients at ``w`` are apart: mean ||g_i - g||^2 about their plain mean g.

    In total, per parameter, and in units of ||g||^2, which a stationary point has not.
    """
    fed, m = exp.federation, len(ids)
    total, squares = torch.zeros(w.numel(), dtype=torch.float64, device=w.device), 0.0
    first: Tensor | None = None
    for part in torch.split(ids, exp.lanes):
        g = full_gradients(exp.task, fed, part, w.expand(len(part), -1)).double()
        first = g[0] if first is None else first
        g = g - first  # seen from one of them, so that gradients that agree lose no digits
        total, squares = total + g.sum(0), squares + float(g.square().sum())
    assert first is not None
    mean = total / m
    spread = max(0.0, squares / m - float(mean.square().sum()))
    size = float((first + mean).square().sum())
    found = {"gradients/gvar_total": spread, "gradients/gvar_coord": spread / w.numel()}
    return found | ({"gradients/gvar_rel": spread / size} if size > 1e-24 else {})


def of_weights(weights: Tensor) -> dict[str, float]:
    """How unequally the clients of a round counted: variance, 1 / sum of squares, entropy of weights with sum 1.

    Nothing where nobody counted.
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


class Top(NamedTuple):
    """The largest eigenvalue of a symmetric matrix, as far as it is known."""

    value: float
    error: float  # it is within so much of an eigenvalue, relative to the largest in absolute value
    iterations: int


def top_eigenvalue(product: Callable[[Tensor], Tensor], start: Tensor) -> Top:
    """The algebraically largest eigenvalue, by Lanczos with full re-orthogonalisation, from ``start`` [P].

    Ends when the residual of the Ritz pair, which bounds the distance to an eigenvalue, is small enough, when the
    space that the start spans is exhausted, or after so many steps.
    """
    basis = (start / torch.linalg.vector_norm(start))[None]
    diagonal: list[float] = []
    beside: list[float] = []
    while True:
        after = product(basis[-1])
        diagonal.append(float(after.double() @ basis[-1].double()))
        for _ in range(2):  # once leaves a part that rounding has made
            after = after - basis.T @ (basis @ after)
        length = float(torch.linalg.vector_norm(after.double()))
        off = torch.tensor(beside, dtype=torch.float64)
        small = torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + torch.diag(off, 1) + torch.diag(off, -1)
        values, vectors = torch.linalg.eigh(small)
        scale = max(float(values.abs().max()), 1e-30)
        error = length * abs(float(vectors[-1, -1])) / scale
        done = error <= _TOLERANCE or length <= 1e-6 * scale
        if done or len(diagonal) == min(_LANCZOS, start.numel()):
            return Top(float(values[-1]), error, len(diagonal))
        beside.append(length)
        basis = torch.cat([basis, (after / length)[None]])


def hessian(exp: Experiment, w: Tensor, buffers: Tensor) -> dict[str, float]:
    """The largest eigenvalue of the Hessian at ``w`` of the loss on the server's own rows, else on all training rows.

    In evaluation mode: BatchNorm uses the statistics that it is handed.
    """
    chunks = list(_held_chunks(exp, buffers) or training_chunks(exp, buffers))

    def product(v: Tensor) -> Tensor:
        bent = torch.zeros_like(w)
        for batch, share in chunks:
            slope = grad(partial(exp.task.loss, batch=batch, training=False))
            bent = bent + share * jvp(slope, (w,), (v,))[1]
        return bent

    start = torch.randn(w.shape, generator=torch.Generator().manual_seed(0)).to(w)
    found = top_eigenvalue(product, start)
    return {
        "hessian/top": found.value,
        "hessian/error": found.error,
        "hessian/iterations": float(found.iterations),
        "hessian/rows": float(sum(len(batch.y) for batch, _ in chunks)),
    }


def hessian_weights(exp: Experiment, moves: Moves, w: Tensor, how: Weighing, buffers: Tensor) -> dict[str, float]:
    """The largest eigenvalue of the Hessian of the same loss along the weights of the clients that count.

    These are a and b of gamma sum_i lambda_i w_i, lambda = softmax(a), gamma = e^b, at what they were in the round;
    LAW-AFL eq. 37 takes the Hessian of theta, which in its section 3.1.1 are these weights.
    """
    counts = how.lam > 0
    dw, chunks = moves.dw[counts], list(_held_chunks(exp, buffers) or training_chunks(exp, buffers))
    point = torch.cat([how.lam[counts].log(), how.shrink.log()[None]]).to(w)

    def loss(free: Tensor, batch: Batch) -> Tensor:
        mixed = free[-1].exp() * (w + free[:-1].softmax(0) @ dw)
        return exp.task.loss(mixed, batch, training=False)

    dense = torch.zeros(len(point), len(point), dtype=torch.float64, device=w.device)
    for batch, share in chunks:
        slope = grad(partial(loss, batch=batch))
        columns = [jvp(slope, (point,), (along,))[1] for along in torch.eye(len(point)).to(w)]
        dense += share * torch.stack(columns).double()
    return {"hessian/weights_top": float(torch.linalg.eigvalsh((dense + dense.T) / 2)[-1])}


class Theory(NamedTuple):
    """The quantities of the convergence theorems."""

    mu: float
    gamma: float
    B: float
    L: float  # the largest curvature of any client's loss, or an estimate of it
    L_minus: float  # how far curvature goes below zero; 0 for convex losses
    K: int  # draws of a round: a client that is drawn twice counts twice
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


def smoothness(exp: Experiment) -> float | None:
    """A bound L on the curvature of every client's loss at any w, if the net is a softmax regression; else None.

    The Hessian of client k is the mean over its rows of (diag p - p p^T) x (x~ x~^T), a Kronecker product.
    No eigenvalue of the first factor is above 1/2, hence L_k <= lambda_max(X~^T X~ / n_k) / 2, and none is
    below 0. X~ are the inputs, with a 1 for the bias. Two classes that are equally likely for every row
    reach the bound.
    """
    known = _BOUNDS.get(exp.task)
    if known is None or known[0] is not exp.federation:
        known = _BOUNDS[exp.task] = exp.federation, _smoothness(exp)
    return known[1]


def _smoothness(exp: Experiment) -> float | None:
    fed, net = exp.federation, exp.task.module(exp.task.w0, exp.task.buffers0).train()
    layers = [m for m in net.modules() if next(m.parameters(recurse=False), None) is not None]
    if len(layers) != 1 or type(layers[0]) is not nn.Linear:
        return None
    layer, top = layers[0], 0.0
    for rows in torch.tensor_split(fed.train.rows, fed.train.start[1:-1]):
        if len(rows):
            x, _ = fed.examples(rows.to(exp.device))
            if not _is_all(net, layer, x):
                return None
            ones = torch.ones(len(x), int(layer.bias is not None), device=x.device)
            top = max(top, _top_square(torch.cat([x.flatten(1), ones], 1).double()))
    return top / 2


def _is_all(net: nn.Module, layer: nn.Linear, x: Tensor) -> bool:
    """Whether all that the net does to ``x`` is to give it, flattened, to ``layer``, whose output is the net's."""
    seen: list[tuple[Tensor, Tensor]] = []
    with layer.register_forward_hook(lambda _, given, out: seen.append((given[0], out))):
        logits = net(x)
    return len(seen) == 1 and torch.equal(seen[0][0], x.flatten(1)) and seen[0][1] is logits


def _top_square(x: Tensor) -> float:
    """The largest eigenvalue of ``x^T x / n`` for ``x`` [n, d], from the smaller of the two products."""
    small = x @ x.T if len(x) <= x.shape[1] else x.T @ x
    return float(torch.linalg.eigvalsh(small)[-1]) / len(x)


def curvature(exp: Experiment, w: Tensor) -> tuple[float, float]:
    """Estimates of the largest eigenvalue of the training loss's Hessian at ``w``, and of minus the smallest.

    By the power method on Hessian-vector products over all training rows; from a fixed start.
    """
    chunks = list(training_chunks(exp, exp.task.buffers0))

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


def training_chunks(exp: Experiment, buffers: Tensor) -> Iterator[tuple[Batch, float]]:
    """All training rows in pieces, each with its share of them."""
    rows = exp.federation.train.rows.to(exp.device)
    for part in torch.split(rows, _ROWS):
        yield _batch(*exp.federation.examples(part), buffers), len(part) / len(rows)


def _held_chunks(exp: Experiment, buffers: Tensor) -> list[tuple[Batch, float]]:
    """The same of the rows that the server has of its own, if it has any."""
    held = exp.algorithm.setup.proxy
    if held is None:
        return []
    pieces = zip(torch.split(held.x, _ROWS), torch.split(held.y, _ROWS), strict=True)
    return [(_batch(x, y, buffers), len(y) / len(held.y)) for x, y in pieces]


def _batch(x: Tensor, y: Tensor, buffers: Tensor) -> Batch:
    zero = torch.zeros((), device=x.device)
    return Batch(x, y, torch.ones(len(y), device=x.device), zero.long(), zero, zero, buffers)


def diagnose(
    exp: Experiment, moves: Moves, before: Any, heard: Any, after: Any, buffers: Tensor | None = None
) -> dict[str, float]:
    """The diagnostics that were asked for: of the clients' ``moves``, and of the server's step.

    ``buffers``: the running statistics after the round.
    """
    wanted = exp.evaluate.diagnostics
    w = exp.algorithm.send(before).w
    found: dict[str, float] = {}
    if "updates" in wanted:
        found |= of_updates(moves, w, exp.algorithm.send(after).w)
        found |= {name: float(value) for name, value in diagnostics_of(exp.algorithm, before, heard, after).items()}
    if "gamma" in wanted or "rho" in wanted:
        found |= gamma(exp, moves, w)
    if "dissimilarity" in wanted or "rho" in wanted:
        found |= dissimilarity(exp, w)
    if "rho" in wanted:
        found |= _rho(exp, w, found, int(heard.senders))
    if "variance" in wanted:
        found |= variance(exp, moves.ids, w)
    if "weights" in wanted:
        weights = contributions_of(exp.algorithm, before, heard, after)
        found |= {} if weights is None else of_weights(weights)
    kept = exp.task.buffers0 if buffers is None else buffers
    if "hessian" in wanted:
        found |= hessian(exp, exp.algorithm.global_model(after), kept)
    # Where nobody trains there are no models that weights could mix.
    trains = bool(phases_of(exp.algorithm)) and trains_in(exp.algorithm, heard.address[1])
    mixed = "hessian_weights" in wanted and trains
    weights = contributions_of(exp.algorithm, before, heard, after) if mixed else None
    if weights is not None and bool(weights.sum() > 0):
        here = weights[torch.searchsorted(heard.clients, moves.ids.to(heard.clients.device))].to(w.device)
        shrink = diagnostics_of(exp.algorithm, before, heard, after).get("weights/shrink", torch.ones(()))
        found |= hessian_weights(exp, moves, w, Weighing(here / here.sum(), shrink.to(here)), kept)
    return found


def _is_stated(exp: Experiment) -> bool:
    """Whether the theorems are about runs like this: the mean step, over all draws, is the full sum_k p_k (w_k - w).

    p_k = n_k / n, as in B. That is so where clients are drawn by p_k and count alike, as the theorems have it; where
    all take part and count by p_k, without any chance; and where all clients have as much data.
    """
    alg, sampling, sizes = exp.algorithm, exp.cohort.sampling, exp.federation.train.sizes
    plain = exp.guard is None and exp.aggregation.rule == "mean" and not exp.bad
    plain = plain and exp.system.deadline is None and exp.system.dropout == 0
    plain = plain and (exp.system.stragglers == 0 or accepts(exp.system, partial=alg.traits.partial_work))
    if not plain or alg.traits.server_lr != 1:
        return False
    alike = bool((sizes == sizes[0]).all()) and sampling in ("uniform", "proportional", "all")
    return alike or (sampling == "all" if alg.traits.weighs_examples else sampling == "proportional")


def _rho(exp: Experiment, w: Tensor, found: dict[str, float], draws: int) -> dict[str, float]:
    """The theorems' rates where they apply; where they do not, that, and what is needed to see why."""
    bound = smoothness(exp)
    L, L_minus = (bound, 0.0) if bound is not None else curvature(exp, w)
    known = {"theory/L": L} if bound is not None else {"theory/L_estimate": L, "theory/L_minus_estimate": L_minus}
    mu, B, g = exp.algorithm.traits.proximal, found.get("dissimilarity/B"), found.get("gamma/max")
    rates: dict[str, float | None] = {}
    if mu and B is not None and g is not None and _is_stated(exp):
        theory = Theory(mu, g, B, L, L_minus, draws, exp.algorithm.traits.relaxation)
        rates = {"theory/rho": rho_paper(theory), "theory/rho_direct": rho_direct(theory)}
        rates["theory/rho_fedprox"] = rho_fedprox(theory)
    applying = {name: value for name, value in rates.items() if value is not None}
    return known | {"theory/applies": float(bool(applying))} | applying
