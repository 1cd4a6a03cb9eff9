"""FedMGDA+: weights under which the average is a common descent direction of the clients' unit updates.

Hu et al., Federated Learning Meets Multi-objective Optimization, IEEE TNSE 2022, Algorithm 1.

    client i:  as FedAvg;  u_i = w - w_i,   uh_i = u_i / ||u_i||
    server:    lambda* = argmin 1/2 ||sum_i lambda_i uh_i||^2
                         over  sum_i lambda_i = 1,  |lambda_i - n_i / sum n| <= epsilon,  0 <= lambda_i <= 1
               w <- w - eta decay^t sum_i lambda*_i uh_i

epsilon = 0 is normalised averaging, epsilon = 1 is MGDA. A client with a zero update is left out: the
least norm would give it all the weight. The quadratic program is solved in float64 by accelerated
projected gradients, until the Frank-Wolfe gap, a certificate, is at most ``tolerance``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from fedloom.algorithm import Algorithm, Inbox, Nothing, Traits, Update, like

Floats = NDArray[np.float64]


class Server(NamedTuple):
    w: Tensor  # [P]
    t: Tensor  # [] rounds in which any client moved


class FedMGDA(Algorithm[Server, Nothing, Update]):
    eta: PositiveFloat = Field(1.0, description="the server's step along the common direction")
    decay: float = Field(1.0, gt=0, le=1, description="factor of eta per round")
    epsilon: float = Field(0.1, ge=0, le=1, description="how far a weight may be from the client's share of the data")
    norm_eps: NonNegativeFloat = Field(1e-8, description="added to a norm before dividing by it")
    tolerance: PositiveFloat = Field(1e-8, description="largest gap at which the weights count as optimal")
    max_iter: PositiveInt = Field(5000, description="most iterations of the solver")

    @property
    def traits(self) -> Traits:
        return super().traits._replace(each_upload=True)

    def init(self, w: Tensor) -> Server:
        return Server(w, torch.zeros((), dtype=torch.float64, device=w.device))

    def send(self, server: Server) -> Server:
        return Server(server.w, server.t.new_empty(0))

    def update(self, server: Server, inbox: Inbox[Update]) -> Server:
        moves = inbox.uploads.dw
        norms = torch.linalg.vector_norm(moves, dim=1, dtype=torch.float64)
        unit = moves.double() / torch.where(norms > 0, norms + self.norm_eps, 1)[:, None]
        # K numbers at a time: a CPU is faster than a GPU here. One copy, since each waits for the GPU.
        known = torch.cat([products(unit), inbox.weights[:, None], norms[:, None]], dim=1).cpu().numpy()
        P, share, moved = known[:, :-2], known[:, -2], known[:, -1] > 0
        if not moved.any():
            return server
        weights = np.zeros(len(moved))
        share = share[moved] / share[moved].sum()
        weights[moved] = common_direction(P[moved][:, moved], share, self.epsilon, self.tolerance, self.max_iter)
        d = torch.from_numpy(weights).to(unit.device) @ unit
        eta = self.eta * self.decay**server.t
        return Server(server.w + like(eta * d, server.w), server.t + 1)


def products(rows: Tensor) -> Tensor:
    """The Gram matrix of the rows.  ``[K, K]``

    Long rows are split: a GPU computes one product of a few long rows on a single multiprocessor.
    """
    parts = 256 if rows.shape[1] >= 1 << 16 else 1
    each = rows.shape[1] // parts
    whole, rest = rows[:, : parts * each].view(-1, parts, each).transpose(0, 1), rows[:, parts * each :]
    return (whole @ whole.mT).sum(0) + rest @ rest.T


def common_direction(P: Floats, share: Floats, epsilon: float, tolerance: float, max_iter: int) -> Floats:
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
